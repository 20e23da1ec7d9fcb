// The arguments of recurrent layers.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/rows.h"

namespace cpuserve {

// Recurrent layers, all in fp32. Each head has a state S [key_width, value_width].
// In the formulas, t is a token, k, q and v are rows of this token, and (x) is the outer product:
//   S_t = exp(g_t) S_{t-1} + k_t (x) u_t     out_t = S_t^T q_t
//   u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)   gated delta rule
//   u_t = beta_t v_t                              Mamba2: k = B, q = C, v = x, beta = dt, g = dt A
// In delta attention with a decay by row, each row of the state has its own g:
// g_t is a vector [key_width], and exp(g_t) multiplies the rows of S_{t-1}.
// The state is computed only after each kStateChunk tokens of the sequence,
// and is then called the closed state. The tokens after the closed state form a chunk.
// Each token of the chunk has an open row: its k, u and G_t, the sum of g since the chunk began.
// The result of a token t adds the closed state S and the open rows i up to t, in ascending order:
//   out_t = exp(G_t) (S^T q_t) + sum_{i <= t} exp(G_t - G_i) (k_i . q_t) u_i
// u_t is computed in the same way. If g_t is a vector, exp(G_t) multiplies the elements of q_t,
// and exp(G_t - G_i) multiplies the elements of k_i. The division of tokens into calls therefore
// changes no bit of a row, and dropping the open rows of the last tokens removes these tokens.
constexpr int64_t kStateChunk = 16;  // tokens of a full chunk, after which the state is closed

struct RecurrentShape {
  int32_t key_width, value_width;
  int32_t heads;        // value heads of a state unit; they share keys and queries
  bool delta;           // true: gated delta rule; false: Mamba2
  bool by_row = false;  // whether g_t is a vector; requires one head, and delta outside of Wkv6Args
};

// Some tokens of one state unit: the states of shape.heads heads of one sequence.
// `closed`, `open` and `scratch` need no alignment, but access is faster at multiples of 64 bytes.
struct RecurrentArgs {
  RecurrentShape shape;
  const float* closed;     // the closed state [heads][key_width][value_width] before the chunk
  float* closed_to;        // the state after the chunk, if this call fills it; may equal `closed`
  float* open;             // recurrent_open_floats() floats; rows after num_open may hold anything
  int64_t num_open;        // number of open rows before this call, 0 to 15
  int64_t rows;            // tokens of this call, 1 to 16 - num_open; the call closes a full chunk
  const float *k, *q, *v;  // row t of k is at k + t * k_stride; a row of v is [heads][value_width]
  int64_t k_stride, q_stride, v_stride;
  const float *g, *beta;  // token t and head h have the index t * stride + h; g is finite and <= 0
  int64_t g_stride, beta_stride;
  // by_row: g of row d of the state is -rate softplus(g[t * g_stride + d] + bias[d]).
  const float* bias = nullptr;
  float rate = 0.0f;
  float* out;  // row t of the result is [heads][value_width] at out + t * out_stride
  int64_t out_stride;
  uint8_t* scratch;  // scratch memory of recurrent_scratch_bytes() bytes
  // The closed state of the state unit that this thread computes next, or nullptr.
  // The kernel prefetches the beginning of this state.
  const float* next = nullptr;
};

// Returns the number of floats of a row of k or u.
// Rows are padded to whole vectors of every ISA level.
inline int64_t recurrent_row_floats(int32_t width) { return round_up(width, 16); }

// Returns the number of floats of the open rows of a state unit: k [16][padded key_width],
// u [heads][16][padded value_width] and G [heads][16], or [16][padded key_width] if by_row.
inline int64_t recurrent_open_floats(const RecurrentShape& s) {
  const int64_t key = recurrent_row_floats(s.key_width);
  const int64_t row = key + s.heads * recurrent_row_floats(s.value_width);
  return kStateChunk * (row + (s.by_row ? key : int64_t{s.heads}));
}

// Returns the bytes of scratch memory for one call (one state unit). The memory has these parts:
// - q [16][padded key_width]
// - u of the chunk [16][padded value_width]
// - kRecurrentSums rows of products of a state and a vector
// - five matrices [16][16] with a number for each pair of rows
// - if by_row, 49 rows [padded key_width]. 16 rows each are exp(G_t) k_t, exp(G_t) q_t and
//   exp(G_end - G_t) k_t; the last row is exp(G_end), with G_end the G_t of the last token
// - a cache line, so that the other parts can be aligned
constexpr int64_t kRecurrentSums = 48;
inline size_t recurrent_scratch_bytes(const RecurrentShape& s) {
  const int64_t key_rows = kStateChunk + (s.by_row ? 3 * kStateChunk + 1 : 0);
  const int64_t rows = key_rows * recurrent_row_floats(s.key_width) +
                       (kStateChunk + kRecurrentSums) * recurrent_row_floats(s.value_width);
  return static_cast<size_t>(rows + 5 * kStateChunk * kStateChunk + 16) * sizeof(float);
}

// Some tokens of one head of a wkv7 layer, all in fp32. Token t has the rows r, decay, key, rate
// and v. With step = sigmoid(rate) and z = key k_k / |key k_k|, and (x) as the outer product:
//   w_t = exp(-exp(-1/2) sigmoid(decay))    b_t = step z_t    k_t = key (1 + (step - 1) k_a)
//   S_t = w_t S_{t-1} + b_t (x) m_t + k_t (x) v_t             m_t = -S_{t-1}^T z_t
//   out_t = norm(S_t^T r_t) + (r_t . (r_k k_t)) v_t
// w_t multiplies the rows of S. As in RecurrentArgs, only every kStateChunk tokens close a state.
// The open row of token i has v_i, m_i, G_i (the sum of log w since the chunk began),
// exp(-G_i) k_i and exp(-G_i) b_i. With the closed state S,
//   S_t^T r_t = S^T q + sum_{i <= t} (exp(-G_i) k_i . q) v_i + (exp(-G_i) b_i . q) m_i
// for q = exp(G_t) r_t, and m_t is computed in the same way from exp(G_{t-1}) z_t and i < t.
struct Wkv7Args {
  int32_t key_width, value_width;
  const float* closed;  // the closed state [key_width][value_width] before the chunk
  float* closed_to;     // the state after the chunk, if this call fills it; may equal `closed`
  float* open;          // wkv7_open_floats() floats; rows after num_open may hold anything
  int64_t num_open;     // number of open rows before this call, 0 to 15
  int64_t rows;         // tokens of this call, 1 to 16 - num_open; the call closes a full chunk
  const float *r, *decay, *key, *rate, *v;  // row t of each is t strides further
  int64_t r_stride, decay_stride, key_stride, rate_stride, v_stride;
  const float *k_k, *k_a, *r_k;   // [key_width]
  const float *norm, *norm_bias;  // [value_width], of a layer norm; nullptr = no norm
  float eps;
  float* out;
  int64_t out_stride;
  uint8_t* scratch;  // wkv7_scratch_bytes() bytes
};

// Returns a shape with the scratch memory and the tiles that a head uses.
inline RecurrentShape wkv7_shape(int32_t key_width, int32_t value_width) {
  return {key_width, value_width, 1, true, true};
}
inline int64_t wkv7_open_floats(int32_t key_width, int32_t value_width) {
  return kStateChunk *
         (3 * recurrent_row_floats(key_width) + 2 * recurrent_row_floats(value_width));
}
inline size_t wkv7_scratch_bytes(int32_t key_width, int32_t value_width) {
  return recurrent_scratch_bytes(wkv7_shape(key_width, value_width));
}

// Some tokens of one head of a wkv6 layer, all in fp32. Token t has the rows r, decay, key and
// v. With w_t = exp(-exp(decay_t)), which multiplies the rows of S,
//   S_t = w_t S_{t-1} + k_t (x) v_t
//   out_t = norm(S_{t-1}^T q_t + (q_t . (bonus k_t)) v_t)   k_t = key_t
//   out_t = norm(S_t^T q_t)                                 k_t = (1 - w_t) key_t, without a bonus
// where q_t = scale r_t. As in RecurrentArgs, only every kStateChunk tokens close a state, and open
// rows are as in a shape with by_row: k_i, v_i and G_i, the sum of log w. A log w is at least
// -30, so that the sums are exact enough; exp(-30) is 1e-13.
struct Wkv6Args {
  int32_t key_width, value_width;
  const float* closed;  // the closed state [key_width][value_width] before the chunk
  float* closed_to;     // the state after the chunk, if this call fills it; may equal `closed`
  float* open;          // wkv6_open_floats() floats; rows after num_open may hold anything
  int64_t num_open;     // number of open rows before this call, 0 to 15
  int64_t rows;         // tokens of this call, 1 to 16 - num_open; the call closes a full chunk
  const float *r, *decay, *key, *v;  // row t of each is t strides further
  int64_t r_stride, decay_stride, key_stride, v_stride;
  const float* bonus;             // [key_width], or nullptr
  const float *norm, *norm_bias;  // [value_width], of a layer norm; nullptr = no norm
  float eps, scale;
  float* out;
  int64_t out_stride;
  uint8_t* scratch;  // wkv6_scratch_bytes() bytes
};

inline RecurrentShape wkv6_shape(int32_t key_width, int32_t value_width) {
  return {key_width, value_width, 1, false, true};
}
inline int64_t wkv6_open_floats(int32_t key_width, int32_t value_width) {
  return recurrent_open_floats(wkv6_shape(key_width, value_width));
}
inline size_t wkv6_scratch_bytes(int32_t key_width, int32_t value_width) {
  return recurrent_scratch_bytes(wkv6_shape(key_width, value_width));
}

#define CPUSERVE_RECURRENT_KERNELS(X) \
  X(recurrent, const RecurrentArgs&) X(wkv7, const Wkv7Args&) X(wkv6, const Wkv6Args&)

}  // namespace cpuserve
