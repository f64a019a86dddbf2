// What the parts of attention share: sizes, the block of rows and the chunk of context they work on, and the softmax's
// steps. attention.cpp tells the whole.
#pragma once

#include "kernels.h"
#include "lanes.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

constexpr int kPage = 16;
constexpr int kChunkPages = 16;
constexpr int kChunk = kPage * kChunkPages;
constexpr int kMaxHeadDim = 1024;
#if defined(__AMX_BF16__)
constexpr int kBlockRows = 16;
constexpr int kTileRows = 4 * kBlockRows;
#else
constexpr int kBlockRows = 12;
constexpr int kTileRows = kBlockRows;
#endif

// Distances between rows are constants, so that the kernels' addresses are; odd numbers of cache lines, so that the
// rows of a block do not compete for the same sets of the cache.
constexpr int kQueryStride = sizeof(Operand) * kMaxHeadDim + 64;  // bytes
constexpr int kScoreStride = kChunk + 48;           // floats; the last group of pages may be filled up by 3 more

// int8 only: what the integer products of a query row with the keys are multiplied by, and where they start.
struct QueryScale {
  float scale;
  int32_t high;
  int32_t low;
};

// The pages of a chunk that some row of a tile sees.
struct Pages {
  int64_t first_token;
  int count;
  const uint8_t* keys[kChunkPages + 3];  // filled up by the last
};

// The tokens that a row sees, counted from the first page of the chunk's.
struct Seen {
  int begin;
  int end;

  bool any() const { return begin < end; }
};

// Pages that are fetched to the L2 cache a little at a time: memory is to work throughout, and a core awaits no more than
// a dozen or so lines at once; a long run of fetches would hold up what comes after it.
struct Ahead {
  const uint8_t* const* pages;
  int left;  // pages
  int64_t page_bytes;
  int64_t at;  // in the first of them

  // So many, of which a page is a multiple.
  template <int Lines>
  __attribute__((always_inline)) void fetch_lines() {
    if (left <= 0) return;
    const uint8_t* p = *pages + at;
    for (int i = 0; i < Lines; i++) fetch(p + i * 64);
    if ((at += Lines * 64) < page_bytes) return;
    at = 0;
    left--;
    pages++;
  }
};

// Up to kBlockRows rows and the pages they are computed against.
struct Block {
  int head_dim;
  int pages;
  const uint8_t* const* keys;           // pages, and 3 more to fill up a group of 4
  const uint8_t* values[kChunkPages];   // the value part of the pages, or a copy of it
  const uint8_t* ahead[kChunkPages + 3];  // for each of `keys`, another page to be fetched meanwhile; maybe itself
  const uint8_t* queries;               // kQueryStride apart
  const QueryScale* query_scales;
  float* scores;                        // kScoreStride apart
  uint8_t* weights;                     // int8 only, as the next
  float* weight_scales;
  int lead;                             // 1 if the first page is the second one of a pair, else 0
  // AMX only:
  Ahead* next;     // not null: those of `ahead` that are still to be fetched
  int* tile_rows;  // what the tile registers are configured for
  uint8_t* rest;   // where keys of 16 dimensions are filled up to 32
};

// What a row has of one chunk, or of all chunks up to one: head_dim sums of weight * value, then the largest score and
// the sum of the weights.
KVERN_INLINE int partial_floats(int head_dim) { return head_dim + 16; }
KVERN_INLINE float& largest(float* partial, int head_dim) { return partial[head_dim]; }
KVERN_INLINE float& total(float* partial, int head_dim) { return partial[head_dim + 1]; }

KVERN_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KVERN_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// `rows` cut evenly into as few parts as hold `most` each: the size of the part that starts at `row`.
KVERN_INLINE int part(int row, int rows, int most) {
  const int parts = (rows + most - 1) / most, size = (rows + parts - 1) / parts;
  return (int)smaller(size, rows - row);
}

constexpr float kNothing = -__builtin_inff();

typedef uint8_t Quartered __attribute__((vector_size(kRegisterBytes / 4)));  // kWide numbers in 8 bits

#if defined(__AVX512F__)
// The compiler makes two instructions of a comparison, and detours through memory of sums over lanes.
KVERN_INLINE Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
KVERN_INLINE float sum_of(const Floats (&parts)[1]) { return _mm512_reduce_add_ps((__m512)parts[0]); }
KVERN_INLINE float largest_of(const Floats (&parts)[1]) { return _mm512_reduce_max_ps((__m512)parts[0]); }
#else
KVERN_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
// Over the 16 lanes of kParts registers, in the order of simd.h.
KVERN_INLINE float sum_of(const Floats (&parts)[kParts]) { return sum(load<F32>(parts)); }
KVERN_INLINE float largest_of(const Floats (&parts)[kParts]) { return max(load<F32>(parts)); }
#endif

// 2^x for x <= 0 with a relative error of 3e-6, which is below the rounding of the weights; 2^0 is exactly 1, and
// 2^-infinity exactly 0.
#if defined(__AVX512F__)
// By a polynomial for 2^f, 0 <= f < 1: its factors, the highest power's first.
template <int N>
KVERN_INLINE Floats power_of_two(Floats x, const float (&factors)[N]) {
  const Floats f = (Floats)_mm512_reduce_ps((__m512)x, 1);  // x less the integer below it, which scalef takes for n
  Floats p = broadcast(factors[0]);
#pragma GCC unroll 8
  for (int i = 1; i < N; i++) p = fma(p, f, broadcast(factors[i]));
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
}
KVERN_INLINE Floats weight(Floats x) {
  return power_of_two(x, {1.3426718302071095e-2f, 5.224242061376572e-2f, 2.412802278995514e-1f, 6.930448412895203e-1f, 1});
}
#else
// NaN gives 0, too. Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
KVERN_INLINE Floats weight(Floats x) {
  const Floats magic = broadcast(12582912.0f);
  Floats bounded = larger(x, broadcast(-127.0f));
  Floats shifted = bounded + magic;
  Floats f = bounded - (shifted - magic);
  Floats p = broadcast(9.582853220665674e-3f);
  p = fma(p, f, broadcast(5.590642620810293e-2f));
  p = fma(p, f, broadcast(2.402409861776630e-1f));
  p = fma(p, f, broadcast(6.931241932253020e-1f));
  p = fma(p, f, broadcast(1.0f));
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}
#endif

KVERN_INLINE int first_page(Seen seen) { return seen.begin / kPage; }
KVERN_INLINE int end_page(Seen seen) { return (seen.end + kPage - 1) / kPage; }

// Put -infinity where the row does not see the token, and return the largest score.
KVERN_INLINE float mask_row(float* scores, Seen seen) {
  for (int t = first_page(seen) * kPage; t < seen.begin; t++) scores[t] = kNothing;
  for (int t = seen.end; t < end_page(seen) * kPage; t++) scores[t] = kNothing;
  Floats top[kParts];
  for (int v = 0; v < kParts; v++) top[v] = broadcast(kNothing);
  for (int p = first_page(seen); p < end_page(seen); p++)
    for (int v = 0; v < kParts; v++) top[v] = larger(load<Floats>(scores + p * kPage + v * kWide), top[v]);
  return largest_of(top);
}

// ---- Kernels for a number of rows that is known to the compiler, by table

using ScoresKernel = void (*)(const Block&, int row);
using ValuesKernel = void (*)(const Block&, int row, int vector, float* partial);

template <class F, int R>
constexpr ScoresKernel scores_kernel() {
  if constexpr (R <= F::kScoreRows)
    return F::template score_rows<R>;
  else
    return nullptr;
}
template <class F, int R, int N>
constexpr ValuesKernel values_kernel() {
  if constexpr (R <= F::kValueRows && N <= F::vectors_at_once(R))
    return F::template sum_values<R, N>;
  else
    return nullptr;
}

template <class F>
struct Tables {
  static constexpr ScoresKernel scores[12] = {
      scores_kernel<F, 1>(), scores_kernel<F, 2>(),  scores_kernel<F, 3>(),  scores_kernel<F, 4>(),
      scores_kernel<F, 5>(), scores_kernel<F, 6>(),  scores_kernel<F, 7>(),  scores_kernel<F, 8>(),
      scores_kernel<F, 9>(), scores_kernel<F, 10>(), scores_kernel<F, 11>(), scores_kernel<F, 12>()};
#define KVERN_ROW(R) \
  { values_kernel<F, R, 1>(), values_kernel<F, R, 2>(), values_kernel<F, R, 3>(), values_kernel<F, R, 4>() }
  static constexpr ValuesKernel values[12][4] = {KVERN_ROW(1), KVERN_ROW(2),  KVERN_ROW(3),  KVERN_ROW(4),
                                                 KVERN_ROW(5), KVERN_ROW(6),  KVERN_ROW(7),  KVERN_ROW(8),
                                                 KVERN_ROW(9), KVERN_ROW(10), KVERN_ROW(11), KVERN_ROW(12)};
#undef KVERN_ROW
};

// All rows of the block, over all of its pages.
template <class F>
void all_scores(const Block& b, int rows) {
  for (int r = 0; r < rows;) {
    const int n = part(r, rows, F::kScoreRows);
    Tables<F>::scores[n - 1](b, r);
    r += n;
  }
}
template <class F>
void all_values(const Block& b, int rows, float* partials) {
  const int vectors = b.head_dim / kLanes, most = F::vectors_at_once(part(0, rows, F::kValueRows));
  for (int v = 0; v < vectors;) {
    const int width = (int)smaller(most, vectors - v);
    for (int r = 0; r < rows;) {
      const int n = part(r, rows, F::kValueRows);
      Tables<F>::values[n - 1][width - 1](b, r, v, partials + r * partial_floats(b.head_dim));
      r += n;
    }
    v += width;
  }
}

}  // namespace
}  // namespace KVERN_ISA
}  // namespace kvern
