// The conversion of a product's input: to bf16, or to int8 in blocks of 32 columns with a scale each. See Activation.
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
  if (out.form == kBf16) {
    uint16_t* values = (uint16_t*)out.values + row * out.columns;
    for (int64_t k = first; k < last; k += kLanes)
      store(values + k, to_bf16(k < columns ? load_at_most(x + k, columns - k) : F32{}));
    return;
  }
  int8_t* values = (int8_t*)out.values + row * out.columns;
  float* scales = out.scale + row * (out.columns / 32);
  int32_t* sums = out.sums + row * (out.columns / 16);
  for (int64_t k = first; k < last; k += 32) {
    F32 a = k < columns ? load_at_most(x + k, columns - k) : F32{};
    F32 b = k + 16 < columns ? load_at_most(x + k + 16, columns - k - 16) : F32{};
    float peak = max(max((F32)((U32)a & 0x7fffffff), (F32)((U32)b & 0x7fffffff)));
    F32 inverse = set1(peak > 0 ? 127.0f / peak : 0.0f);
    I32 qa = round_to_int(a * inverse), qb = round_to_int(b * inverse);
    store(values + k, __builtin_convertvector(qa, I8x16));
    store(values + k + 16, __builtin_convertvector(qb, I8x16));
    scales[k / 32] = peak / 127.0f;
    sums[k / 16] = sum(qa);
    sums[k / 16 + 1] = sum(qb);
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
