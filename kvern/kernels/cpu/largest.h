// The largest of a row of numbers, lane by lane: found by a product as it goes, or by argmax.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace kvern {
namespace KVERN_ISA {

constexpr int32_t kNoColumn = INT32_MAX;

struct Largest {
  F32 value = set1(-__builtin_inff());
  I32 column = set1(kNoColumn);  // the first of equals, NaN above all; anything if the value is -infinity

  // The 16 columns from `first` on, of which n count; they come in ascending order.
  void offer(F32 v, int64_t first, int64_t n) {
    I32 lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    if (n < kLanes) v = lane < (int32_t)n ? v : set1(-__builtin_inff());
    const I32 better = (v > value) | ((v != v) & (value == value));
    value = better ? v : value;
    column = better ? lane + (int32_t)first : column;
  }
};

// Where a thread's part of a product keeps those of all rows, one after the other: see LinearArgs::finds_largest.
constexpr int64_t kLargestBytes = int64_t(1) << 20;
inline Largest* largest_of(uint8_t* scratch) { return (Largest*)(scratch + kScratchBytes - kLargestBytes); }

}  // namespace KVERN_ISA
}  // namespace kvern
