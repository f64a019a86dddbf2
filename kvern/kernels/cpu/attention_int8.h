// Attention's inner kernels for a cache of int8.
//
// A page of one head is keys [head_dim / 4][16 tokens][4] with 128 added, values [4 quads of tokens][head_dim][4], and
// the float32 scales of its 16 keys and 16 values. Both products are sums of integers, so exact in any order.
//
// The other side of a product, a query row or a row of weights, is rounded to 16 bits and kept as two bytes,
// 256 * high + low, each with a product of its own: one byte would lose more than the cache has lost already. Twice the
// products of half the bytes is the same work as bf16, with half the memory read.
//
//   keys     bytes are unsigned with 128 added; the query's signed. What the 128 added is known from the sum of the
//            query's bytes: the sums start with it taken away.
//   values   a token's scale goes into its weight. Then the row's weights of a chunk are rounded to 0..65535 of their
//            largest; values are signed.
//
// See attention_bf16.h for what goes into registers and what is fetched when.
#pragma once

#include "attention.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

typedef uint8_t U8x16 __attribute__((vector_size(16)));

KVERN_INLINE Floats whole(Ints high, Ints low) { return fma(to_float(high), broadcast(256.0f), to_float(low)); }

struct Int8 {
#if defined(__AVX512F__)
  static constexpr int kScoreRows = 6, kValueRows = 6;
  static constexpr int pages_at_once(int rows) { return rows <= 3 ? 4 : 2; }
  static constexpr int vectors_at_once(int) { return 2; }
#else
  static constexpr int kScoreRows = kParts == 2 ? 2 : 1, kValueRows = kScoreRows;
  static constexpr int pages_at_once(int) { return 1; }
  static constexpr int vectors_at_once(int) { return 1; }
#endif
  static constexpr int kWeightStride = 2 * kChunk + 64;  // bytes
  static constexpr int kLow = kMaxHeadDim;     // where the low bytes of a query row start
  static constexpr int kLowWeights = kChunk;   // and those of a row of weights

  static int64_t head_bytes(int head_dim) { return 32 * head_dim + 128; }
  static int64_t value_offset(int head_dim) { return 16 * head_dim; }

  static void set_query(const float* q, float factor, int head_dim, uint8_t* query, QueryScale* scale) {
    F32 top = {};
    for (int i = 0; i < head_dim; i += kLanes) {
      F32 v = load<F32>(q + i);
      top = max(top, max(v, -v));
    }
    const float amax = max(top);
    const F32 inverse = set1(amax > 0 ? kMostTwoBytes / amax : 0.0f);
    I32 high_sums = {}, low_sums = {};
    for (int i = 0; i < head_dim; i += kLanes) {
      const TwoBytes v = two_bytes(round_to_int(load<F32>(q + i) * inverse));
      store(query + i, __builtin_convertvector(v.high, I8x16));
      store(query + kLow + i, __builtin_convertvector(v.low, I8x16));
      high_sums += v.high;
      low_sums += v.low;
    }
    *scale = {amax / kMostTwoBytes * factor, -128 * sum(high_sums), -128 * sum(low_sums)};
  }

  // Bytes are finite whatever they are; the weights see to the scales.
  static const uint8_t* clean_values(const uint8_t* values, Seen, int, uint8_t*) { return values; }

  template <int R>
  static void score_rows(const Block& b, int row) {
    constexpr int P = pages_at_once(R), V = P * kParts;
    const int64_t scales = 32 * b.head_dim;
    float* out = b.scores + row * kScoreStride;
    for (int page = 0; page < b.pages; page += P) {
      const uint8_t *k[P], *ahead[P];
      for (int p = 0; p < P; p++) {
        k[p] = b.keys[page + p];
        ahead[p] = b.ahead[page + p];
      }
      Ints high[R][V], low[R][V];
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          high[r][v] = broadcast(b.query_scales[row + r].high);
          low[r][v] = broadcast(b.query_scales[row + r].low);
        }
      const uint8_t* q = b.queries + row * kQueryStride;
      for (int64_t d = 0; d < b.head_dim * 16; d += 64, q += 4) {
        Bytes keys[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          keys[v] = load<Bytes>(k[v / kParts] + v % kParts * kRegisterBytes + d);
          if (v % kParts == 0) fetch(ahead[v / kParts] + d);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const SignedBytes high_quad = (SignedBytes)broadcast_int(q + r * kQueryStride);
          const SignedBytes low_quad = (SignedBytes)broadcast_int(q + r * kQueryStride + kLow);
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) {
            high[r][v] = dot_u8s8(high[r][v], keys[v], high_quad);
            low[r][v] = dot_u8s8(low[r][v], keys[v], low_quad);
          }
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          Floats factor = load<Floats>(k[v / kParts] + scales + v % kParts * kRegisterBytes);
          factor *= broadcast(b.query_scales[row + r].scale);
          store(out + r * kScoreStride + page * kPage + v * kWide, whole(high[r][v], low[r][v]) * factor);
        }
    }
  }

  static float mask_scores(const Block& b, int row, Seen seen) { return mask_row(b.scores + row * kScoreStride, seen); }

  static void weigh(const Block& b, int row, Seen seen, float* partial) {
    float* s = b.scores + row * kScoreStride;
    uint8_t* out = b.weights + row * kWeightStride;
    const int64_t scales = 32 * b.head_dim + 64;
    const float top = largest(partial, b.head_dim);
    const Floats offset = broadcast(top == kNothing ? 0.0f : top);
    Floats sums[kParts] = {}, tops[kParts] = {};
    for (int p = first_page(seen); p < end_page(seen); p++)
      for (int v = 0; v < kParts; v++) {
        const int t = p * kPage + v * kWide;
        Floats w = weight(load<Floats>(s + t) - offset);
        sums[v] += w;
        // Where the weight is 0 the scale may be anything, even NaN.
        Floats scaled = w > 0 ? w * load<Floats>(b.keys[p] + scales + v * kRegisterBytes) : Floats{};
        tops[v] = larger(scaled, tops[v]);
        store(s + t, scaled);
      }
    // Below this, 65535 / amax overflows; values so small are 0 for any purpose.
    const float amax = largest_of(tops), usable = amax > 1e-30f ? amax : 0.0f;
    const Floats inverse = broadcast(usable > 0 ? 65535.0f / usable : 0.0f);
    weigh_nothing(b, row);
    for (int t = first_page(seen) * kPage; t < end_page(seen) * kPage; t += kWide) {
      // Adding 2^23 leaves the nearest integer in the low bits.
      Words w = (Words)(load<Floats>(s + t) * inverse + broadcast(8388608.0f));
      store(out + t, __builtin_convertvector(w >> 8 & 255, Quartered));
      store(out + kLowWeights + t, __builtin_convertvector(w & 255, Quartered));
    }
    b.weight_scales[row] = usable / 65535.0f;
    total(partial, b.head_dim) = sum_of(sums);
  }

  static void weigh_nothing(const Block& b, int row) {
    uint8_t* out = b.weights + row * kWeightStride;
    memset(out, 0, b.pages * kPage);
    memset(out + kLowWeights, 0, b.pages * kPage);
    b.weight_scales[row] = 0;
  }

  template <int R, int N>
  static void sum_values(const Block& b, int row, int vector, float* partial) {
    constexpr int V = N * kParts;
    const int64_t line = b.head_dim * 4;
    const uint8_t* w = b.weights + row * kWeightStride;
    Ints high[R][V], low[R][V];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) high[r][v] = low[r][v] = Ints{};
    for (int page = 0; page < b.pages; page++) {
      const uint8_t* at = b.values[page] + vector * 64;
      const uint8_t* ahead = b.ahead[page] + value_offset(b.head_dim) + vector * 64;
      if (vector == 0) fetch(b.ahead[page] + 32 * b.head_dim);  // the scales
      if (vector == 0) fetch(b.ahead[page] + 32 * b.head_dim + 64);
      for (int t = 0; t < kPage / 4; t++, at += line, ahead += line, w += 4) {
        SignedBytes values[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          values[v] = load<SignedBytes>(at + v * kRegisterBytes);
          if (v % kParts == 0) fetch(ahead + v * kRegisterBytes);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const Bytes high_quad = (Bytes)broadcast_int(w + r * kWeightStride);
          const Bytes low_quad = (Bytes)broadcast_int(w + r * kWeightStride + kLowWeights);
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) {
            high[r][v] = dot_u8s8(high[r][v], high_quad, values[v]);
            low[r][v] = dot_u8s8(low[r][v], low_quad, values[v]);
          }
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        store(partial + r * partial_floats(b.head_dim) + vector * kLanes + v * kWide,
              whole(high[r][v], low[r][v]) * broadcast(b.weight_scales[row + r]));
  }

  static void scores(const Block& b, int rows) { all_scores<Int8>(b, rows); }
  static void values(const Block& b, int rows, float* partials) { all_values<Int8>(b, rows, partials); }
  static void stay_awake(int) {}
  static void finish(int*) {}
};

}  // namespace
}  // namespace KVERN_ISA
}  // namespace kvern
