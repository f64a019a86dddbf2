// Attention's inner kernels for a cache of bf16, with AMX: a tile register holds 16 lines of 64 bytes, and one
// instruction multiplies two of them. A page's keys, [pairs of dimensions][16 tokens][2], are what it wants of its
// right operand, as they lie in memory. The values of two pages are, once they lie together: [16 pairs of
// tokens][head_dim][2].
//
//   scores   rows x 32 dimensions of the queries, times 16 pairs of dimensions x 16 tokens
//   values   rows x 32 tokens of the weights, times 16 pairs of tokens x 16 dimensions
//
// A block of up to 16 rows has the sums of four pages, or of four groups of 16 dimensions, in registers at a time; one
// of up to 32 rows has two halves, and the sums of two pages or groups, so that what is loaded is used twice. In which
// order the instruction adds is its own, so every number of rows goes through it, one row as well, and always with 32
// dimensions or tokens, which start at multiples of 32: what is missing is 0. Tiles have the height of the block, which
// is configured when it changes: what a multiplication takes grows with the height.
//
// The keys and values that come next are fetched between the products and while values are copied: see Ahead. That takes
// longer than the products, and is left out where they are in the cache anyway.
#pragma once

#include "attention_bf16.h"

#if defined(__AMX_BF16__)

namespace kvern {
namespace KVERN_ISA {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct Bf16Tiles : Bf16Cache {
  static void finish(int* tile_rows) {
    if (*tile_rows) _tile_release();
    *tile_rows = 0;
  }

  static void scores(const Block& b, int rows) {
    configure(b, rows);
    memory_is_read(b.queries);
    const int step = rows > 16 ? 2 : 4;
    for (int page = 0; page < b.pages; page += step) {
      const uint8_t* const* keys = b.keys + page;
      float* out = b.scores + page * kPage;
      const uint8_t* rest[4];
      const bool uneven = b.head_dim % 32 != 0;
      for (int p = 0; uneven && p < step; p++) rest[p] = fill_up(b, keys[p], p);
      rows > 16 ? score_pages<2, 2>(b, keys, uneven ? rest : nullptr, out)
                : score_pages<1, 4>(b, keys, uneven ? rest : nullptr, out);
    }
    memory_is_read(b.scores);
  }

  static void values(const Block& b, int rows, float* partials) {
    configure(b, rows);
    const int pairs = (b.lead + b.pages + 1) / 2, vectors = b.head_dim / kLanes, step = rows > 16 ? 2 : 4;
    for (int i = 0; i < pairs && !b.again; i++) put_together(b, i);
    memory_is_read(b.weights);
    for (int v = 0; v < vectors; v += step) {
      const int n = (int)smaller(step, vectors - v);
      if (rows > 16)
        n == 2 ? sum_values<2, 2>(b, pairs, v, partials) : sum_values<2, 1>(b, pairs, v, partials);
      else if (n == 4)
        sum_values<1, 4>(b, pairs, v, partials);
      else if (n == 3)
        sum_values<1, 3>(b, pairs, v, partials);
      else
        n == 2 ? sum_values<1, 2>(b, pairs, v, partials) : sum_values<1, 1>(b, pairs, v, partials);
    }
    memory_is_read(partials);
  }

 private:
  // The intrinsics do not tell the compiler which memory they read and write.
  __attribute__((always_inline)) static void memory_is_read(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

  // Tiles 0 to 3 hold sums (2 and 3 of the lower half, if there is one), 4 and 5 the left operand's halves, 6 the right
  // one.
  static void configure(const Block& b, int rows) {
    if (*b.tile_rows == rows) return;
    *b.tile_rows = rows;
    TileConfig config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      const bool lower = rows > 16 && (i == 2 || i == 3 || i == 5);
      config.rows[i] = (uint8_t)(i >= 6 ? 16 : lower ? rows - 16 : smaller(rows, 16));
      config.row_bytes[i] = 64;
    }
    memory_is_read(&config);
    _tile_loadconfig(&config);
  }

  // The last 16 dimensions of a page's keys, and 0 for 16 more.
  static const uint8_t* fill_up(const Block& b, const uint8_t* keys, int index) {
    uint8_t* to = b.rest + index * 1024;
    memcpy(to, keys + b.head_dim / 32 * 1024, 512);
    memset(to + 512, 0, 512);
    return to;
  }

  static void copy_values(const Block& b, int page, uint8_t* to) {
    const uint8_t* from = b.values[page];
    for (int i = 0; i < (int)value_offset(b.head_dim); i += 512) {
      if (b.next) b.next->fetch_eight_lines();
      for (int j = 0; j < 512; j += 64) store(to + i + j, load<U32>(from + i + j));
    }
  }

  static void put_together(const Block& b, int pair) {
    const int64_t bytes = value_offset(b.head_dim);
    for (int i = 0; i < 2; i++) {
      const int page = 2 * pair + i - b.lead;
      uint8_t* to = b.pairs + (2 * pair + i) * bytes;
      page >= 0 && page < b.pages ? copy_values(b, page, to) : (void)memset(to, 0, bytes);
    }
  }

  template <int H, int N>
  __attribute__((always_inline)) static void clear_sums() {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2 || H > 1) _tile_zero(2);
    if constexpr (N > 3 || (H > 1 && N > 1)) _tile_zero(3);
  }
  template <int H, int N>
  __attribute__((always_inline)) static void store_sums(float* out, int64_t row_floats) {
    constexpr int column = H > 1 ? 0 : 2 * kLanes;
    float* rest = H > 1 ? out + 16 * row_floats : out;
    _tile_stored(0, out, row_floats * 4);
    if constexpr (N > 1) _tile_stored(1, out + kLanes, row_floats * 4);
    if constexpr (N > 2 || H > 1) _tile_stored(2, rest + column, row_floats * 4);
    if constexpr (N > 3 || (H > 1 && N > 1)) _tile_stored(3, rest + column + kLanes, row_floats * 4);
  }

// The intrinsics want numbers written out. Load the right operand and add the products with what is loaded of the left
// one: to two halves, or to one.
#define KVERN_MULTIPLY(SUM, SUM_OF_LOWER, at, line)                \
  {                                                                \
    if (b.next) b.next->fetch_eight_lines();                       \
    _tile_loadd(6, at, line);                                      \
    _tile_dpbf16ps(SUM, 4, 6);                                     \
    if constexpr (H > 1) _tile_dpbf16ps(SUM_OF_LOWER, 5, 6);       \
  }

  // 32 dimensions of H halves of the queries by N pages, whose keys lie at k[page] + offset.
  template <int H, int N>
  __attribute__((always_inline)) static void multiply_keys(const Block& b, const uint8_t* queries,
                                                           const uint8_t* const* k, int64_t offset) {
    _tile_loadd(4, queries, kQueryStride);
    if constexpr (H > 1) _tile_loadd(5, queries + 16 * kQueryStride, kQueryStride);
    KVERN_MULTIPLY(0, 2, k[0] + offset, 64)
    if constexpr (N > 1) KVERN_MULTIPLY(1, 3, k[1] + offset, 64)
    if constexpr (N > 2) KVERN_MULTIPLY(2, 2, k[2] + offset, 64)
    if constexpr (N > 3) KVERN_MULTIPLY(3, 3, k[3] + offset, 64)
  }

  // rest: the keys of the last 16 dimensions, filled up, or null.
  template <int H, int N>
  static void score_pages(const Block& b, const uint8_t* const* k, const uint8_t* const* rest, float* out) {
    const int64_t end = b.head_dim / 32 * 1024;
    clear_sums<H, N>();
    for (int64_t d = 0; d < end; d += 1024) multiply_keys<H, N>(b, b.queries + d / 16, k, d);
    if (rest) multiply_keys<H, N>(b, b.queries + end / 16, rest, 0);
    store_sums<H, N>(out, kScoreStride);
  }

  template <int H, int N>
  static void sum_values(const Block& b, int pairs, int vector, float* partials) {
    const int64_t line = b.head_dim * 4;
    const uint8_t *v = b.pairs + vector * 64, *w = b.weights - b.lead * 32;
    clear_sums<H, N>();
    for (int i = 0; i < pairs; i++, v += 16 * line, w += 64) {
      _tile_loadd(4, w, kWeightStride);
      if constexpr (H > 1) _tile_loadd(5, w + 16 * kWeightStride, kWeightStride);
      KVERN_MULTIPLY(0, 2, v, line)
      if constexpr (N > 1) KVERN_MULTIPLY(1, 3, v + 64, line)
      if constexpr (N > 2) KVERN_MULTIPLY(2, 2, v + 128, line)
      if constexpr (N > 3) KVERN_MULTIPLY(3, 3, v + 192, line)
    }
    store_sums<H, N>(partials + vector * kLanes, partial_floats(b.head_dim));
  }
#undef KVERN_MULTIPLY
};

}  // namespace
}  // namespace KVERN_ISA
}  // namespace kvern

#endif
