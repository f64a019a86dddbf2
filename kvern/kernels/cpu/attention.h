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
constexpr int kBlockRows = 12;

// Distances between rows are constants, so that the kernels' addresses are; odd numbers of cache lines, so that the rows
// of a block do not compete for the same sets of the cache.
constexpr int kQueryStride = 2 * kMaxHeadDim + 64;  // bytes
constexpr int kScoreStride = kChunk + 48;           // floats; the last group of pages may be filled up by 3 more
constexpr int kWeightStride = 2 * kChunk + 64;      // bytes

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
  const uint8_t* keys[kChunkPages + 8];  // filled up by the last
};

// Up to kBlockRows rows and the pages they are computed against.
struct Block {
  int head_dim;
  int pages;
  const uint8_t* const* keys;           // pages; 8 more may be looked at
  const uint8_t* values[kChunkPages];   // the value part of the pages, or a copy of it
  const uint8_t* ahead[kChunkPages];    // pages whose keys are read next
  const uint8_t* queries;               // kQueryStride apart
  const QueryScale* query_scales;
  float* scores;                        // kScoreStride apart
  uint8_t* weights;                     // kWeightStride apart
  float* weight_scales;                 // int8 only
};

// What a row has of one chunk, or of all chunks up to one: head_dim sums of weight * value, then the largest score and
// the sum of the weights.
KVERN_INLINE int partial_floats(int head_dim) { return head_dim + 16; }
KVERN_INLINE float& largest(float* partial, int head_dim) { return partial[head_dim]; }
KVERN_INLINE float& total(float* partial, int head_dim) { return partial[head_dim + 1]; }

constexpr float kNothing = -__builtin_inff();

typedef uint16_t Halved __attribute__((vector_size(kRegisterBytes / 2)));   // kWide numbers in 16 bits
typedef uint8_t Quartered __attribute__((vector_size(kRegisterBytes / 4)));  // kWide numbers in 8 bits

KVERN_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Over the 16 lanes of kParts registers, in the order of simd.h.
KVERN_INLINE F32 together(const Floats (&parts)[kParts]) { return load<F32>(parts); }

// 2^x for x <= 0 with a relative error of 3e-6, which is below the rounding of the weights; 2^0 is exactly 1, and what
// is -infinity or NaN gives exactly 0. Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
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

// The tokens that a row sees, counted from the first page of the chunk's; not empty.
struct Seen {
  int begin;
  int end;
};
KVERN_INLINE int first_page(Seen seen) { return seen.begin / kPage; }
KVERN_INLINE int end_page(Seen seen) { return (seen.end + kPage - 1) / kPage; }

// Put -infinity where the row does not see the token, and return the largest score.
KVERN_INLINE float mask_scores(float* scores, Seen seen) {
  for (int t = first_page(seen) * kPage; t < seen.begin; t++) scores[t] = kNothing;
  for (int t = seen.end; t < end_page(seen) * kPage; t++) scores[t] = kNothing;
  Floats top[kParts];
  for (int v = 0; v < kParts; v++) top[v] = broadcast(kNothing);
  for (int p = first_page(seen); p < end_page(seen); p++)
    for (int v = 0; v < kParts; v++) top[v] = larger(load<Floats>(scores + p * kPage + v * kWide), top[v]);
  return max(together(top));
}

}  // namespace
}  // namespace KVERN_ISA
}  // namespace kvern
