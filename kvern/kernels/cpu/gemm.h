// The matrix product's frame: which panels and rows a kernel sees, and what becomes of its sums.
//
//   for each chunk of rows                            (one, unless its activations would fall out of the cache)
//     for each band of units of this thread           (a unit, unless so few rows would fit that bands are better: then
//                                                      a slab of all rows stays in the cache, and the sums of the band)
//       for each slab of k                            (one, unless panels are too long for the nearest cache)
//         for each group of panels of the band        W streams through the cache once
//           [bring the slab to the form the kernel reads, in scratch memory]
//           for each tile of rows                     the slab's part of the panels stays in the nearest cache
//             kernel: y[rows][panels * 16], over the slab
//             finish, after the last slab: bias, gate, residual, store; with a gate the conversion for the next product
//                      (or while the kernel computes the next tile: Method::finishes)
//
// Threads divide the panels, so that each weight is read once, or if rows are many the rows, so that a thread finds in
// its own cache what the operation before it wrote there; never k. A kernel adds up each output in one order of k whatever
// its tile: so a row's bits depend neither on the other rows nor on the number of threads.
//
// Panels come in units of two: neighbours, or with a gate panel j of either half, so that f(a) * b is computed from sums
// that are at hand.
#pragma once

#include "largest.h"
#include "records.h"

namespace kvern {
namespace KVERN_ISA {

KVERN_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
KVERN_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kMaxPanels = 4;    // at once
constexpr int kMaxTileRows = 32;

// Parts of a thread's scratch memory.
constexpr int64_t kPreparedBytes = int64_t(4) << 20;  // panels in the form the kernel reads
constexpr int64_t kSumsBytes = int64_t(1) << 20;      // see Tile::sums
constexpr int64_t kGateBytes = int64_t(2) << 20;      // see gate_across_panels
static_assert(kPreparedBytes + kSumsBytes + kGateBytes + kLargestBytes <= (int64_t)kScratchBytes, "");
static_assert(kPreparedBytes >= 2 * kMaxColumns * kPanel * 2, "two panels of bf16 fit");

// The sums of a tile, some of whose rows are still to be finished.
struct Unfinished {
  int rows;
};

// What a kernel multiplies: a few rows of x with a few panels.
struct Tile {
  const uint8_t* panels[kMaxPanels];
  int64_t groups;     // of 32 k
  int64_t begin, end; // with Method::slab_groups: those to compute now; from begin > 0 on the sums so far are in `y`
  const Activation* x;
  int64_t row;        // the first one
  int rows;
  int height;         // AMX: rows of a tile register
  // Blocks: what a kernel needs of the activations' sums, for each row of the tile `sums_stride` numbers:
  // without a minimum int32 -offset * sum, which the integer sum starts from; else float scale * sum.
  // With Method::by_group they are turned about, and the activations' scales go with them: for each group `sums_stride`
  // numbers, of which the first half are the scales of the rows from this tile's first one on.
  const uint8_t* sums;
  int64_t sums_stride;
  // Method::finishes: the tile before, whose rows [first, last) `finish` finishes.
  const Unfinished* before;
  void (*finish)(const Unfinished& before, int first, int last);
  // What to prefetch while computing: so many lines of each with each group of k.
  const uint8_t* ahead[kMaxPanels];
  int64_t ahead_lines;

  template <int panels>
  KVERN_INLINE void prefetch_ahead(const Tile& t, int64_t group) {
    for (int64_t i = group * t.ahead_lines; i < (group + 1) * t.ahead_lines; i++)
      for (int p = 0; p < panels; p++) fetch(t.ahead[p] + i * 64);
  }
};

// Sums of the tile, [rows][panels * 16].
using TileKernel = void (*)(const Tile& tile, float* y);

// Groups [begin, end) of a packed panel to their places in `out`, which has room for all.
using Prepare = void (*)(const uint8_t* panel, int64_t begin, int64_t end, uint8_t* out);

// How to compute a product: chosen by the forms of the operands and the number of rows.
struct Method {
  int panels = 2;            // at once: 2 or 4
  int tile_rows = 1;         // at most
  int64_t chunk_rows = 0;    // at most, 0 for no limit
  bool full_tiles = false;   // all tiles have `tile_rows` rows, the last overlaps the one before
  int64_t slab_groups = 0;   // not 0: tiles read at most so many groups at a time, see the frame
  int64_t band_units = 1;    // with slabs: units in a band; kSumsBytes hold the sums of a chunk of rows for all of them
  int sums_per_group = 0;    // blocks: a row's numbers in the table of Tile::sums; 2 if a group has two scales, or by_group
  bool by_group = false;     // see there
  int offset = 0;
  bool minimum = false;
  bool finishes = false;     // kernels, of two panels, call Tile::finish for all rows of the tile before, then write y
  TileKernel kernels[kMaxTileRows] = {};  // by the tile's rows - 1
  // From packed to the form the kernel reads; null if that is the packed one.
  Prepare prepare = nullptr;
  int64_t prepared_bytes = 0;  // of a panel
  // Before the first and after the last tile, given the rows of the tallest; returns Tile::height.
  int (*begin)(int tallest) = nullptr;
  void (*end)() = nullptr;
};

// Fill `method` for activations in floats, in blocks of integers, and, but for int16, for either with AMX.
void use_floats(const PackedWeight& weight, int64_t rows, Method& method);
void use_blocks(int32_t form, const PackedWeight& weight, int64_t rows, Method& method);
#if defined(__AMX_TILE__)
void use_amx(const LinearArgs& args, int64_t rows, Method& method);
#endif

// To bf16 panels; null for a type that is bf16.
Prepare prepare_bf16(int32_t type);

// `f` called with each quantised type as a template argument: f.template operator()<type>().
template <class F>
KVERN_INLINE void with_type(int32_t type, F& f) {
  switch (type) {
    case kQ4_0: f.template operator()<kQ4_0>(); break;
    case kQ4_1: f.template operator()<kQ4_1>(); break;
    case kQ5_0: f.template operator()<kQ5_0>(); break;
    case kQ8_0: f.template operator()<kQ8_0>(); break;
    case kQ4_K: f.template operator()<kQ4_K>(); break;
    case kQ5_K: f.template operator()<kQ5_K>(); break;
    case kQ6_K: f.template operator()<kQ6_K>(); break;
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
