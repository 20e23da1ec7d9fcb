#include "runtime/attention_plan.h"

#include <algorithm>
#include <utility>

namespace cpuserve {
namespace {

// Rows of a prefill unit. K and V of a chunk (64 KB at head_dim 64) are read from L2 once per unit,
// so tall units read less; at least kUnitsPerThread units a thread let the last ones even out.
constexpr int64_t kMinTileRows = 48, kMaxTileRows = 240, kTileStep = 24;
constexpr int64_t kUnitsPerThread = 8;
// Units of at most so many rows may be split over chunks: beyond, partial rows cost as much memory
// traffic as the keys they save waiting for.
constexpr int64_t kMaxSplitRows = 64;
constexpr int64_t kMaxSplitUnits = 4096;
// A split costs a merge and a barrier: worth it when some thread would have 10 % more than its
// part.
constexpr double kTolerance = 1.1;
constexpr double kPiecesPerShare = 4;
constexpr int64_t kPartialHeader = 16;  // floats in front of o (table.h)

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

AttentionPlan::AttentionPlan(AttentionGeometry geometry, int64_t max_tokens, int64_t max_seqs,
                             Ranks ranks)
    : geometry_(geometry),
      ranks_(std::move(ranks)),
      threads_(ranks_.threads()),
      head_ends_(static_cast<size_t>(geometry.kv_heads)),
      cuts_(static_cast<size_t>(ranks_.count()) + 1),
      places_(static_cast<size_t>(geometry.kv_heads) + 1),
      loads_(static_cast<size_t>(threads_)) {
  const auto owner = [&](int32_t h) { return ranks_.owner_of_middle(h, geometry.kv_heads); };
  for (int32_t h = 0; h < geometry.kv_heads; h++) {
    int32_t& end = head_ends_[static_cast<size_t>(h)] = h + 1;
    while (end < geometry.kv_heads && owner(end) == owner(h)) end++;
  }
  const int64_t tiles = max_tokens * geometry.group() / kMinTileRows + max_seqs;
  const auto units = static_cast<size_t>(tiles * geometry.kv_heads);
  whole_.reserve(units + kMaxSplitUnits);  // as large as units_: build() may swap them
  units_.reserve(units + kMaxSplitUnits);
  merges_.reserve(std::min<size_t>(units, kMaxSplitUnits));
}

// Keys visited times rows, with a floor of rows below which a chunk is bound by reading it.
double AttentionPlan::cost(const AttentionUnit& u) const noexcept {
  constexpr int64_t kReadBoundRows = 4;
  return static_cast<double>(u.chunk1 - u.chunk0) * u.heads *
         static_cast<double>(std::max(u.rows, kReadBoundRows));
}

// KV heads of a decode unit: as many as leave kUnitsPerThread units a thread.
int32_t AttentionPlan::heads_a_unit(const StepInput& in) const noexcept {
  int64_t decoding = 0;
  for (int32_t s = 0; s < in.seqs; s++) decoding += in.query_start[s + 1] - in.query_start[s] == 1;
  const int64_t heads = decoding * geometry_.kv_heads / (threads_ * kUnitsPerThread);
  return static_cast<int32_t>(std::clamp<int64_t>(heads, 1, geometry_.kv_heads));
}

void AttentionPlan::add_sequence(const StepInput& in, int32_t seq, int64_t tile_rows,
                                 int32_t heads_a_unit) noexcept {
  const int64_t queries = in.query_start[seq + 1] - in.query_start[seq];
  const int64_t pos0 = in.kv_len[seq] - queries, rows = queries * geometry_.group();
  // Longest tiles (the last rows see the most keys) first, so that short ones fill the end.
  for (int64_t end = rows; end > 0; end -= std::min(end, tile_rows)) {
    const int64_t begin = std::max<int64_t>(0, end - tile_rows);
    const int64_t first_pos = pos0 + begin / geometry_.group();
    const int64_t last_pos = pos0 + (end - 1) / geometry_.group();
    const int64_t first_key =
        geometry_.window > 0 ? std::max<int64_t>(0, first_pos - geometry_.window + 1) : 0;
    const int32_t step = queries == 1 ? heads_a_unit : 1;
    for (int32_t head = 0, heads = 0; head < geometry_.kv_heads; head += heads) {
      heads = std::min(step, head_ends_[static_cast<size_t>(head)] - head);
      whole_.push_back({seq, head, begin, end - begin, static_cast<int32_t>(first_key / kChunk),
                        static_cast<int32_t>(last_pos / kChunk + 1), -1, 0, heads});
    }
  }
}

// Whether giving each unit to the least loaded thread leaves one of them with too much. With many
// units a thread it does not.
bool AttentionPlan::unbalanced(double total, double* share) noexcept {
  if (static_cast<int64_t>(whole_.size()) >= 2 * kUnitsPerThread * threads_) return false;
  std::fill(loads_.begin(), loads_.end(), 0.0);
  for (const AttentionUnit& u : whole_) {
    *std::min_element(loads_.begin(), loads_.end()) += cost(u);
  }
  *share = total / threads_;
  return *std::max_element(loads_.begin(), loads_.end()) > kTolerance * *share;
}

// Cuts a unit of one KV head over its chunks if that is worth it and fits.
bool AttentionPlan::split_unit(const AttentionUnit& u, double piece_cost, int64_t* partial,
                               int64_t* splits) noexcept {
  const int64_t slot = kPartialHeader + geometry_.hd_pad;
  const int64_t chunks = u.chunk1 - u.chunk0, floats = u.rows * chunks * slot;
  const auto wanted = static_cast<int64_t>(cost(u) / piece_cost) + 1;
  const int64_t pieces = std::min(chunks, wanted);
  if (pieces < 2 || u.rows > kMaxSplitRows || *partial + floats > kPartialFloats ||
      *splits + pieces > kMaxSplitUnits) {
    return false;
  }
  const int64_t step = ceil_div(chunks, pieces);
  for (int64_t c = 0; c < chunks; c += step) {
    AttentionUnit piece = u;
    piece.chunk0 = u.chunk0 + static_cast<int32_t>(c);
    piece.chunk1 = u.chunk0 + static_cast<int32_t>(std::min(c + step, chunks));
    piece.partial = *partial + c * slot;
    piece.partial_stride = chunks;
    units_.push_back(piece);
  }
  merges_.push_back({u.seq, u.kv_head, u.row0, u.rows, chunks, *partial});
  *partial += floats;
  *splits += pieces;
  return true;
}

void AttentionPlan::split_units(double piece_cost) noexcept {
  int64_t partial = 0, splits = 0;
  for (const AttentionUnit& u : whole_) {
    for (int32_t head = 0; head < u.heads; head++) {
      AttentionUnit one = u;
      one.kv_head += head;
      one.heads = 1;
      // Whole where it cannot be cut: slower to balance, the same result.
      if (!split_unit(one, piece_cost, &partial, &splits)) units_.push_back(one);
    }
  }
}

void AttentionPlan::build(const StepInput& in) noexcept {
  whole_.clear();
  units_.clear();
  merges_.clear();
  const int64_t all_rows = in.tokens * geometry_.q_heads;
  const int64_t even = all_rows / (threads_ * kUnitsPerThread);
  const int64_t tile_rows =
      std::clamp(ceil_div(even, kTileStep) * kTileStep, kMinTileRows, kMaxTileRows);
  const int32_t heads = heads_a_unit(in);
  for (int32_t s = 0; s < in.seqs; s++) add_sequence(in, s, tile_rows, heads);
  double total = 0, share = 0;
  for (const AttentionUnit& u : whole_) total += cost(u);
  if (threads_ > 1 && unbalanced(total, &share)) {
    split_units(share / kPiecesPerShare);
  } else {
    std::swap(units_, whole_);
  }
  share_out(total);
}

// Sorts the units by head, each head's in the order they had, and cuts them by their cost.
void AttentionPlan::share_out(double total) noexcept {
  const auto count = static_cast<int64_t>(units_.size());
  std::fill(cuts_.begin(), cuts_.end(), count);
  cuts_[0] = 0;
  if (ranks_.count() == 1) return;
  std::fill(places_.begin(), places_.end(), 0);
  for (const AttentionUnit& u : units_) places_[static_cast<size_t>(u.kv_head) + 1]++;
  for (size_t h = 1; h < places_.size(); h++) places_[h] += places_[h - 1];
  whole_.resize(units_.size());
  for (const AttentionUnit& u : units_) whole_[places_[static_cast<size_t>(u.kv_head)]++] = u;
  std::swap(units_, whole_);
  double before = 0;
  int rank = 0;
  for (int64_t i = 0; i < count; i++) {
    const double half = cost(units_[static_cast<size_t>(i)]) / 2;
    // A unit belongs to the rank in whose part of the whole its middle lies.
    while (rank + 1 < ranks_.count() &&
           (before + half) * threads_ >= total * static_cast<double>(ranks_.threads_of(rank).end)) {
      cuts_[static_cast<size_t>(++rank)] = i;
    }
    before += 2 * half;
  }
}

}  // namespace cpuserve
