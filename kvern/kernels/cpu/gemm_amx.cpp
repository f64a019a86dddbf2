// Products with AMX: tile registers of 16 lines of 64 bytes, and one instruction that multiplies two of them.
//
// bf16: a line of the left operand is 32 k of one row of x, as it lies in memory; the right operand is 16 lines of a
// panel, [16 pairs of k][16 columns][2], as they lie there. The order in which the instruction adds is its own, so every
// number of rows goes through it or does the same. Shapes:
//
//   square   up to 32 rows x 2 panels   4 tiles of sums, 2 of x, 2 of W: each loaded tile is used twice
//   wide     up to 16 rows x 4 panels   4 tiles of sums, 1 of x: four streams of W, which a short step waits for
//   row      1 row x 4 panels           of packed weights, by vector instructions that give the same bits
//
// int8: the integer sums of a group of k, for 16 rows and one panel, are one instruction; what takes time is to bring
// them from the tile to the vector registers, through memory, and to scale them. Integer sums are exact and what follows
// is the sequence of gemm_blocks.cpp, so the bits are the same. That file's kernels serve few rows, and types with two
// scales in a group, for which tiles would be half empty.
//
// Tile registers are configured once per product: the tallest tile of rows is halved, and the upper and the lower half
// of all tiles have this height. Where a tile is shorter its halves overlap, and give the common rows the same bits.
#if defined(__AMX_TILE__)

#include "gemm.h"
#include "tiles.h"
#include "unpack_bf16.h"
#include "unpack_bytes.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

// The intrinsics do not tell the compiler that they read memory.
KVERN_INLINE void memory_is_read() { asm volatile("" ::: "memory"); }

// Activations of a chunk of rows should stay in the second-level cache while all panels pass.
constexpr int64_t kChunkBytes = int64_t(1) << 20;
constexpr int64_t kLeastChunk = 128;

constexpr int64_t kSlabGroups = 20;  // of two panels are 40 kB

// Of rows so long that fewer than these fit there, a slab stays instead, with the sums of a band of units.
constexpr int64_t kBandRows = 256;
constexpr int64_t kBandUnits = kSumsBytes / (kBandRows * 2 * kPanel * sizeof(float));

// Behind the sums: x, then W.
constexpr TileShape kPanelShape = {16, 64};

int begin_square(int tallest) {
  const int height = (tallest + 1) / 2;
  const TileShape rows = {height, 64};
  configure_tiles({rows, rows, rows, rows, rows, rows, kPanelShape, kPanelShape});
  return height;
}

int begin_wide(int tallest) {
  const TileShape rows = {tallest, 64};
  configure_tiles({rows, rows, rows, rows, rows, kPanelShape, kPanelShape, kPanelShape});
  return tallest;
}

int begin_int8(int tallest) {
  const TileShape sums = {tallest, 64}, x = {tallest, kGroup}, w = {kGroup / 4, 64};
  configure_tiles({sums, sums, sums, sums, x, x, w, w});
  return tallest;
}

void end() { _tile_release(); }

// A few rows of the tile before are finished with each group: while tiles are multiplied the vector units have nothing to
// do.
//
// Panels together with the rows of a tile are more than the nearest cache holds. What is used by one tile only is loaded
// so that it does not drive out the rest: x, or, if there is but one tile of rows, the panels.
template <bool one_tile>
void bf16_square(const Tile& t, float* y) {
  const int64_t stride = t.x->columns * 2, below = t.rows - t.height;
  const uint8_t* x = (const uint8_t*)t.x->values + t.row * stride;
  memory_is_read();
  if (t.begin == 0) {
    zero_sums();
  } else {
    _tile_loadd(0, y, 128);
    _tile_loadd(1, y + 16, 128);
    _tile_loadd(2, y + below * 32, 128);
    _tile_loadd(3, y + below * 32 + 16, 128);
  }
  const int rows_a_group = (int)divide_up(t.before->rows, t.end - t.begin);
  int done = 0;
  for (int64_t group = t.begin; group < t.end; group++) {
    Tile::prefetch_ahead<2>(t, group);
    if constexpr (one_tile) {
      _tile_stream_loadd(6, t.panels[0] + group * 1024, 64);
      _tile_loadd(4, x + group * 64, stride);
      _tile_stream_loadd(7, t.panels[1] + group * 1024, 64);
      _tile_loadd(5, x + below * stride + group * 64, stride);
    } else {
      _tile_loadd(6, t.panels[0] + group * 1024, 64);
      _tile_stream_loadd(4, x + group * 64, stride);
      _tile_loadd(7, t.panels[1] + group * 1024, 64);
      _tile_stream_loadd(5, x + below * stride + group * 64, stride);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (done < t.before->rows) {
      const int next = (int)least(done + rows_a_group, t.before->rows);
      t.finish(*t.before, done, next);
      done = next;
    }
  }
  _tile_stored(0, y, 128);
  _tile_stored(1, y + 16, 128);
  _tile_stored(2, y + below * 32, 128);
  _tile_stored(3, y + below * 32 + 16, 128);
}

void bf16_wide(const Tile& t, float* y) {
  const int64_t stride = t.x->columns * 2;
  const uint8_t* x = (const uint8_t*)t.x->values + t.row * stride;
  memory_is_read();
  zero_sums();
  for (int64_t group = 0; group < t.groups; group++) {
    Tile::prefetch_ahead<4>(t, group);
    _tile_loadd(4, x + group * 64, stride);
    _tile_stream_loadd(5, t.panels[0] + group * 1024, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_stream_loadd(6, t.panels[1] + group * 1024, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_stream_loadd(7, t.panels[2] + group * 1024, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_stream_loadd(5, t.panels[3] + group * 1024, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  store_beside(y, 4 * kPanel * sizeof(float), 4);
}

// The same from packed panels, for steps of so few rows that unpacking takes longest: a group at a time through a buffer
// in the nearest cache. While a group is multiplied the next one is unpacked.
template <int type>
void bf16_wide_packed(const Tile& t, float* y) {
  alignas(64) uint8_t lines[2][4][kGroupOfBf16];
  const int64_t stride = t.x->columns * 2;
  const uint8_t* x = (const uint8_t*)t.x->values + t.row * stride;
  zero_sums();
  for (int64_t group = 0; group <= t.groups; group++) {
    if (group < t.groups) {
      Tile::prefetch_ahead<4>(t, group);
#pragma GCC unroll 1
      for (int p = 0; p < 4; p++) unpack_group<type>(t.panels[p], group, lines[group & 1][p]);
    }
    memory_is_read();
    if (group == 0) continue;
    auto& last = lines[(group - 1) & 1];
    _tile_loadd(4, x + (group - 1) * 64, stride);
    _tile_loadd(5, last[0], 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, last[1], 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, last[2], 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, last[3], 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  store_beside(y, 4 * kPanel * sizeof(float), 4);
}

// One row of x with packed panels, without tiles: their instruction adds to y the sum of all even k of the group and that
// of all odd ones, y + (even + odd), each in ascending order and starting from 0. So do these multiply-adds, and unpacked
// weights need not go through memory. Intel's manual gives the order, the tests compare. (The instruction takes numbers
// too small to be normal for 0, as the engine has all others do.)
template <int type>
void bf16_row_packed(const Tile& t, float* y) {
  const uint16_t* x = (const uint16_t*)t.x->values + t.row * t.x->columns;
  for (int p = 0; p < 4; p++) store(y + p * kPanel, F32{});
  for (int64_t group = 0; group < t.groups; group++) {
    Tile::prefetch_ahead<4>(t, group);
    alignas(64) float k[kGroup];
    store(k, from_bf16(load<U16x16>(x + group * kGroup)));
    store(k + kLanes, from_bf16(load<U16x16>(x + group * kGroup + kLanes)));
#pragma GCC unroll 1
    for (int p = 0; p < 4; p++) {
      // Each multiply-add reads its k from memory: there are not registers enough to keep them all.
      asm volatile("" : : "r"(k) : "memory");
      F32 even{}, odd{};
      each_quad<type>(t.panels[p], group, 0, [&](int i, const Quad& q) __attribute__((always_inline)) {
        even = fma(cut_off(q.w[0]), broadcast(k[4 * i]), even);
        odd = fma(cut_off(q.w[1]), broadcast(k[4 * i + 1]), odd);
        even = fma(cut_off(q.w[2]), broadcast(k[4 * i + 2]), even);
        odd = fma(cut_off(q.w[3]), broadcast(k[4 * i + 3]), odd);
      });
      store(y + p * kPanel, load<F32>(y + p * kPanel) + (even + odd));
    }
  }
}

struct UsePacked {
  Method& m;
  bool one;
  template <int type>
  void operator()() {
    if (one) {
      m.kernels[0] = bf16_row_packed<type>;
      m.begin = nullptr;
      m.end = nullptr;
    } else {
      for (TileKernel& kernel : m.kernels) kernel = bf16_wide_packed<type>;
    }
  }
};

constexpr int kInt8Rows = 16;

// Sums of panel `i` for 16 rows, kept in as many registers.
template <int type>
KVERN_INLINE void int8_panel(const Tile& t, int i, float* y) {
  using U = UnpackedOf<type>;
  const int64_t stride = t.x->columns;
  const uint8_t* x = (const uint8_t*)t.x->values + t.row * stride;
  alignas(64) int32_t ints[2][kInt8Rows][kPanel];  // two, so that a group need not wait for the one before to be read
  F32 sums[kInt8Rows];
#pragma GCC unroll 16
  for (int r = 0; r < kInt8Rows; r++) sums[r] = F32{};
  memory_is_read();
  for (int64_t group = 0; group < t.groups; group++) {
    for (int64_t line = 0; line < t.ahead_lines; line++) fetch(t.ahead[i] + (group * t.ahead_lines + line) * 64);
    const uint8_t* w = U::record(t.panels[i], group);
    auto& dots = ints[group & 1];
    _tile_zero(0);
    _tile_loadd(4, x + group * kGroup, stride);
    _tile_loadd(6, w, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_stored(0, dots, 64);
    memory_is_read();
    const F32 factor = U::scale(w, 0, 0, 0);
    F32 minimum{};
    if constexpr (U::kMinimum) minimum = U::minimum(w, 0, 0);
    const uint8_t *scales = t.sums + group * t.sums_stride * 4, *added = scales + t.sums_stride / 2 * 4;
#pragma GCC unroll 16
    for (int r = 0; r < kInt8Rows; r++) {
      I32 dot = load<I32>(dots[r]);
      if constexpr (!U::kMinimum) dot += broadcast_int(added + r * 4);
      sums[r] = fma(factor * broadcast_float(scales + r * 4), to_float(dot), sums[r]);
      if constexpr (U::kMinimum) sums[r] = fma(minimum, broadcast_float(added + r * 4), sums[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kInt8Rows; r++) store(y + r * 2 * kPanel, sums[r]);
}

template <int type>
void int8_tile(const Tile& t, float* y) {
  for (int i = 0; i < 2; i++) int8_panel<type>(t, i, y + i * kPanel);
}

struct UseInt8 {
  Method& m;
  int64_t in;
  template <int type>
  void operator()() {
    using R = Record<type>;
    if constexpr (R::kHalves == 1) {
      m.tile_rows = kInt8Rows;
      m.full_tiles = true;
      m.sums_per_group = 2;
      m.by_group = true;
      m.offset = R::kOffset;
      m.minimum = R::kMinimum;
      m.kernels[kInt8Rows - 1] = int8_tile<type>;
      m.prepare = unpack<type>;
      m.prepared_bytes = UnpackedOf<type>::kBytes * in / kGroup;
      m.begin = begin_int8;
      m.end = end;
    }
  }
};

KVERN_INLINE int64_t chunk(int64_t row_bytes) {
  int64_t rows = kChunkBytes / row_bytes;
  return rows > kLeastChunk ? rows : kLeastChunk;
}

void use_amx_bf16(const PackedWeight& weight, int64_t rows, Method& m) {
  m.end = end;
  if (rows <= 16) {
    m.panels = 4;
    m.tile_rows = 16;
    m.begin = begin_wide;
    for (TileKernel& kernel : m.kernels) kernel = bf16_wide;
    UsePacked use{m, rows == 1};
    with_type(weight.type, use);
    return;
  }
  m.prepare = prepare_bf16(weight.type);
  m.prepared_bytes = weight.in * kPanel * 2;
  m.tile_rows = 32;
  m.begin = begin_square;
  m.slab_groups = kSlabGroups;
  m.finishes = true;
  for (TileKernel& kernel : m.kernels) kernel = rows > m.tile_rows ? bf16_square<false> : bf16_square<true>;
}

}  // namespace

void use_amx(const LinearArgs& args, int64_t rows, Method& m) {
  if (args.x.form == kFloats) {
    use_amx_bf16(args.weight, rows, m);
    m.chunk_rows = chunk(args.x.columns * 2);
    if (m.slab_groups && m.chunk_rows < kBandRows && rows > m.chunk_rows) {
      m.chunk_rows = kBandRows;
      m.band_units = kBandUnits;
    }
  } else if (rows < kInt8Rows || args.weight.type == kQ6_K || args.x.form == kInt16) {
    use_blocks(args.x.form, args.weight, rows, m);
  } else {
    UseInt8 use{m, args.weight.in};
    with_type(args.weight.type, use);
    m.chunk_rows = chunk(args.x.columns);
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern

#endif
