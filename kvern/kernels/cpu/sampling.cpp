// Sampling: from a row of logits to a token, for the rows that need more than an argmax.
//
// What happens to a row, and in which order, is what kvern/sampling/sampler.py says, which is the same in NumPy: bias,
// mask, penalties, temperature, min_p, top_k, top_p, one draw. Rows are drawn from the op's counter by whichever thread
// is free; a row's token depends on nothing but the row.
//
//   x        the row's logits; a copy if anything is to be changed in them
//   weights  exp((x - largest) / temperature), 0 where a cut has taken the token away
//   blocks   of kBlock tokens: the sum and the largest of their weights, so that most of the row need not be looked at
//            again: the draw finds its block first, and cuts gather their candidates from blocks that reach high enough
//
// top_k: no fewer than k weights reach the k-th largest of the blocks' largest. top_p: all weights below (1 - top_p) /
// columns of the sum hold together less than what is left out. What is above such a bound is counted by magnitude, in
// bins of the leading bits, which are ordered as floats are; the border lies in one bin. Its weights are halved around
// their median until it is found: no more than its neighbourhood is sorted.
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace kvern {
namespace KVERN_ISA {

namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kFewCandidates = 32;
constexpr int kBinShift = 20;  // leaves the exponent and 3 bits of the mantissa
constexpr int kBins = (0x3f800000 >> kBinShift) + 1;  // up to 1
constexpr float kLeast = 1.2e-38f;                     // the least normal number, about: below it is 0
constexpr float kNone = -__builtin_inff();

struct Candidate {
  float weight;
  int32_t id;
};
// A lambda, as calls to a function would not be inlined.
constexpr auto larger_first = [](const Candidate& a, const Candidate& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
};

struct Room {
  float* weights;  // columns, filled up to whole blocks
  float* largest;  // of each block
  double* sums;
  Candidate* candidates;
};

int64_t num_blocks(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

double sum_of_blocks(const Room& room, int64_t columns) {
  double total = 0;
  for (int64_t i = 0; i < num_blocks(columns); i++) total += room.sums[i];
  return total;
}

Room lay_out(uint8_t* scratch, int64_t columns) {
  const int64_t blocks = num_blocks(columns);
  Room r;
  r.weights = (float*)scratch;
  r.sums = (double*)(r.weights + blocks * kBlock);
  r.largest = (float*)(r.sums + blocks);
  r.candidates = (Candidate*)(r.largest + (blocks + 1) / 2 * 2);
  return r;
}
static_assert(kMostSampled * 12 + (kMostSampled / kBlock + 2) * (12 + kBlock) < (int64_t)kScratchBytes, "");

// The number in [0, 1) that belongs to `position` under `seed`: Philox4x32-10, as kvern/sampling/rng.py has it.
double uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
  uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ key[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ key[1],
                              (uint32_t)a};
    for (int i = 0; i < 4; i++) c[i] = next[i];
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return (double)(((uint64_t)c[0] << 32 | c[1]) >> 11) * 0x1p-53;
}

bool changes_logits(const SampleRow& r) { return r.num_bias || r.num_stop || r.num_seen; }

// Ids past the row, which requests may name, are nothing to it.
void change_logits(const SampleRow& r, int64_t columns, float* x) {
  const auto there = [&](int64_t id) { return id >= 0 && id < columns; };
  for (int64_t i = 0; i < r.num_bias; i++)
    if (there(r.bias_ids[i])) x[r.bias_ids[i]] += r.bias_values[i];
  for (int64_t i = 0; i < r.num_stop; i++)
    if (there(r.stop_ids[i])) x[r.stop_ids[i]] = kNone;
  for (int64_t i = 0; i < r.num_seen; i++) {
    if (!there(r.seen_ids[i])) continue;
    float v = x[r.seen_ids[i]];
    const float count = r.seen_counts[i];
    if (r.repetition != 1.0f) v = v > 0 ? v / r.repetition : v * r.repetition;
    v -= r.frequency * count;
    if (count > 0) v -= r.presence;
    x[r.seen_ids[i]] = v;
  }
}

// The largest of each block, and of all.
float find_largest(const float* x, int64_t columns, float* largest) {
  float all = kNone;
  for (int64_t start = 0; start < columns; start += kBlock) {
    const int64_t end = start + kBlock < columns ? start + kBlock : columns;
    F32 top = set1(kNone);
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) top = max(load<F32>(x + i), top);
    float block = max(top);
    for (; i < end; i++) block = x[i] > block ? x[i] : block;
    largest[start / kBlock] = block;
    all = block > all ? block : all;
  }
  return all;
}

int32_t first_of(const float* x, const float* largest, float value) {
  int64_t block = 0;
  while (largest[block] != value) block++;
  int64_t i = block * kBlock;
  while (x[i] != value) i++;
  return (int32_t)i;
}

// Weights of all blocks; `room.largest` holds the blocks' largest logits before, and their largest weights after.
void weigh(const SampleRow& r, const float* x, int64_t columns, float peak, const Room& room) {
  const F32 top = set1(peak), inverse = set1(1.0f / r.temperature);
  const float lowest = r.min_p > 0 ? __builtin_logf(r.min_p) : kNone;
  for (int64_t start = 0, block = 0; start < columns; start += kBlock, block++) {
    float* w = room.weights + start;
    const float highest = (room.largest[block] - peak) * (1.0f / r.temperature);
    if (highest < lowest || highest < -88.0f) {
      memset(w, 0, kBlock * sizeof(float));
      room.largest[block] = 0;
      room.sums[block] = 0;
      continue;
    }
    F32 sums = {}, tops = {};
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const int64_t left = columns - start - i;
      F32 v = {};
      if (left > 0) {
        const F32 scaled = (load_at_most(x + start + i, left) - top) * inverse;
        v = scaled >= lowest ? exp(scaled) : F32{};
        for (int64_t lane = left; lane < kLanes; lane++) v[lane] = 0;
      }
      store(w + i, v);
      sums += v;
      tops = max(v, tops);
    }
    room.largest[block] = max(tops);
    room.sums[block] = sum(sums);
  }
}

// f(index) for each weight of at least `bound`, which is above 0.
template <class F>
void each_above(const Room& room, int64_t columns, float bound, F f) {
  for (int64_t start = 0, block = 0; start < columns; start += kBlock, block++) {
    if (room.largest[block] < bound) continue;
    for (int64_t i = start; i < start + kBlock; i += kLanes) {
#if defined(__AVX512F__)
      uint32_t hits = _mm512_cmp_ps_mask(_mm512_loadu_ps(room.weights + i), _mm512_set1_ps(bound), _CMP_GE_OQ);
      for (; hits; hits &= hits - 1) f(i + __builtin_ctz(hits));
#else
      for (int64_t at = i; at < i + kLanes; at++)
        if (room.weights[at] >= bound) f(at);
#endif
    }
  }
}

// Weights of one magnitude, from `least` to below `end`.
struct Bin {
  float least, end;
  double above;  // the sum of what(weight) of all larger ones
};

// The bin in which the running sum of what(weight), from the largest weight on, reaches `need`; the last one that holds
// anything, if rounding left none.
template <class F>
Bin border(const Room& room, int64_t columns, float bound, double need, F what) {
  double bins[kBins] = {};
  each_above(room, columns, bound, [&](int64_t i) {
    uint32_t bits;
    memcpy(&bits, room.weights + i, 4);
    bins[bits >> kBinShift] += what(room.weights[i]);
  });
  uint32_t bin = 0;
  double above = 0, held = 0;
  for (uint32_t i = kBins; i-- > 0 && held < need;) {
    if (bins[i] == 0) continue;
    bin = i;
    above = held;
    held += bins[i];
  }
  const uint32_t edges[2] = {bin << kBinShift, (bin + 1) << kBinShift};
  Bin found = {0, 0, above};
  memcpy(&found.least, edges, 8);
  if (found.least < bound) found.least = bound;
  return found;
}

// Weights from `least` to below `end`.
int64_t gather(const Room& room, int64_t columns, float least, float end) {
  int64_t n = 0;
  each_above(room, columns, least, [&](int64_t i) {
    if (room.weights[i] < end) room.candidates[n++] = {room.weights[i], (int32_t)i};
  });
  return n;
}

// A weight that at least k reach, unless fewer are above 0.
float bound_of_top(const Room& room, int64_t columns, int64_t k) {
  const int64_t blocks = num_blocks(columns);
  if (blocks < k) return border(room, columns, kLeast, (double)k, [](float) { return 1.0; }).least;
  int64_t n = 0;
  for (int64_t i = 0; i < blocks; i++)
    if (room.largest[i] >= kLeast) room.candidates[n++] = {room.largest[i], (int32_t)i};
  if (n < k) return kLeast;
  std::nth_element(room.candidates, room.candidates + k - 1, room.candidates + n, larger_first);
  return room.candidates[k - 1].weight;
}

double sum_of(const Candidate* c, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; i++) total += c[i].weight;
  return total;
}

// Of the fewest largest that hold `need`, the last.
Candidate last_of_nucleus(Candidate* c, int64_t n, double need) {
  int64_t begin = 0, end = n;
  double held = 0;  // by those before `begin`
  while (end - begin > kFewCandidates) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(c + begin, c + middle, c + end, larger_first);
    const double half = sum_of(c + begin, middle - begin);
    if (held + half >= need) {
      end = middle;
    } else {
      held += half;
      begin = middle;
    }
  }
  std::sort(c + begin, c + end, larger_first);
  do held += c[begin++].weight;
  while (begin < end && held < need);
  return c[begin - 1];
}

// The index at which the running sum first passes `target`; the last that adds anything, if rounding left none.
template <class F>
int64_t first_above(int64_t n, double target, double before, F weight) {
  int64_t last = 0;
  for (int64_t i = 0; i < n; i++) {
    const double w = weight(i);
    if (w > 0) last = i;
    before += w;
    if (before > target) return i;
  }
  return last;
}

int32_t draw_from_all(const Room& room, int64_t columns, double number) {
  double before = 0;
  const double target = number * sum_of_blocks(room, columns);
  const int64_t block = first_above(num_blocks(columns), target, 0, [&](int64_t i) { return room.sums[i]; });
  for (int64_t i = 0; i < block; i++) before += room.sums[i];
  const float* w = room.weights + block * kBlock;
  return (int32_t)(block * kBlock + first_above(kBlock, target, before, [&](int64_t i) { return (double)w[i]; }));
}

// From those that do not come after `last`.
int32_t draw_up_to(const Room& room, int64_t columns, const Candidate& last, double number) {
  double total = 0, before = 0;
  const auto kept = [&](int64_t i) { return room.weights[i] > last.weight || i <= last.id; };
  each_above(room, columns, last.weight, [&](int64_t i) { total += kept(i) ? room.weights[i] : 0; });
  int64_t drawn = -1, any = 0;
  each_above(room, columns, last.weight, [&](int64_t i) {
    if (!kept(i)) return;
    any = i;
    before += room.weights[i];
    if (drawn < 0 && before > number * total) drawn = i;
  });
  return (int32_t)(drawn < 0 ? any : drawn);
}

// The last token that top_k and top_p leave, in the order of their weights.
Candidate last_kept(const SampleRow& r, const Room& room, int64_t columns) {
  const float all = 2.0f;  // above every weight
  Candidate* c = room.candidates;
  if (r.top_k > 0 && r.top_k < columns) {
    const int64_t n = gather(room, columns, bound_of_top(room, columns, r.top_k), all), k = n < r.top_k ? n : r.top_k;
    std::nth_element(c, c + k - 1, c + n, larger_first);
    return r.top_p < 1 ? last_of_nucleus(c, k, r.top_p * sum_of(c, k)) : c[k - 1];
  }
  const double total = sum_of_blocks(room, columns);
  const float bound = (float)((1.0 - r.top_p) * total / (double)columns);
  const auto itself = [](float weight) { return (double)weight; };
  const Bin bin = border(room, columns, bound > kLeast ? bound : kLeast, r.top_p * total, itself);
  return last_of_nucleus(c, gather(room, columns, bin.least, bin.end), r.top_p * total - bin.above);
}

// -1 if all tokens are masked.
int32_t sample_row(const SampleRow& r, int64_t columns, uint8_t* scratch) {
  const Room room = lay_out(scratch, columns);
  const float* x = r.logits;
  if (changes_logits(r)) {
    memcpy(room.weights, x, (size_t)columns * sizeof(float));
    change_logits(r, columns, room.weights);
    x = room.weights;
  }
  const float peak = find_largest(x, columns, room.largest);
  if (peak == kNone) return -1;
  if (r.temperature == 0) return first_of(x, room.largest, peak);
  weigh(r, x, columns, peak, room);
  const double number = uniform(r.seed, (uint64_t)r.position);
  if ((r.top_k <= 0 || r.top_k >= columns) && r.top_p >= 1) return draw_from_all(room, columns, number);
  return draw_up_to(room, columns, last_kept(r, room, columns), number);
}

}  // namespace

void sample(const Op& op, const Step& step, int thread, int) {
  const SampleArgs& args = op.sample;
  int32_t& next = step.counters[op.counter].next;
  for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < args.num_rows;)
    args.tokens[i] = sample_row(args.rows[i], args.columns, step.scratch[thread]);
}

}  // namespace KVERN_ISA
}  // namespace kvern
