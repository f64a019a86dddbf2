// Operations on rows: normalisation, gates, sums, the conversion of a matrix product's input, argmax.
//
// Rows are divided evenly over the threads. Columns past the last whole vector are computed in a vector of their own,
// padded with zeros.
#include "activations.h"
#include "kernels.h"
#include "largest.h"
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

// The first largest of all that is offered, NaN above all.
struct Peak {
  float value = -__builtin_inff();
  int32_t column = kNoColumn;

  void offer(const Largest& found) {
    for (int i = 0; i < kLanes; i++) offer(found.value[i], found.column[i]);
  }

 private:
  void offer(float v, int32_t i) {
    const bool nan = v != v, is_nan = value != value;
    if (is_nan && !nan) return;
    if ((nan && !is_nan) || v > value || ((v == value || (nan && is_nan)) && i < column)) value = v, column = i;
  }
};

}  // namespace

void argmax(const Op& op, const Step& step, int thread, int threads) {
  const ArgmaxArgs& a = op.argmax;
  Range r = part(num_rows(op, step), thread, threads);
  for (int64_t i = r.begin; i < r.end; i++) {
    Peak peak;
    if (a.finds_largest && step.largest_only) {
      for (int t = 0; t < threads; t++) peak.offer(largest_of(step.scratch[t])[i]);
    } else {
      const float* x = a.x.data + i * a.x.stride;
      Largest found;
      for (int64_t k = 0; k < a.columns; k += kLanes) found.offer(load_at_most(x + k, a.columns - k), k, a.columns - k);
      peak.offer(found);
    }
    // If the largest is -infinity all are, and the first of them is column 0.
    a.index[i] = peak.value == -__builtin_inff() ? 0 : peak.column;
    a.value[i] = peak.value;
  }
}

}  // namespace KVERN_ISA
}  // namespace kvern
