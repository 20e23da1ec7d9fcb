// The arguments of recurrent layers.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/rows.h"

namespace cpuserve {

// Recurrent layers, all in fp32. A state S [key_width, value_width] of each head follows
//   S_t = exp(g_t) S_{t-1} + k_t (x) u_t     out_t = S_t^T q_t
//   u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)   gated delta rule
//   u_t = beta_t v_t                              Mamba2: k = B, q = C, v = x, beta = dt, g = dt A
// State at absolute multiples of kStateChunk tokens is closed. The tokens since then are open rows:
// their k, their u, and G_t, the sum of g since the chunk began. A token reads the closed state
// once and chains over the open rows before it in ascending order,
//   out_t = exp(G_t) (S^T q_t) + sum_{i <= t} exp(G_t - G_i) (k_i . q_t) u_i
// and u_t likewise. So a row's bits do not depend on how tokens are cut into calls, and to forget
// the last tokens is to forget their rows.
constexpr int64_t kStateChunk = 16;  // tokens of a closed chunk

struct RecurrentShape {
  int32_t key_width, value_width;
  int32_t heads;  // value heads of a unit, which share its keys and queries
  bool delta;     // gated delta rule, else Mamba2
};

// One unit: `heads` states of one sequence. `closed`, `open` and `scratch` need no alignment, but
// are read faster at multiples of 64 bytes.
struct RecurrentArgs {
  RecurrentShape shape;
  const float* closed;  // [heads][key_width][value_width] at the last closed boundary
  float* closed_to;     // where the call that fills the chunk writes the state; may equal `closed`
  float* open;          // recurrent_open_floats() floats; rows after num_open may hold anything
  int64_t num_open;     // open rows before this call, 0 to 15
  int64_t rows;         // tokens of this call, 1 to 16 - num_open; the call closes a full chunk
  const float *k, *q, *v;  // row t at k + t * k_stride etc.; v row [heads][value_width]
  int64_t k_stride, q_stride, v_stride;
  const float *g, *beta;  // of (t, head) at t * gate_stride + head; g <= 0 and finite
  int64_t gate_stride;
  float* out;  // row t: [heads][value_width] at out + t * out_stride
  int64_t out_stride;
  uint8_t* scratch;  // recurrent_scratch_bytes() bytes
  // `closed` of the unit that this thread computes next, to fetch the beginning of its states
  // ahead; or nullptr.
  const float* next = nullptr;
};

// Rows of k and u are padded to whole vectors of any level.
inline int64_t recurrent_row_floats(int32_t width) { return round_up(width, 16); }

// Floats of a unit's open rows: k [16][key row], u [heads][16][value row], G [heads][16].
inline int64_t recurrent_open_floats(const RecurrentShape& s) {
  const int64_t row = recurrent_row_floats(s.key_width) +
                      s.heads * (recurrent_row_floats(s.value_width) + int64_t{1});
  return kStateChunk * row;
}

// Scratch: q [16][key row]; u until the chunk's end [16][value row], and products of states and
// vectors; five matrices of one number for each pair of rows; and a line to align them.
constexpr int64_t kRecurrentSums = 48;
inline size_t recurrent_scratch_bytes(const RecurrentShape& s) {
  const int64_t rows = kStateChunk * recurrent_row_floats(s.key_width) +
                       (kStateChunk + kRecurrentSums) * recurrent_row_floats(s.value_width);
  return static_cast<size_t>(rows + 5 * kStateChunk * kStateChunk + 16) * sizeof(float);
}

// The causal convolution of each channel before a recurrent layer, then silu if `silu`:
//   out[t][c] = bias[c] + sum_j weight[j][c] x[t - taps + 1 + j][c], one chain, j ascending
// A task may take some of the channels; then pointers are to its first one and the strides say how
// many floats there are from row to row.
constexpr int32_t kMaxTaps = 8;
struct ShortConvArgs {
  const float* x;
  int64_t x_stride;
  const float* before;  // the taps - 1 inputs before the first row, oldest first
  const float* weight;  // [taps][channels], oldest first
  const float* bias;    // [channels] or nullptr
  bool silu;
  int32_t taps;  // 1 to kMaxTaps
  int64_t channels, rows;
  float* out;  // must not overlap x or before
  int64_t out_stride;
  int64_t before_stride = 0, weight_stride = 0;  // 0 = channels
};

// RMS norm of each group of columns of a row, and a gate:
//   gate_first   out = rms(x silu(z)) weight     Mamba2
//   otherwise    out = rms(x) weight silu(z)     Qwen3-Next
struct GatedNormArgs {
  const float* x;
  int64_t x_stride;
  const float* z;
  int64_t z_stride;
  const float* weight;  // [width] if shared_weight, else [groups][width]
  int64_t groups, width;
  float eps;
  bool gate_first, shared_weight;
  float* out;  // may equal x, with the same stride
  int64_t out_stride;
  int64_t rows;
};

}  // namespace cpuserve
