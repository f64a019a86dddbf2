// Products of activations in blocks of integers, int8 or int16, with quantised panels.
//
// Of each group of 32 k (or half of it, where it has two scales) the products are added up as integers, which is exact,
// starting from -offset * (sum of the activations) so that the values may stay unsigned. Then, in ascending order of k:
//
//   y = fma(d * scale, sum, y)     and for types with a minimum    y = fma(m, scale * sum of the activations, y)
//
// Of values of 16 bits the high and the low bytes are added up apart, sum = 256 * high + low.
//
// The same floating-point operations in every kernel, so any of them gives the same bits.
#include "gemm.h"
#include "unpack_bytes.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

// Rows of a tile, times 2 panels: floats, and integers for each of a value's bytes. 24 of 32 registers with AVX-512.
#if defined(__AVX512F__)
constexpr int tile_rows(int bytes) { return bytes == 1 ? 6 : 4; }
#else
constexpr int tile_rows(int bytes) { return bytes == 1 ? 2 : 1; }
#endif

template <class Rec, int bytes, int R, int P>
void blocks_tile(const Tile& t, float* y) {
  constexpr int V = P * kParts, kQuads = 8 / Rec::kHalves;
  Floats sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[r][v] = Floats{};
  const int64_t stride = t.x->columns, groups = t.groups;
  const int8_t* x = (const int8_t*)t.x->values + t.row * stride * bytes;
  const float* scales = t.x->scale + t.row * stride / kGroup;
  for (int64_t i = 0; i < groups; i++) {
    Tile::prefetch_ahead<P>(t, i);
    const int group = i % Rec::kGroups;
    const uint8_t* records[P];
    for (int p = 0; p < P; p++) records[p] = Rec::record(t.panels[p], i);
#pragma GCC unroll 2
    for (int half = 0; half < Rec::kHalves; half++) {
      Ints dots[bytes][R][V];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
          dots[0][r][v] = Ints{};
          dots[bytes - 1][r][v] = Rec::kMinimum
                                      ? Ints{}
                                      : broadcast_int(t.sums + (r * t.sums_stride + i * Rec::kHalves + half) * 4);
        }
#pragma GCC unroll 8
      for (int g = half * kQuads; g < (half + 1) * kQuads; g++) {
        Bytes w[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) w[v] = Rec::quad(records[v / kParts], group, g, v % kParts);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int byte = 0; byte < bytes; byte++) {
            const int8_t* quad = x + (r * stride + i * kGroup) * bytes + byte * kGroup + g * 4;
            const SignedBytes a = (SignedBytes)broadcast_int(quad);
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) {
              Ints& sum = dots[byte][r][v];
              sum = Rec::kBits < 8 ? dot_small(sum, w[v], a) : dot_u8s8(sum, w[v], a);
            }
          }
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++)
          if (bytes == 2) dots[0][r][v] = (dots[0][r][v] << 8) + dots[1][r][v];
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) {
        Floats d = Rec::scale(records[v / kParts], group, half, v % kParts);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
          sums[r][v] = fma(d * broadcast(scales[r * (stride / kGroup) + i]), to_float(dots[0][r][v]), sums[r][v]);
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

template <class Rec, int bytes, int R>
void fill_kernels(Method& m) {
  m.kernels[R - 1] = blocks_tile<Rec, bytes, R, 2>;
  if constexpr (R > 1) fill_kernels<Rec, bytes, R - 1>(m);
}

template <int bytes>
struct Use {
  Method& m;
  int64_t in;
  int64_t rows;
  template <int type>
  void operator()() {
    constexpr int most = tile_rows(bytes);
    m.sums_per_group = Record<type>::kHalves;
    m.offset = Record<type>::kOffset;
    m.minimum = Record<type>::kMinimum;
    m.tile_rows = most;
    if (rows == 1) {
      m.panels = 4;
      m.kernels[0] = blocks_tile<Record<type>, bytes, 1, 4>;
    } else if (rows <= most) {
      fill_kernels<Record<type>, bytes, most>(m);
    } else {
      fill_kernels<UnpackedOf<type>, bytes, most>(m);
      m.prepare = unpack<type>;
      m.prepared_bytes = UnpackedOf<type>::kBytes * in / kGroup;
    }
  }
};

}  // namespace

void use_blocks(int32_t form, const PackedWeight& weight, int64_t rows, Method& m) {
  Use<1> narrow{m, weight.in, rows};
  Use<2> wide{m, weight.in, rows};
  form == kInt8 ? with_type(weight.type, narrow) : with_type(weight.type, wide);
}

}  // namespace KVERN_ISA
}  // namespace kvern
