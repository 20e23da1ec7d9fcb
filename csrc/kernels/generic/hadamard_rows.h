// Multiplies the blocks of rows by a Hadamard matrix and by signs, for matrices whose weights were
// multiplied so before they were quantized. The result is written in the row format that the next
// operation reads.
#pragma once
#include <stdint.h>

#include "kernels/table/rows.h"

namespace cpuserve {

// The arguments of hadamard_rows. H is the Hadamard matrix of `block` rows, a power of two from 16
// on, divided by the square root of `block`; it is its own inverse. The kernel processes rows
// [m0, m1).
struct HadamardArgs {
  Rows x;              // f32, of whole blocks
  Rows out;            // output in any format
  const float* signs;  // [width]: 1 or -1
  int32_t block;
  bool inverse;  // false: out = H (signs * x). true: out = signs * (H x)
  // Before, heads of `head` columns move: x has the first head of each of `key_heads` groups, then
  // the second heads, and so on; the heads of a group become neighbours. With 1, nothing moves.
  int64_t head, key_heads;
  int64_t m0, m1;
  float* scratch;  // width floats
};
#define CPUSERVE_HADAMARD_KERNELS(X) X(hadamard_rows, const HadamardArgs&)

}  // namespace cpuserve

#ifdef CPUSERVE_VEC  // in an ISA unit
#include "kernels/generic/convert.h"
#include "kernels/generic/hadamard.h"

namespace CPUSERVE_NS {

// y = x * signs * factor over n columns, a multiple of 16; y may be x.
CPUSERVE_INLINE void multiply_signs(float* y, const float* x, const float* signs, float factor,
                                    int64_t n) {
  const F f = set1(factor);
  for (int64_t i = 0; i < n; i += kLanes) store(y + i, mul(mul(load(x + i), load(signs + i)), f));
}

static inline void hadamard_rows(const HadamardArgs& a) noexcept {
  const int64_t width = a.x.width, heads = width / a.head, group = heads / a.key_heads;
  const float factor = 1.0f / sqrtf(static_cast<float>(a.block));
  for (int64_t r = a.m0; r < a.m1; r++) {
    const float* x = f32_row(a.x, r);
    for (int64_t i = 0; i < heads; i++) {  // head i of the result
      const int64_t from = i % group * a.key_heads + i / group;
      memcpy(a.scratch + i * a.head, x + from * a.head,
             static_cast<size_t>(a.head) * sizeof(float));
    }
    if (!a.inverse) multiply_signs(a.scratch, a.scratch, a.signs, 1.0f, width);
    for (int64_t i = 0; i < width; i += a.block) mix_block(a.scratch + i, a.block);
    for (int64_t i = 0; i < width; i += kLanes) {
      const F y = mul(load(a.scratch + i), set1(factor));
      store(a.scratch + i, a.inverse ? mul(y, load(a.signs + i)) : y);
    }
    store_row(a.out, r, 0, a.scratch, static_cast<int>(width));
  }
}

}  // namespace CPUSERVE_NS
#endif
