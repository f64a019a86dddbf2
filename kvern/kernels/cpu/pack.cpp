// Weights from a GGUF file's rows into the panels of records.h.
//
// The work is divided by panels, and a panel's bytes depend on its own 16 rows only, so that several threads can pack.
// Rows past the last are zeros.
#include "formats.h"
#include "records.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

KVERN_INLINE uint32_t word(const uint8_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

// One group of 32 k of 16 rows; u(n) are row n's values of the group. Four k at a time, as the bytes of a word.
template <int type, class Values>
void pack_values(Values u, int group, uint8_t* record) {
  using R = Record<type>;
  uint8_t* low = record + group * R::kLowLines * 64;
  uint8_t* upper = record + R::kUpper + group * R::kUpperLines * 64;
  for (int n = 0; n < kPanel; n++) {
    const uint8_t* v = u(n);
    for (int g = 0; g < R::kLowLines; g++) {
      uint32_t x = word(v + 4 * g);
      if (R::kBits < 8) x = (x & 0x0f0f0f0fu) | (word(v + 16 + 4 * g) & 0x0f0f0f0fu) << 4;
      memcpy(low + g * 64 + 4 * n, &x, 4);
    }
    for (int h = 0; h < R::kUpperLines; h++) {
      uint32_t x = 0;
      if (R::kBits == 5)
        for (int g = 0; g < 8; g++) x |= (word(v + 4 * g) >> 4 & 0x01010101u) << g;
      else
        for (int g = 0; g < 4; g++) x |= (word(v + 16 * h + 4 * g) >> 4 & 0x03030303u) << 2 * g;
      memcpy(upper + h * 64 + 4 * n, &x, 4);
    }
  }
}

// Scales of the block that fills the record's groups from `group` on.
template <int type>
void pack_scales(const Decoded* blocks, int group, uint8_t* record) {
  using R = Record<type>;
  for (int n = 0; n < kPanel; n++) {
    const Decoded& b = blocks[n];
    memcpy(record + R::kD + group * 32 + 2 * n, &b.d, 2);
    if (R::kMinimum) memcpy(record + R::kM + group * 32 + 2 * n, &b.m, 2);
    if (!R::kNested) continue;
    for (int i = 0; i < R::kGroups * R::kHalves; i++) record[R::kScales + i * kPanel + n] = b.scales[i];
    for (int i = 0; R::kMinimum && i < R::kGroups; i++) record[R::kMinimums + i * kPanel + n] = b.minimums[i];
  }
}

// `rows` is the panel's first row; only `present` of the 16 are there.
template <int type>
void pack_quantised(const uint8_t* rows, int64_t row_bytes, int64_t present, int64_t in, uint8_t* panel) {
  using B = Block<type>;
  using R = Record<type>;
  constexpr int kGroupsPerBlock = B::kWeights / kGroup;
  Decoded blocks[kPanel];
  memset(blocks, 0, sizeof blocks);
  memset(panel, 0, R::panel_bytes(in));
  for (int64_t i = 0; i < in / B::kWeights; i++) {
    for (int64_t n = 0; n < present; n++) B::read(rows + n * row_bytes + i * B::kBytes, blocks[n]);
    int64_t first = i * kGroupsPerBlock;
    uint8_t* record = panel + first / R::kGroups * R::kBytes;
    int group = first % R::kGroups;
    for (int g = 0; g < kGroupsPerBlock; g++)
      pack_values<type>([&](int n) { return blocks[n].u + g * kGroup; }, group + g, record);
    pack_scales<type>(blocks, group, record);
  }
}

KVERN_INLINE uint16_t element(int32_t type, const uint8_t* row, int64_t k) {
  if (type == kF32) {
    float x;
    memcpy(&x, row + 4 * k, 4);
    return to_bf16(x);
  }
  uint16_t half;
  memcpy(&half, row + 2 * k, 2);
  return type == kF16 ? to_bf16(from_fp16(half)) : half;
}

template <int type>
void pack_floats(const uint8_t* rows, int64_t row_bytes, int64_t present, int64_t in, uint8_t* panel) {
  memset(panel, 0, panel_bytes(type, in));
  for (int64_t n = 0; n < present; n++)
    for (int64_t k = 0; k < in; k++) {
      uint16_t x = element(type, rows + n * row_bytes, k);
      memcpy(panel + k / 2 * 64 + 4 * n + 2 * (k % 2), &x, 2);
    }
}

using PackPanel = void (*)(const uint8_t*, int64_t, int64_t, int64_t, uint8_t*);

PackPanel pack_function(int32_t type) {
  switch (type) {
    case kF32: return pack_floats<kF32>;
    case kF16: return pack_floats<kF16>;
    case kBF16: return pack_floats<kBF16>;
    case kQ4_0: return pack_quantised<kQ4_0>;
    case kQ4_1: return pack_quantised<kQ4_1>;
    case kQ5_0: return pack_quantised<kQ5_0>;
    case kQ8_0: return pack_quantised<kQ8_0>;
    case kQ4_K: return pack_quantised<kQ4_K>;
    case kQ5_K: return pack_quantised<kQ5_K>;
    case kQ6_K: return pack_quantised<kQ6_K>;
    default: return nullptr;
  }
}

int64_t block_weights(int32_t type) {
  if (is_float(type)) return 1;
  return type == kQ4_K || type == kQ5_K || type == kQ6_K ? 256 : 32;
}

}  // namespace

size_t packed_bytes(int32_t type, int64_t out, int64_t in) {
  if (!pack_function(type) || out <= 0 || in <= 0 || in % block_weights(type)) return 0;
  if (!is_float(type) && in > kMaxColumns) return 0;
  return (size_t)((out + kPanel - 1) / kPanel) * panel_bytes(type, in);
}

void pack(int32_t type, const uint8_t* rows, int64_t row_bytes, int64_t out, int64_t in, uint8_t* panels,
          int64_t first_panel, int64_t last_panel) {
  const PackPanel pack_panel = pack_function(type);
  const int64_t bytes = panel_bytes(type, in);
  for (int64_t p = first_panel; p < last_panel; p++) {
    int64_t present = out - p * kPanel < kPanel ? out - p * kPanel : kPanel;
    pack_panel(rows + p * kPanel * row_bytes, row_bytes, present, in, panels + p * bytes);
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
