// The matrix products of Arm: SMMLA for int8 (feature I8MM) and BFMMLA for bf16 (feature BF16).
//
// A product adds A [2 rows][8 bytes] times B [2 columns][8 bytes] to C,
// four sums in the order {row 0 column 0, row 0 column 1, row 1 column 0, row 1 column 1}.
// The 8 bytes are 8 elements of K in int8 or 4 in bf16. BFMMLA computes each sum as two BFDOTs
// in ascending K, so a sum depends only on its own row and column.
#pragma once
#include <arm_neon.h>

#include "kernels/vec/vec.h"

// gcc's instruction scheduler moves all loads of a loop step before its products,
// and then there are too few registers for the loaded values.
#if defined(__GNUC__) && !defined(__clang__)
#define CPUSERVE_IN_ORDER __attribute__((optimize("no-schedule-insns")))
#else
#define CPUSERVE_IN_ORDER
#endif

namespace CPUSERVE_NS {

#ifdef __ARM_FEATURE_MATMUL_INT8
CPUSERVE_INLINE I mmla(I acc, Q a, Q b) {
  return vmmlaq_s32(acc, vreinterpretq_s8_u8(a.v), vreinterpretq_s8_u8(b.v));
}
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
CPUSERVE_INLINE F mmla(F acc, Q a, Q b) {
  return vbfmmlaq_f32(acc, vreinterpretq_bf16_u8(a.v), vreinterpretq_bf16_u8(b.v));
}
#endif

// first_halves joins the first 8 bytes of a and of b; last_halves joins the last 8 bytes.
CPUSERVE_INLINE Q first_halves(Q a, Q b) {
  return {vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a.v), vreinterpretq_u64_u8(b.v)))};
}
CPUSERVE_INLINE Q last_halves(Q a, Q b) {
  return {vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a.v), vreinterpretq_u64_u8(b.v)))};
}
CPUSERVE_INLINE F first_halves(F a, F b) {
  return vreinterpretq_f32_u64(vzip1q_u64(vreinterpretq_u64_f32(a), vreinterpretq_u64_f32(b)));
}
CPUSERVE_INLINE F last_halves(F a, F b) {
  return vreinterpretq_f32_u64(vzip2q_u64(vreinterpretq_u64_f32(a), vreinterpretq_u64_f32(b)));
}

// a and b hold a first and a second pair of bf16 of each of 4 columns.
// first_pairs returns both pairs of columns 0 and 1, last_pairs both pairs of columns 2 and 3.
CPUSERVE_INLINE Q first_pairs(P a, P b) {
  return {vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u16(a.v), vreinterpretq_u32_u16(b.v)))};
}
CPUSERVE_INLINE Q last_pairs(P a, P b) {
  return {vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u16(a.v), vreinterpretq_u32_u16(b.v)))};
}

// Returns {a, a, b, b}, in the order of the four sums of a product:
// a belongs to the sums of row 0, and b to the sums of row 1.
CPUSERVE_INLINE F of_rows(float a, float b) { return vcombine_f32(vdup_n_f32(a), vdup_n_f32(b)); }
CPUSERVE_INLINE I of_rows(int32_t a, int32_t b) {
  return vcombine_s32(vdup_n_s32(a), vdup_n_s32(b));
}

CPUSERVE_INLINE F as_floats(F x) { return x; }
CPUSERVE_INLINE F as_floats(I x) { return vreinterpretq_f32_s32(x); }
CPUSERVE_INLINE void from_floats(F x, F* to) { *to = x; }
CPUSERVE_INLINE void from_floats(F x, I* to) { *to = vreinterpretq_s32_f32(x); }

// An integer sum starts from kSumBias and stays within 2^22 of it. Its bits, read as a float, are
// then 1.5 x 2^23 + the unbiased sum, which one subtraction converts exactly. SCVTF instead takes
// two micro-operations on Neoverse V1 and V2, and only two of the four pipelines can execute it.
constexpr int32_t kSumBias = 0x4b400000;
CPUSERVE_INLINE F unbiased(I sum) {
  return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(12582912.0f));
}

}  // namespace CPUSERVE_NS
