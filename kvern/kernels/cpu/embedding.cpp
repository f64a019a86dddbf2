// Rows of an embedding table to float32, from any type a GGUF file may hold it in. Each thread takes a run of tokens.
#include "formats.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

template <int type>
void decode_blocks(const uint8_t* row, int64_t columns, float* out) {
  using B = Block<type>;
  for (int64_t k = 0; k < columns; k += B::kWeights, row += B::kBytes) decode<type>(row, out + k);
}

void decode_halves(int32_t type, const uint8_t* row, int64_t columns, float* out) {
  for (int64_t k = 0; k < columns; k++) {
    uint16_t half;
    memcpy(&half, row + 2 * k, 2);
    out[k] = type == kF16 ? from_fp16(half) : from_bf16(half);
  }
}

void decode_row(int32_t type, const uint8_t* row, int64_t columns, float* out) {
  switch (type) {
    case kF32: memcpy(out, row, columns * sizeof(float)); break;
    case kF16:
    case kBF16: decode_halves(type, row, columns, out); break;
    case kQ4_0: decode_blocks<kQ4_0>(row, columns, out); break;
    case kQ4_1: decode_blocks<kQ4_1>(row, columns, out); break;
    case kQ5_0: decode_blocks<kQ5_0>(row, columns, out); break;
    case kQ8_0: decode_blocks<kQ8_0>(row, columns, out); break;
    case kQ4_K: decode_blocks<kQ4_K>(row, columns, out); break;
    case kQ5_K: decode_blocks<kQ5_K>(row, columns, out); break;
    case kQ6_K: decode_blocks<kQ6_K>(row, columns, out); break;
    default: memset(out, 0, columns * sizeof(float)); break;
  }
}

}  // namespace

void embedding(const Op& op, const Step& step, int thread, int threads) {
  const EmbeddingArgs& args = op.embedding;
  const int64_t rows = num_rows(op, step);
  const int64_t first = rows * thread / threads, last = rows * (thread + 1) / threads;
  for (int64_t i = first; i < last; i++) {
    const uint8_t* row = args.table + step.token_ids[i] * args.row_bytes;
    decode_row(args.type, row, args.columns, args.out.data + i * args.out.stride);
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
