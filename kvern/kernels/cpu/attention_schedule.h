// Attention's work, divided among the threads, and the pages that a part of it reads. attention.cpp tells the whole.
//
// A unit is a tile with all its pieces, drawn from the op's counter when a thread is free. A tile that is more than a
// fraction of a thread's share of the work (one stream with a long context) is split: its pieces are units, their
// partials go to slots that all threads see, and whoever finishes the last piece of a tile merges them, in the order in
// which one thread would have done it. Each thread derives the same schedule from the plan.
//
// A thread's scratch holds its own workspace, and behind it its part of the slots: slot s lies in scratch[s % threads].
// How many pieces of each split tile are finished is counted in the rest of the op's counter line, of which this op
// leaves zeros behind.
#pragma once

#include "attention_int8.h"

namespace kvern {
namespace KVERN_ISA {
namespace {

constexpr int kSharedRows = 48;     // at most, of segments put together
constexpr int kSplitShare = 4;      // a tile above 1 / kSplitShare of a thread's share of the work is split
constexpr int kMaxSplitTiles = 62;  // as many as the op's counter line has room for

// Segments [segment, segment + count): one, or several with one query token each, whose first `shared` chunks are the
// same.
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
  uint8_t* rest;  // AMX only
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
  uint16_t* finished(int split_tile) const { return counter.finished + split_tile; }
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
  w.weights = take(at, kBlockRows * Int8::kWeightStride);
  w.weight_scales = (float*)take(at, kBlockRows * 4);
  w.partial = (float*)take(at, kBlockRows * row_bytes);
  w.state = (float*)take(at, rows * row_bytes);
  w.copies = take(at, 2 * 32 * head_dim);
  w.rest = take(at, 4 * 1024);
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

// ---- Fetching ahead

// What a thread reads is one sequence of pages: unit after unit, piece after piece. While a piece is computed as many
// pages are fetched as it has, a constant number of pages before their turn (those of the first piece), so that memory
// has the same to do throughout, however uneven the pieces are.
struct Cursor {
  const Unit* unit;
  int piece;
  int page;  // of `pages`, the next one to be fetched
  Pages pages;
};

void point_at(const Context& c, const Unit& unit, int piece, Cursor* at) {
  at->unit = &unit;
  at->piece = piece;
  at->page = 0;
  list_pages(c, unit.tile, piece_of(c, unit.tile, unit.piece + piece), &at->pages);
}

// Up to `count` pages from the cursor on, as far as units are known: to the end of `next`, or of the cursor's if that is
// null. Returns how many.
int take_pages(const Context& c, const Unit* next, int count, Cursor* at, const uint8_t** pages) {
  int taken = 0;
  for (;;) {
    while (taken < count && at->page < at->pages.count) pages[taken++] = at->pages.keys[at->page++];
    if (taken == count) return taken;
    if (at->piece + 1 < at->unit->pieces)
      point_at(c, *at->unit, at->piece + 1, at);
    else if (next && at->unit != next)
      point_at(c, *next, 0, at);
    else
      return taken;
  }
}

// What `rows` rows of the tile, from `row` on, see of these pages; empty if nothing.
void list_seen(const Context& c, const Tile& tile, const Pages& pages, int row, int rows, Seen* seen) {
  const bool several = tile.strand->count > 1;
  const int64_t tokens = pages.count * kPage;
  int query = row / c.group, head = row % c.group;
  for (int r = 0; r < rows; query++, head = 0) {
    const int64_t position =
        several ? c.position(tile.strand->segment + query, 0) : c.position(tile.strand->segment, tile.query + query);
    const int64_t begin = smaller(larger(0, c.first_seen(position) - pages.first_token), tokens);
    const int64_t end = larger(0, smaller(position + 1 - pages.first_token, tokens));
    for (; head < c.group && r < rows; head++) seen[r++] = {(int)begin, (int)end};
  }
}

}  // namespace
}  // namespace KVERN_ISA
}  // namespace kvern
