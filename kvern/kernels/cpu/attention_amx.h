// Attention's inner kernels for a cache of bf16, with AMX: a tile register holds 16 lines of 64 bytes, and one
// instruction multiplies two of them. A page's keys, [pairs of dimensions][16 tokens][2], and its values, [pairs of
// tokens][head_dim][2], are what it wants of its right operand, as they lie in memory:
//
//   scores   rows x 32 dimensions of the queries, times 16 pairs of dimensions x 16 tokens
//   values   rows x 16 tokens of the weights, times 8 pairs of tokens x 16 dimensions
//
// Up to four pages, or four groups of 16 dimensions, have their sums in registers at a time. In which order the
// instruction adds is its own, so every number of rows goes through it, one row as well. Tiles have the height of the
// block, which is configured when it changes: what a multiplication takes grows with the height.
//
// Fetching ahead, as attention_bf16.h explains it, takes longer than the products: it is left out where keys and values
// are in the cache anyway.
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
  // Tiles 0 to 3 hold sums, 4 and 5 the left and the right operand; 6 and 7 too, where only 16 numbers of a row are
  // left to multiply: a page's tokens, or the last dimensions of a head_dim that is not a multiple of 32.
  static void configure(const Block& b, int rows) {
    if (*b.tile_rows == rows) return;
    *b.tile_rows = rows;
    TileConfig config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      config.rows[i] = i == 5 ? 16 : i == 7 ? 8 : rows;
      config.row_bytes[i] = i == 6 ? 32 : 64;
    }
    memory_is_read(&config);
    _tile_loadconfig(&config);
  }

  static void finish(int* tile_rows) {
    if (*tile_rows) _tile_release();
    *tile_rows = 0;
  }

  static void scores(const Block& b, int rows) {
    configure(b, rows);
    memory_is_read(b.queries);
    for (int page = 0; page < b.pages; page += 4) switch (b.pages - page) {
        case 1: score_pages<1>(b, page); break;
        case 2: score_pages<2>(b, page); break;
        case 3: score_pages<3>(b, page); break;
        default: score_pages<4>(b, page);
      }
    memory_is_read(b.scores);
  }

  static void values(const Block& b, int rows, float* partials) {
    configure(b, rows);
    memory_is_read(b.weights);
    const int vectors = b.head_dim / kLanes;
    for (int v = 0; v < vectors; v += 4) switch (vectors - v) {
        case 1: sum_values<1>(b, v, partials); break;
        case 2: sum_values<2>(b, v, partials); break;
        case 3: sum_values<3>(b, v, partials); break;
        default: sum_values<4>(b, v, partials);
      }
    memory_is_read(partials);
  }

 private:
  // The intrinsics do not tell the compiler which memory they read and write.
  __attribute__((always_inline)) static void memory_is_read(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

  template <int N>
  __attribute__((always_inline)) static void clear_sums() {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) _tile_zero(2);
    if constexpr (N > 3) _tile_zero(3);
  }
  template <int N>
  __attribute__((always_inline)) static void store_sums(float* out, int distance, int64_t row_floats) {
    _tile_stored(0, out, row_floats * 4);
    if constexpr (N > 1) _tile_stored(1, out + distance, row_floats * 4);
    if constexpr (N > 2) _tile_stored(2, out + 2 * distance, row_floats * 4);
    if constexpr (N > 3) _tile_stored(3, out + 3 * distance, row_floats * 4);
  }

// The intrinsics want numbers written out. The left operand is loaded; add its product with what lies at `at`.
#define KVERN_MULTIPLY(SUM, LEFT, RIGHT, at, line) \
  {                                                \
    _tile_loadd(RIGHT, at, line);                  \
    _tile_dpbf16ps(SUM, LEFT, RIGHT);              \
  }

  template <int P>
  static void score_pages(const Block& b, int page) {
    const int64_t values = value_offset(b.head_dim), end = b.head_dim / 32 * 1024;
    const uint8_t* const* k = b.keys + page;
    clear_sums<P>();
    for (int64_t d = 0; d < end; d += 1024) {
      for (int p = 0; b.fetch && p < P; p++)
        for (int line = 0; line < 1024; line += 64) prefetch(k[p] + values + d + line);
      _tile_loadd(4, b.queries + d / 16, kQueryStride);
      KVERN_MULTIPLY(0, 4, 5, k[0] + d, 64)
      if constexpr (P > 1) KVERN_MULTIPLY(1, 4, 5, k[1] + d, 64)
      if constexpr (P > 2) KVERN_MULTIPLY(2, 4, 5, k[2] + d, 64)
      if constexpr (P > 3) KVERN_MULTIPLY(3, 4, 5, k[3] + d, 64)
    }
    if (end < b.head_dim * 32) {
      for (int p = 0; b.fetch && p < P; p++)
        for (int line = 0; line < 512; line += 64) prefetch(k[p] + values + end + line);
      _tile_loadd(6, b.queries + end / 16, kQueryStride);
      KVERN_MULTIPLY(0, 6, 7, k[0] + end, 64)
      if constexpr (P > 1) KVERN_MULTIPLY(1, 6, 7, k[1] + end, 64)
      if constexpr (P > 2) KVERN_MULTIPLY(2, 6, 7, k[2] + end, 64)
      if constexpr (P > 3) KVERN_MULTIPLY(3, 6, 7, k[3] + end, 64)
    }
    store_sums<P>(b.scores + page * kPage, kPage, kScoreStride);
  }

  template <int N>
  static void sum_values(const Block& b, int vector, float* partials) {
    const int64_t line = b.head_dim * 4;
    clear_sums<N>();
    for (int page = 0; page < b.pages; page++) {
      const uint8_t* v = b.values[page] + vector * 64;
      const uint8_t* ahead = b.ahead[page] + vector * 64;
      for (int t = 0; b.fetch && t < kPage / 2; t++)
        for (int i = 0; i < N; i++) prefetch(ahead + t * line + i * 64);
      _tile_loadd(6, b.weights + page * 32, kWeightStride);
      KVERN_MULTIPLY(0, 6, 7, v, line)
      if constexpr (N > 1) KVERN_MULTIPLY(1, 6, 7, v + 64, line)
      if constexpr (N > 2) KVERN_MULTIPLY(2, 6, 7, v + 128, line)
      if constexpr (N > 3) KVERN_MULTIPLY(3, 6, 7, v + 192, line)
    }
    store_sums<N>(partials + vector * kLanes, kLanes, partial_floats(b.head_dim));
  }
#undef KVERN_MULTIPLY
};

}  // namespace
}  // namespace KVERN_ISA
}  // namespace kvern

#endif
