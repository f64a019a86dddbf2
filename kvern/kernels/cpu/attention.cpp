// Attention of query tokens to the paged cache: one kernel for decode, prefill in chunks, and any mixture of them.
//
// Rows. The query heads that share a kv head, for some query tokens, are the rows that keys and values are read once
// for. A tile is one kv head and as many tokens of a segment as fill kTileRows rows; with decode one token. Segments
// that decode and whose block tables begin alike (a common prompt) are put together: the rows of all of them are
// computed against what they share, then each one's against the rest.
//
// Chunks. The context is cut into chunks of kChunk tokens, at multiples of kChunk from position 0 on. A row and a chunk
// give a partial: the largest score m, the weights' sum l and the weighted sum of values o, where a weight is
// 2^(score - m). Partials are merged in ascending order, into m = -infinity, l = o = 0:
//
//   m' = max(m, m_c)     l = l * 2^(m - m') + l_c * 2^(m_c - m')     o likewise
//
// and a chunk of which the row sees nothing is left out. What a row does not see has the score -infinity, hence exactly
// the weight 0, and adding 0 changes no sum. So a row's bits depend on nothing but the row, the keys and values it sees
// and their positions: not on the tile's height, other segments, or who computes which chunk.
//
// Garbage. Past the end of a context, and left of a sliding window, the last or first page may hold anything, even NaN,
// and 0 * NaN is NaN: values there are replaced by 0 in a copy of the page. Pages of which nothing is seen are not read
// at all, as left of the window the table may name blocks of others.
//
//   queries  [rows][head_dim]   scaled by scale * log2(e), so that the softmax is one of powers of 2
//   scores   [rows][kChunk]     for one block of rows (at most kBlockRows) and one chunk: these stay in the L1 cache
//   weights  [rows][kChunk]     as the product with the values reads them, where the scores were if they fit
//
// For each piece of a tile (a chunk, with the rows it is computed for), for each block of rows: all scores, the softmax
// of each row, all weighted sums. Whoever has a row's last partial writes the result out, converted for the product
// that reads it if that is wanted (AttentionArgs::quantized). How the two products are computed: attention_bf16.h,
// attention_amx.h, attention_int8.h. Who computes what: attention_schedule.h.

#include "attention_amx.h"
#include "attention_bf16.h"
#include "attention_int8.h"
#include "attention_schedule.h"
#include "quantize.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

#if defined(__AMX_BF16__)
using Bf16Kernels = Bf16Tiles;
#else
using Bf16Kernels = Bf16;
#endif

// Partials of the `rows` rows of a block, `row` being the first one in the tile. Complete even for a row that sees nothing.
template <class F>
void compute_block(const Context& c, const Tile& tile, const Pages& pages, const Block& b, int row, int rows,
                   float* partials) {
  Seen seen[kBlockRows];
  list_seen(c, tile, pages, row, rows, seen);
  F::scores(b, rows);
  // In two loops, so that the processor need not wait for each row's maximum.
  for (int r = 0; r < rows; r++)
    largest(partials + r * c.row_floats(), b.head_dim) = seen[r].any() ? F::mask_scores(b, r, seen[r]) : kNothing;
  for (int r = 0; r < rows; r++) {
    F::stay_awake(r);
    float* partial = partials + r * c.row_floats();
    if (seen[r].any()) {
      F::weigh(b, r, seen[r], partial);
    } else {
      F::weigh_nothing(b, r);
      total(partial, b.head_dim) = 0;
    }
  }
  F::values(b, rows, partials);
}

// Where the values of each page lie: in a copy, if the page holds garbage.
template <class F>
void point_at_values(const Context& c, const Tile& tile, const Piece& piece, const Pages& pages, Block* b) {
  const int64_t offset = F::value_offset(b->head_dim);
  for (int i = 0; i < pages.count; i++) b->values[i] = pages.keys[i] + offset;
  const int last = pages.count - 1, begin = (int)(seen_by(c, tile, piece).begin - pages.first_token);
  const int64_t end = smaller(c.plan.context_len[piece.segment] - pages.first_token, pages.count * kPage);
  if (begin > 0) b->values[0] = F::clean_values(b->values[0], {begin, (int)end}, b->head_dim, c.work.copies);
  if (end < pages.count * kPage && (last > 0 || begin == 0)) {
    const Seen part = {(int)larger(0, begin - last * kPage), (int)end - last * kPage};
    b->values[last] = F::clean_values(b->values[last], part, b->head_dim, c.work.copies + 32 * b->head_dim);
  }
}

// One rule for all, wherever the partial was computed.
void merge(float* state, float* partial, int head_dim) {
  const float m = largest(state, head_dim), m_chunk = largest(partial, head_dim);
  if (m_chunk == kNothing) return;
  const float m_new = m > m_chunk ? m : m_chunk;
  // One of the two is 1.
  const F32 power = exp2(set1(m > m_chunk ? m_chunk - m : m - m_chunk));
  const F32 fade = m > m_chunk ? set1(1.0f) : power, share = m > m_chunk ? power : set1(1.0f);
  for (int i = 0; i < head_dim; i += kLanes)
    store(state + i, fma(load<F32>(partial + i), share, load<F32>(state + i) * fade));
  largest(state, head_dim) = m_new;
  total(state, head_dim) = total(state, head_dim) * fade[0] + total(partial, head_dim) * share[0];
}

// Partials of `rows` rows that have seen nothing.
void clear(float* partials, int rows, int head_dim) {
  for (int r = 0; r < rows; r++, partials += partial_floats(head_dim)) {
    memset(partials, 0, partial_floats(head_dim) * 4);
    largest(partials, head_dim) = kNothing;
  }
}

// The partials of a piece: to `to`, or merged into the rows' state if that is null. `next`: see Cursor.
template <class F>
void compute_piece(Context& c, const Tile& tile, const Piece& piece, const Unit* next, Cursor* cursor, float* to) {
  Pages pages;
  list_pages(c, tile, piece, &pages);
  const int floats = c.row_floats(), head_dim = c.args.cache.head_dim;
  if (pages.count == 0) {
    if (to) clear(to, piece.rows, head_dim);
    return;
  }
  Block b;
  b.head_dim = head_dim;
  b.pages = pages.count;
  b.keys = pages.keys;
  b.lead = (int)(pages.first_token / kPage % 2);
  b.scores = c.work.scores + b.lead * kPage;  // behind a page that is missing
  b.weights = c.work.weights;
  b.weight_scales = c.work.weight_scales;
  b.tile_rows = &c.work.tile_rows;
  b.rest = c.work.rest;
  point_at_values<F>(c, tile, piece, pages, &b);
  const int taken = take_pages(c, next, pages.count, cursor, b.ahead);
  for (int i = taken; i < pages.count + 3; i++) b.ahead[i] = pages.keys[i];
  Ahead ahead = {b.ahead, taken, c.head_bytes, 0};
  for (int r = 0; r < piece.rows;) {
    const int n = part(r, piece.rows, kBlockRows), row = piece.row + r;
    float* partials = to ? to + r * floats : c.work.partial;
    b.next = r == 0 && tile.strand->tiles == 1 ? &ahead : nullptr;  // of more tiles, one has just used them
    b.queries = c.work.queries + (int64_t)row * kQueryStride;
    b.query_scales = c.work.query_scales + row;
    compute_block<F>(c, tile, pages, b, row, n, partials);
    for (int i = 0; !to && i < n; i++)
      merge(c.work.state + (int64_t)(row + i) * floats, partials + i * floats, head_dim);
    r += n;
  }
}

// Where a row's query lies, in floats from the start of q's or the output's first row of the head.
int64_t row_offset(const Context& c, const Tile& tile, int row, int64_t stride) {
  const int query = row / c.group;
  const int64_t token = tile.strand->count > 1 ? c.plan.q_start[tile.strand->segment + query]
                                               : c.plan.q_start[tile.strand->segment] + tile.query + query;
  return token * stride + (tile.head * c.group + row % c.group) * (int64_t)c.args.cache.head_dim;
}

template <class F>
void set_queries(const Context& c, const Tile& tile) {
  const float factor = c.args.scale * 1.4426950408889634f;
  for (int r = 0; r < tile.queries * c.group; r++)
    F::set_query(c.args.q.data + row_offset(c, tile, r, c.args.q.stride), factor, c.args.cache.head_dim,
                 c.work.queries + (int64_t)r * kQueryStride, c.work.query_scales + r);
}

// `columns` of an activation that start `offset` values behind its first one, as an activation of one row.
Activation part_of(const Activation& a, int64_t offset, int columns) {
  if (a.form == kFloats) return {a.form, columns, (Operand*)a.values + offset, nullptr, nullptr};
  const int bytes = a.form == kInt16 ? 2 : 1;
  return {a.form, columns, (int8_t*)a.values + bytes * offset, a.scale + offset / 32, a.sums + offset / 16};
}

void write_out(const Context& c, const Tile& tile) {
  const int head_dim = c.args.cache.head_dim;
  const Activation& quantized = c.args.quantized;
  for (int r = 0; r < tile.queries * c.group; r++) {
    float* state = c.work.state + (int64_t)r * c.row_floats();
    float* out = quantized.values ? state : c.args.out.data + row_offset(c, tile, r, c.args.out.stride);
    const F32 inverse = set1(1.0f / total(state, head_dim));
    for (int i = 0; i < head_dim; i += kLanes) store(out + i, load<F32>(state + i) * inverse);
    if (!quantized.values) continue;
    const Activation part = part_of(quantized, row_offset(c, tile, r, quantized.columns), head_dim);
    quantize_columns(out, head_dim, 0, head_dim, part, 0);
  }
}

void merge_slots(const Context& c, const Unit& unit) {
  const Tile& tile = unit.tile;
  clear(c.work.state, tile.queries * c.group, c.args.cache.head_dim);
  for (int i = 0; i < tile.strand->pieces; i++) {
    const Piece piece = piece_of(c, tile, i);
    for (int r = 0; r < piece.rows; r++)
      merge(c.work.state + (int64_t)(piece.row + r) * c.row_floats(),
            c.slot(unit.first_slot + i) + r * c.row_floats(), c.args.cache.head_dim);
  }
}

// `next` is the unit that comes after this one, or null.
template <class F>
void compute_unit(Context& c, const Unit& unit, const Unit* next, Cursor* cursor) {
  const Tile& tile = unit.tile;
  const bool split = unit.split_tile >= 0;
  if (cursor->unit != &unit) {  // at the start
    point_at(c, unit, 0, cursor);
    cursor->page = cursor->pages.count;
  }
  set_queries<F>(c, tile);
  for (int i = 0; i < unit.pieces; i++) {
    const Piece piece = piece_of(c, tile, unit.piece + i);
    // The first piece has all rows, and what it gives is what merging it into nothing would.
    float* to = split ? c.slot(unit.first_slot + unit.piece) : i == 0 ? c.work.state : nullptr;
    compute_piece<F>(c, tile, piece, next, cursor, to);
  }
  if (split) {
    const int before = __atomic_fetch_add(c.finished(unit.split_tile), 1, __ATOMIC_ACQ_REL);
    if (before + 1 < tile.strand->pieces) return;
    __atomic_store_n(c.finished(unit.split_tile), 0, __ATOMIC_RELAXED);  // for the next op with this counter
    merge_slots(c, unit);
  }
  write_out(c, tile);
}

template <class F>
void run(Context& c) {
  Unit units[2];
  Cursor cursor;
  cursor.unit = nullptr;
  int strand = 0, turn = 0;
  bool more = find_unit(c, __atomic_fetch_add(&c.counter.next, 1, __ATOMIC_RELAXED), strand, &units[0]);
  while (more) {
    Unit *now = &units[turn], *next = &units[turn ^ 1];
    more = find_unit(c, __atomic_fetch_add(&c.counter.next, 1, __ATOMIC_RELAXED), strand, next);
    compute_unit<F>(c, *now, more ? next : nullptr, &cursor);
    turn ^= 1;
  }
  F::finish(&c.work.tile_rows);
}

}  // namespace

void attention(const Op& op, const Step& step, int thread, int threads) {
  const AttentionArgs& args = op.attention;
  const Plan& plan = step.plans[args.plan];
  const int group = args.heads / args.cache.kv_heads, head_dim = args.cache.head_dim;
  const bool int8 = args.cache.type == kKVInt8;
  const int tile_queries = (int)larger(1, kTileRows / group);
  const int max_rows = (int)larger(kSharedRows, tile_queries * group);
  Context c = {args,
               step,
               plan,
               threads,
               group,
               tile_queries,
               int8 ? Int8::head_bytes(head_dim) : Bf16Cache::head_bytes(head_dim),
               lay_out(step.scratch[thread], plan.num_segments, max_rows, head_dim),
               0,
               0,
               step.counters[op.counter]};
  make_schedule(c);
  int8 ? run<Int8>(c) : run<Bf16Kernels>(c);
}

}  // namespace KVERN_ISA
}  // namespace kvern
