// Quantised weights as bf16: a group of a panel as [16 pairs of k][16 columns][2], as the products in bf16 read it, or its
// values one by one.
//
// A weight's value there is, for a type of so many bits,
//
//   w = fma(B + u, d', m' - B d')      d' = c d,  m' = c m;  m: the minimum, or -offset * d
//
// with its lower 16 bits cut off: the same in every kernel, whatever the number of rows. c = 1 + 3/1024 makes up for what
// is cut off, on average; the error is hardly larger than that of rounding, which would take an instruction more.
//
// B is a power of two, so B + u costs a mask only: its bits are those of B with u in the mantissa. With B = 2^bits u lies
// at the mantissa's upper end, with 2^(bits + 8) eight bits lower, so that one shift brings two values to their places.
// The product's last bits are lost there, less than the 2^-12th part of d for 4 bits and the 2^-8th for 8.
#pragma once

#include "records.h"

namespace kvern {
namespace KVERN_ISA {

constexpr int64_t kGroupOfBf16 = kGroup * kPanel * 2;  // bytes

// Of a group, for one part of a line: d', and m' - B d' for either B.
struct Factors {
  Floats d, upper, lower;
};
template <int type>
KVERN_INLINE Factors factors(const uint8_t* record, int group, int half, int part) {
  using R = Record<type>;
  const Floats c = broadcast(1.0f + 3.0f / 1024);
  const Floats d = R::scale(record, group, half, part) * c;
  const Floats m = R::kMinimum ? R::minimum(record, group, part) * c : d * -(float)R::kOffset;
  return {d, fma(d, broadcast(-(float)(1 << R::kBits)), m), fma(d, broadcast(-(float)(256 << R::kBits)), m)};
}

// B + u, where u lies from bit `at` on.
template <int bits, int at>
KVERN_INLINE Floats with_base(Words v) {
  constexpr uint32_t mask = ((1u << bits) - 1) << at;
  const Words base = (Words)broadcast((float)(1 << (23 - at)));
#if defined(__AVX512F__)
  return (Floats)_mm512_ternarylogic_epi32((__m512i)v, _mm512_set1_epi32((int)mask), (__m512i)base, 0xea);
#else
  return (Floats)((v & mask) | base);
#endif
}
KVERN_INLINE Words shift(Words v, int n) { return n > 0 ? v << n : v >> -n; }

// Four weights of each lane, not cut off yet.
struct Quad {
  Floats w[4];
};

KVERN_INLINE Floats cut_off(Floats v) { return (Floats)((Words)v & 0xffff0000u); }

// Of each lane the bits [first + 8 i, first + 8 i + bits), i = 0..3.
template <int bits>
KVERN_INLINE Quad unpack_quad(Words v, int first, const Factors& f) {
  constexpr int kUpper = 23 - bits, kLower = 15 - bits;
  const Words a = shift(v, kLower - first), b = shift(v, kLower - first - 16);
  return {{fma(with_base<bits, kLower>(a), f.d, f.lower), fma(with_base<bits, kUpper>(a), f.d, f.upper),
           fma(with_base<bits, kLower>(b), f.d, f.lower), fma(with_base<bits, kUpper>(b), f.d, f.upper)}};
}

// f(i, weights of k 4 i..4 i + 3) for i = 0..7, of a group's columns in one part of a line.
template <int type, class F>
KVERN_INLINE void each_quad(const uint8_t* panel, int64_t index, int part, F f) {
  using R = Record<type>;
  const uint8_t* record = R::record(panel, index);
  const int group = index % R::kGroups;
  Factors of_half = factors<type>(record, group, 0, part);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    if (R::kHalves == 2 && i == 4) of_half = factors<type>(record, group, 1, part);
    if constexpr (R::kBits == 4) {
      const Words v = load<Words>(record + (group * 4 + i % 4) * 64 + part * kRegisterBytes);
      f(i, unpack_quad<4>(v, i / 4 * 4, of_half));
    } else {
      f(i, unpack_quad<R::kBits>((Words)R::quad(record, group, i, part), 0, of_half));
    }
  }
}

// Two vectors, cut off, as pairs of bf16: lane i holds a[i] in its lower half, b[i] in the upper.
KVERN_INLINE Words bf16_pairs(Floats a, Floats b) {
  const Words lower = (Words)a >> 16;
#if defined(__AVX512F__)
  return (Words)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)lower, (__m512i)b);
#else
  return lower | (Words)cut_off(b);
#endif
}

template <int type>
KVERN_INLINE void unpack_group(const uint8_t* panel, int64_t index, uint8_t* out) {
#pragma GCC unroll 4
  for (int part = 0; part < kParts; part++)
    each_quad<type>(panel, index, part, [&](int i, const Quad& q) __attribute__((always_inline)) {
      uint8_t* lines = out + i * 128 + part * kRegisterBytes;
      store(lines, bf16_pairs(q.w[0], q.w[1]));
      store(lines + 64, bf16_pairs(q.w[2], q.w[3]));
    });
}

}  // namespace KVERN_ISA
}  // namespace kvern
