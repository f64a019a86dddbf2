// Products of activations in bf16, or in float32 where the set has no dot product of bf16, with bf16 panels.
//
// A tile of R rows and P panels keeps R * P * 16 sums in registers; for each pair of k it loads a line of each panel and
// multiplies it by each row's pair, broadcast. Each output has one sum, added to in ascending order of k. Enough
// outputs are under way to hide the latency of the dot product.
//
// Quantised weights are brought to bf16 panels first, a group of panels at a time in scratch memory, where all rows read
// them.
#include "gemm.h"
#include "unpack_bf16.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // times 2 panels: 24 of 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 3;   // times 2 panels of 2 parts: 12 of 16
#else
constexpr int kTileRows = 1;
#endif

template <int R, int P>
void floats_tile(const Tile& t, float* y) {
  constexpr int V = P * kParts;
  Floats sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[r][v] = Floats{};
  const uint8_t* panels[P];
  for (int p = 0; p < P; p++) panels[p] = t.panels[p];
  const int64_t stride = t.x->columns;
  const Operand* x = (const Operand*)t.x->values + t.row * stride;
  for (int64_t group = 0; group < t.groups; group++) {
    Tile::prefetch_ahead<P>(t, group);
#pragma GCC unroll 4
    for (int pair = 0; pair < kGroup / 2; pair++) {
      const int64_t line = group * (kGroup / 2) + pair;
      Line w[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) w[v] = load_line(panels[v / kParts] + line * 64 + v % kParts * kRegisterBytes);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Pair a = broadcast_pair(x + r * stride + line * 2);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) sums[r][v] = dot(sums[r][v], w[v], a);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(y + (r * V + v) * kWide, sums[r][v]);
}

template <int type>
void prepare(const uint8_t* panel, int64_t begin, int64_t end, uint8_t* out) {
  for (int64_t i = begin; i < end; i++) unpack_group<type>(panel, i, out + i * kGroupOfBf16);
}

struct PrepareOf {
  Prepare found = nullptr;
  template <int type>
  void operator()() {
    found = prepare<type>;
  }
};

template <int R>
void fill_kernels(Method& m) {
  m.kernels[R - 1] = floats_tile<R, 2>;
  if constexpr (R > 1) fill_kernels<R - 1>(m);
}

}  // namespace

Prepare prepare_bf16(int32_t type) {
  PrepareOf f;
  with_type(type, f);
  return f.found;
}

void use_floats(const PackedWeight& weight, int64_t rows, Method& m) {
  m.prepare = prepare_bf16(weight.type);
  m.prepared_bytes = weight.in * kPanel * 2;
  if (rows == 1 && (!m.prepare || 4 * m.prepared_bytes <= kPreparedBytes)) {
    m.panels = 4;
    m.kernels[0] = floats_tile<1, 4>;
    return;
  }
  m.tile_rows = kTileRows;
  fill_kernels<kTileRows>(m);
}

}  // namespace KVERN_ISA
}  // namespace kvern
