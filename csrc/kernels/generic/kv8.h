// Keys and values as codes: the key (or value) of one token and head is stored as codes and one
// fp32 scale. With 8 bits, it maps the largest magnitude to the largest code; with 4 bits, it is
// the scale of least squared error. The number that each code stands for is exact in bf16.
#pragma once
#include "kernels/generic/attention_kv.h"
#include "kernels/generic/hadamard.h"
#include "kernels/generic/math.h"

namespace CPUSERVE_NS {

CPUSERVE_INLINE uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

// Encodes x, rounded to nearest even, as an e4m3 code: a sign bit, an exponent with bias kBias,
// and kMantissa mantissa bits. |x| must be at most 448, the largest finite value of a code.
// The function has no branches, so the compiler can vectorize loops that call it.
CPUSERVE_INLINE uint8_t to_e4m3(float x) {
  constexpr int kMantissa = 3, kBias = 7, kDrop = 23 - kMantissa;
  constexpr uint32_t kLeast = static_cast<uint32_t>(128 - kBias) << 23;  // smallest normal number
  // The bits of a power of two as a float. Its last mantissa bit has the value of the smallest e4m3
  // step, so adding it to a value below the normal numbers of e4m3 rounds the value to whole steps.
  constexpr uint32_t kMagic = static_cast<uint32_t>(128 - kBias + kDrop) << 23;
  const uint32_t bits = float_bits(x), size = bits & 0x7fffffff;
  float magnitude, magic;
  memcpy(&magnitude, &size, 4);
  memcpy(&magic, &kMagic, 4);
  const uint32_t small = float_bits(magnitude + magic) - kMagic;
  const uint32_t rounded = size + ((1u << (kDrop - 1)) - 1) + ((size >> kDrop) & 1);
  const uint32_t normal = (rounded >> kDrop) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
  return static_cast<uint8_t>((size < kLeast ? small : normal) | (bits >> 24 & 0x80));
}

CPUSERVE_INLINE void store_codes(KvInt8, uint8_t* p, F x) {
  store_s8(reinterpret_cast<int8_t*>(p), x);
}
CPUSERVE_INLINE void store_codes(KvE4m3, uint8_t* p, F x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; i++) p[i] = to_e4m3(lanes[i]);
}

// Writes the codes of n values, and zeros from n to hd. Returns the scale of the values:
// a value is the scale times the number that Kv::load reads from its code. A NaN or infinity
// in x makes the scale NaN, because results would otherwise be wrong without notice.
template <class Kv>
static inline float encode_row(const float* x, int n, int hd, uint8_t* codes) {
  F top = zero(), poison = zero();
  const auto value = [&](int i) { return i + kLanes <= n ? load(x + i) : load_n(x + i, n - i); };
  for (int i = 0; i < n; i += kLanes) {
    const F v = value(i);
    top = max(top, max(v, sub(zero(), v)));
    poison = fma(v, zero(), poison);
  }
  const float largest = reduce_max(top);
  const F factor = set1(largest > 0.0f ? Kv::kLargest / largest : 0.0f);
  for (int i = 0; i < hd; i += kLanes) {
    store_codes(Kv{}, codes + i, i < n ? mul(value(i), factor) : zero());
  }
  return largest / Kv::kLargest * Kv::kWiden + reduce_add(poison);
}

// Stores a key (`keys` is the K half of a KV block) in token slot `at`.
template <class Kv>
static inline void store_key_codes(const KvLayer& kv, uint8_t* keys, int at, const float* x) {
  const int hd = kv.hd_pad;
  alignas(64) uint8_t codes[kMaxHeadDim];
  key_scales(keys, hd)[at] = encode_row<Kv>(x, kv.head_dim, hd, codes);
  for (int i = 0; i < hd; i++) keys[i * kBlock + at] = codes[i];
}

// Returns the code of the level (kValueLevels) that is nearest to x; a NaN gets any code.
CPUSERVE_INLINE int nearest_level(float x) {
  const float size = __builtin_fabsf(x);
  int steps = 0;
#pragma GCC unroll 7
  for (int i = 9; i < 16; i++) steps += size > (kValueLevels[i - 1] + kValueLevels[i]) / 2;
  return x < 0.0f ? 7 - steps : 8 + steps;
}

// Writes the 4-bit codes of n values to `row`, and returns their scale. The largest magnitude times
// 1, 0.9 or 0.8 becomes the largest level, whichever has the least squared error, and then the
// scale is fitted to the levels. (Of normal values, the error is 9.0 % rms for heads of 128, 9.4 %
// with the first factor alone, and 10.8 % with 16 equidistant levels.)
static inline float encode_levels(const float* x, int n, uint8_t* row) {
  alignas(64) uint8_t codes[kMaxHeadDim], best_codes[kMaxHeadDim];
  float top = 0.0f, poison = 0.0f;
  for (int i = 0; i < n; i++) {
    const float size = __builtin_fabsf(x[i]);
    top = size > top ? size : top;
    poison += x[i] * 0.0f;  // NaN if a value is not finite
  }
  constexpr float kShares[] = {1.0f, 0.9f, 0.8f};
  float best = -1.0f, scale = 0.0f;
  for (const float share : kShares) {
    const float factor = top > 0.0f ? kValueLevels[15] / (top * share) : 0.0f;
    for (int i = 0; i < n; i++) codes[i] = static_cast<uint8_t>(nearest_level(x[i] * factor));
    F products = zero(), squares = zero();
    for (int i = 0; i < n; i += kLanes) {
      const F level = keep(load_levels(kValueLevels, codes + i, 0), 0, n - i, zero());
      products = fma(load_n(x + i, n - i), level, products);
      squares = fma(level, level, squares);
    }
    const float product = reduce_add(products), square = reduce_add(squares);
    if (product * product <= best * square) continue;  // the error is |x|^2 - product^2 / square
    best = product * product / square;
    scale = product / square;
    memcpy(best_codes, codes, static_cast<size_t>(n));
  }
  memset(row, 0, static_cast<size_t>(FourBitValues::width(n)));
  for (int i = 0; i < n; i++) {
    row[FourBitValues::offset(i)] |= static_cast<uint8_t>(best_codes[i] << i / 16 % 2 * 4);
  }
  return scale + poison;
}

// Stores a value (`values` is the V half of a KV block) in token slot `at`.
template <class Kv>
static inline void store_value_codes(const KvLayer& kv, uint8_t* values, int at, const float* x) {
  const int hd = kv.hd_pad, width = Kv::Values::width(hd);
  float& scale = key_scales(values, width)[at];
  if constexpr (Kv::Values::kCodes == 1) {
    scale = encode_row<Kv>(x, kv.head_dim, hd, values + at * width);
  } else {
    alignas(64) float mixed[kMaxHeadDim];
    memcpy(mixed, x, static_cast<size_t>(kv.head_dim) * sizeof(float));
    mix_key(mixed, kv.head_dim);
    scale = encode_levels(mixed, kv.head_dim, values + at * width);
  }
}

}  // namespace CPUSERVE_NS
