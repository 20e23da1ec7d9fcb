// The fields of operations that have a word for each value (names.h).
#pragma once
#include <cstdint>

namespace cpuserve {

// How a RouteOp makes the weights of experts from their logits.
enum class Score : int32_t {
  softmax = 0,
  sigmoid,
  chosen_softmax,
  near_softmax,
  chosen_sigmoid,
  sqrt_softplus
};

// The values of an EmbedOp for a token with a row of the media buffer (StepInput::media_rows).
enum class MediaToken : int32_t {
  id,     // the row of its id, as for every other token
  row,    // the first columns of its row of the media buffer, not scaled
  zero,   // zeros
  other,  // the row of the id `other`, which the model has for all of them
};

}  // namespace cpuserve
