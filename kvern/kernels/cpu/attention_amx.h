// Attention's inner kernels for a cache of bf16, with AMX: a tile register holds 16 lines of 64 bytes, and one
// instruction multiplies two of them. A page's keys, [pairs of dimensions][16 tokens][2], and its values, [pairs of
// tokens][head_dim][2], are what it wants of its right operand, as they lie in memory.
//
//   scores   rows x 32 dimensions of the queries, times 16 pairs of dimensions x 16 tokens
//   values   rows x 16 tokens of the weights, times 8 pairs of tokens x 16 dimensions
//
// The sums of four pages, or of four groups of 16 dimensions, are in registers at a time. In which order the instruction
// adds is its own, so every number of rows goes through it, one row as well, and always with 32 dimensions or 16 tokens:
// what is missing is 0. Tiles have the height of the block, which is configured when it changes.
//
// Keys and values are loaded as what will not be needed again, so that they do not drive scores out of the nearest cache.
// Those that come next are fetched between the products: see Ahead. That takes longer than the products, and is left out
// where they are in the cache anyway.
#pragma once

#include "attention_bf16.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace kvern {
namespace KVERN_ISA {
namespace {

struct Bf16Tiles : Bf16Cache {
  static void finish(int* tile_rows) {
    if (*tile_rows) _tile_release();
    *tile_rows = 0;
  }

  static void scores(const Block& b, int rows) {
    configure(b, rows);
    memory_is_read(b.queries);
    const bool uneven = b.head_dim % 32 != 0;
    for (int page = 0; page < b.pages; page += 4) {
      const uint8_t* rest[4];
      for (int p = 0; uneven && p < 4; p++) rest[p] = fill_up(b, b.keys[page + p], p);
      score_pages(b, page, uneven ? rest : nullptr);
    }
    memory_is_read(b.scores);
  }

  static void values(const Block& b, int rows, float* partials) {
    configure(b, rows);
    memory_is_read(b.scores);
    const int vectors = b.head_dim / kLanes;
    for (int v = 0; v < vectors; v += 4) sum_values(b, v, (int)smaller(4, vectors - v), partials);
    memory_is_read(partials);
  }

  // Called with each row of the softmax.
  static void stay_awake(int row) {
    if (row % 8 == 0) keep_tiles_awake();
  }

 private:
  // The intrinsics do not tell the compiler which memory they read and write.
  __attribute__((always_inline)) static void memory_is_read(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

  // Tiles 0 to 3 hold sums, 4 queries and 6 keys, 5 weights and 7 values.
  static void configure(const Block& b, int rows) {
    if (*b.tile_rows == rows) return;
    *b.tile_rows = rows;
    const TileShape sums = {rows, 64};
    configure_tiles({sums, sums, sums, sums, {rows, 64}, {rows, 2 * kPage}, {16, 64}, {kPage / 2, 64}});
  }

  // The last 16 dimensions of a page's keys, and 0 for 16 more.
  static const uint8_t* fill_up(const Block& b, const uint8_t* keys, int index) {
    uint8_t* to = b.rest + index * 1024;
    memcpy(to, keys + b.head_dim / 32 * 1024, 512);
    memset(to + 512, 0, 512);
    return to;
  }

// The intrinsics want numbers written out.
#define KVERN_MULTIPLY_KEYS(SUM, at)           \
  {                                            \
    if (b.next) b.next->fetch_lines<16>();     \
    _tile_stream_loadd(6, at, 64);             \
    _tile_dpbf16ps(SUM, 4, 6);                 \
  }
#define KVERN_MULTIPLY_VALUES(SUM, at)         \
  {                                            \
    if (b.next) b.next->fetch_lines<8>();      \
    _tile_stream_loadd(7, at, b.head_dim * 4); \
    _tile_dpbf16ps(SUM, 5, 7);                 \
  }

  // 32 dimensions of the queries by 4 pages, whose keys lie at k[page] + offset.
  __attribute__((always_inline)) static void multiply_keys(const Block& b, const uint8_t* queries,
                                                           const uint8_t* const* k, int64_t offset) {
    _tile_loadd(4, queries, kQueryStride);
    KVERN_MULTIPLY_KEYS(0, k[0] + offset)
    KVERN_MULTIPLY_KEYS(1, k[1] + offset)
    KVERN_MULTIPLY_KEYS(2, k[2] + offset)
    KVERN_MULTIPLY_KEYS(3, k[3] + offset)
  }

  // 4 pages from `page` on. rest: the keys of the last 16 dimensions, filled up, or null.
  static void score_pages(const Block& b, int page, const uint8_t* const* rest) {
    const int64_t end = b.head_dim / 32 * 1024;
    zero_sums();
    for (int64_t d = 0; d < end; d += 1024) multiply_keys(b, b.queries + d / 16, b.keys + page, d);
    if (rest) multiply_keys(b, b.queries + end / 16, rest, 0);
    store_beside(b.scores + page * kPage, kScoreStride * 4, 4);
  }

  // The dimensions of n vectors.
  static void sum_values(const Block& b, int vector, int n, float* partials) {
    const uint8_t* w = weights_of(b, 0);
    zero_sums();
    for (int page = 0; page < b.pages; page++, w += 2 * kPage) {
      const uint8_t* v = b.values[page] + vector * 64;
      _tile_loadd(5, w, kWeightStride);
      KVERN_MULTIPLY_VALUES(0, v)
      if (n > 1) KVERN_MULTIPLY_VALUES(1, v + 64)
      if (n > 2) KVERN_MULTIPLY_VALUES(2, v + 128)
      if (n > 3) KVERN_MULTIPLY_VALUES(3, v + 192)
    }
    store_beside(partials + vector * kLanes, partial_floats(b.head_dim) * 4, n);
  }
#undef KVERN_MULTIPLY_KEYS
#undef KVERN_MULTIPLY_VALUES
};

}  // namespace
}  // namespace KVERN_ISA
}  // namespace kvern

#endif
