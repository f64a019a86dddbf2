// Vectors of 64 bytes for every instruction set, in GCC's vector extensions (clang knows them too).
//
// Each kernel file is compiled once per instruction set, with KVERN_ISA naming the namespace. What the compiler cannot
// derive from plain arithmetic (dot products of bf16 and int8, rounding, table look-ups) stands here, once per set.
// Nothing in these files may call an inline function of the standard library: the linker keeps one copy of those, maybe
// one compiled for instructions that this machine lacks.
//
// -ffp-contract=off: a product and a sum become one rounding only where `fma` says so, so that a result does not depend
// on what the compiler made of the code around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KVERN_INLINE static inline __attribute__((always_inline))

namespace kvern {
namespace KVERN_ISA {

typedef float F32 __attribute__((vector_size(64)));      // 16 lanes
typedef int32_t I32 __attribute__((vector_size(64)));    // 16 lanes
typedef uint32_t U32 __attribute__((vector_size(64)));   // 16 lanes
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef int8_t I8x16 __attribute__((vector_size(16)));
constexpr int kLanes = 16;

template <class V>
KVERN_INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
KVERN_INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}
// The first n of 16, the others 0.
KVERN_INLINE F32 load_at_most(const float* p, int64_t n) {
  if (n >= kLanes) return load<F32>(p);
#if defined(__AVX512F__)
  return (F32)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  F32 v = {};
  memcpy(&v, p, (size_t)n * 4);
  return v;
#endif
}
KVERN_INLINE void store_at_most(float* p, F32 v, int64_t n) {
  if (n >= kLanes) return store(p, v);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  memcpy(p, &v, (size_t)n * 4);
#endif
}
KVERN_INLINE F32 set1(float x) { return F32{} + x; }
KVERN_INLINE I32 set1(int32_t x) { return I32{} + x; }
KVERN_INLINE int32_t load_i32(const void* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return x;
}
// To the L2 cache, which can await several times as many lines at once as L1.
KVERN_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

KVERN_INLINE F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }
KVERN_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
KVERN_INLINE F32 bits_to_float(U32 v) { return (F32)v; }

KVERN_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union { F32 v; __m256 h[2]; } x{a}, y{b}, z{c};
  z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
  z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
  return z.v;
#else
  return a * b + c;
#endif
}

KVERN_INLINE F32 sqrt(F32 v) {
#if defined(__AVX512F__)
  return (F32)_mm512_sqrt_ps((__m512)v);
#else
  F32 r;
  for (int i = 0; i < kLanes; i++) r[i] = __builtin_sqrtf(v[i]);
  return r;
#endif
}

// Sum and maximum of the lanes, in an order that is the same everywhere: halves onto each other.
KVERN_INLINE float sum(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float a[16];
  store(a, v);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) a[i] += a[i + n];
  return a[0];
#endif
}
KVERN_INLINE float max(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float a[16];
  store(a, v);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) a[i] = a[i] > a[i + n] ? a[i] : a[i + n];
  return a[0];
#endif
}
KVERN_INLINE int32_t sum(I32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t a[16];
  store(a, v);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) a[i] += a[i + n];
  return a[0];
#endif
}

// To the nearest integer, halves to even.
KVERN_INLINE I32 round_to_int(F32 v) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  union { F32 v; __m256 h[2]; } x{v};
  union { I32 v; __m256i h[2]; } r;
  r.h[0] = _mm256_cvtps_epi32(x.h[0]);
  r.h[1] = _mm256_cvtps_epi32(x.h[1]);
  return r.v;
#else
  // Adding and taking away 1.5 * 2^23 rounds what is below 2^22, as the int8 values this serves are.
  const F32 magic = set1(12582912.0f);
  return __builtin_convertvector((v + magic) - magic, I32);
#endif
}

// Numbers up to +-kMostTwoBytes as 256 * high + low, both signed bytes.
constexpr float kMostTwoBytes = 32512.0f;  // 127 * 256, so that the high byte stays below 128
struct TwoBytes {
  I32 high, low;
};
KVERN_INLINE TwoBytes two_bytes(I32 v) {
  const I32 high = (v + 128) >> 8;
  return {high, v - (high << 8)};
}

// bf16 <-> float. To bf16: to nearest, halves to even; NaN stays NaN.
KVERN_INLINE uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 64);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
KVERN_INLINE float from_bf16(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
KVERN_INLINE U16x16 to_bf16(F32 v) {
#if defined(__AVX512BF16__)
  return (U16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  U32 u = (U32)v;
  U32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  U32 nan = (u >> 16) | 64;
  U32 bits = (I32)(u & 0x7fffffff) > 0x7f800000 ? nan : rounded;
  return __builtin_convertvector(bits, U16x16);
#endif
}
KVERN_INLINE F32 from_bf16(U16x16 v) { return (F32)(__builtin_convertvector(v, U32) << 16); }

KVERN_INLINE float from_fp16(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff, u;
  if (exponent == 0) {
    float f = (float)mantissa * 0x1p-24f;
    memcpy(&u, &f, 4);
    u |= sign;
  } else {
    u = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13;
  }
  float f;
  memcpy(&f, &u, 4);
  return f;
#endif
}
// 16 of them.
KVERN_INLINE F32 load_fp16(const void* p) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  uint16_t h[16];
  memcpy(h, p, 32);
  F32 v;
  for (int i = 0; i < kLanes; i++) v[i] = from_fp16(h[i]);
  return v;
#endif
}

// What is multiplied with bf16 weights, keys or values: bf16 where the set has a dot product of it. Else float32, since
// every product would have to bring it there again.
#if defined(__AVX512BF16__)
typedef uint16_t Operand;
KVERN_INLINE void store_operands(Operand* p, F32 v) { store(p, to_bf16(v)); }
#else
typedef float Operand;
KVERN_INLINE void store_operands(Operand* p, F32 v) { store(p, v); }
#endif

// 2^x for x <= 127; below -126 it is 0. Relative error below 3e-7 (Cephes' polynomial on [-0.5, 0.5]).
KVERN_INLINE F32 exp2(F32 x) {
#if defined(__AVX512F__)
  const F32 f = (F32)_mm512_reduce_ps((__m512)x, 0), n = x - f;  // x less the nearest integer
#else
  F32 bounded = max(x, set1(-127.0f));
  I32 n = round_to_int(bounded);
  F32 f = bounded - to_float(n);
#endif
  F32 p = set1(1.535336188319500e-4f);
  p = fma(p, f, set1(1.339887440266574e-3f));
  p = fma(p, f, set1(9.618437357674640e-3f));
  p = fma(p, f, set1(5.550332471162809e-2f));
  p = fma(p, f, set1(2.402264791363012e-1f));
  p = fma(p, f, set1(6.931472028550421e-1f));
  p = fma(p, f, set1(1.0f));
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (F32)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  F32 r = p * (F32)((n + 127) << 23);
  return x < set1(-126.0f) ? F32{} : r;
#endif
}
KVERN_INLINE F32 exp(F32 x) { return exp2(x * set1(1.442695040888963f)); }

}  // namespace KVERN_ISA
}  // namespace kvern
