// Rotary position embedding, and writing keys and values to the paged cache.
//
// Both divide (rows x heads) evenly among the threads, in order, so that even one token keeps several threads busy.
// Where a run of tokens fills pages of the cache, it is divided between pages.
//
// The cache wants keys with two (bf16) or four (int8) dimensions of a token side by side, values with two or four
// tokens of a dimension side by side (attention_bf16.h says why):
//
//   bf16   keys [head_dim / 2][16 tokens][2]     values [8 pairs of tokens][head_dim][2]
//   int8   keys [head_dim / 4][16 tokens][4]     values [4 quads of tokens][head_dim][4]     float scales [2][16]
//
// A key is scattered in words of 4 bytes, which are its own; keys that fill a page are transposed in registers and
// stored by the line. The words of a value belong to 2 or 4 tokens: where all of them are in this thread's share they
// are put together in registers and stored whole; else each token stores its own bytes and touches no other, as another
// thread may be writing the neighbours.
//
// int8: one scale for each token and head, the largest magnitude / 127. Keys are stored with 128 added, because the
// integer dot product wants one of its sides unsigned.

#include "kernels.h"
#include "simd.h"

namespace kvern {
namespace KVERN_ISA {

namespace {

constexpr int kPage = 16;
constexpr int kMaxHeadDim = 1024;

typedef uint8_t U8x16 __attribute__((vector_size(16)));

struct Share {
  int64_t begin;
  int64_t end;
};

Share share(int64_t total, int thread, int threads) {
  return {total * thread / threads, total * (thread + 1) / threads};
}

// The products are rounded before they are added, as the reference does it.
void rotate(const float* x, float* out, const float* cosines, const float* sines, const float* scale, int half) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    F32 a = load<F32>(x + i), b = load<F32>(x + half + i), c = load<F32>(cosines + i), s = load<F32>(sines + i);
    const F32 f = scale ? load<F32>(scale + i) : set1(1.0f);
    store(out + i, (a * c - b * s) * f);
    store(out + half + i, (b * c + a * s) * f);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i], f = scale ? scale[i] : 1.0f;
    out[i] = (a * cosines[i] - b * sines[i]) * f;
    out[half + i] = (b * cosines[i] + a * sines[i]) * f;
  }
}

// One head's page, and where in it a token lies.
struct Place {
  uint8_t* page;
  int offset;
};

Place place(const KVCache& cache, int64_t slot, int head, int64_t head_bytes) {
  return {cache.base + (slot / kPage * cache.kv_heads + head) * head_bytes, (int)(slot % kPage)};
}

void scatter_words(const void* from, uint8_t* to, int words) {
  const uint8_t* p = (const uint8_t*)from;
  for (int i = 0; i < words; i++) memcpy(to + i * 64, p + i * 4, 4);
}

// Exchange rows and lanes.
void transpose(U32 (&rows)[16]) {
#if defined(__AVX512F__)
  const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int n = 8; n; n /= 2) {
    const __m512i first = (__m512i)((lane & n) != 0 ? lane - n + 16 : lane);
    const __m512i second = (__m512i)((lane & n) != 0 ? lane + 16 : lane + n);
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
      if (r & n) continue;
      const __m512i a = (__m512i)rows[r], b = (__m512i)rows[r + n];
      rows[r] = (U32)_mm512_permutex2var_epi32(a, first, b);
      rows[r + n] = (U32)_mm512_permutex2var_epi32(a, second, b);
    }
  }
#else
  uint32_t from[16][16], to[16][16];
  memcpy(from, rows, sizeof from);
  for (int r = 0; r < 16; r++)
    for (int i = 0; i < 16; i++) to[i][r] = from[r][i];
  memcpy(rows, to, sizeof to);
#endif
}

// The keys of a page's 16 tokens, as the cache keeps numbers, with room to read beyond the last.
struct KeyRows {
  uint8_t bytes[kPage][2 * kMaxHeadDim + 64];
};

void write_key_page(const KeyRows& keys, uint8_t* page, int words) {
  for (int w = 0; w < words; w += 16) {
    U32 block[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; t++) block[t] = load<U32>(keys.bytes[t] + w * 4);
    transpose(block);
    if (words - w >= 16) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) store(page + (w + i) * 64, block[i]);
    } else {
      memcpy(page + w * 64, block, (size_t)(words - w) * 64);
    }
  }
}

void to_bf16_row(const float* x, int head_dim, uint8_t* row) {
  for (int i = 0; i < head_dim; i += kLanes) store(row + i * 2, to_bf16(load<F32>(x + i)));
}

void write_bf16_key(const float* k, Place at, int head_dim) {
  uint8_t row[2 * kMaxHeadDim];
  to_bf16_row(k, head_dim, row);
  scatter_words(row, at.page + at.offset * 4, head_dim / 2);
}

void write_bf16_key_page(const float* k, int64_t stride, uint8_t* page, int head_dim) {
  KeyRows keys;
  for (int t = 0; t < kPage; t++) to_bf16_row(k + t * stride, head_dim, keys.bytes[t]);
  write_key_page(keys, page, head_dim / 2);
}

void write_bf16_value(const float* v, Place at, int head_dim) {
  uint16_t row[kMaxHeadDim];
  for (int i = 0; i < head_dim; i += kLanes) store(row + i, to_bf16(load<F32>(v + i)));
  uint16_t* to = (uint16_t*)(at.page + 32 * head_dim) + at.offset / 2 * head_dim * 2 + at.offset % 2;
  for (int i = 0; i < head_dim; i++) to[2 * i] = row[i];
}

void write_bf16_value_pair(const float* v, int64_t stride, Place at, int head_dim) {
  uint8_t* to = at.page + 32 * head_dim + at.offset / 2 * head_dim * 4;
  for (int i = 0; i < head_dim; i += kLanes) {
    U32 even = __builtin_convertvector(to_bf16(load<F32>(v + i)), U32);
    U32 odd = __builtin_convertvector(to_bf16(load<F32>(v + stride + i)), U32);
    store(to + i * 4, even | odd << 16);
  }
}

// x / scale as integers from -127 to 127; returns the scale.
float quantize(const float* x, int head_dim, int32_t* out) {
  F32 top = {};
  for (int i = 0; i < head_dim; i += kLanes) {
    F32 v = load<F32>(x + i);
    top = max(top, max(v, -v));
  }
  float amax = max(top);
  F32 inverse = set1(amax > 0 ? 127.0f / amax : 0.0f);
  for (int i = 0; i < head_dim; i += kLanes) store(out + i, round_to_int(load<F32>(x + i) * inverse));
  return amax / 127.0f;
}

float to_int8_row(const float* x, int head_dim, uint8_t* row) {
  int32_t q[kMaxHeadDim];
  float scale = quantize(x, head_dim, q);
  for (int i = 0; i < head_dim; i += kLanes) store(row + i, __builtin_convertvector(load<I32>(q + i) + 128, U8x16));
  return scale;
}

void write_int8_key(const float* k, Place at, int head_dim) {
  uint8_t row[kMaxHeadDim];
  float scale = to_int8_row(k, head_dim, row);
  scatter_words(row, at.page + at.offset * 4, head_dim / 4);
  memcpy(at.page + 32 * head_dim + at.offset * 4, &scale, 4);
}

void write_int8_key_page(const float* k, int64_t stride, uint8_t* page, int head_dim) {
  KeyRows keys;
  float scales[kPage];
  for (int t = 0; t < kPage; t++) scales[t] = to_int8_row(k + t * stride, head_dim, keys.bytes[t]);
  write_key_page(keys, page, head_dim / 4);
  memcpy(page + 32 * head_dim, scales, sizeof scales);
}

void write_int8_value(const float* v, Place at, int head_dim) {
  int32_t q[kMaxHeadDim];
  float scale = quantize(v, head_dim, q);
  uint8_t* to = at.page + 16 * head_dim + at.offset / 4 * head_dim * 4 + at.offset % 4;
  for (int i = 0; i < head_dim; i++) to[4 * i] = (uint8_t)q[i];
  memcpy(at.page + 32 * head_dim + 64 + at.offset * 4, &scale, 4);
}

void write_int8_value_quad(const float* v, int64_t stride, Place at, int head_dim) {
  int32_t q[4][kMaxHeadDim];
  float scales[4];
  for (int t = 0; t < 4; t++) scales[t] = quantize(v + t * stride, head_dim, q[t]);
  uint8_t* to = at.page + 16 * head_dim + at.offset / 4 * head_dim * 4;
  for (int i = 0; i < head_dim; i += kLanes) {
    U32 word = {};
    for (int t = 0; t < 4; t++) word |= ((U32)load<I32>(q[t] + i) & 255) << (8 * t);
    store(to + i * 4, word);
  }
  memcpy(at.page + 32 * head_dim + 64 + at.offset * 4, scales, 16);
}

// How many of this head's tokens, from `token` on, lie side by side from the start of a group of `size`: all, or one.
int group_at(const int64_t* slots, int64_t token, int64_t end, int size) {
  if (slots[token] % size || token + size > end) return 1;
  for (int i = 1; i < size; i++)
    if (slots[token + i] != slots[token] + i) return 1;
  return size;
}

// The first of (heads x tokens) from `i` on that does not continue a page of the one before it.
int64_t page_border(const int64_t* slots, int64_t tokens, int64_t i) {
  int64_t t = i % tokens;
  if (t == 0) return i;
  for (; t < tokens && slots[t] % kPage && slots[t] == slots[t - 1] + 1; t++) i++;
  return i;
}

void write_head(const WriteKVArgs& args, const int64_t* slots, int head, Share tokens) {
  const KVCache& cache = args.cache;
  const int dim = cache.head_dim, column = head * dim;
  const bool int8 = cache.type == kKVInt8;
  const int64_t bytes = int8 ? 32 * dim + 128 : 64 * dim;
  for (int64_t t = tokens.begin; t < tokens.end;) {
    const float* k = args.k.data + t * args.k.stride + column;
    Place at = place(cache, slots[t], head, bytes);
    int n = group_at(slots, t, tokens.end, kPage);
    if (int8)
      n == kPage ? write_int8_key_page(k, args.k.stride, at.page, dim) : write_int8_key(k, at, dim);
    else
      n == kPage ? write_bf16_key_page(k, args.k.stride, at.page, dim) : write_bf16_key(k, at, dim);
    t += n;
  }
  for (int64_t t = tokens.begin; t < tokens.end;) {
    const float* v = args.v.data + t * args.v.stride + column;
    Place at = place(cache, slots[t], head, bytes);
    int n = group_at(slots, t, tokens.end, int8 ? 4 : 2);
    if (int8)
      n == 4 ? write_int8_value_quad(v, args.v.stride, at, dim) : write_int8_value(v, at, dim);
    else
      n == 2 ? write_bf16_value_pair(v, args.v.stride, at, dim) : write_bf16_value(v, at, dim);
    t += n;
  }
}

}  // namespace

void rotary(const Op& op, const Step& step, int thread, int threads) {
  const RotaryArgs& args = op.rotary;
  const int half = args.head_dim / 2;
  const Share work = share(num_rows(op, step) * args.heads, thread, threads);
  for (int64_t i = work.begin; i < work.end; i++) {
    const int64_t row = i / args.heads, column = i % args.heads * args.head_dim;
    const int64_t position = step.positions[op.rows == kTokens ? row : step.rows[row]];
    const float* cosines = args.table + position * args.head_dim;
    rotate(args.x.data + row * args.x.stride + column, args.out.data + row * args.out.stride + column, cosines,
           cosines + half, args.scale ? args.scale + i % args.heads * half : nullptr, half);
  }
}

void write_kv(const Op& op, const Step& step, int thread, int threads) {
  const WriteKVArgs& args = op.write_kv;
  const int64_t* slots = step.plans[args.plan].slots;
  const int64_t tokens = step.num_tokens;
  // Head by head, so that a share holds long runs of tokens of a head.
  if (tokens == 0) return;
  Share work = share(tokens * args.cache.kv_heads, thread, threads);
  work = {page_border(slots, tokens, work.begin), page_border(slots, tokens, work.end)};
  for (int64_t i = work.begin; i < work.end;) {
    const int64_t head = i / tokens, first = i % tokens;
    const int64_t last = work.end - i < tokens - first ? first + work.end - i : tokens;
    write_head(args, slots, (int)head, {first, last});
    i += last - first;
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
