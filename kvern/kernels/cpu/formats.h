// The blocks of weights as they lie in a GGUF file.
//
// A row of a quantised tensor is a sequence of blocks of 32 or 256 weights. `Block<type>::read` takes one apart into
// unsigned values and what they are scaled by; a weight is then
//
//   Q4_0 Q5_0 Q8_0   d * (u - offset)
//   Q4_1             d * u + m
//   Q4_K Q5_K        (d * scales[i]) * u - m * minimums[i]      i = k / 32
//   Q6_K             (d * scales[i]) * (u - offset)             i = k / 16
//
// with d and m in fp16. Packing rearranges the values, `decode` multiplies them out: it gives the bits that ggml gives.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace kvern {
namespace KVERN_ISA {

constexpr int kMaxBlock = 256;

struct Decoded {
  uint8_t u[kMaxBlock];
  uint8_t scales[16];    // of groups of 32 (unsigned) or 16 (Q6_K, signed)
  uint8_t minimums[8];   // of groups of 32
  uint16_t d;
  uint16_t m;
};

template <int type>
struct Block;

// Values of 4 bits: the first half of a block in the low nibbles.
KVERN_INLINE void read_nibbles(const uint8_t* q, uint8_t* u) {
  for (int i = 0; i < 16; i++) {
    u[i] = q[i] & 15;
    u[i + 16] = q[i] >> 4;
  }
}

template <>
struct Block<kQ4_0> {  // d, 16 x 2 nibbles
  static constexpr int kWeights = 32, kBytes = 18, kOffset = 8;
  static void read(const uint8_t* block, Decoded& out) {
    memcpy(&out.d, block, 2);
    read_nibbles(block + 2, out.u);
  }
};

template <>
struct Block<kQ4_1> {  // d, m, 16 x 2 nibbles
  static constexpr int kWeights = 32, kBytes = 20, kOffset = 0;
  static void read(const uint8_t* block, Decoded& out) {
    memcpy(&out.d, block, 2);
    memcpy(&out.m, block + 2, 2);
    read_nibbles(block + 4, out.u);
  }
};

template <>
struct Block<kQ5_0> {  // d, 32 fifth bits, 16 x 2 nibbles
  static constexpr int kWeights = 32, kBytes = 22, kOffset = 16;
  static void read(const uint8_t* block, Decoded& out) {
    memcpy(&out.d, block, 2);
    uint32_t fifth;
    memcpy(&fifth, block + 2, 4);
    read_nibbles(block + 6, out.u);
    for (int i = 0; i < 32; i++) out.u[i] |= (fifth >> i & 1) << 4;
  }
};

template <>
struct Block<kQ8_0> {  // d, 32 signed bytes
  static constexpr int kWeights = 32, kBytes = 34, kOffset = 128;
  static void read(const uint8_t* block, Decoded& out) {
    memcpy(&out.d, block, 2);
    for (int i = 0; i < 32; i++) out.u[i] = block[2 + i] ^ 0x80;
  }
};

// 8 scales and 8 minimums of 6 bits in 12 bytes: the first four of each in the low bits of bytes 0-3 and 4-7; of the
// others 4 bits in bytes 8-11 and 2 in the high bits of bytes 0-7.
KVERN_INLINE void read_scales_k(const uint8_t* q, Decoded& out) {
  for (int i = 0; i < 4; i++) {
    out.scales[i] = q[i] & 63;
    out.minimums[i] = q[i + 4] & 63;
    out.scales[i + 4] = (q[i + 8] & 15) | (q[i] >> 6) << 4;
    out.minimums[i + 4] = (q[i + 8] >> 4) | (q[i + 4] >> 6) << 4;
  }
}

// 4 x 32 bytes: byte i of run j holds weights 64j + i and 64j + 32 + i.
KVERN_INLINE void read_nibbles_k(const uint8_t* q, uint8_t* u) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 32; i++) {
      u[64 * j + i] = q[32 * j + i] & 15;
      u[64 * j + 32 + i] = q[32 * j + i] >> 4;
    }
}

template <>
struct Block<kQ4_K> {  // d, m, scales, nibbles
  static constexpr int kWeights = 256, kBytes = 144, kOffset = 0;
  static void read(const uint8_t* block, Decoded& out) {
    memcpy(&out.d, block, 2);
    memcpy(&out.m, block + 2, 2);
    read_scales_k(block + 4, out);
    read_nibbles_k(block + 16, out.u);
  }
};

template <>
struct Block<kQ5_K> {  // d, m, scales, 32 bytes of fifth bits (bit j of byte i: weight 32j + i), nibbles
  static constexpr int kWeights = 256, kBytes = 176, kOffset = 0;
  static void read(const uint8_t* block, Decoded& out) {
    memcpy(&out.d, block, 2);
    memcpy(&out.m, block + 2, 2);
    read_scales_k(block + 4, out);
    read_nibbles_k(block + 48, out.u);
    for (int j = 0; j < 8; j++)
      for (int i = 0; i < 32; i++) out.u[32 * j + i] |= (block[16 + i] >> j & 1) << 4;
  }
};

template <>
struct Block<kQ6_K> {  // 2 x 64 bytes of nibbles, 2 x 32 bytes of upper bits, 16 scales, d
  static constexpr int kWeights = 256, kBytes = 210, kOffset = 32;
  static void read(const uint8_t* block, Decoded& out) {
    memcpy(&out.d, block + 208, 2);
    memcpy(out.scales, block + 192, 16);
    for (int half = 0; half < 2; half++) {
      const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
      uint8_t* u = out.u + 128 * half;
      for (int i = 0; i < 32; i++) {
        u[i] = (low[i] & 15) | (high[i] & 3) << 4;
        u[i + 32] = (low[i + 32] & 15) | (high[i] >> 2 & 3) << 4;
        u[i + 64] = (low[i] >> 4) | (high[i] >> 4 & 3) << 4;
        u[i + 96] = (low[i + 32] >> 4) | (high[i] >> 6) << 4;
      }
    }
  }
};

// One block to float32.
template <int type>
KVERN_INLINE void decode(const uint8_t* block, float* out) {
  using B = Block<type>;
  Decoded x;
  B::read(block, x);
  const float d = from_fp16(x.d);
  for (int i = 0; i < B::kWeights; i++) {
    float u = (float)(x.u[i] - B::kOffset);
    if constexpr (type == kQ4_K || type == kQ5_K)
      out[i] = d * x.scales[i / 32] * u - from_fp16(x.m) * x.minimums[i / 32];
    else if constexpr (type == kQ6_K)
      out[i] = d * (int8_t)x.scales[i / 16] * u;
    else if constexpr (type == kQ4_1)
      out[i] = d * u + from_fp16(x.m);
    else
      out[i] = d * u;
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
