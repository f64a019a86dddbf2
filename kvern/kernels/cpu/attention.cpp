// Attention of query tokens to the paged cache: one kernel for decode, prefill in chunks, and any mixture of them.
//
// Rows. The query heads that share a kv head, for some query tokens, are the rows that keys and values are read for once.
// A tile is one kv head and as many tokens of a segment as fill kBlockRows rows; with decode one token. Segments that
// decode and whose block tables begin alike (a common prompt) are put together: the rows of all of them are computed
// against what they share, then each one's against the rest.
//
// Chunks. The context is cut into chunks of kChunk tokens, at multiples of kChunk from position 0 on. A row and a chunk
// give a partial: the largest score m, the weights' sum l and the weighted sum of values o, with weights 2^(score - m).
// Partials are merged in ascending order, into m = -infinity, l = o = 0:
//
//   m' = max(m, m_c)     l = l * 2^(m - m') + l_c * 2^(m_c - m')     o likewise
//
// and a chunk of which the row sees nothing is left out. So a row's bits depend on nothing but the row, the keys and
// values it sees and their positions: not on the tile's height, other segments, or who computes which chunk. Keys outside
// of what a row sees get the score -infinity, hence the weight 0 exactly, and adding 0 changes no sum. What lies there may
// be anything, even NaN, so values that no row of a tile sees are never multiplied, and nor are pages of which none is seen
// ever read: left of a sliding window the table may name blocks of others.
//
//   queries  [rows][head_dim]   scaled by scale * log2(e), so that the softmax is one of powers of 2
//   scores   [rows][kChunk]     for one block of rows (at most kBlockRows) and one chunk: these stay in the L1 cache
//   weights  [rows][kChunk]     as the product with the values reads them
//
// Work. A unit is a tile with all its chunks, drawn from a shared counter when a thread is free. A tile that is more than
// a fraction of a thread's share (one stream with a long context) is split: its chunks are units, their partials go to
// memory shared by the threads, and whoever finishes the last one of a tile merges them, in the same order. All threads
// derive the same schedule from the plan.
//
// The scratch of a thread: its own workspace from the front; behind it slots for partials, which lie around the threads
// (slot s in scratch[s % threads]).

#include "attention_amx.h"
#include "attention_bf16.h"
#include "attention_int8.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

#if defined(__AMX_BF16__)
using Bf16Kernels = Bf16Tiles;
#else
using Bf16Kernels = Bf16;
#endif

constexpr int kSharedRows = 48;      // at most, of segments put together
constexpr int kSplitShare = 4;       // a tile above 1 / kSplitShare of a thread's share of the work is split
constexpr int kMaxSplitTiles = 62;   // as many as the op's counter line has room for

// Segments [segment, segment + count): one, or several with one query token each whose first `shared` chunks are the same.
struct Strand {
  int segment;
  int count;
  int shared;
  int tiles;
  int pieces;  // of each tile: chunks, with the rows they are computed for
  int weight;  // of each tile: about how long it takes
  bool split;
  int64_t chunk;  // the first one
  int64_t first_unit;
  int first_split_tile;
  int64_t first_slot;
};

struct Tile {
  const Strand* strand;
  int head;
  int query;  // the first one, among the segment's or the strand's
  int queries;
};

// A chunk of one segment, and the rows of the tile it is computed for.
struct Piece {
  int segment;
  int64_t chunk;
  int row;
  int rows;
};

// All pieces of a tile, or one.
struct Unit {
  Tile tile;
  int piece;
  int pieces;
  int split_tile;  // -1: not split
  int64_t first_slot;
};

struct Workspace {
  Strand* strands;
  uint8_t* queries;
  QueryScale* query_scales;
  float* scores;
  uint8_t* weights;
  float* weight_scales;
  float* partial;
  float* state;
  uint8_t* copies;
  int64_t bytes;
  int tile_rows;  // AMX only: what the tile registers are configured for
};

struct Context {
  const AttentionArgs& args;
  const Step& step;
  const Plan& plan;
  int threads;
  int group;         // query heads of a kv head
  int tile_queries;
  int64_t head_bytes;
  Workspace work;
  int strands;
  int64_t slot_floats;
  Counter& counter;

  int row_floats() const { return partial_floats(args.cache.head_dim); }
  int64_t position(int segment, int64_t query) const {
    return plan.context_len[segment] - plan.q_len[segment] + query;
  }
  int64_t first_seen(int64_t position) const { return args.window > 0 ? larger(0, position - args.window + 1) : 0; }
  float* slot(int64_t index) const {
    return (float*)(step.scratch[index % threads] + work.bytes) + index / threads * slot_floats;
  }
  uint16_t* finished(int split_tile) const { return (uint16_t*)((uint8_t*)&counter + 4) + split_tile; }
};

uint8_t* take(uint8_t*& at, int64_t bytes) {
  uint8_t* taken = at;
  at += (bytes + 63) / 64 * 64;
  return taken;
}

Workspace lay_out(uint8_t* memory, int segments, int rows, int head_dim) {
  Workspace w;
  uint8_t* at = memory;
  const int64_t row_bytes = partial_floats(head_dim) * 4;
  w.strands = (Strand*)take(at, segments * (int64_t)sizeof(Strand));
  w.queries = take(at, (int64_t)rows * kQueryStride);
  w.query_scales = (QueryScale*)take(at, rows * (int64_t)sizeof(QueryScale));
  w.scores = (float*)take(at, (int64_t)kBlockRows * kScoreStride * 4);
  w.weights = take(at, kBlockRows * kWeightStride);
  w.weight_scales = (float*)take(at, kBlockRows * 4);
  w.partial = (float*)take(at, kBlockRows * row_bytes);
  w.state = (float*)take(at, rows * row_bytes);
  w.copies = take(at, 2 * 32 * head_dim);
  w.bytes = at - memory;
  w.tile_rows = 0;
  return w;
}

// ---- The schedule

// How many whole chunks, from position 0 on, two decoding segments have in common.
int64_t common_chunks(const Plan& plan, int a, int b) {
  const int64_t tokens = smaller(plan.context_len[a], plan.context_len[b]) / kChunk * kChunk;
  const int32_t* left = plan.block_tables + a * plan.table_stride;
  const int32_t* right = plan.block_tables + b * plan.table_stride;
  int64_t equal = 0;
  while (equal * plan.block_size < tokens && left[equal] == right[equal]) equal++;
  return smaller(equal * plan.block_size, tokens) / kChunk;
}

// Put together what follows segment `s`, as long as about as much is shared: a little that many share must not keep
// apart those that share a lot.
void extend(const Context& c, Strand& s) {
  const Plan& plan = c.plan;
  if (plan.q_len[s.segment] != 1 || c.args.window > 0) return;
  const int most = kSharedRows / c.group;
  for (int next = s.segment + 1; next < plan.num_segments && s.count < most && plan.q_len[next] == 1; next++) {
    const int64_t common = common_chunks(plan, next - 1, next);
    if (common == 0 || (s.count > 1 && (common * 2 < s.shared || common > s.shared * 2))) return;
    s.shared = (int)(s.count == 1 ? common : smaller(common, s.shared));
    s.count++;
  }
}

int64_t end_chunk(const Plan& plan, int segment) { return (plan.context_len[segment] + kChunk - 1) / kChunk; }

Strand make_strand(const Context& c, int segment) {
  Strand s = {};
  s.segment = segment;
  s.count = 1;
  s.tiles = 1;
  extend(c, s);
  if (s.count > 1) {
    s.pieces = s.shared;
    s.weight = s.shared * (1 + s.count * c.group / kBlockRows);
    for (int i = 0; i < s.count; i++) {
      const int own = (int)end_chunk(c.plan, segment + i) - s.shared;
      s.pieces += own;
      s.weight += own;
    }
  } else {
    s.tiles = (int)((c.plan.q_len[segment] + c.tile_queries - 1) / c.tile_queries);
    s.chunk = c.first_seen(c.position(segment, 0)) / kChunk;
    s.pieces = s.weight = (int)(end_chunk(c.plan, segment) - s.chunk);
  }
  return s;
}

// Number units, tiles and slots. False if the split tiles are too many for the counter line or the scratch.
bool number(Context& c, int64_t split_above) {
  const int kv_heads = c.args.cache.kv_heads;
  int64_t units = 0, slots = 0;
  int split_tiles = 0, slot_rows = 1;
  for (int i = 0; i < c.strands; i++) {
    Strand& s = c.work.strands[i];
    s.split = s.weight > split_above && s.pieces > 1;
    s.first_unit = units;
    s.first_split_tile = split_tiles;
    s.first_slot = slots;
    const int64_t tiles = (int64_t)s.tiles * kv_heads;
    units += s.split ? tiles * s.pieces : tiles;
    if (!s.split) continue;
    if (tiles > kMaxSplitTiles - split_tiles || s.pieces > 65535) return false;
    split_tiles += (int)tiles;
    slots += tiles * s.pieces;
    const int64_t queries = s.count > 1 ? s.count : smaller(c.plan.q_len[s.segment], c.tile_queries);
    slot_rows = (int)larger(slot_rows, queries * c.group);
  }
  c.slot_floats = (int64_t)slot_rows * c.row_floats();
  const int64_t room = ((int64_t)kScratchBytes - c.work.bytes) / (c.slot_floats * 4);
  return (slots + c.threads - 1) / c.threads <= room;
}

void make_schedule(Context& c) {
  int64_t total_weight = 0;
  for (int segment = 0; segment < c.plan.num_segments;) {
    Strand s = make_strand(c, segment);
    total_weight += (int64_t)s.weight * s.tiles * c.args.cache.kv_heads;
    c.work.strands[c.strands++] = s;
    segment += s.count;
  }
  // Fewer than `share * threads` tiles can be above this, so that they find room.
  const int64_t share = smaller(kSplitShare, larger(1, kMaxSplitTiles / c.threads));
  const int64_t none = total_weight;
  if (c.threads == 1 || !number(c, total_weight / (share * c.threads))) number(c, none);
}

// Unit `index`, if there is one. `strand` only grows, as the indices a thread draws do.
bool find_unit(const Context& c, int64_t index, int& strand, Unit* unit) {
  const int kv_heads = c.args.cache.kv_heads;
  for (; strand < c.strands; strand++) {
    const Strand& s = c.work.strands[strand];
    const int64_t tiles = (int64_t)s.tiles * kv_heads, at = index - s.first_unit;
    if (at >= (s.split ? tiles * s.pieces : tiles)) continue;
    // Head by head, so that a head's keys and values stay in the cache; the longest tiles first.
    const int tile = (int)(s.split ? at / s.pieces : at);
    const int query = (s.tiles - 1 - tile % s.tiles) * c.tile_queries;
    const int queries = s.count > 1 ? s.count : (int)smaller(c.tile_queries, c.plan.q_len[s.segment] - query);
    unit->tile = {&s, tile / s.tiles, query, queries};
    unit->piece = s.split ? (int)(at % s.pieces) : 0;
    unit->pieces = s.split ? 1 : s.pieces;
    unit->split_tile = s.split ? s.first_split_tile + tile : -1;
    unit->first_slot = s.first_slot + (int64_t)tile * s.pieces;
    return true;
  }
  return false;
}

// ---- Pieces

Piece piece_of(const Context& c, const Tile& tile, int index) {
  const Strand& s = *tile.strand;
  if (s.count == 1) return {s.segment, s.chunk + index, 0, tile.queries * c.group};
  if (index < s.shared) return {s.segment, index, 0, tile.queries * c.group};
  index -= s.shared;
  for (int i = 0;; i++) {
    const int own = (int)end_chunk(c.plan, s.segment + i) - s.shared;
    if (index < own) return {s.segment + i, s.shared + index, i * c.group, c.group};
    index -= own;
  }
}

struct Range {
  int64_t begin;
  int64_t end;
};

// Positions that some row of the piece sees, in the piece's chunk.
Range seen_by(const Context& c, const Tile& tile, const Piece& piece) {
  const bool several = tile.strand->count > 1;
  const int64_t first = c.position(piece.segment, several ? 0 : tile.query);
  const int64_t last = several ? first : c.position(piece.segment, tile.query + tile.queries - 1);
  return {larger(c.first_seen(first), piece.chunk * kChunk), smaller(last + 1, (piece.chunk + 1) * kChunk)};
}

// The piece's pages; none if none of its tokens is seen.
void list_pages(const Context& c, const Tile& tile, const Piece& piece, Pages* pages) {
  const Range seen = seen_by(c, tile, piece);
  const int64_t first = seen.begin / kPage, end = (seen.end + kPage - 1) / kPage;
  pages->first_token = first * kPage;
  pages->count = seen.begin < seen.end ? (int)(end - first) : 0;
  if (pages->count == 0) return;
  const KVCache& cache = c.args.cache;
  const int32_t* table = c.plan.block_tables + piece.segment * c.plan.table_stride;
  const int64_t block_pages = c.plan.block_size / kPage;
  int64_t block = first / block_pages, offset = first % block_pages;
  for (int i = 0; i < pages->count; i++) {
    const int64_t page = table[block] * block_pages + offset;
    pages->keys[i] = cache.base + (page * cache.kv_heads + tile.head) * c.head_bytes;
    if (++offset == block_pages) {
      offset = 0;
      block++;
    }
  }
  for (int i = 0; i < 3; i++) pages->keys[pages->count + i] = pages->keys[pages->count - 1];
}

// What a row of the tile sees of these pages; empty if nothing.
Seen seen_by_row(const Context& c, const Tile& tile, const Pages& pages, int row) {
  const bool several = tile.strand->count > 1;
  const int query = row / c.group;
  const int64_t position =
      several ? c.position(tile.strand->segment + query, 0) : c.position(tile.strand->segment, tile.query + query);
  const int64_t tokens = pages.count * kPage;
  const int64_t begin = larger(0, c.first_seen(position) - pages.first_token);
  return {(int)smaller(begin, tokens), (int)larger(0, smaller(position + 1 - pages.first_token, tokens))};
}

// ---- Computing

// Partials of the `rows` rows of a block, `row` being the first one in the tile.
template <class F>
void compute_block(const Context& c, const Tile& tile, const Pages& pages, const Block& b, int row, int rows,
                   float* partials) {
  F::scores(b, rows);
  for (int r = 0; r < rows; r++) {
    float* partial = partials + r * c.row_floats();
    const Seen seen = seen_by_row(c, tile, pages, row + r);
    if (seen.begin < seen.end) {
      F::weigh(b, r, seen, partial);
    } else {
      F::weigh_nothing(b, r);
      largest(partial, b.head_dim) = kNothing;
    }
  }
  F::values(b, rows, partials);
}

// Values that are multiplied are those of tokens some row sees, or a later token of the same context: never what lies left
// of a window or past the context's end, which is replaced by 0 in a copy of the page.
template <class F>
void point_at_values(const Context& c, const Tile& tile, const Piece& piece, const Pages& pages, const Pages& next,
                     Block* b) {
  const int64_t offset = F::value_offset(b->head_dim);
  for (int i = 0; i < pages.count; i++) {
    b->values[i] = pages.keys[i] + offset;
    b->ahead[i] = i < next.count ? next.keys[i] : pages.keys[i];
  }
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
  const F32 fade = exp2(set1(m - m_new)), share = exp2(set1(m_chunk - m_new));
  for (int i = 0; i < head_dim; i += kLanes)
    store(state + i, fma(load<F32>(partial + i), share, load<F32>(state + i) * fade));
  largest(state, head_dim) = m_new;
  total(state, head_dim) = total(state, head_dim) * fade[0] + total(partial, head_dim) * share[0];
}

// The partials of a piece: to `slot`, or merged into the rows' state if that is null.
template <class F>
void compute_piece(Context& c, const Tile& tile, const Piece& piece, const Pages& pages, const Pages& next,
                   float* slot) {
  const int floats = c.row_floats(), head_dim = c.args.cache.head_dim;
  if (pages.count == 0) {
    for (int r = 0; slot && r < piece.rows; r++) largest(slot + r * floats, head_dim) = kNothing;
    return;
  }
  Block b;
  b.head_dim = head_dim;
  b.pages = pages.count;
  b.keys = pages.keys;
  b.scores = c.work.scores;
  b.weights = c.work.weights;
  b.weight_scales = c.work.weight_scales;
  b.tile_rows = &c.work.tile_rows;
  point_at_values<F>(c, tile, piece, pages, next, &b);
  for (int r = 0; r < piece.rows;) {
    const int n = part(r, piece.rows, kBlockRows), row = piece.row + r;
    float* partials = slot ? slot + r * floats : c.work.partial;
    b.fetch = r == 0 && tile.strand->tiles == 1;  // else they were used just before
    b.queries = c.work.queries + (int64_t)row * kQueryStride;
    b.query_scales = c.work.query_scales + row;
    compute_block<F>(c, tile, pages, b, row, n, partials);
    for (int i = 0; !slot && i < n; i++)
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

void clear_state(const Context& c, const Tile& tile) {
  const int head_dim = c.args.cache.head_dim;
  for (int r = 0; r < tile.queries * c.group; r++) {
    float* state = c.work.state + (int64_t)r * c.row_floats();
    memset(state, 0, c.row_floats() * 4);
    largest(state, head_dim) = kNothing;
  }
}

void write_out(const Context& c, const Tile& tile) {
  const int head_dim = c.args.cache.head_dim;
  for (int r = 0; r < tile.queries * c.group; r++) {
    float* state = c.work.state + (int64_t)r * c.row_floats();
    float* out = c.args.out.data + row_offset(c, tile, r, c.args.out.stride);
    const F32 inverse = set1(1.0f / total(state, head_dim));
    for (int i = 0; i < head_dim; i += kLanes) store(out + i, load<F32>(state + i) * inverse);
  }
}

void merge_slots(const Context& c, const Unit& unit) {
  const Tile& tile = unit.tile;
  clear_state(c, tile);
  for (int i = 0; i < tile.strand->pieces; i++) {
    const Piece piece = piece_of(c, tile, i);
    for (int r = 0; r < piece.rows; r++)
      merge(c.work.state + (int64_t)(piece.row + r) * c.row_floats(),
            c.slot(unit.first_slot + i) + r * c.row_floats(), c.args.cache.head_dim);
  }
}

// `next` is the unit that comes after this one, or null: its first keys are fetched at the end.
template <class F>
void compute_unit(Context& c, const Unit& unit, const Unit* next) {
  const Tile& tile = unit.tile;
  const bool split = unit.split_tile >= 0;
  Pages pages[2];
  set_queries<F>(c, tile);
  if (!split) clear_state(c, tile);
  Piece piece = piece_of(c, tile, unit.piece);
  list_pages(c, tile, piece, &pages[0]);
  for (int i = 0; i < unit.pieces; i++) {
    Pages &now = pages[i % 2], &later = pages[(i + 1) % 2];
    Piece following = {};
    later.count = 0;
    if (i + 1 < unit.pieces) {
      following = piece_of(c, tile, unit.piece + i + 1);
      list_pages(c, tile, following, &later);
    } else if (next) {
      list_pages(c, next->tile, piece_of(c, next->tile, next->piece), &later);
    }
    compute_piece<F>(c, tile, piece, now, later, split ? c.slot(unit.first_slot + unit.piece) : nullptr);
    piece = following;
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
  int strand = 0, turn = 0;
  bool more = find_unit(c, __atomic_fetch_add(&c.counter.next, 1, __ATOMIC_RELAXED), strand, &units[0]);
  while (more) {
    Unit *now = &units[turn], *next = &units[turn ^ 1];
    more = find_unit(c, __atomic_fetch_add(&c.counter.next, 1, __ATOMIC_RELAXED), strand, next);
    compute_unit<F>(c, *now, more ? next : nullptr);
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
  const int tile_queries = (int)larger(1, kBlockRows / group), max_rows = (int)larger(kSharedRows, tile_queries * group);
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
