// The conversion of a product's input: see Activation.
//
// Operations whose result is read by products alone convert it themselves, where it is still in the caches, with the same
// bits as the operation `quantize`.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace kvern {
namespace KVERN_ISA {

// Columns [first, last) of row `row`, from x[0, columns), in which what lies past `columns` counts as 0. first and last
// are multiples of 32.
KVERN_INLINE void quantize_columns(const float* x, int64_t columns, int64_t first, int64_t last, const Activation& out,
                                   int64_t row) {
  if (out.form == kFloats) {
    Operand* values = (Operand*)out.values + row * out.columns;
    for (int64_t k = first; k < last; k += kLanes)
      store_operands(values + k, k < columns ? load_at_most(x + k, columns - k) : F32{});
    return;
  }
  const bool wide = out.form == kInt16;
  const float most = wide ? kMostTwoBytes : 127.0f;
  int8_t* values = (int8_t*)out.values + row * out.columns * (wide ? 2 : 1);
  float* scales = out.scale + row * (out.columns / 32);
  int32_t* sums = out.sums + row * (out.columns / 16);
  for (int64_t k = first; k < last; k += 32) {
    F32 a = k < columns ? load_at_most(x + k, columns - k) : F32{};
    F32 b = k + 16 < columns ? load_at_most(x + k + 16, columns - k - 16) : F32{};
    float peak = max(max((F32)((U32)a & 0x7fffffff), (F32)((U32)b & 0x7fffffff)));
    // Below 1e-30 `most / peak` may overflow, and the values are 0 for any purpose.
    if (peak <= 1e-30f) peak = 0;
    F32 inverse = set1(peak > 0 ? most / peak : 0.0f);
    I32 qa = round_to_int(a * inverse), qb = round_to_int(b * inverse);
    if (wide) {
      const TwoBytes first = two_bytes(qa), second = two_bytes(qb);
      int8_t* block = values + 2 * k;
      store(block, __builtin_convertvector(first.high, I8x16));
      store(block + 16, __builtin_convertvector(second.high, I8x16));
      store(block + 32, __builtin_convertvector(first.low, I8x16));
      store(block + 48, __builtin_convertvector(second.low, I8x16));
    } else {
      store(values + k, __builtin_convertvector(qa, I8x16));
      store(values + k + 16, __builtin_convertvector(qb, I8x16));
    }
    scales[k / 32] = peak / most;
    sums[k / 16] = sum(qa);
    sums[k / 16 + 1] = sum(qb);
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
