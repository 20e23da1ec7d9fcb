// The input of one step is one array of int32 words (cpuserve/runtime/executor.py:
// StepArrays). parse_step checks it and finds the arrays in it.
#pragma once
#include <cstdint>
#include <cstring>

#include "base/span.h"
#include "runtime/block_tables.h"

namespace cpuserve {

// Values of row_target for rows without a token to score: kSampledRow requests a sampled token,
// kHiddenRow requests the hidden state of the row as a vector.
constexpr int32_t kSampledRow = -1, kHiddenRow = -2;

// The counts of a step, and pointers to arrays in `words`, which must outlive this object.
struct StepInput {
  int64_t tokens, seqs, rows, groups;
  const int32_t *token_ids, *positions;      // [tokens]
  const int32_t* query_start;                // [seqs + 1]
  const int32_t* kv_len;                     // [seqs] keys, new ones included
  const int32_t* seq_slot;                   // [seqs] distinct request slots
  const int32_t *table_first, *table_start;  // [seqs * groups] (table_start: + 1)
  const int32_t* table_entries;              // new entries of all tables
  const int32_t* adapters;                   // [seqs], or null without adapters
  const int32_t* adapter_scales;             // [seqs] bits of floats, or null
  const int32_t* media_rows;                 // [tokens], or null without media
  const int32_t* angles;                     // [axes, tokens], or null
  const int32_t* ends;                       // see StepContext::find_ends, or null
  const int32_t *row_token, *row_slot, *row_target, *row_top;  // [rows]
  const int32_t* row_draft;                                    // [rows], or null without drafts
  const int32_t* row_mask;                                     // [rows], or null without masks
  const int32_t* masks;                                        // [masks, mask_words(vocab)]

  // Returns the new entries of a block table, which replace its entries from its table_first on.
  Span<const int32_t> new_entries(int64_t seq, int64_t group) const noexcept {
    const int32_t* start = table_start + seq * groups + group;
    return {table_entries + start[0], start[1] - start[0]};
  }

  // Returns the scale of the LoRA adapter of sequence s. Call it only if the step has adapters.
  float adapter_scale(int64_t s) const noexcept {
    float scale;
    std::memcpy(&scale, adapter_scales + s, sizeof scale);
    return scale;
  }

  // Returns the row of the media buffer that token t has instead of the row of its id, or -1.
  int32_t media_row(int64_t t) const noexcept { return media_rows ? media_rows[t] : -1; }

  // Returns the place of token t on an axis, which its angles depend on. Call it only if the step
  // has angles; in other steps it is the position on every axis.
  int32_t angle(int64_t axis, int64_t t) const noexcept { return angles[axis * tokens + t]; }

  // Returns the draft token of row r, or -1 if the row has none.
  // The next row gets a token only if row r samples its draft token.
  int32_t draft(int64_t r) const noexcept { return row_draft ? row_draft[r] : -1; }
};

constexpr int64_t kMostAxes = 4;  // of the places of a token (StepInput::angles)

// Returns the number of int32 words of a bitmask, which has one bit for each id of the vocabulary.
constexpr int64_t mask_words(int64_t vocab) { return (vocab + 31) / 32; }

struct StepLimits {
  int64_t max_tokens, max_seqs, max_positions, num_blocks, num_slots, embed_rows, vocab, max_top;
  bool hidden = false;   // the program returns hidden states of rows instead of logits
  int64_t adapters = 0;  // number of adapters that sequences can use
  int64_t groups = 1;    // block tables of each sequence (Program::table_groups)
  int64_t states = 0;    // number of state slots, for the last table of a sequence; 0: no states
  int64_t media = 0;     // number of rows of the media buffer
  // Each sequence has a multiple of `fold` tokens, and a row for each fold. The only sequence of a
  // step may have fewer than `fold` further tokens at the end, which have no row.
  int64_t fold = 1;
  int64_t axes = 0;           // number of axes that ropes turn by (RopeStoreOp::axes)
  bool needs_angles = false;  // each step has angles
};

// Checks every number that kernels use as an index, because kernels do not check it again.
// Throws std::invalid_argument for the first index out of range.
// Of the block tables, checks only the new entries, because the entries in `tables`
// were checked in earlier steps. Does not change the entries in `tables`.
StepInput parse_step(Span<const int32_t> words, const StepLimits& limits, BlockTables& tables,
                     Span<const int32_t> masks = {});

}  // namespace cpuserve
