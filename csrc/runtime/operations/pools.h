// The pools of tokens that a step completes.
#pragma once
#include <algorithm>

#include "runtime/worker.h"

namespace cpuserve {

// Calls compute(sequence, first, last) for the pools [first, last) of each sequence that this
// thread computes: the thread that processes the last token of a pool computes it.
template <class Compute>
void each_pools(int32_t pool, Worker& w, const Compute& compute) noexcept {
  const StepInput& in = w.input();
  const Range own = w.share(w.tokens());
  for (int64_t s = 0; s < in.seqs; s++) {
    const int64_t begin = in.query_start[s], end = in.query_start[s + 1];
    // Returns the number of whole pools of the sequence that end before a row of the step.
    const auto whole = [&](int64_t row) {
      return (in.positions[begin] + std::clamp(row, begin, end) - begin) / pool;
    };
    const int64_t first = whole(own.begin), last = whole(own.end);
    if (first < last) compute(s, first, last);
  }
}

}  // namespace cpuserve
