// Operations on rows: normalisation, gates, sums, the conversion of a matrix product's input, argmax.
//
// Rows are divided evenly over the threads; argmax of a single row divides its columns. Columns past the last whole
// vector are computed in a vector of their own, padded with zeros.
#include "activations.h"
#include "kernels.h"
#include "simd.h"

namespace kvern {
namespace KVERN_ISA {

namespace {

struct Range {
  int64_t begin, end;
};
KVERN_INLINE Range part(int64_t n, int thread, int threads) { return {n * thread / threads, n * (thread + 1) / threads}; }

KVERN_INLINE F32 load_some(const float* p, int64_t n) {
  F32 v = {};
  memcpy(&v, p, (size_t)(n < kLanes ? n : kLanes) * 4);
  return v;
}
KVERN_INLINE void store_some(float* p, F32 v, int64_t n) { memcpy(p, &v, (size_t)(n < kLanes ? n : kLanes) * 4); }

// out[i] = f(i), 16 columns at a time.
template <class F>
KVERN_INLINE void each(float* out, int64_t columns, F f) {
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) store(out + i, f(i, (int64_t)kLanes));
  if (i < columns) store_some(out + i, f(i, columns - i), columns - i);
}
KVERN_INLINE F32 take(const float* p, int64_t n) { return n == kLanes ? load<F32>(p) : load_some(p, n); }

}  // namespace

void take_rows(const Op& op, const Step& step, int thread, int threads) {
  const TakeRowsArgs& a = op.take_rows;
  Range r = part(step.num_rows, thread, threads);
  for (int64_t i = r.begin; i < r.end; i++)
    memcpy(a.out.data + i * a.out.stride, a.x.data + step.rows[i] * a.x.stride, (size_t)a.columns * 4);
}

void add(const Op& op, const Step& step, int thread, int threads) {
  const AddArgs& a = op.add;
  Range r = part(num_rows(op, step), thread, threads);
  for (int64_t i = r.begin; i < r.end; i++) {
    const float *x = a.a.data + i * a.a.stride, *y = a.b.data + i * a.b.stride;
    each(a.out.data + i * a.out.stride, a.columns, [&](int64_t k, int64_t n) { return take(x + k, n) + take(y + k, n); });
  }
}

void scale(const Op& op, const Step& step, int thread, int threads) {
  const ScaleArgs& a = op.scale;
  Range r = part(num_rows(op, step), thread, threads);
  for (int64_t i = r.begin; i < r.end; i++) {
    const float* x = a.x.data + i * a.x.stride;
    each(a.out.data + i * a.out.stride, a.columns, [&](int64_t k, int64_t n) { return take(x + k, n) * a.factor; });
  }
}

void rms_norm(const Op& op, const Step& step, int thread, int threads) {
  const RmsNormArgs& a = op.rms_norm;
  Range r = part(num_rows(op, step), thread, threads);
  for (int64_t i = r.begin; i < r.end; i++) {
    for (int64_t start = 0; start < a.columns; start += a.group) {
      const float* x = a.x.data + i * a.x.stride + start;
      // Four sums, so that the additions need not wait for each other.
      F32 squares[4] = {};
      int64_t k = 0;
      for (; k + 4 * kLanes <= a.group; k += 4 * kLanes)
        for (int j = 0; j < 4; j++) {
          F32 v = load<F32>(x + k + j * kLanes);
          squares[j] = fma(v, v, squares[j]);
        }
      for (; k < a.group; k += kLanes) {
        F32 v = load_some(x + k, a.group - k);
        squares[0] = fma(v, v, squares[0]);
      }
      float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)a.group;
      F32 factor = set1(1.0f / sqrt(set1(mean + a.eps))[0]);
      each(a.out.data + i * a.out.stride + start, a.group, [&](int64_t c, int64_t n) {
        return take(x + c, n) * factor * (take(a.weight + c, n) + a.offset);
      });
    }
  }
}

void gate(const Op& op, const Step& step, int thread, int threads) {
  const GateArgs& a = op.gate;
  Range r = part(num_rows(op, step), thread, threads);
  for (int64_t i = r.begin; i < r.end; i++) {
    const float *x = a.x.data + i * a.x.stride, *y = x + a.columns;
    float* out = a.out.data + i * a.out.stride;
    if (a.gate == kSilu)
      each(out, a.columns, [&](int64_t k, int64_t n) { return silu(take(x + k, n)) * take(y + k, n); });
    else
      each(out, a.columns, [&](int64_t k, int64_t n) { return gelu_tanh(take(x + k, n)) * take(y + k, n); });
  }
}

namespace {

void quantize_bf16(const float* x, int64_t columns, const Activation& out, int64_t row) {
  uint16_t* values = (uint16_t*)out.values + row * out.columns;
  for (int64_t k = 0; k < out.columns; k += kLanes)
    store(values + k, to_bf16(k < columns ? load_some(x + k, columns - k) : F32{}));
}

void quantize_int8(const float* x, int64_t columns, const Activation& out, int64_t row) {
  int8_t* values = (int8_t*)out.values + row * out.columns;
  float* scales = out.scale + row * (out.columns / 32);
  int32_t* sums = out.sums + row * (out.columns / 16);
  for (int64_t k = 0; k < out.columns; k += 32) {
    F32 a = k < columns ? load_some(x + k, columns - k) : F32{};
    F32 b = k + 16 < columns ? load_some(x + k + 16, columns - k - 16) : F32{};
    F32 abs_a = (F32)((U32)a & 0x7fffffff), abs_b = (F32)((U32)b & 0x7fffffff);
    float peak = max(max(abs_a, abs_b));
    F32 inverse = set1(peak > 0 ? 127.0f / peak : 0.0f);
    I32 qa = round_to_int(a * inverse), qb = round_to_int(b * inverse);
    store(values + k, __builtin_convertvector(qa, I8x16));
    store(values + k + 16, __builtin_convertvector(qb, I8x16));
    scales[k / 32] = peak / 127.0f;
    sums[k / 16] = sum(qa);
    sums[k / 16 + 1] = sum(qb);
  }
}

}  // namespace

void quantize(const Op& op, const Step& step, int thread, int threads) {
  const QuantizeArgs& a = op.quantize;
  Range r = part(num_rows(op, step), thread, threads);
  for (int64_t i = r.begin; i < r.end; i++) {
    const float* x = a.x.data + i * a.x.stride;
    if (a.out.form == kBf16)
      quantize_bf16(x, a.columns, a.out, i);
    else
      quantize_int8(x, a.columns, a.out, i);
  }
}

namespace {

// The first largest of x[begin, end), NaN above all.
void argmax_range(const float* x, int64_t begin, int64_t end, int32_t* index, float* value) {
  I32 lane;
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  F32 best = set1(-__builtin_inff());
  I32 where = set1((int32_t)end);
  int64_t k = begin;
  for (; k + kLanes <= end; k += kLanes) {
    F32 v = load<F32>(x + k);
    I32 better = (v > best) | ((v != v) & (best == best)) | ((where == (int32_t)end) & (v == best));
    best = better ? v : best;
    where = better ? lane + (int32_t)k : where;
  }
  float peak = -__builtin_inff();
  int32_t found = (int32_t)end;
  auto offer = [&](float v, int32_t i) {
    bool nan = v != v, peak_nan = peak != peak;
    if (i >= end || (peak_nan && !nan)) return;
    if ((nan && !peak_nan) || v > peak || ((v == peak || (nan && peak_nan)) && i < found)) peak = v, found = i;
  };
  for (int i = 0; i < kLanes; i++) offer(best[i], where[i]);
  for (; k < end; k++) offer(x[k], (int32_t)k);
  *index = found;
  *value = peak;
}

}  // namespace

void argmax(const Op& op, const Step& step, int thread, int threads) {
  const ArgmaxArgs& a = op.argmax;
  Range r = part(num_rows(op, step), thread, threads);
  for (int64_t i = r.begin; i < r.end; i++)
    argmax_range(a.x.data + i * a.x.stride, 0, a.columns, a.index + i, a.value + i);
}

}  // namespace KVERN_ISA
}  // namespace kvern
