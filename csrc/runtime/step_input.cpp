#include "runtime/step_input.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/table.h"

namespace cpuserve {
namespace {

constexpr int64_t kHeader = 12;
// Indices of words in the header of the input. These words are the number of masks,
// the number of entries of `adapters` (and of `adapter_scales`), the number of block tables
// of a sequence after the first table, the numbers of entries of row_draft and of media_rows,
// and the number of axes of `angles`.
// The words from kUnused on have no meaning yet and are 0.
constexpr int64_t kMasks = 4, kAdapters = 5, kMoreGroups = 6, kDrafts = 7, kMedia = 8, kAxes = 9;
constexpr int64_t kUnused = 10;

class Reader {
 public:
  explicit Reader(Span<const int32_t> words) : at_(words.data()), left_(words.size()) {}
  const int32_t* take(int64_t count) {
    check_argument(count <= left_, "the words of the step are too short: ", count - left_,
                   " are missing");
    const int32_t* p = at_;
    at_ += count;
    left_ -= count;
    return p;
  }
  int64_t left() const { return left_; }

 private:
  const int32_t* at_;
  int64_t left_;
};

void check_range(const char* what, int64_t index, int64_t value, int64_t low, int64_t high) {
  check_argument(value >= low && value < high, what, "[", index, "] = ", value, " is not in [", low,
                 ", ", high, ")");
}

// Checks that start[0] is 0, that start[n] is `total`,
// and that successive offsets in `start` differ by at least `least`.
void check_offsets(const char* what, const int32_t* start, int64_t n, int64_t total,
                   int64_t least) {
  check_argument(start[0] == 0 && start[n] == total, what, " does not run from 0 to ", total);
  for (int64_t i = 0; i < n; i++) {
    check_argument(start[i + 1] - int64_t{start[i]} >= least, what, "[", i, "] is not ",
                   least > 0 ? "below" : "at most", " the next entry");
  }
}

// Checks the new entries of the block table of sequence s and cache group g, and that the table
// has blocks for all keys of the sequence.
void check_table(const StepInput& in, const StepLimits& limits, int64_t s, int64_t g) {
  const Span<const int32_t> entries = in.new_entries(s, g);
  for (const int32_t& block : entries) {
    check_range("block_tables", &block - in.table_entries, block, 0, limits.num_blocks);
  }
  const int64_t blocks = in.table_first[s * in.groups + g] + entries.size();
  check_argument(blocks * kBlock >= in.kv_len[s], "sequence ", s, " has ", blocks, " blocks for ",
                 in.kv_len[s], " keys");
}

// Checks the new entries of a table of state slots. Entry num_blocks + i is state slot i.
// Entry num_blocks - 1 means that a block has no state slot and uses the next slot of the table,
// so the table needs a slot for the block of the last token or for a later block.
void check_states(const StepInput& in, const StepLimits& limits, int64_t s,
                  Span<const int32_t> kept) {
  const int64_t g = in.groups - 1, first = in.table_first[s * in.groups + g];
  const int32_t gone = static_cast<int32_t>(limits.num_blocks - 1);
  const Span<const int32_t> entries = in.new_entries(s, g);
  for (const int32_t& slot : entries) {
    check_range("state table", &slot - in.table_entries, slot, gone,
                limits.num_blocks + limits.states);
  }
  bool found = false;
  for (int64_t b = (in.kv_len[s] - 1) / kBlock; b < first + entries.size() && !found; b++) {
    found = (b < first ? kept[b] : entries[b - first]) != gone;
  }
  check_argument(found, "sequence ", s, " has no state slot for its last token");
}

void check_tables(const StepInput& in, const StepLimits& limits, BlockTables& tables, int64_t s) {
  const int64_t slot = in.seq_slot[s];
  check_range("seq_slot", s, slot, 0, limits.num_slots);
  check_argument(tables.claim(slot), "seq_slot[", s, "] = ", slot,
                 " is that of another sequence of the step");
  for (int64_t g = 0; g < in.groups; g++) {
    const Span<const int32_t> kept = tables.table(slot, g);
    const int64_t at = s * in.groups + g;
    check_range("table_first", at, in.table_first[at], 0, kept.size() + 1);
    if (limits.states > 0 && g == in.groups - 1) {
      check_states(in, limits, s, kept);
    } else {
      check_table(in, limits, s, g);
    }
  }
}

void check_sequence(const StepInput& in, const StepLimits& limits, BlockTables& tables, int64_t s) {
  const int64_t first = in.query_start[s], queries = in.query_start[s + 1] - first;
  const int64_t keys = in.kv_len[s];
  check_range("kv_len", s, keys, queries, limits.max_positions + 1);
  check_argument(queries % limits.fold == 0 || in.seqs == 1, "sequence ", s, " has ", queries,
                 " tokens, which cannot be folded ", limits.fold, " at a time");
  check_tables(in, limits, tables, s);
  for (int64_t i = 0; i < queries; i++) {
    const int64_t t = first + i;
    check_argument(in.positions[t] == keys - queries + i, "positions[", t, "] = ", in.positions[t],
                   ", but sequence ", s, " is at ", keys - queries + i);
    check_range("token_ids", t, in.token_ids[t], 0, limits.embed_rows);
  }
}

// Checks that a step with media has a row of the media buffer, or -1, for each token.
void check_media(const StepInput& in, const StepLimits& limits) {
  for (int64_t t = 0; in.media_rows && t < in.tokens; t++) {
    check_range("media_rows", t, in.media_rows[t], -1, limits.media);
  }
}

// Checks that a step with angles has a row of the tables of cos and sin for each of them.
void check_angles(const StepInput& in, const StepLimits& limits) {
  for (int64_t i = 0; in.angles && i < limits.axes * in.tokens; i++) {
    check_range("angles", i, in.angles[i], 0, limits.max_positions);
  }
}

void check_row(const StepInput& in, const StepLimits& limits, int64_t r) {
  check_range("row_token", r, in.row_token[r], 0, in.tokens / limits.fold);
  check_range("row_slot", r, in.row_slot[r], 0, limits.num_slots);
  const int64_t least = limits.hidden ? kHiddenRow : kSampledRow;
  const int64_t end = limits.hidden ? kHiddenRow + 1 : limits.vocab;
  check_range("row_target", r, in.row_target[r], least, end);
  check_range("row_top", r, in.row_top[r], -1, limits.max_top + 1);
}

// Checks row r if it has a draft token. Rows r and r + 1 must sample for the same request slot,
// and row r + 1 must belong to the draft token, which is the next token of the sequence.
void check_draft(const StepInput& in, const StepLimits& limits, int64_t r) {
  check_range("row_draft", r, in.row_draft[r], -1, limits.vocab);
  if (in.row_draft[r] < 0) return;
  const int64_t next = int64_t{in.row_token[r]} + 1;
  const bool follows = r + 1 < in.rows && in.row_token[r + 1] == next &&
                       in.row_slot[r + 1] == in.row_slot[r] && in.row_target[r] < 0 &&
                       in.row_target[r + 1] < 0;
  check_argument(follows, "row_draft[", r, "] = ", in.row_draft[r],
                 ", but the next row does not sample the token after it");
  check_argument(!std::binary_search(in.query_start, in.query_start + in.seqs, next), "row_draft[",
                 r, "] belongs to the last token of its sequence");
  check_argument(in.token_ids[next] == in.row_draft[r], "row_draft[", r, "] = ", in.row_draft[r],
                 ", but the next token is ", in.token_ids[next]);
}

// Checks that no rows except [begin, end), which verify draft tokens,
// sample with their request slot, because they change its sampler state while the step runs.
void check_alone(const StepInput& in, int64_t begin, int64_t end) {
  for (int64_t r = 0; r < in.rows; r++) {
    const bool other = (r < begin || r >= end) && in.row_target[r] < 0;
    check_argument(!other || in.row_slot[r] != in.row_slot[begin], "row_slot[", r,
                   "] = ", in.row_slot[r], " is verified by other rows of the step");
  }
}

void check_drafts(const StepInput& in, const StepLimits& limits) {
  for (int64_t r = 0; r < in.rows; r++) check_draft(in, limits, r);
  for (int64_t r = 0; r < in.rows; r++) {
    const int64_t begin = r;
    while (in.row_draft[r] >= 0) r++;
    if (r > begin) check_alone(in, begin, r + 1);
  }
}

}  // namespace

StepInput parse_step(Span<const int32_t> words, const StepLimits& limits, BlockTables& tables,
                     Span<const int32_t> masks) {
  Reader reader(words);
  const int32_t* header = reader.take(kHeader);
  StepInput in{};
  in.tokens = header[0];
  in.seqs = header[1];
  in.rows = header[2];
  in.groups = limits.groups;
  const int64_t blocks = header[3], adapters = header[kAdapters];
  const int64_t num_masks = header[kMasks];
  check_argument(in.tokens >= 1 && in.tokens <= limits.max_tokens, "a step must have 1 to ",
                 limits.max_tokens, " tokens, not ", in.tokens);
  check_argument(in.seqs >= 1 && in.seqs <= limits.max_seqs, "a step must have 1 to ",
                 limits.max_seqs, " sequences, not ", in.seqs);
  const int64_t most_rows = limits.max_tokens / limits.fold;
  check_argument(in.rows >= 0 && in.rows <= most_rows, "a step must have 0 to ", most_rows,
                 " logit rows, not ", in.rows);
  check_argument(in.rows == 0 || limits.vocab > 0 || limits.hidden,
                 "the step has rows, but this program has neither a logits nor a hidden op");
  check_argument(blocks >= 0, "a step cannot have ", blocks, " new blocks");
  check_argument(header[kMoreGroups] == limits.groups - 1, "the step has block tables for ",
                 int64_t{header[kMoreGroups]} + 1, " groups of layers, but the program has ",
                 limits.groups);
  check_argument(adapters == 0 || adapters == in.seqs, "a step of ", in.seqs,
                 " sequences cannot have ", adapters, " adapters: it has one for each, or none");
  const int64_t drafts = header[kDrafts];
  check_argument(drafts == 0 || drafts == in.rows, "a step of ", in.rows,
                 " logit rows cannot have ", drafts, " drafts: it has one for each row, or none");
  const int64_t media = header[kMedia];
  check_argument(media == 0 || media == in.tokens, "a step of ", in.tokens, " tokens cannot have ",
                 media, " media rows: it has one for each, or none");
  const int64_t axes = header[kAxes];
  check_argument(axes == limits.axes || (axes == 0 && !limits.needs_angles),
                 "the step has angles of ", axes, " axes, but the program has ", limits.axes);
  for (int64_t i = kUnused; i < kHeader; i++) check_range("header", i, header[i], 0, 1);
  const int64_t words_of_masks = num_masks * mask_words(limits.vocab);
  check_argument(num_masks >= 0 && masks.size() == words_of_masks, "the ", num_masks,
                 " masks of the step need ", words_of_masks, " words, but there are ",
                 masks.size());

  in.token_ids = reader.take(in.tokens);
  in.positions = reader.take(in.tokens);
  in.query_start = reader.take(in.seqs + 1);
  in.kv_len = reader.take(in.seqs);
  in.seq_slot = reader.take(in.seqs);
  in.table_first = reader.take(in.seqs * in.groups);
  in.table_start = reader.take(in.seqs * in.groups + 1);
  in.table_entries = reader.take(blocks);
  in.adapters = adapters > 0 ? reader.take(adapters) : nullptr;
  in.adapter_scales = adapters > 0 ? reader.take(adapters) : nullptr;
  in.media_rows = media > 0 ? reader.take(media) : nullptr;
  in.angles = axes > 0 ? reader.take(axes * in.tokens) : nullptr;
  in.row_token = reader.take(in.rows);
  in.row_slot = reader.take(in.rows);
  in.row_target = reader.take(in.rows);
  in.row_top = reader.take(in.rows);
  in.row_draft = drafts > 0 ? reader.take(drafts) : nullptr;
  if (num_masks > 0) in.row_mask = reader.take(in.rows);
  in.masks = masks.data();
  check_argument(reader.left() == 0, "the words of the step are too long: ", reader.left(),
                 " are left over");

  check_offsets("query_start", in.query_start, in.seqs, in.tokens, 1);
  check_offsets("table_start", in.table_start, in.seqs * in.groups, blocks, 0);
  tables.begin_step();
  for (int64_t s = 0; s < in.seqs; s++) check_sequence(in, limits, tables, s);
  for (int64_t s = 0; s < adapters; s++) {
    check_range("adapters", s, in.adapters[s], -1, limits.adapters);
  }
  check_media(in, limits);
  check_angles(in, limits);
  for (int64_t r = 0; r < in.rows; r++) check_row(in, limits, r);
  if (in.row_draft) check_drafts(in, limits);
  for (int64_t r = 0; in.row_mask && r < in.rows; r++) {
    check_range("row_mask", r, in.row_mask[r], -1, num_masks);
  }
  return in;
}

}  // namespace cpuserve
