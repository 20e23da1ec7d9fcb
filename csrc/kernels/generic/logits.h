// The last operations of a model on its logits: multiplication by a scale, and a softcap.
#pragma once
#include "kernels/generic/math.h"
#include "kernels/table.h"

namespace CPUSERVE_NS {

CPUSERVE_INLINE F finish_logits(F x, F scale, float softcap) {
  x = mul(x, scale);
  if (softcap <= 0.0f) return x;
  const F cap = set1(softcap);
  return mul(cap, tanh(div(x, cap)));
}

static inline void scale_logits(const ScaleLogitsArgs& a) noexcept {
  const F scale = set1(a.scale);
  int64_t i = 0;
  for (; i + kLanes <= a.count; i += kLanes) {
    store(a.logits + i, finish_logits(load(a.logits + i), scale, a.softcap));
  }
  const int left = static_cast<int>(a.count - i);
  if (left > 0) {
    store_n(a.logits + i, finish_logits(load_n(a.logits + i, left), scale, a.softcap), left);
  }
}

}  // namespace CPUSERVE_NS
