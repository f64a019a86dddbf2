// A group of a quantised panel as bf16, [16 pairs of k][16 columns][2], as the products in bf16 read it.
//
// A weight's value there is, for a type of so many bits,
//
//   w = fma(B + u, d, m - B d)    B = 2^bits; m: the minimum, or -offset * d
//
// rounded to the nearest bf16, halves away from zero: the same in every kernel, whatever the number of rows. B + u costs
// a mask only, as its bits are those of B with u in the mantissa. m - B d is exact without a minimum, and else nearly
// always. To round so is one addition before the lower half is cut off.
#pragma once

#include "records.h"

namespace kvern {
namespace KVERN_ISA {

constexpr int64_t kGroupOfBf16 = kGroup * kPanel * 2;  // bytes

// Of a group, for one part of a line: what unpacking needs besides the values.
struct Factors {
  Floats d, m;
};
template <int type>
KVERN_INLINE Factors factors(const uint8_t* record, int group, int half, int part) {
  using R = Record<type>;
  const Floats d = R::scale(record, group, half, part);
  // The product with the offset, a small integer, is exact.
  const Floats m = R::kMinimum ? R::minimum(record, group, part) : d * -(float)R::kOffset;
  return {d, fma(d, broadcast(-(float)(1 << R::kBits)), m)};
}

// B + u, where u lies from bit 23 - bits on.
template <int bits>
KVERN_INLINE Floats with_base(Words v) {
  constexpr uint32_t mask = ((1u << bits) - 1) << (23 - bits);
  const Words base = (Words)broadcast((float)(1 << bits));
#if defined(__AVX512F__)
  return (Floats)_mm512_ternarylogic_epi32((__m512i)v, _mm512_set1_epi32((int)mask), (__m512i)base, 0xea);
#else
  return (Floats)((v & mask) | base);
#endif
}
KVERN_INLINE Words shift(Words v, int n) { return n > 0 ? v << n : v >> -n; }

// Two vectors as pairs of bf16: lane i holds a[i] in its lower half, b[i] in the upper.
KVERN_INLINE Words rounded_pairs(Floats a, Floats b) {
  const Words x = ((Words)a + 0x8000) >> 16, y = (Words)b + 0x8000;
#if defined(__AVX512F__)
  return (Words)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)x, (__m512i)y);
#else
  return x | (y & 0xffff0000u);
#endif
}

// Of each lane the bits [first + 8 i, first + 8 i + bits), i = 0..3, to two lines.
template <int bits>
KVERN_INLINE void unpack_quad(Words v, int first, const Factors& f, uint8_t* out) {
  Floats w[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) w[i] = fma(with_base<bits>(shift(v, 23 - bits - first - 8 * i)), f.d, f.m);
  store(out, rounded_pairs(w[0], w[1]));
  store(out + 64, rounded_pairs(w[2], w[3]));
}

template <int type>
KVERN_INLINE void unpack_group(const uint8_t* panel, int64_t index, uint8_t* out) {
  using R = Record<type>;
  const uint8_t* record = R::record(panel, index);
  const int group = index % R::kGroups;
#pragma GCC unroll 4
  for (int part = 0; part < kParts; part++) {
    uint8_t* lines = out + part * kRegisterBytes;
    Factors f = factors<type>(record, group, 0, part);
    if constexpr (R::kBits == 4) {
#pragma GCC unroll 4
      for (int g = 0; g < 4; g++) {
        const Words v = load<Words>(record + (group * 4 + g) * 64 + part * kRegisterBytes);
        unpack_quad<4>(v, 0, f, lines + 2 * g * 64);
        unpack_quad<4>(v, 4, f, lines + (8 + 2 * g) * 64);
      }
    } else {
#pragma GCC unroll 8
      for (int g = 0; g < 8; g++) {
        if (R::kHalves == 2 && g == 4) f = factors<type>(record, group, 1, part);
        unpack_quad<R::kBits>((Words)R::quad(record, group, g, part), 0, f, lines + 2 * g * 64);
      }
    }
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
