#include "runtime/attention_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace cpuserve {
namespace {

// Limits for the number of rows of a tile (an attention unit of a prompt). Each tile reads the keys
// and values of a chunk once (64 KB at head_dim 64), so tiles with more rows read less in total.
// With kUnitsPerThread units per thread, threads finish at about the same time.
constexpr int64_t kMinTileRows = 24, kMaxTileRows = 240, kTileStep = 24;
constexpr int64_t kUnitsPerThread = 16;
// Tiles get fewer than kMinTileRows rows if threads would be idle otherwise: one token
// of a latent layer (MLA) has 16 to 128 rows and one KV head. A tile of fewer than kLeastTileRows
// rows takes as long as a tile of kLeastTileRows rows, because both wait for the keys from memory.
constexpr int64_t kLeastTileRows = 4;
// More tiles read more bytes: every tile reads the keys and values of its chunks,
// and all threads share the memory bandwidth. If all threads read, reading one key takes as long
// as multiplying it by kReadRows rows: for each dimension 4 bytes (K and V in bf16)
// at 4.5 GB/s per thread, against 2 products at 180 per ns.
// A single thread gets no more than 4.5 GB/s, even if fewer than kFewThreads threads read.
constexpr int64_t kReadRows = 80, kFewThreads = 13;
// Units of at most this many rows may be split over their chunks.
// With more rows, writing and reading partial results costs as much time as the split saves.
// (A unit of one token may be split even if its KV head has more query heads than kMaxSplitRows.)
constexpr int64_t kMaxSplitRows = 64;
// Splitting units costs a merge and a barrier. Units are split if some thread would otherwise have
// over 10 % more work than its share, which is the total cost divided by the number of threads.
constexpr double kTolerance = 1.1;
// If no unit costs more than this fraction of a share, no unit is split:
// threads that finish early claim units from the shares of other threads.
constexpr double kSmall = 1.0 / 8;
// A unit is not split if one side of the split would cost less than this fraction of a share.
constexpr double kEdge = 1.0 / 32;
// The part of a split unit in one share is divided into about kPiecesPerShare pieces,
// so that other threads can claim some of these pieces if the owner of the share is delayed.
// Pieces are whole chunks, so there can be more pieces, up to kMostPiecesPerShare.
constexpr double kPiecesPerShare = 4;
constexpr int64_t kMostPiecesPerShare = 12;
// A merge unit is a task that adds up about this many partial results (its rows times its chunks),
// which takes one thread 4 us at head_dim 128.
constexpr int64_t kMergePartials = 128;
// The buffer of partial results is as large as decode steps need, but at least 16 MB.
// Sequences with more than one token in the step are split only as far as this buffer suffices.
constexpr int64_t kLeastPartialFloats = int64_t{4} << 20;
constexpr int64_t kPartialHeader = 16;  // floats of a partial result before o (table/attention.h)

}  // namespace

AttentionPlan::AttentionPlan(AttentionGeometry geometry, const AttentionLimits& limits, Ranks ranks)
    : geometry_(geometry),
      ranks_(std::move(ranks)),
      threads_(ranks_.threads()),
      head_ends_(static_cast<size_t>(geometry.kv_heads)),
      cuts_(static_cast<size_t>(threads_) + 1),
      places_(static_cast<size_t>(geometry.kv_heads) + 1),
      partial_floats_(floats_for_partials(limits)),
      selected_floats_((threads_ - 1) * geometry.group() * ceil_div(geometry.most, kChunk) *
                       slot()) {
  const auto owner = [&](int32_t h) { return ranks_.owner_of_middle(h, geometry.kv_heads); };
  for (int32_t h = 0; h < geometry.kv_heads; h++) {
    int32_t& end = head_ends_[static_cast<size_t>(h)] = h + 1;
    while (end < geometry.kv_heads && owner(end) == owner(h)) end++;
  }
  // A run of tokens that see the same picture, or the end of a section, ends a tile.
  const int64_t sections = geometry.sections ? limits.tokens / geometry.window + limits.seqs : 0;
  const int64_t runs = geometry.spans ? limits.tokens : sections;
  const int64_t tiles = limits.tokens * geometry.group() / kMinTileRows + limits.seqs + runs;
  const int64_t pieces = threads_ > 1 ? (kMostPiecesPerShare + 2) * threads_ : 0;
  const auto units = static_cast<size_t>(tiles * geometry.kv_heads + pieces);
  whole_.reserve(units);  // build() swaps whole_ and units_, so both have the same capacity
  units_.reserve(units);
  // Fewer units are split than there are threads, and a merge unit has at least one row.
  const int64_t split_rows = std::max<int64_t>(kMaxSplitRows, geometry.group());
  merges_.reserve(static_cast<size_t>((threads_ - 1) * split_rows));
}

int64_t AttentionPlan::slot() const noexcept { return kPartialHeader + geometry_.hd_pad; }

// Returns the number of floats that decode steps need for partial results. There are fewer split
// units than threads, each unit has at most the keys of the longest sequence,
// and all split units together have at most as many chunks as all keys of the cache.
int64_t AttentionPlan::floats_for_partials(const AttentionLimits& limits) const noexcept {
  if (threads_ == 1) return 0;
  const auto chunks_of = [&](int64_t keys) {
    const int64_t sides = geometry_.causal ? 1 : 2, ahead = geometry_.spans ? limits.tokens : 0;
    if (geometry_.most > 0) keys = std::min<int64_t>(keys, geometry_.most);
    const int64_t window = sides * geometry_.window + ahead;
    const int64_t seen = geometry_.window > 0 ? std::min(keys, window) : keys;
    return ceil_div(seen, kChunk) + 1;
  };
  const int64_t longest = chunks_of(limits.sequence_keys);
  const int64_t by_threads = (threads_ - 1) * geometry_.group() * longest;
  const int64_t all_chunks =
      std::min(limits.keys / kChunk + 2 * limits.seqs, limits.seqs * longest);
  return std::max(std::min(by_threads, geometry_.q_heads * all_chunks) * slot(),
                  kLeastPartialFloats);
}

// Returns the cost of an attention unit: its keys times its rows times its KV heads.
// A unit of fewer than kLeastTileRows rows waits for memory,
// so it costs as much as a unit of kLeastTileRows rows.
double AttentionPlan::cost(const AttentionUnit& u) const noexcept {
  return static_cast<double>(u.keys()) * u.heads *
         static_cast<double>(std::max(u.rows, kLeastTileRows));
}

// Returns the number of KV heads of an attention unit in decode: as many as possible
// while each thread still has at least kUnitsPerThread units.
int32_t AttentionPlan::heads_a_unit(const StepInput& in) const noexcept {
  int64_t decoding = 0;
  for (int32_t s = 0; s < in.seqs; s++) decoding += in.query_start[s + 1] - in.query_start[s] == 1;
  const int64_t heads = decoding * geometry_.kv_heads / (threads_ * kUnitsPerThread);
  return static_cast<int32_t>(std::clamp<int64_t>(heads, 1, geometry_.kv_heads));
}

// Returns the number of rows of a tile. If there are fewer pairs of a KV head and a chunk
// than threads, tiles get fewer rows, so that more threads have work (at most two units each),
// but not so few rows that threads wait for memory.
int64_t AttentionPlan::tile_rows(const StepInput& in) const noexcept {
  const int64_t even = in.tokens * geometry_.q_heads / (threads_ * kUnitsPerThread);
  const int64_t rows =
      std::clamp(ceil_div(even, kTileStep) * kTileStep, kMinTileRows, kMaxTileRows);
  if (in.seqs * geometry_.kv_heads >= threads_) return rows;
  int64_t chunks = 0, longest_rows = 0;
  for (int32_t s = 0; s < in.seqs; s++) {
    const int64_t queries = in.query_start[s + 1] - in.query_start[s];
    const int64_t seen = geometry_.window > 0
                             ? std::min<int64_t>(in.kv_len[s], geometry_.window + queries)
                             : in.kv_len[s];
    chunks += ceil_div(seen, kChunk) * geometry_.kv_heads;
    longest_rows = std::max(longest_rows, queries * geometry_.group());
  }
  if (longest_rows == 0) return rows;
  // The longest sequence has longest_rows / n tiles of n rows. Each tile reads all chunks again,
  // which takes as long as computing kReadRows rows, but threads share the reading. So a tile takes
  // as long to compute as all tiles to read if n = kReadRows * chunks * (longest_rows / n) /
  // threads: n * n equals `square`.
  const double square = static_cast<double>(kReadRows * chunks * longest_rows) /
                        static_cast<double>(std::max<int64_t>(threads_, kFewThreads));
  const int64_t tiles =
      std::clamp<int64_t>(std::llround(static_cast<double>(longest_rows) / std::sqrt(square)), 1,
                          ceil_div(threads_, chunks));
  const int64_t low = ceil_div(ceil_div(longest_rows, tiles), kLeastTileRows) * kLeastTileRows;
  return std::min(rows, low);
}

// Returns the position after the last key that the token at `position` of a sequence attends to.
int64_t AttentionPlan::end_of_keys(int64_t position, int64_t keys) const noexcept {
  if (geometry_.causal) return position + 1;
  return geometry_.window > 0 ? std::min(keys, position + geometry_.window) : keys;
}

// Returns the position of the first key that the token at `position` attends to.
int64_t AttentionPlan::first_key(int64_t position) const noexcept {
  if (geometry_.sections) return position / geometry_.window * geometry_.window;
  return geometry_.window > 0 ? std::max<int64_t>(0, position - geometry_.window + 1) : 0;
}

// Returns the first token of the run that `token` is in: the tokens of a picture or of a section,
// or tokens that see no later token. Tokens count from the first token of the sequence in the step.
int64_t AttentionPlan::first_of_run(const StepInput& in, int32_t seq,
                                    int64_t token) const noexcept {
  const int64_t pos0 = in.kv_len[seq] - (in.query_start[seq + 1] - in.query_start[seq]);
  if (geometry_.sections) return std::max<int64_t>(0, first_key(pos0 + token) - pos0);
  if (!geometry_.spans || !in.ends) return 0;
  const int32_t* ends = in.ends + in.query_start[seq];
  const auto single = [&](int64_t t) {
    return ends[t] == pos0 + t + 1 && (t == 0 || ends[t - 1] != ends[t]);
  };
  int64_t first = token;
  const bool alone = single(token);
  while (first > 0 && (alone ? single(first - 1) : ends[first - 1] == ends[token])) first--;
  return first;
}

void AttentionPlan::add_sequence(const StepInput& in, int32_t seq, int64_t tile_rows,
                                 int32_t heads_a_unit) noexcept {
  int64_t queries = in.query_start[seq + 1] - in.query_start[seq];
  const int64_t pos0 = in.kv_len[seq] - queries;
  if (geometry_.most > 0) queries = std::clamp<int64_t>(geometry_.most - pos0, 0, queries);
  const int64_t rows = queries * geometry_.group();
  const int32_t step = queries == 1 ? heads_a_unit : 1;
  // Tiles are made from the last rows to the first. The last rows see the most keys, so long tiles
  // come first, and short tiles at the end let all threads finish at about the same time.
  int64_t least = rows;  // the first row of the run of tokens that tiles are made of
  bool both_sides = false;
  for (int64_t end = rows, begin; end > 0; end = begin) {
    const int64_t last = (end - 1) / geometry_.group();
    if (end <= least) {
      const int64_t first = first_of_run(in, seq, last);
      least = first * geometry_.group();
      both_sides = geometry_.spans && in.ends && first < last &&
                   in.ends[in.query_start[seq] + first] == pos0 + last + 1;
    }
    begin = std::max(least, end - tile_rows);
    const int64_t first_pos = pos0 + begin / geometry_.group();
    const int64_t run_end =
        both_sides ? in.ends[in.query_start[seq] + last] : end_of_keys(pos0 + last, in.kv_len[seq]);
    add_tile({seq, 0, begin, end - begin, static_cast<int32_t>(first_key(first_pos) / kChunk),
              static_cast<int32_t>(ceil_div(run_end, kChunk)), -1, 0, 0,
              static_cast<int32_t>(run_end), both_sides},
             step);
  }
}

// Adds the units of all KV heads for a tile; a unit has up to `step` heads.
void AttentionPlan::add_tile(AttentionUnit tile, int32_t step) noexcept {
  for (int32_t head = 0; head < geometry_.kv_heads; head += tile.heads) {
    tile.kv_head = head;
    tile.heads = std::min(step, head_ends_[static_cast<size_t>(head)] - head);
    whole_.push_back(tile);
  }
}

// Sorts the units by KV head before any unit is split, and keeps the order within each head.
void AttentionPlan::sort_by_head() noexcept {
  std::fill(places_.begin(), places_.end(), 0);
  for (const AttentionUnit& u : whole_) places_[static_cast<size_t>(u.kv_head) + 1]++;
  for (size_t h = 1; h < places_.size(); h++) places_[h] += places_[h - 1];
  units_.resize(whole_.size());
  for (const AttentionUnit& u : whole_) units_[places_[static_cast<size_t>(u.kv_head)]++] = u;
  std::swap(units_, whole_);
  units_.clear();
}

// Returns whether a thread would have too much work (kTolerance) if no unit were split.
// A unit belongs to the thread that has the middle of the unit in its share, as in share_out.
bool AttentionPlan::uneven(double largest) const noexcept {
  if (threads_ == 1 || largest <= kSmall * share_) return false;
  double before = 0, load = 0;
  auto thread = int64_t{0};
  for (const AttentionUnit& u : whole_) {
    const double c = cost(u);
    const auto of = static_cast<int64_t>((before + c / 2) / share_);
    load = of == thread ? load + c : c;
    if (load > kTolerance * share_) return true;
    thread = of;
    before += c;
  }
  return false;
}

// Returns whether a thread's share of the total cost ends inside the range [before, before + cost),
// and not close to the ends of this range.
bool AttentionPlan::crosses(double before, double cost) const noexcept {
  const double first = before / share_ + kEdge, last = (before + cost) / share_ - kEdge;
  return std::floor(first) < std::floor(last);
}

// Splits each unit that crosses the end of a share: first into its KV heads, then over its chunks.
void AttentionPlan::cut_at_shares() noexcept {
  double before = 0;
  int64_t partial = 0;
  for (const AttentionUnit& u : whole_) {
    if (!crosses(before, cost(u))) {
      units_.push_back(u);
      before += cost(u);
      continue;
    }
    for (int32_t head = 0; head < u.heads; head++) {
      AttentionUnit one = u;
      one.kv_head += head;
      one.heads = 1;
      // A unit that cannot be split stays whole.
      // Threads are then less evenly loaded, but the result is the same.
      if (!crosses(before, cost(one)) || !split_unit(one, before, &partial)) units_.push_back(one);
      before += cost(one);
    }
  }
}

// Splits a unit of one KV head over its chunks, if it is small enough (kMaxSplitRows)
// and its partial results fit the buffer. Returns whether the unit was split.
bool AttentionPlan::split_unit(const AttentionUnit& u, double before, int64_t* partial) noexcept {
  const int64_t chunks = u.chunk1 - u.chunk0, floats = u.rows * chunks * slot();
  const int64_t most_rows = std::max<int64_t>(kMaxSplitRows, geometry_.group());
  if (chunks < 2 || u.rows > most_rows || *partial + floats > partial_floats_) return false;
  push_pieces(u, chunks, before, *partial);
  push_merges(u, chunks, *partial);
  *partial += floats;
  return true;
}

void AttentionPlan::push_pieces(AttentionUnit piece, int64_t chunks, double before,
                                int64_t partial) noexcept {
  const int32_t chunk0 = piece.chunk0;
  const double a_chunk = cost(piece) / static_cast<double>(chunks);
  const auto most = std::max<int64_t>(1, static_cast<int64_t>(share_ / kPiecesPerShare / a_chunk));
  piece.partial_stride = chunks;
  auto thread = static_cast<int64_t>(before / share_);
  for (int64_t c = 0; c < chunks;) {
    const double to = static_cast<double>(++thread) * share_ - before;  // the end of this share
    const int64_t end =
        thread < threads_ ? std::min<int64_t>(chunks, std::llround(to / a_chunk)) : chunks;
    if (end <= c) continue;
    const int64_t pieces = ceil_div(end - c, most), begin = c;
    for (int64_t i = 0; i < pieces; i++) {
      const int64_t next = begin + (end - begin) * (i + 1) / pieces;
      piece.chunk0 = chunk0 + static_cast<int32_t>(c);
      piece.chunk1 = chunk0 + static_cast<int32_t>(next);
      piece.partial = partial + c * slot();
      units_.push_back(piece);
      c = next;
    }
  }
}

void AttentionPlan::push_merges(const AttentionUnit& u, int64_t chunks, int64_t partial) noexcept {
  const int64_t step = std::max<int64_t>(1, kMergePartials / chunks);
  for (int64_t row = 0; row < u.rows; row += step) {
    merges_.push_back({u.seq, u.kv_head, u.row0 + row, std::min(step, u.rows - row), chunks,
                       partial + row * chunks * slot()});
  }
}

void AttentionPlan::build(const StepInput& in) noexcept {
  whole_.clear();
  units_.clear();
  merges_.clear();
  const int64_t rows = tile_rows(in);
  const int32_t heads = heads_a_unit(in);
  for (int32_t s = 0; s < in.seqs; s++) add_sequence(in, s, rows, heads);
  if (ranks_.count() > 1) sort_by_head();
  double total = 0, largest = 0;
  for (const AttentionUnit& u : whole_) {
    total += cost(u);
    largest = std::max(largest, cost(u));
  }
  share_ = total / threads_;
  if (uneven(largest)) {
    cut_at_shares();
  } else {
    std::swap(units_, whole_);
  }
  share_out();
}

// Assigns the units to threads: a unit belongs to the thread that has the middle of the unit
// in its share of the total cost.
void AttentionPlan::share_out() noexcept {
  const auto count = static_cast<int64_t>(units_.size());
  std::fill(cuts_.begin(), cuts_.end(), count);
  cuts_[0] = 0;
  double before = 0;
  int thread = 0;
  for (int64_t i = 0; i < count; i++) {
    const double half = cost(units_[static_cast<size_t>(i)]) / 2;
    while (thread + 1 < threads_ && before + half >= share_ * (thread + 1)) {
      cuts_[static_cast<size_t>(++thread)] = i;
    }
    before += 2 * half;
  }
}

}  // namespace cpuserve
