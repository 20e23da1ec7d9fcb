// Multiplies heads of q and k by a Hadamard matrix before k is quantized to int8:
// every dim becomes a signed sum of all dims of its block (64 dims if head_dim is 64), so that
// one large dim no longer determines the scale of all others. The scores q . k do not change.
// Values are mixed like keys before they are quantized to 4 bits, and outputs like queries.
#pragma once
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

struct LaneSigns {
  alignas(64) float of[kLanes][kLanes];
};

// Returns the Hadamard matrix of kLanes rows and columns.
static constexpr LaneSigns lane_signs() {
  LaneSigns signs{};
  for (int i = 0; i < kLanes; i++) {
    for (int j = 0; j < kLanes; j++) {
      bool odd = false;
      for (int common = i & j; common; common &= common - 1) odd = !odd;
      signs.of[i][j] = odd ? -1.0f : 1.0f;
    }
  }
  return signs;
}
static constexpr LaneSigns kLaneSigns = lane_signs();

// Multiplies the kLanes values at x by the matrix kLaneSigns, in place. This replaces the last
// steps of the fast Hadamard transform in mix_block, which would combine lanes of one vector.
static inline void mix_lanes(float* x) {
  F sum = mul(set1(x[0]), load(kLaneSigns.of[0]));
  for (int j = 1; j < kLanes; j++) sum = fma(set1(x[j]), load(kLaneSigns.of[j]), sum);
  store(x, sum);
}

// x = H x over n dims; n is a power of two and H the Hadamard matrix of n rows.
static inline void mix_block(float* x, int n) {
  int step = n / 2;
  for (; step >= kLanes; step /= 2) {
    for (int i = 0; i < n; i += 2 * step) {
      for (float *y = x + i, *z = y + step; y < x + i + step; y += kLanes, z += kLanes) {
        const F a = load(y), b = load(z);
        store(y, add(a, b));
        store(z, sub(a, b));
      }
    }
  }
  if (n >= kLanes) {
    for (int i = 0; i < n; i += kLanes) mix_lanes(x + i);
    return;
  }
  for (; step > 0; step /= 2) {
    for (int i = 0; i < n; i++) {
      if (i & step) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
}

// Multiplies each block of dims of a key by the Hadamard matrix H. The number of dims of a block
// is the largest power of two that divides hd: 64 for hd 64, 32 for hd 96, 16 for hd 80.
static inline void mix_key(float* x, int hd) {
  const int n = hd & -hd;
  for (int i = 0; i < hd; i += n) mix_block(x + i, n);
}

// Multiplies each block of n dims of a query by the transposed inverse of H, which is H / n.
// The product of a mixed query and a mixed key is then q . k.
static inline void mix_query(float* x, int hd) {
  mix_key(x, hd);
  const float inverse = 1.0f / static_cast<float>(hd & -hd);
  for (int i = 0; i < hd; i++) x[i] *= inverse;
}

}  // namespace CPUSERVE_NS
