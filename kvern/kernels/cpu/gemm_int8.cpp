// Products of int8 activations with quantised panels.
//
// Of each group of 32 k (or half of it, where it has two scales) the products are added up as integers, which is exact,
// starting from -offset * (sum of the activations) so that the values may stay unsigned. Then, in ascending order of k:
//
//   y = fma(d * scale, sum, y)     and for types with a minimum    y = fma(m, scale * sum of the activations, y)
//
// The same floating-point operations in every kernel, so any of them gives the same bits.
#include "gemm.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 6;  // times 2 panels, integers and floats: 24 of 32 registers
#else
constexpr int kTileRows = 2;
#endif

template <int type, int R, int P>
void int8_tile(const Tile& t, float* y) {
  using Rec = Record<type>;
  constexpr int V = P * kParts, kQuads = 8 / Rec::kHalves;
  Floats sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[r][v] = Floats{};
  const int64_t stride = t.x->columns, groups = t.groups;
  const int8_t* x = (const int8_t*)t.x->values + t.row * stride;
  const float* scales = t.x->scale + t.row * stride / kGroup;
  for (int64_t i = 0; i < groups; i++) {
    Tile::prefetch_ahead<P>(t, i);
    const int group = i % Rec::kGroups;
    const uint8_t* records[P];
    for (int p = 0; p < P; p++) records[p] = Rec::record(t.panels[p], i);
#pragma GCC unroll 2
    for (int half = 0; half < Rec::kHalves; half++) {
      Ints dots[R][V];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++)
          dots[r][v] = Rec::kMinimum
                           ? Ints{}
                           : broadcast_int(t.sums + (r * t.sums_stride + i * Rec::kHalves + half) * 4);
#pragma GCC unroll 8
      for (int g = half * kQuads; g < (half + 1) * kQuads; g++) {
        Bytes w[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) w[v] = Rec::quad(records[v / kParts], group, g, v % kParts);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          SignedBytes a = (SignedBytes)broadcast_int(x + r * stride + i * kGroup + g * 4);
#pragma GCC unroll 16
          for (int v = 0; v < V; v++)
            dots[r][v] = Rec::kBits < 8 ? dot_small(dots[r][v], w[v], a) : dot_u8s8(dots[r][v], w[v], a);
        }
      }
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) {
        Floats d = Rec::scale(records[v / kParts], group, half, v % kParts);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
          sums[r][v] = fma(d * broadcast(scales[r * (stride / kGroup) + i]), to_float(dots[r][v]), sums[r][v]);
        if constexpr (Rec::kMinimum) {
          Floats m = Rec::minimum(records[v / kParts], group, v % kParts);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++)
            sums[r][v] = fma(m, broadcast_float(t.sums + (r * t.sums_stride + i) * 4), sums[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(y + (r * V + v) * kWide, sums[r][v]);
}

template <int type, int R>
void fill_kernels(Method& m) {
  m.kernels[R - 1] = int8_tile<type, R, 2>;
  if constexpr (R > 1) fill_kernels<type, R - 1>(m);
}

struct Use {
  Method& m;
  int64_t rows;
  template <int type>
  void operator()() {
    m.sums_per_group = Record<type>::kHalves;
    m.offset = Record<type>::kOffset;
    m.minimum = Record<type>::kMinimum;
    if (rows == 1) {
      m.panels = 4;
      m.kernels[0] = int8_tile<type, 1, 4>;
    } else {
      m.tile_rows = kTileRows;
      fill_kernels<type, kTileRows>(m);
    }
  }
};

}  // namespace

void use_int8(const PackedWeight& weight, int64_t rows, Method& m) {
  Use use{m, rows};
  with_type(weight.type, use);
}

}  // namespace KVERN_ISA
}  // namespace kvern
