// The selective scan of Mamba 1.
#pragma once
#include <stdint.h>

#include "kernels/table/recurrent.h"

namespace cpuserve {

// Some tokens of some channels of a Mamba layer, all in fp32. Each channel c has a state S[n][c]:
//   S_t[n][c] = exp(dt_t[c] rates[n][c]) S_{t-1}[n][c] + B_t[n] dt_t[c] x_t[c]
//   out_t[c] = (sum_n C_t[n] S_t[n][c] + d[c] x_t[c]) silu(z_t[c])     dt = softplus(steps)
// The state is kept after each kStateChunk tokens of the sequence only (the closed state). The
// tokens since then form a chunk, and each has an open row: dt, dt x and B. A call computes the
// states of the chunk again from the closed state and the open rows, one token after another.
// The division of tokens into calls therefore changes no bit of a row, and dropping the open rows
// of the last tokens removes these tokens.
// Pointers to channels point to the first channel of this call.
struct SelectiveScanArgs {
  int64_t channels;
  int32_t width;        // n ascends from 0 to width - 1
  const float* closed;  // the closed state [width][channels] before the chunk
  float* closed_to;     // the state after the chunk, if this call fills it; may equal `closed`
  float* open;       // selective_scan_open_floats() floats; rows after num_open may hold anything
  int64_t num_open;  // number of open rows before this call, 0 to 15
  int64_t rows;      // tokens of this call, 1 to 16 - num_open; the call closes a full chunk
  const float *x, *steps, *z, *b, *c;  // first row of each; row t is t strides further
  int64_t x_stride, steps_stride, z_stride, b_stride, c_stride;
  const float* rates;  // row n is at rates + n * rates_stride; all numbers are <= 0
  int64_t rates_stride;
  const float* d;
  float* out;
  int64_t out_stride;
};

// Returns the number of floats of the open rows of a unit: dt and dt x [16][channels],
// and B [16][width in whole cache lines].
inline int64_t selective_scan_open_floats(int64_t channels, int32_t width) {
  return kStateChunk * (2 * channels + round_up(width, 16));
}

#define CPUSERVE_SELECTIVE_SCAN_KERNELS(X) X(selective_scan, const SelectiveScanArgs&)

}  // namespace cpuserve

#ifdef CPUSERVE_VEC  // in an ISA unit
#include "kernels/generic/activation.h"

namespace CPUSERVE_NS {

// Computes columns [at, at + n) of the open rows and of the output, where n <= kLanes.
template <bool kTail>
static inline void scan_columns(const SelectiveScanArgs& a, const float* keys, int64_t key_row,
                                int64_t at, int n) {
  const auto get = [&](const float* p) { return kTail ? load_n(p + at, n) : load(p + at); };
  const auto put = [&](float* p, F x) { kTail ? store_n(p + at, x, n) : store(p + at, x); };
  float* const dts = a.open;
  float* const us = a.open + kStateChunk * a.channels;
  F dt[kStateChunk], u[kStateChunk], sum[kStateChunk];
  const int64_t total = a.num_open + a.rows;
  for (int64_t i = 0; i < a.num_open; i++) {
    dt[i] = get(dts + i * a.channels);
    u[i] = get(us + i * a.channels);
  }
  for (int64_t t = 0; t < a.rows; t++) {
    const int64_t i = a.num_open + t;
    dt[i] = softplus(get(a.steps + t * a.steps_stride));
    u[i] = mul(dt[i], get(a.x + t * a.x_stride));
    sum[t] = zero();
    put(dts + i * a.channels, dt[i]);
    put(us + i * a.channels, u[i]);
  }
  for (int64_t row = 0; row < a.width; row++) {
    const F rate = get(a.rates + row * a.rates_stride);
    F state = get(a.closed + row * a.channels);
    const float* key = keys + row;
    for (int64_t i = 0; i < a.num_open; i++) {
      state = fma(set1(key[i * key_row]), u[i], mul(decayed(mul(dt[i], rate)), state));
    }
    for (int64_t t = 0; t < a.rows; t++) {
      const int64_t i = a.num_open + t;
      state = fma(set1(key[i * key_row]), u[i], mul(decayed(mul(dt[i], rate)), state));
      sum[t] = fma(set1(a.c[t * a.c_stride + row]), state, sum[t]);
    }
    if (total == kStateChunk) put(a.closed_to + row * a.channels, state);
  }
  const F d = get(a.d);
  for (int64_t t = 0; t < a.rows; t++) {
    const F y = fma(d, get(a.x + t * a.x_stride), sum[t]);
    put(a.out + t * a.out_stride, mul(y, silu(get(a.z + t * a.z_stride))));
  }
}

static inline void selective_scan(const SelectiveScanArgs& a) noexcept {
  const int64_t key_row = round_up(a.width, 16);
  float* const keys = a.open + 2 * kStateChunk * a.channels;
  for (int64_t t = 0; t < a.rows; t++) {
    const float* b = a.b + t * a.b_stride;
    for (int64_t i = 0; i < a.width; i++) keys[(a.num_open + t) * key_row + i] = b[i];
  }
  int64_t c = 0;
  for (; c + kLanes <= a.channels; c += kLanes) scan_columns<false>(a, keys, key_row, c, kLanes);
  if (c < a.channels) {
    scan_columns<true>(a, keys, key_row, c, static_cast<int>(a.channels - c));
  }
}

}  // namespace CPUSERVE_NS
#endif
