// How packed weights lie in memory.
//
// A matrix [out, in] is cut into panels of 16 rows (16 columns of the product). A panel is one contiguous stream along k,
// so that a product reads memory forwards and finds 16 outputs in one line of 64 bytes:
//
//   bf16       [in / 2][16 rows][2 k]
//   quantised  records, each of the panel's 16 rows and 1, 2 or 8 groups of 32 k:
//
//     nibbles  per group 4 lines; byte 4n + i of line g holds the low 4 bits of u[n][4g + i] and of u[n][16 + 4g + i]
//     bytes    per group 8 lines; byte 4n + i of line g holds u[n][4g + i]           (Q8_0, instead of nibbles)
//     upper    5 bits: per group a line; bit g of byte 4n + i is the fifth bit of u[n][4g + i]
//              6 bits: per group 2 lines; bits 2g, 2g + 1 of byte 4n + i of line h are those of u[n][16h + 4g + i]
//     scales   K-quants: per group 16 bytes, per group 16 minimums; Q6_K: per 16 k 16 signed bytes
//     d, m     fp16 [16 rows]
//
// Byte 4n + i: four k of one row lie together, as dot_u8s8 takes them. A line read as bytes, `quad`, holds the unsigned
// values of 4 k. Repacking loses nothing and adds nothing but what makes records whole lines, since a line that
// straddles two costs two loads.
#pragma once

#include "kernels.h"
#include "lanes.h"

namespace kvern {
namespace KVERN_ISA {

constexpr int kPanel = 16;
constexpr int kGroup = 32;
// Of a quantised weight: what a thread's scratch memory holds of a panel depends on it.
constexpr int64_t kMaxColumns = 1 << 16;

// What differs between the types. `kHalves`: how many scales a group of 32 has.
template <int type>
struct Shape;
template <>
struct Shape<kQ4_0> {
  static constexpr int kBits = 4, kGroups = 2, kHalves = 1, kOffset = 8;
  static constexpr bool kMinimum = false, kNested = false;
};
template <>
struct Shape<kQ4_1> {
  static constexpr int kBits = 4, kGroups = 1, kHalves = 1, kOffset = 0;
  static constexpr bool kMinimum = true, kNested = false;
};
template <>
struct Shape<kQ5_0> {
  static constexpr int kBits = 5, kGroups = 2, kHalves = 1, kOffset = 16;
  static constexpr bool kMinimum = false, kNested = false;
};
template <>
struct Shape<kQ8_0> {
  static constexpr int kBits = 8, kGroups = 2, kHalves = 1, kOffset = 128;
  static constexpr bool kMinimum = false, kNested = false;
};
template <>
struct Shape<kQ4_K> {
  static constexpr int kBits = 4, kGroups = 8, kHalves = 1, kOffset = 0;
  static constexpr bool kMinimum = true, kNested = true;
};
template <>
struct Shape<kQ5_K> {
  static constexpr int kBits = 5, kGroups = 8, kHalves = 1, kOffset = 0;
  static constexpr bool kMinimum = true, kNested = true;
};
template <>
struct Shape<kQ6_K> {
  static constexpr int kBits = 6, kGroups = 8, kHalves = 2, kOffset = 32;
  static constexpr bool kMinimum = false, kNested = true;
};

template <int type>
struct Record : Shape<type> {
  using S = Shape<type>;
  // Offsets of the parts, and lines per group. `Nested` types have scales and minimums of groups below d and m.
  static constexpr int kLowLines = S::kBits == 8 ? 8 : 4;
  static constexpr int kUpperLines = S::kBits == 5 ? 1 : S::kBits == 6 ? 2 : 0;
  static constexpr int kUpper = S::kGroups * kLowLines * 64;
  static constexpr int kScales = kUpper + S::kGroups * kUpperLines * 64;
  static constexpr int kMinimums = kScales + (S::kNested ? S::kGroups * S::kHalves * kPanel : 0);
  static constexpr int kD = kMinimums + (S::kNested && S::kMinimum ? S::kGroups * kPanel : 0);
  static constexpr int kNumD = S::kNested ? 1 : S::kGroups;
  static constexpr int kM = kD + kNumD * 32;
  static constexpr int kBytes = (kM + (S::kMinimum ? kNumD * 32 : 0) + 63) / 64 * 64;
  static constexpr int kGroupBytes = kBytes / S::kGroups;  // on average

  static int64_t panel_bytes(int64_t in) { return (in / kGroup + S::kGroups - 1) / S::kGroups * kBytes; }
  static const uint8_t* record(const uint8_t* panel, int64_t group) { return panel + group / S::kGroups * kBytes; }

  // Unsigned values of k 4g..4g+3 of a group, for the rows of one part of a line.
  // `g` is a constant wherever this is called, in a loop that is unrolled.
  KVERN_INLINE Bytes quad(const uint8_t* record, int group, int g, int part) {
    const uint8_t* low = record + (group * kLowLines + g % kLowLines) * 64 + part * kRegisterBytes;
    Bytes v = load<Bytes>(low);
    if constexpr (S::kBits == 8) return v;
    v = shift_and(v, g < 4 ? 0 : -4, 15);
    const uint8_t* upper = record + kUpper + group * kUpperLines * 64 + part * kRegisterBytes;
    if constexpr (S::kBits == 5) v |= shift_and(load<Bytes>(upper), 4 - g, 16);
    if constexpr (S::kBits == 6) v |= shift_and(load<Bytes>(upper + g / 4 * 64), 4 - 2 * (g % 4), 48);
    return v;
  }
  // The factor of a group's values (of one half of them), and what is added to the product.
  KVERN_INLINE Floats scale(const uint8_t* record, int group, int half, int part) {
    const uint8_t* d = record + kD + part * kWide * 2;
    if constexpr (!S::kNested) return load_fp16s(d + group * 32);
    const uint8_t* scales = record + kScales + (group * S::kHalves + half) * kPanel + part * kWide;
    return load_fp16s(d) * (type == kQ6_K ? load_s8(scales) : load_u8(scales));
  }
  KVERN_INLINE Floats minimum(const uint8_t* record, int group, int part) {
    const uint8_t* m = record + kM + part * kWide * 2;
    if constexpr (!S::kNested) return load_fp16s(m + group * 32);
    return -(load_fp16s(m) * load_u8(record + kMinimums + group * kPanel + part * kWide));
  }
};

static_assert(Record<kQ4_0>::kBytes == 576 && Record<kQ4_1>::kBytes == 320 && Record<kQ5_0>::kBytes == 704 &&
                  Record<kQ8_0>::kBytes == 1088 && Record<kQ4_K>::kBytes == 2368 && Record<kQ5_K>::kBytes == 2880 &&
                  Record<kQ6_K>::kBytes == 3392,
              "records are what the types' bits need, in whole lines");

KVERN_INLINE bool is_float(int32_t type) { return type == kBF16 || type == kF16 || type == kF32; }

KVERN_INLINE int64_t panel_bytes(int32_t type, int64_t in) {
  switch (type) {
    case kF32:
    case kF16:
    case kBF16: return (in + 31) / 32 * 32 * kPanel * 2;
    case kQ4_0: return Record<kQ4_0>::panel_bytes(in);
    case kQ4_1: return Record<kQ4_1>::panel_bytes(in);
    case kQ5_0: return Record<kQ5_0>::panel_bytes(in);
    case kQ8_0: return Record<kQ8_0>::panel_bytes(in);
    case kQ4_K: return Record<kQ4_K>::panel_bytes(in);
    case kQ5_K: return Record<kQ5_K>::panel_bytes(in);
    case kQ6_K: return Record<kQ6_K>::panel_bytes(in);
    default: return 0;
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
