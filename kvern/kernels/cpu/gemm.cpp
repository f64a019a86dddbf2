// The matrix product: see gemm.h for the order of its loops. The kernels are in gemm_floats, gemm_blocks and gemm_amx.
#include "gemm.h"

#include "activations.h"
#include "quantize.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

// A panel up to this size is read ahead while the panels before it are computed; of a longer one, what comes soon.
constexpr int64_t kShortPanel = 32 << 10;
constexpr int64_t kAheadBytes = 4096;

// From so many rows for each thread on, threads divide the rows.
constexpr int64_t kRowsToDivide = 64;

// The part of a product that one thread computes.
struct Product {
  LinearArgs args;
  int64_t first_row, last_row;
  int64_t first_unit, last_unit;
  int64_t panels;       // of the weight
  int64_t half;         // panels of one half if there is a gate, else 0
  int64_t panel_bytes;
  int64_t origin;       // the column that lies first in `out`
  Largest* largest;     // where the largest of each row go, instead of all to `out`; or null
};

int64_t panel_index(const Product& p, int64_t unit, int i) {
  return p.half ? unit + i / 2 + (i % 2 ? p.half : 0) : 2 * unit + i;
}

int64_t num_units(const Product& p) { return p.half ? p.half : divide_up(p.panels, 2); }

Product make_product(const LinearArgs& args, int64_t rows) {
  Product p{};
  p.args = args;
  p.last_row = rows;
  p.panels = divide_up(args.weight.out, kPanel);
  p.half = args.gate == kNoGate ? 0 : args.weight.out / 2 / kPanel;
  p.panel_bytes = panel_bytes(args.weight.type, args.weight.in);
  p.last_unit = num_units(p);
  return p;
}

KVERN_INLINE F32 gated(int32_t gate, F32 a, F32 b) { return (gate == kSilu ? silu(a) : gelu_tanh(a)) * b; }

// Whether the result is converted for the next product: to floats, or to integers in blocks.
KVERN_INLINE bool converts_to_floats(const LinearArgs& a) { return a.quantized.values && a.quantized.form == kFloats; }
KVERN_INLINE bool converts_to_blocks(const LinearArgs& a) { return a.quantized.values && a.quantized.form != kFloats; }

// A unit's sums for some rows, y[rows][stride], and where they go.
struct Results : Unfinished {
  const Product* p;
  const float* y;
  int64_t stride;
  int64_t row, column;   // of the first
  int64_t columns[2];    // of the panels; with a gate there is one
  bool pad;              // the next product's input has 16 columns more
  F32 bias[2];
};

Results results_of(const Product& p, int64_t unit, int64_t row, int64_t rows, const float* y, int64_t stride) {
  const LinearArgs& a = p.args;
  const int64_t columns = p.half ? a.weight.out / 2 : a.weight.out, column = panel_index(p, unit, 0) * kPanel;
  Results s;
  s.rows = (int)rows;
  s.p = &p;
  s.y = y;
  s.stride = stride;
  s.row = row;
  s.column = column;
  s.columns[0] = least(columns - column, kPanel);
  s.columns[1] = p.half ? 0 : least(columns - column - kPanel, kPanel);
  s.pad = converts_to_floats(a) && column + kPanel == columns && columns < a.quantized.columns;
  if (a.bias) {
    // Halves are whole panels.
    s.bias[0] = load_at_most(a.bias + column, s.columns[0]);
    if (p.half)
      s.bias[1] = load<F32>(a.bias + columns + column);
    else if (s.columns[1] > 0)
      s.bias[1] = load_at_most(a.bias + column + kPanel, s.columns[1]);
  }
  return s;
}

// Rows [first, last) of them to `out`. A few at a time, so what does not depend on the row is in `results_of`.
void finish(const Unfinished& unfinished, int first, int last) {
  const Results& s = (const Results&)unfinished;
  const LinearArgs& a = s.p->args;
  const bool gate = s.p->half != 0, to_floats = converts_to_floats(a);
  const float* y = s.y + first * s.stride;
  int64_t row = s.row + first;
  float* out = a.out.data + row * a.out.stride + s.column - s.p->origin;
  const float* residual = a.residual.data ? a.residual.data + row * a.residual.stride + s.column : nullptr;
  Operand* operands = to_floats ? (Operand*)a.quantized.values + row * a.quantized.columns + s.column : nullptr;
  for (const int64_t end = s.row + last; row < end; row++) {
    for (int i = 0; i < 2; i++) {
      const int64_t n = s.columns[i];
      if (n <= 0) break;
      F32 v = load<F32>(y + i * kPanel);
      if (a.bias) v += s.bias[i];
      if (gate) {
        F32 b = load<F32>(y + kPanel);
        if (a.bias) b += s.bias[1];
        v = gated(a.gate, v, b);
      }
      if (residual) v += load_at_most(residual + i * kPanel, n);
      if (s.p->largest)
        s.p->largest[row].offer(v, s.column + i * kPanel, n);
      else if (to_floats)  // which has room for whole panels
        store_operands(operands + i * kPanel, v);
      else
        store_at_most(out + i * kPanel, v, n);
    }
    if (s.pad) store_operands(operands + kPanel, F32{});
    y += s.stride;
    out += a.out.stride;
    if (residual) residual += a.residual.stride;
    if (to_floats) operands += a.quantized.columns;
  }
}

// The form in blocks that the next product reads, of what the units before `last_unit` have just brought to `out`: columns in
// blocks of 32, two units, of which the second one is among the last `units`.
void convert(const Product& p, int64_t last_unit, int64_t units, int64_t first_row, int64_t last_row) {
  const LinearArgs& a = p.args;
  const int64_t columns = a.weight.out / 2, block = 2 * kPanel;
  const bool all = last_unit == p.half;
  const int64_t first = (last_unit - units) / 2 * block;
  const int64_t last = all ? a.quantized.columns : last_unit / 2 * block;
  if (first >= last) return;
  for (int64_t row = first_row; row < last_row; row++)
    quantize_columns(a.out.data + row * a.out.stride, columns, first, last, a.quantized, row);
}

// A number of 4 bytes to place `index` of a table.
template <class T>
KVERN_INLINE void put(uint8_t* table, int64_t index, T x) {
  static_assert(sizeof x == 4, "");
  memcpy(table + index * 4, &x, 4);
}

// The table of Tile::sums for rows [first, last) of x.
void make_sums(const Activation& x, const Method& m, int64_t first, int64_t last, int64_t groups, uint8_t* out) {
  const int64_t rows = last - first;
  for (int64_t row = 0; row < rows; row++) {
    const int32_t* sums = x.sums + (first + row) * x.columns / 16;
    const float* scale = x.scale + (first + row) * x.columns / kGroup;
    for (int64_t g = 0; g < groups; g++, sums += 2) {
      const int64_t at = m.by_group ? (2 * g + 1) * rows + row : (row * groups + g) * m.sums_per_group;
      if (m.by_group) put(out, at - rows, scale[g]);
      if (m.minimum) {
        put(out, at, scale[g] * (float)(sums[0] + sums[1]));
      } else if (m.by_group || m.sums_per_group == 1) {
        put(out, at, -m.offset * (sums[0] + sums[1]));
      } else {
        put(out, at, -m.offset * sums[0]);
        put(out, at + 1, -m.offset * sums[1]);
      }
    }
  }
}

// Point `t` at the unit's panels, of which its groups are prepared if need be.
void take_panels(const Product& p, const Method& m, int64_t unit, uint8_t* scratch, Tile& t) {
  for (int i = 0; i < m.panels; i++) {
    // A kernel takes so many panels; where there are no more it gets the last one again, and `finish` drops it.
    int64_t index = least(panel_index(p, unit, i), p.panels - 1);
    t.panels[i] = p.args.weight.panels + index * p.panel_bytes;
    if (m.prepare) {
      uint8_t* prepared = scratch + i * m.prepared_bytes;
      m.prepare(t.panels[i], t.begin, t.end, prepared);
      t.panels[i] = prepared;
    }
  }
}

// How a chunk of rows goes over its units and over k: each band's units for one slab after the other.
struct Course {
  int64_t step, band_units, slabs;
};

// A unit and a slab of its panels; the last one is followed by Product::last_unit.
struct Part {
  int64_t band, slab, unit;
};

Part part_after(const Product& p, const Course& course, Part part) {
  const int64_t end = least(part.band + course.band_units, p.last_unit);
  part.unit += course.step;
  if (part.unit < end) return part;
  if (part.slab + 1 < course.slabs) return {part.band, part.slab + 1, part.band};
  return {end, 0, end};
}

// What tile number `tile` of `tiles` prefetches: of the part that comes next, or where one tile reads a long panel, of what
// follows there.
void look_ahead(const Product& p, const Method& m, const Course& course, Part now, Part next, int64_t tile, int64_t tiles,
                Tile& t) {
  const int64_t calls = t.end - t.begin;
  const bool same = tiles == 1 && p.panel_bytes > kShortPanel;
  const bool none = same ? m.prepare != nullptr : next.unit >= p.last_unit;
  const int64_t from = same ? kAheadBytes : p.panel_bytes * next.slab / course.slabs / 64 * 64;
  const int64_t lines = none ? 0 : p.panel_bytes / course.slabs / 64;
  t.ahead_lines = divide_up(lines, tiles * calls);
  const int64_t start = tile * calls * t.ahead_lines;
  if (start >= lines) t.ahead_lines = 0;
  for (int i = 0; i < m.panels; i++) {
    int64_t index = least(panel_index(p, same ? now.unit : next.unit, i), p.panels - 1);
    t.ahead[i] = p.args.weight.panels + index * p.panel_bytes + from + (start - t.begin * t.ahead_lines) * 64;
  }
}

void multiply_chunk(const Product& p, const Method& m, int64_t first, int64_t last, uint8_t* scratch, int height) {
  alignas(64) float one_tile[kMaxTileRows * kMaxPanels * kPanel];
  uint8_t* sums = scratch + kPreparedBytes;
  Tile t{};
  t.x = &p.args.x;
  t.groups = p.args.weight.in / kGroup;
  t.height = height;
  Results before;
  before.rows = 0;
  t.before = &before;
  t.finish = finish;
  const bool later = m.finishes && !converts_to_blocks(p.args);
  const int64_t rows = last - first, tiles = divide_up(rows, m.tile_rows), stride = m.panels * kPanel;
  const int64_t slabs = tiles > 1 && m.slab_groups ? divide_up(t.groups, m.slab_groups) : 1, step = m.panels / 2;
  const Course course = {step, slabs > 1 ? m.band_units : step, slabs};
  t.sums_stride = m.by_group ? 2 * rows : t.groups * m.sums_per_group;
  if (m.sums_per_group) make_sums(p.args.x, m, first, last, t.groups, sums);
  for (Part now = {p.first_unit, 0, p.first_unit}, next; now.unit < p.last_unit; now = next) {
    next = part_after(p, course, now);
    t.begin = t.groups * now.slab / slabs;
    t.end = t.groups * (now.slab + 1) / slabs;
    take_panels(p, m, now.unit, scratch, t);
    for (int64_t i = 0; i < tiles; i++) {
      int64_t start = m.full_tiles ? i * m.tile_rows : rows * i / tiles;
      const int64_t stop = m.full_tiles ? least(start + m.tile_rows, rows) : rows * (i + 1) / tiles;
      const int64_t from = m.full_tiles ? stop - m.tile_rows : start;
      t.row = first + from;
      t.rows = (int)(stop - from);
      t.sums = sums + from * (m.by_group ? 1 : t.sums_stride) * 4;
      look_ahead(p, m, course, now, next, i, tiles, t);
      float* y = slabs == 1 ? one_tile : (float*)sums + ((now.unit - now.band) * tiles + i) * m.tile_rows * stride;
      m.kernels[t.rows - 1](t, y);
      before.rows = 0;
      if (now.slab + 1 < slabs) continue;
      y += (start - from) * stride;
      const int64_t units = least(step, p.last_unit - now.unit);
      for (int64_t u = 0; u < units; u++) {
        before = results_of(p, now.unit + u, first + start, stop - start, y + u * 2 * kPanel, stride);
        if (later) continue;
        finish(before, 0, before.rows);
        before.rows = 0;
      }
      if (converts_to_blocks(p.args)) convert(p, now.unit + units, units, first + start, first + stop);
    }
  }
  finish(before, 0, before.rows);
}

void multiply(const Product& p, uint8_t* scratch) {
  const int64_t rows = p.last_row - p.first_row;
  if (rows <= 0 || p.first_unit >= p.last_unit) return;
  Method m;
#if defined(__AMX_TILE__)
  use_amx(p.args, rows, m);
#else
  p.args.x.form == kFloats ? use_floats(p.args.weight, rows, m) : use_blocks(p.args.x.form, p.args.weight, rows, m);
#endif
  int64_t chunk = m.chunk_rows ? m.chunk_rows : rows;
  if (m.sums_per_group) chunk = least(chunk, kSumsBytes / 4 / (p.args.weight.in / kGroup * m.sums_per_group));
  const int64_t chunks = divide_up(rows, chunk);
  const int tallest = chunks > 1 || m.full_tiles ? m.tile_rows : (int)divide_up(rows, divide_up(rows, m.tile_rows));
  const int height = m.begin ? m.begin(tallest) : 0;
  for (int64_t i = 0; i < chunks; i++)
    multiply_chunk(p, m, p.first_row + rows * i / chunks, p.first_row + rows * (i + 1) / chunks, scratch, height);
  if (m.end) m.end();
}

// The first of n units of 16 columns that a thread computes. Where it converts them they come in blocks of 32.
int64_t part(int64_t n, int thread, int threads, const LinearArgs& args) {
  return args.quantized.values ? least(divide_up(n, 2) * thread / threads * 2, n) : n * thread / threads;
}

// A gate whose halves do not begin at a panel: both products to scratch memory, some rows at a time, then the gate.
void gate_across_panels(const LinearArgs& args, int64_t rows, int thread, int threads, uint8_t* scratch) {
  const int64_t columns = args.weight.out / 2, panels = divide_up(columns, kPanel);
  LinearArgs plain = args;
  plain.gate = kNoGate;
  plain.residual.data = nullptr;
  plain.quantized.values = nullptr;
  float* buffer = (float*)(scratch + kPreparedBytes + kSumsBytes);
  // In passes over columns and rows: what fits the buffer.
  constexpr int64_t kColumns = 256, kRows = kGateBytes / (2 * (kColumns + 64) * sizeof(float));
  const int64_t end = least(part(panels, thread + 1, threads, args) * kPanel, columns);
  for (int64_t c = part(panels, thread, threads, args) * kPanel; c < end; c += kColumns) {
    const int64_t n = least(kColumns, end - c);
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t last_row = least(row + kRows, rows);
      for (int half = 0; half < 2; half++) {
        Product p = make_product(plain, rows);
        const int64_t column = half * columns + c;
        p.first_row = row;
        p.last_row = last_row;
        p.first_unit = column / (2 * kPanel);
        p.last_unit = divide_up(column + n, 2 * kPanel);
        p.origin = p.first_unit * 2 * kPanel;
        p.args.out = {buffer + half * (kColumns + 64) - row * 2 * (kColumns + 64), 2 * (kColumns + 64)};
        multiply(p, scratch);
      }
      const float *a = buffer + c % (2 * kPanel), *b = buffer + (kColumns + 64) + (columns + c) % (2 * kPanel);
      for (int64_t r = row; r < last_row; r++)
        for (int64_t i = 0; i < n; i += kPanel) {
          const int64_t at = (r - row) * 2 * (kColumns + 64) + i, m = least(n - i, kPanel);
          F32 v = gated(args.gate, load_at_most(a + at, m), load_at_most(b + at, m));
          if (args.residual.data) v += load_at_most(args.residual.data + r * args.residual.stride + c + i, m);
          store_at_most(args.out.data + r * args.out.stride + c + i, v, m);
        }
      if (!args.quantized.values) continue;
      const int64_t last = c + n < columns ? c + n : args.quantized.columns;
      for (int64_t r = row; r < last_row; r++)
        quantize_columns(args.out.data + r * args.out.stride, columns, c, last, args.quantized, r);
    }
  }
}

}  // namespace

void linear(const Op& op, const Step& step, int thread, int threads) {
  const LinearArgs& args = op.linear;
  const int64_t rows = num_rows(op, step);
  if (args.gate != kNoGate && args.weight.out % (2 * kPanel))
    return gate_across_panels(args, rows, thread, threads, step.scratch[thread]);
  Product p = make_product(args, rows);
  if (args.finds_largest && step.largest_only) {
    p.largest = largest_of(step.scratch[thread]);
    for (int64_t r = 0; r < rows; r++) p.largest[r] = Largest{};
  }
  if (rows >= kRowsToDivide * threads) {
    p.first_row = rows * thread / threads;
    p.last_row = rows * (thread + 1) / threads;
    return multiply(p, step.scratch[thread]);
  }
  const int64_t units = num_units(p);
  p.first_unit = part(units, thread, threads, args);
  p.last_unit = part(units, thread + 1, threads, args);
  multiply(p, step.scratch[thread]);
}

}  // namespace KVERN_ISA
}  // namespace kvern
