// What a step is made of: operations with their arguments, and what changes from one step to the next.
//
// An operation (`Op`) is plain data: a kind and a struct of arguments, made once by Python (kvern/kernels/cpu/ops.py
// holds the same structs) and run many times. Everything that differs between steps (tokens, positions, block tables, how
// many rows there are) is read from the `Step`, so one list of operations serves every batch.
//
// A kernel is run by all threads at once: `kernel(args, step, thread, threads)`, and divides its work by these two. A
// barrier follows each operation. Kernels allocate nothing; they have `step.scratch[thread]` to work in.
//
// Batch invariance: a row of the output is computed from its row of the input (and the cache) in an order that depends
// neither on how many rows there are, nor where it stands, nor on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvern {

// Rows of float32, `stride` floats apart.
struct View {
  float* data;
  int64_t stride;
};

// The input of a matrix product, [rows, columns]. One of three forms:
//   floats  values[row * columns + k]: bf16, or float32 with instruction sets that have no dot product of bf16
//   int8    blocks of 32 columns: x is about scale[row * columns / 32 + k / 32] * values[row * columns + k];
//           sums[row * columns / 16 + k / 16] is the sum of 16 values.
//   int16   likewise; a value is 256 * high + low, two signed bytes, and a block lies as its 32 high and its 32 low ones
// columns is a multiple of 32 (what lies past the real ones is 0).
struct Activation {
  int32_t form;  // ActivationForm
  int64_t columns;
  void* values;
  float* scale;
  int32_t* sums;
};
enum ActivationForm : int32_t { kFloats = 0, kInt8 = 1, kInt16 = 2 };

// A tensor of weights as a GGUF file names its type; the numbers are ggml's.
enum WeightType : int32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

// A packed weight [out, in]: see pack.cpp. `in` counts padded columns, a multiple of 32; `out` real ones, the last panel
// is padded to 16 by zeros.
struct PackedWeight {
  int32_t type;  // WeightType: bf16 (also for F16 and F32 sources), or the quantised type
  int64_t in;
  int64_t out;
  const uint8_t* panels;
  int64_t bytes;
};

// Keys and values of one layer, pages of 16 tokens:
//   page p, kv head h at base + (p * kv_heads + h) * head_bytes
//   bf16  keys [head_dim / 2][16 tokens][2], then values [8 pairs of tokens][head_dim][2]; head_bytes = 64 * head_dim
//   int8  keys + 128 [head_dim / 4][16][4], values [4 quads of tokens][head_dim][4], then float32 scales [16] of the
//         keys and [16] of the values; head_bytes = 32 * head_dim + 128
// A block of the cache is block_size / 16 pages in a row.
struct KVCache {
  uint8_t* base;
  int32_t kv_heads;
  int32_t head_dim;  // a multiple of 16
  int32_t type;      // kKVBf16, kKVInt8
  int32_t reserved;
};
enum KVType : int32_t { kKVBf16 = 0, kKVInt8 = 1 };

// Block tables of one group of layers, and the step's segments. As kvern.kernels.ops.AttentionMetadata has it.
struct Plan {
  const int64_t* slots;        // [num_tokens] block * block_size + offset
  const int64_t* q_start;      // [num_segments]
  const int64_t* q_len;        // [num_segments]
  const int64_t* context_len;  // [num_segments]
  const int32_t* block_tables; // [num_segments, table_stride]
  int64_t table_stride;
  int32_t num_segments;
  int32_t block_size;
};

constexpr int kMaxPlans = 16;

// One line per op: threads draw work from it. finished: attention's, which leaves it at 0.
struct alignas(128) Counter {
  int32_t next;
  uint16_t finished[62];
};

struct Step {
  int64_t num_tokens;
  int64_t num_rows;            // rows of which logits are wanted
  const int32_t* token_ids;    // [num_tokens]
  const int64_t* positions;    // [num_tokens]
  const int64_t* rows;         // [num_rows] among the tokens
  Plan plans[kMaxPlans];
  int32_t largest_only;        // of logits, nothing but each row's largest is wanted
  int32_t reserved;
  // Set by run(): work memory of each thread, and a counter for each op of the tape, zero when the op starts.
  uint8_t** scratch;
  Counter* counters;
};
constexpr size_t kScratchBytes = size_t(8) << 20;

// How many rows an operation has.
enum Rows : int32_t { kTokens = 0, kLogitRows = 1 };

enum OpKind : int32_t {
  kEmbedding,
  kTakeRows,
  kQuantize,
  kLinear,
  kAdd,
  kScale,
  kRmsNorm,
  kGate,
  kRotary,
  kWriteKV,
  kAttention,
  kArgmax,
  kSample,
  kNumOpKinds,
};

struct EmbeddingArgs {  // out[i] = table[token_ids[i]]
  const uint8_t* table;
  int64_t row_bytes;
  int64_t columns;
  int32_t type;
  int32_t reserved;
  View out;
};
struct TakeRowsArgs {  // out[i] = x[step.rows[i]]
  View x;
  View out;
  int64_t columns;
};
struct QuantizeArgs {  // x [rows, columns] to the form the next product reads; columns of `out` past these become 0
  View x;
  int64_t columns;
  Activation out;
};
struct LinearArgs {  // out = x W^T + bias + residual, or the gate of its two halves
  Activation x;
  PackedWeight weight;
  const float* bias;  // [out], or null
  View residual;      // [rows, out], or data null; may be the same memory as `out`
  View out;
  int32_t gate;  // kNoGate; else W's rows are the two halves a, b, and out [rows, out / 2] = f(a) * b
  int32_t finds_largest;  // if step.largest_only: each thread's largest of each row instead of `out`, for argmax
  // values not null, only with a gate: the result is read by products alone and goes here; `out` is room to work in.
  Activation quantized;
};
struct AddArgs {
  View a;
  View b;
  View out;
  int64_t columns;
};
struct ScaleArgs {
  View x;
  View out;
  int64_t columns;
  float factor;
};
struct RmsNormArgs {  // over groups of `group` columns; weight [group]
  View x;
  View out;
  const float* weight;
  int64_t columns;
  int64_t group;
  float eps;
  float offset;
  Activation quantized;  // values not null: the result is read by products alone, and goes here instead of `out`
};
struct GateArgs {  // out = f(x[:, :columns]) * x[:, columns:]
  View x;
  View out;
  int64_t columns;
  int32_t gate;
};
enum Gate : int32_t { kNoGate = 0, kSilu = 1, kGeluTanh = 2 };
struct RotaryArgs {  // heads of x [rows, heads * head_dim], dimension i with i + head_dim / 2
  View x;
  View out;
  const float* table;  // [positions][2][head_dim / 2]: cosines, then sines
  const float* scale;  // [heads][head_dim / 2], what the rotated pairs are multiplied by; or null
  int32_t heads;
  int32_t head_dim;
};
struct WriteKVArgs {  // k, v [tokens, kv_heads * head_dim] to plan.slots
  View k;
  View v;
  KVCache cache;
  int32_t plan;
};
struct AttentionArgs {
  View q;
  View out;
  KVCache cache;
  int32_t plan;
  int32_t heads;
  float scale;
  int32_t window;  // 0: none
  Activation quantized;  // values not null: as with RmsNormArgs; head_dim is a multiple of 32 then
};
struct ArgmaxArgs {  // of each row: where it is (the lowest index of equals), and the value; NaN counts as largest
  View x;
  int64_t columns;
  int32_t* index;
  float* value;
  int32_t finds_largest;  // x is the result of such a product
};
// A row to sample: see kvern/sampling/sampler.py for what the parameters mean.
struct SampleRow {
  const float* logits;  // [columns]
  const int64_t* bias_ids;
  const float* bias_values;
  const int64_t* stop_ids;  // masked
  const int64_t* seen_ids;  // distinct tokens that the penalties are for
  const float* seen_counts;  // how often each is in the output
  int64_t num_bias;
  int64_t num_stop;
  int64_t num_seen;
  uint64_t seed;
  int64_t position;
  int64_t top_k;  // 0: all
  double top_p;
  float temperature;  // 0: the largest
  float min_p;
  float repetition;
  float frequency;
  float presence;
  int32_t reserved;
};
struct SampleArgs {  // one token for each of rows; -1 where all are masked. columns: up to kMostSampled
  const SampleRow* rows;
  int64_t num_rows;
  int64_t columns;
  int32_t* tokens;
};
constexpr int64_t kMostSampled = 500000;

struct Op {
  int32_t kind;
  int32_t rows;     // Rows
  int32_t counter;  // the index of this op's counter in step.counters
  int32_t reserved;
  union {
    EmbeddingArgs embedding;
    TakeRowsArgs take_rows;
    QuantizeArgs quantize;
    LinearArgs linear;
    AddArgs add;
    ScaleArgs scale;
    RmsNormArgs rms_norm;
    GateArgs gate;
    RotaryArgs rotary;
    WriteKVArgs write_kv;
    AttentionArgs attention;
    ArgmaxArgs argmax;
    SampleArgs sample;
    uint8_t bytes[256];
  };
};

inline int64_t num_rows(const Op& op, const Step& step) { return op.rows == kTokens ? step.num_tokens : step.num_rows; }

using Kernel = void (*)(const Op& op, const Step& step, int thread, int threads);

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  Kernel run[kNumOpKinds];
  // Bytes that a packed weight needs; 0 if the type cannot be packed with these numbers of rows and columns.
  size_t (*packed_bytes)(int32_t type, int64_t out, int64_t in);
  // Pack rows (as they lie in a file, `row_bytes` apart) into panels [first_panel, last_panel). `in` columns as in the file.
  void (*pack)(int32_t type, const uint8_t* rows, int64_t row_bytes, int64_t out, int64_t in, uint8_t* panels,
               int64_t first_panel, int64_t last_panel);
};

// Null where a build leaves a set out.
__attribute__((weak)) const Kernels* kernels_portable();
__attribute__((weak)) const Kernels* kernels_avx2();
__attribute__((weak)) const Kernels* kernels_avx512();
__attribute__((weak)) const Kernels* kernels_avx512_bf16();
__attribute__((weak)) const Kernels* kernels_amx();

}  // namespace kvern
