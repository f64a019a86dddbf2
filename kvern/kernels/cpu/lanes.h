// Vectors as wide as the machine's registers, for the inner loops of the matrix products.
//
// simd.h's vectors of 64 bytes are one register with AVX-512 only. GCC keeps variables of wider vector types in memory,
// which a loop over a dozen accumulators cannot bear, so these loops see a line of 64 bytes as kParts registers of kWide
// lanes. With AVX-512 the types and functions here are those of simd.h.
#pragma once

#include "simd.h"

namespace kvern {
namespace KVERN_ISA {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr int kParts = 64 / kRegisterBytes;
constexpr int kWide = kRegisterBytes / 4;

typedef float Floats __attribute__((vector_size(kRegisterBytes)));
typedef int32_t Ints __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t Words __attribute__((vector_size(kRegisterBytes)));
typedef uint16_t Halves __attribute__((vector_size(kRegisterBytes)));  // bf16 as bits, or words of 16 bits
typedef uint8_t Bytes __attribute__((vector_size(kRegisterBytes)));
typedef int8_t SignedBytes __attribute__((vector_size(kRegisterBytes)));

// x - 0 is x, which the compiler knows; x + 0 it would have to compute.
KVERN_INLINE Floats broadcast(float x) { return x - Floats{}; }
KVERN_INLINE Ints broadcast(int32_t x) { return x - Ints{}; }
KVERN_INLINE Floats broadcast_float(const void* p) {
  float x;
  memcpy(&x, p, 4);
  return broadcast(x);
}
KVERN_INLINE Ints broadcast_int(const void* p) { return broadcast(load_i32(p)); }

// Each byte shifted by n (to the right if n < 0) and masked; the mask drops what comes from the neighbour.
KVERN_INLINE Bytes shift_and(Bytes v, int n, uint8_t mask) {
  Words w = (Words)v;
  return (Bytes)(n > 0 ? w << n : w >> -n) & mask;
}

// kWide bytes to numbers.
KVERN_INLINE Floats load_u8(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  Floats v;
  for (int i = 0; i < kWide; i++) v[i] = (float)p[i];
  return v;
#endif
}
KVERN_INLINE Floats load_s8(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  Floats v;
  for (int i = 0; i < kWide; i++) v[i] = (float)(int8_t)p[i];
  return v;
#endif
}

#if defined(__AVX512F__)

KVERN_INLINE Floats load_fp16s(const void* p) { return load_fp16(p); }

#else

KVERN_INLINE Floats to_float(Ints v) { return __builtin_convertvector(v, Floats); }

KVERN_INLINE Floats load_fp16s(const uint8_t* p) {
#if defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  uint16_t h[kWide];
  memcpy(h, p, sizeof h);
  Floats v;
  for (int i = 0; i < kWide; i++) v[i] = from_fp16(h[i]);
  return v;
#endif
}

KVERN_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

#endif

// Lines of weights, keys or values in bf16 times operands: acc[i] += line[2i] * pair[0] + line[2i + 1] * pair[1].
#if defined(__AVX512BF16__)
typedef Halves Line;
typedef Halves Pair;
KVERN_INLINE Line load_line(const uint8_t* p) { return load<Halves>(p); }
KVERN_INLINE Pair broadcast_pair(const Operand* p) { return (Halves)broadcast_int(p); }
KVERN_INLINE Floats dot(Floats acc, const Line& line, const Pair& pair) {
  return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)line, (__m512bh)(__m512i)pair);
}
#else
struct Line {
  Floats even, odd;
};
typedef Line Pair;
KVERN_INLINE Line load_line(const uint8_t* p) {
  const Words bits = load<Words>(p);
  return {(Floats)(bits << 16), (Floats)(bits & 0xffff0000u)};
}
KVERN_INLINE Pair broadcast_pair(const Operand* p) { return {broadcast_float(p), broadcast_float(p + 1)}; }
KVERN_INLINE Floats dot(Floats acc, const Line& line, const Pair& pair) {
  return fma(line.odd, pair.odd, fma(line.even, pair.even, acc));
}
#endif

// acc[i] += the sum of a[4i..4i+3] * b[4i..4i+3], a unsigned, b signed; exact.
KVERN_INLINE Ints dot_u8s8(Ints acc, Bytes a, SignedBytes b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  // Even and odd bytes apart, as 16-bit numbers: vpmaddubsw would saturate where a is above 128.
  __m256i x = (__m256i)a, y = (__m256i)b;
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0xff)),
                                   _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
  return acc + (Ints)_mm256_add_epi32(even, odd);
#elif defined(__SSE2__)
  __m128i x = (__m128i)a, y = (__m128i)b;
  __m128i even = _mm_madd_epi16(_mm_and_si128(x, _mm_set1_epi16(0xff)), _mm_srai_epi16(_mm_slli_epi16(y, 8), 8));
  __m128i odd = _mm_madd_epi16(_mm_srli_epi16(x, 8), _mm_srai_epi16(y, 8));
  return acc + (Ints)_mm_add_epi32(even, odd);
#else
  Words x = (Words)a;
  Ints y = (Ints)b;
  acc += (Ints)(x & 0xff) * (y << 24 >> 24);
  acc += (Ints)(x >> 8 & 0xff) * (y << 16 >> 24);
  acc += (Ints)(x >> 16 & 0xff) * (y << 8 >> 24);
  acc += (Ints)(x >> 24) * (y >> 24);
  return acc;
#endif
}

// The same for a below 64, where no sum of two products leaves 16 bits.
KVERN_INLINE Ints dot_small(Ints acc, Bytes a, SignedBytes b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i pairs = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
  return acc + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  return dot_u8s8(acc, a, b);
#endif
}

}  // namespace KVERN_ISA
}  // namespace kvern
