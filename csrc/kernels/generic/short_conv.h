// The short convolution before a recurrent layer.
#pragma once
#include <stdint.h>

namespace cpuserve {

// The causal convolution of each channel before a recurrent layer, followed by silu if `silu`:
//   out[t][c] = bias[c] + sum_j weight[j][c] x[t - taps + 1 + j][c]
// The terms of the sum are added to bias[c] one after another, with j ascending.
// A task may compute only some of the channels. All pointers then point to its first channel,
// and the strides are the numbers of floats from one row to the next.
constexpr int32_t kMaxTaps = 8;
struct ShortConvArgs {
  const float* x;
  int64_t x_stride;
  const float* before;  // the taps - 1 inputs before the first row, oldest input first
  const float* weight;  // [taps][channels], the weights of the oldest input first
  const float* bias;    // [channels] or nullptr
  bool silu;
  int32_t taps;  // 1 to kMaxTaps
  int64_t channels, rows;
  float* out;  // output, which must not overlap x or before
  int64_t out_stride;
  int64_t before_stride = 0, weight_stride = 0;  // 0 = channels
};
#define CPUSERVE_SHORT_CONV_KERNELS(X) X(short_conv, const ShortConvArgs&)

}  // namespace cpuserve

#ifdef CPUSERVE_VEC  // in an ISA unit
#include "kernels/generic/activation.h"

namespace CPUSERVE_NS {

// Computes columns [c, c + n) of an output row, where n <= kLanes.
// tap[j] is the input row that row j of the weights multiplies.
template <bool kTail>
CPUSERVE_INLINE void short_conv_vector(const ShortConvArgs& a, const float* const* tap,
                                       int64_t weight_stride, int64_t c, int n, float* out) {
  const auto at = [&](const float* p) { return kTail ? load_n(p + c, n) : load(p + c); };
  F sum = a.bias ? at(a.bias) : zero();
  for (int j = 0; j < a.taps; j++) sum = fma(at(a.weight + j * weight_stride), at(tap[j]), sum);
  if (a.silu) sum = silu(sum);
  kTail ? store_n(out + c, sum, n) : store(out + c, sum);
}

// Computes all rows for kColumns columns at a time, so that the weights stay in L1:
// 8 taps of 512 columns are 16 KB.
static inline void short_conv(const ShortConvArgs& a) noexcept {
  constexpr int64_t kColumns = 512;
  const int64_t before_stride = a.before_stride ? a.before_stride : a.channels;
  const int64_t weight_stride = a.weight_stride ? a.weight_stride : a.channels;
  for (int64_t c0 = 0; c0 < a.channels; c0 += kColumns) {
    const int64_t c1 = c0 + kColumns < a.channels ? c0 + kColumns : a.channels;
    for (int64_t t = 0; t < a.rows; t++) {
      const float* tap[kMaxTaps];
      for (int j = 0; j < a.taps; j++) {
        const int64_t row = t - a.taps + 1 + j;
        tap[j] = row < 0 ? a.before + (a.taps - 1 + row) * before_stride : a.x + row * a.x_stride;
      }
      float* out = a.out + t * a.out_stride;
      int64_t c = c0;
      for (; c + kLanes <= c1; c += kLanes) {
        short_conv_vector<false>(a, tap, weight_stride, c, kLanes, out);
      }
      if (c < c1) short_conv_vector<true>(a, tap, weight_stride, c, static_cast<int>(c1 - c), out);
    }
  }
}

}  // namespace CPUSERVE_NS
#endif
