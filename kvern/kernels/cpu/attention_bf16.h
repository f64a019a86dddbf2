// Attention's inner kernels for a cache of bf16.
//
// A page of one head is keys [head_dim / 2][16 tokens][2], then values [8 pairs of tokens][head_dim][2]. One load of 64
// bytes is 16 tokens by 2 dimensions of the keys, or 16 dimensions by 2 tokens of the values; `dot` with 2 operands
// of the other side in all lanes adds to 16 results, and no sum across lanes is ever needed.
//
//   scores   for rows x pages in registers: over the dimensions
//   values   for rows x vectors of 16 dimensions in registers: over the tokens
//
// A row's weights take the place of its scores: pages, from the start of the row on, of 16 operands each.
//
// Each result is one chain of `dot` in ascending order, whatever rows, pages and vectors share the registers.
//
// Memory is kept busy throughout: with each line of a page's keys or values that is read, one of a page that comes later
// is fetched (`Block::ahead`). Into the L2 cache: keys and values of a chunk are more than L1 holds, and it can await too
// few lines to keep memory busy.
#pragma once

#include "attention.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

// What does not depend on how the products are computed.
struct Bf16Cache {
  static constexpr int kWeightStride = kScoreStride * 4;  // bytes

  // Of the block's first page.
  static uint8_t* weights_of(const Block& b, int row) {
    return (uint8_t*)(b.scores + row * kScoreStride - b.lead * kPage) + b.lead * kPage * sizeof(Operand);
  }

  static int64_t head_bytes(int head_dim) { return 64 * head_dim; }
  static int64_t value_offset(int head_dim) { return 32 * head_dim; }

  static void set_query(const float* q, float factor, int head_dim, uint8_t* query, QueryScale*) {
    for (int i = 0; i < head_dim; i += kLanes) store_operands((Operand*)query + i, load<F32>(q + i) * set1(factor));
    if (head_dim % 32) store_operands((Operand*)query + head_dim, F32{});  // AMX takes 32 at a time
  }

  // A copy of a page's values with 0 for the tokens that no row sees: 0 * what happens to lie there may be NaN.
  static const uint8_t* clean_values(const uint8_t* values, Seen seen, int head_dim, uint8_t* copy) {
    for (int t = 0; t < kPage / 2; t++) {
      uint32_t low = 2 * t >= seen.begin && 2 * t < seen.end ? 0xffffu : 0;
      uint32_t high = 2 * t + 1 >= seen.begin && 2 * t + 1 < seen.end ? 0xffff0000u : 0;
      for (int i = 0; i < head_dim; i += kLanes) {
        const int at = (t * head_dim + i) * 4;
        store(copy + at, load<U32>(values + at) & (low | high));
      }
    }
    return copy;
  }

  // Scores to weights. Where these are rounded to bf16 the sum is that of the rounded ones, so that the result is a true
  // average.
#if defined(__AVX512BF16__)
  // By pairs of pages, which start at multiples of 32 tokens wherever the first page is: pages that a pair lacks count
  // as not seen.
  static float mask_scores(const Block& b, int row, Seen seen) {
    const int lead = b.lead * kPage, begin = (seen.begin + lead) / 32, end = (seen.end + lead + 31) / 32;
    float* s = b.scores + row * kScoreStride - lead;
    hide(s, begin * 32, seen.begin + lead);
    hide(s, seen.end + lead, end * 32);
    Floats tops[2] = {broadcast(kNothing), broadcast(kNothing)};
    for (int i = begin; i < end; i++)
      for (int p = 0; p < 2; p++) tops[p] = larger(load<Floats>(s + i * 32 + p * kPage), tops[p]);
    const Floats all[1] = {larger(tops[0], tops[1])};
    return largest_of(all);
  }

  static void weigh(const Block& b, int row, Seen seen, float* partial) {
    const int lead = b.lead * kPage, pairs = (b.lead + b.pages + 1) / 2;
    const int begin = (seen.begin + lead) / 32, end = (seen.end + lead + 31) / 32;
    const float *s = b.scores + row * kScoreStride - lead, top = largest(partial, b.head_dim);
    uint8_t* out = (uint8_t*)s;
    const Floats offset = broadcast(top == kNothing ? 0.0f : top);
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 sums = _mm512_setzero_ps();
    for (int i = 0; i < begin; i++) store(out + i * 64, Floats{});
    for (int i = begin; i < end; i++) {
      const Floats first = short_weight(load<Floats>(s + i * 32) - offset);
      const Floats second = short_weight(load<Floats>(s + i * 32 + kPage) - offset);
      const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
      sums = _mm512_dpbf16_ps(sums, rounded, ones);
      store(out + i * 64, rounded);
    }
    for (int i = end; i < pairs; i++) store(out + i * 64, Floats{});
    total(partial, b.head_dim) = _mm512_reduce_add_ps(sums);
  }

  // As `weight`, with a relative error of 9e-5, of what is rounded to 8 bits.
  static Floats short_weight(Floats x) {
    return power_of_two(x, {7.70670473575592e-2f, 2.2764499485492706e-1f, 6.951167583465576e-1f, 1});
  }

  // -infinity for scores [begin, end).
  static void hide(float* scores, int begin, int end) {
    for (int t = begin; t < end;) {
      const int n = (int)smaller(kLanes, end - t);
      _mm512_mask_storeu_ps(scores + t, (__mmask16)((1u << n) - 1), _mm512_set1_ps(kNothing));
      t += n;
    }
  }
#else
  static float mask_scores(const Block& b, int row, Seen seen) { return mask_row(b.scores + row * kScoreStride, seen); }

  static void weigh(const Block& b, int row, Seen seen, float* partial) {
    const float *s = b.scores + row * kScoreStride, top = largest(partial, b.head_dim);
    uint8_t* out = weights_of(b, row);
    const Floats offset = broadcast(top == kNothing ? 0.0f : top);
    Floats sums[kParts] = {};
    constexpr int kPageBytes = kPage * sizeof(Operand);
    memset(out, 0, first_page(seen) * kPageBytes);
    for (int p = first_page(seen); p < end_page(seen); p++)
      for (int v = 0; v < kParts; v++) {
        const int t = p * kPage + v * kWide;
        const Floats w = weight(load<Floats>(s + t) - offset);
        sums[v] += w;
        store(out + t * sizeof(Operand), w);
      }
    memset(out + end_page(seen) * kPageBytes, 0, (b.pages - end_page(seen)) * kPageBytes);
    total(partial, b.head_dim) = sum_of(sums);
  }
#endif

  static void weigh_nothing(const Block& b, int row) {
    memset(weights_of(b, row), 0, b.pages * kPage * sizeof(Operand));
  }
};

struct Bf16 : Bf16Cache {
  // What is in registers: rows * vectors sums, and besides a line takes two where it is brought to float32.
#if defined(__AVX512BF16__)
  static constexpr int kScoreRows = 12, kValueRows = 6;
  static constexpr int pages_at_once(int rows) { return rows <= 6 ? 4 : 2; }
  static constexpr int vectors_at_once(int) { return 4; }
#elif defined(__AVX512F__)
  static constexpr int kScoreRows = 12, kValueRows = 12;
  static constexpr int pages_at_once(int rows) { return rows <= 5 ? 4 : 2; }
  static constexpr int vectors_at_once(int rows) { return rows <= 5 ? 4 : 2; }
#else
  static constexpr int kScoreRows = kParts == 2 ? 4 : 2, kValueRows = kScoreRows;
  static constexpr int pages_at_once(int) { return 1; }
  static constexpr int vectors_at_once(int) { return 1; }
#endif

  template <int R>
  static void score_rows(const Block& b, int row) {
    constexpr int P = pages_at_once(R), V = P * kParts;
    float* out = b.scores + row * kScoreStride;
    for (int page = 0; page < b.pages; page += P) {
      const uint8_t *k[P], *ahead[P];
      for (int p = 0; p < P; p++) {
        k[p] = b.keys[page + p];
        ahead[p] = b.ahead[page + p];
      }
      Floats acc[R][V];
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[r][v] = Floats{};
      const uint8_t* q = b.queries + row * kQueryStride;
      for (int64_t d = 0; d < b.head_dim * 32; d += 64, q += 2 * sizeof(Operand)) {
        Line keys[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          keys[v] = load_line(k[v / kParts] + v % kParts * kRegisterBytes + d);
          if (v % kParts == 0) fetch(ahead[v / kParts] + d);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const Pair pair = broadcast_pair((const Operand*)(q + r * kQueryStride));
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) acc[r][v] = dot(acc[r][v], keys[v], pair);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(out + r * kScoreStride + page * kPage + v * kWide, acc[r][v]);
    }
  }

  template <int R, int N>
  static void sum_values(const Block& b, int row, int vector, float* partial) {
    constexpr int V = N * kParts;
    const int64_t line = b.head_dim * 4;
    const uint8_t* w = weights_of(b, row);
    Floats acc[R][V];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[r][v] = Floats{};
    for (int page = 0; page < b.pages; page++) {
      const uint8_t* at = b.values[page] + vector * 64;
      const uint8_t* ahead = b.ahead[page] + value_offset(b.head_dim) + vector * 64;
      for (int t = 0; t < kPage / 2; t++, at += line, ahead += line, w += 2 * sizeof(Operand)) {
        Line values[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          values[v] = load_line(at + v * kRegisterBytes);
          if (v % kParts == 0) fetch(ahead + v * kRegisterBytes);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const Pair pair = broadcast_pair((const Operand*)(w + r * kWeightStride));
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) acc[r][v] = dot(acc[r][v], values[v], pair);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        store(partial + r * partial_floats(b.head_dim) + vector * kLanes + v * kWide, acc[r][v]);
  }

  static void scores(const Block& b, int rows) { all_scores<Bf16>(b, rows); }
  static void values(const Block& b, int rows, float* partials) { all_values<Bf16>(b, rows, partials); }
  static void stay_awake(int) {}
  static void finish(int*) {}
};

}  // namespace
}  // namespace KVERN_ISA
}  // namespace kvern
