// A quantised panel in a form that needs no unpacking, for products in integers where several tiles of rows read it: of
// each group 8 lines of values, the factors of each half, and the minimums, in float32.
#pragma once

#include "records.h"

namespace kvern {
namespace KVERN_ISA {

template <bool minimums, int halves, int bits>
struct Unpacked {
  static constexpr int kGroups = 1, kHalves = halves, kBits = bits;
  static constexpr bool kMinimum = minimums;
  static constexpr int kBytes = (8 + halves + minimums) * 64;

  static const uint8_t* record(const uint8_t* panel, int64_t group) { return panel + group * kBytes; }
  KVERN_INLINE Bytes quad(const uint8_t* record, int, int g, int part) {
    return load<Bytes>(record + g * 64 + part * kRegisterBytes);
  }
  KVERN_INLINE Floats scale(const uint8_t* record, int, int half, int part) {
    return load<Floats>(record + (8 + half) * 64 + part * kRegisterBytes);
  }
  KVERN_INLINE Floats minimum(const uint8_t* record, int, int part) {
    return load<Floats>(record + (8 + halves) * 64 + part * kRegisterBytes);
  }
};
// Few of them, so that few kernels are compiled: 4 stands for all numbers of bits below 8.
template <int type>
using UnpackedOf = Unpacked<Record<type>::kMinimum, Record<type>::kHalves, Record<type>::kBits == 8 ? 8 : 4>;

template <int type>
void unpack(const uint8_t* panel, int64_t begin, int64_t end, uint8_t* out) {
  using R = Record<type>;
  out += begin * UnpackedOf<type>::kBytes;
  for (int64_t i = begin; i < end; i++, out += UnpackedOf<type>::kBytes) {
    const uint8_t* record = R::record(panel, i);
    const int group = i % R::kGroups;
#pragma GCC unroll 4
    for (int part = 0; part < kParts; part++) {
      uint8_t* lines = out + part * kRegisterBytes;
#pragma GCC unroll 8
      for (int g = 0; g < 8; g++) store(lines + g * 64, R::quad(record, group, g, part));
#pragma GCC unroll 2
      for (int half = 0; half < R::kHalves; half++) store(lines + (8 + half) * 64, R::scale(record, group, half, part));
      if constexpr (R::kMinimum) store(lines + (8 + R::kHalves) * 64, R::minimum(record, group, part));
    }
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
