// The flat int32 block of one step (cpuserve/runtime/executor.py: StepArrays), checked.
#pragma once
#include <cstdint>

#include "base/span.h"

namespace cpuserve {

// Pointers into the words of the caller, valid as long as those exist.
struct StepInput {
  int64_t tokens, seqs, rows;
  const int32_t *token_ids, *positions;                        // [tokens]
  const int32_t* query_start;                                  // [seqs + 1]
  const int32_t* kv_len;                                       // [seqs] keys after this step
  const int32_t *table_start, *block_tables;                   // [seqs + 1], [table_start[seqs]]
  const int32_t *row_token, *row_slot, *row_target, *row_top;  // [rows]
};

struct StepLimits {
  int64_t max_tokens, max_seqs, max_positions, num_blocks, num_slots, embed_rows, vocab, max_top;
};

// Throws std::invalid_argument that names the first index out of range, before anything runs.
// Checks everything that kernels use as an index, because kernels do not check it again.
StepInput parse_step(Span<const int32_t> words, const StepLimits& limits);

}  // namespace cpuserve
