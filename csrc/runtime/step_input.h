// The flat int32 block of one step (cpuserve/runtime/executor.py: StepArrays), checked.
#pragma once
#include <cstdint>

#include "base/span.h"
#include "runtime/block_tables.h"

namespace cpuserve {

// Targets of rows that are not scored: a token is sampled, or the row's vector is wanted.
constexpr int32_t kSampledRow = -1, kHiddenRow = -2;

// Pointers into the words of the caller, valid as long as those exist.
struct StepInput {
  int64_t tokens, seqs, rows, groups;
  const int32_t *token_ids, *positions;                        // [tokens]
  const int32_t* query_start;                                  // [seqs + 1]
  const int32_t* kv_len;                                       // [seqs] keys after this step
  const int32_t* seq_slot;                                     // [seqs] all different
  const int32_t *table_first, *table_start;                    // [seqs][groups], and 1 + that
  const int32_t* table_entries;                                // new ones of all tables
  const int32_t* adapters;                                     // [seqs], or none
  const int32_t *row_token, *row_slot, *row_target, *row_top;  // [rows]
  const int32_t* row_draft;                                    // [rows], or null without drafts
  const int32_t* row_mask;                                     // [rows], or null without masks
  const int32_t* masks;                                        // [masks, mask_words(vocab)]

  // The new entries of a table, which follow its first `table_first` ones.
  Span<const int32_t> new_entries(int64_t seq, int64_t group) const noexcept {
    const int32_t* start = table_start + seq * groups + group;
    return {table_entries + start[0], start[1] - start[0]};
  }

  // The token that must be sampled in row r for the next row to be sampled, or -1.
  int32_t draft(int64_t r) const noexcept { return row_draft ? row_draft[r] : -1; }
};

// The words of a mask: one bit for each id of the vocabulary.
constexpr int64_t mask_words(int64_t vocab) { return (vocab + 31) / 32; }

struct StepLimits {
  int64_t max_tokens, max_seqs, max_positions, num_blocks, num_slots, embed_rows, vocab, max_top;
  bool hidden = false;   // the program returns vectors of rows instead of logits
  int64_t adapters = 0;  // that sequences may name
  int64_t groups = 1;    // of layers, each with block tables of its own
  int64_t states = 0;    // slots of states, which the tables of the last group name; 0 = none
};

// Throws std::invalid_argument for the first index out of range, before anything runs.
// Checks everything that kernels use as an index, because kernels do not check it again. Of the
// block tables only the new entries are checked: `tables` has the others, and does not change.
StepInput parse_step(Span<const int32_t> words, const StepLimits& limits, BlockTables& tables,
                     Span<const int32_t> masks = {});

}  // namespace cpuserve
