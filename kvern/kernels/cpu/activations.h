// The gate's functions. They stand here because two kernels apply them: the matrix product, to its accumulators, and the
// gate on its own (rows.cpp). Both must give the same bits.
#pragma once

#include "simd.h"

namespace kvern {
namespace KVERN_ISA {

// 1 + e^-x. The exponent is bounded where `exp` is defined; what is divided by it there has long become tiny.
KVERN_INLINE F32 one_plus_exp_minus(F32 x) {
  const F32 bound = set1(88.0f);
  F32 minus = -x;
  return set1(1.0f) + exp(minus < bound ? minus : bound);
}

// a / b for b from 1 on. The estimate and one step of Newton's take a fraction of a division, and are right to 2 ulp.
KVERN_INLINE F32 quotient(F32 a, F32 b) {
#if defined(__AVX512F__)
  const F32 r = (F32)_mm512_rcp14_ps((__m512)b);
  return a * fma(r, (F32)_mm512_fnmadd_ps((__m512)b, (__m512)r, _mm512_set1_ps(1.0f)), r);
#else
  return a / b;
#endif
}

KVERN_INLINE F32 silu(F32 x) { return quotient(x, one_plus_exp_minus(x)); }

// (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)); 1.5957... is 2 sqrt(2 / pi).
KVERN_INLINE F32 gelu_tanh(F32 x) {
  F32 cubic = fma(x * x * x, set1(0.044715f), x);
  return quotient(x, one_plus_exp_minus(cubic * set1(1.595769121605731f)));
}

}  // namespace KVERN_ISA
}  // namespace kvern
