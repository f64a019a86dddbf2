// Operations on rows: normalisation, gates, sums, the conversion of a matrix product's input, argmax.
//
// Rows are divided evenly over the threads. Columns past the last whole vector are computed in a vector of their own,
// padded with zeros.
#include "activations.h"
#include "kernels.h"
#include "quantize.h"
#include "simd.h"

namespace kvern {
namespace KVERN_ISA {

namespace {

struct Range {
  int64_t begin, end;
};
KVERN_INLINE Range part(int64_t n, int thread, int threads) { return {n * thread / threads, n * (thread + 1) / threads}; }

// out[i] = f(i), 16 columns at a time.
template <class F>
KVERN_INLINE void each(float* out, int64_t columns, F f) {
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) store(out + i, f(i, (int64_t)kLanes));
  if (i < columns) store_at_most(out + i, f(i, columns - i), columns - i);
}
KVERN_INLINE F32 take(const float* p, int64_t n) { return n == kLanes ? load<F32>(p) : load_at_most(p, n); }

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
    float* out = a.quantized.values ? (float*)step.scratch[thread] : a.out.data + i * a.out.stride;
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
        F32 v = load_at_most(x + k, a.group - k);
        squares[0] = fma(v, v, squares[0]);
      }
      float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)a.group;
      F32 factor = set1(1.0f / sqrt(set1(mean + a.eps))[0]);
      each(out + start, a.group, [&](int64_t c, int64_t n) {
        return take(x + c, n) * factor * (take(a.weight + c, n) + a.offset);
      });
    }
    if (a.quantized.values) quantize_columns(out, a.columns, 0, a.quantized.columns, a.quantized, i);
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

void quantize(const Op& op, const Step& step, int thread, int threads) {
  const QuantizeArgs& a = op.quantize;
  Range r = part(num_rows(op, step), thread, threads);
  for (int64_t i = r.begin; i < r.end; i++) {
    quantize_columns(a.x.data + i * a.x.stride, a.columns, 0, a.out.columns, a.out, i);
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
