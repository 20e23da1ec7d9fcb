// The matrix products of Arm: SMMLA of int8 (I8MM) and BFMMLA of bf16 (BF16).
//
// A product adds A [2 rows][8 bytes] times B [2 columns][8 bytes] to C, four sums in the order
// {row 0 column 0, row 0 column 1, row 1 column 0, row 1 column 1}. The 8 bytes are 8 int8 or 4
// bf16 of K. BFMMLA is defined as two BFDOTs one after another for each sum, in ascending K, and
// each sum depends on its own row and column only.
#pragma once
#include <arm_neon.h>

#include "kernels/vec/vec.h"

// gcc's scheduler moves the loads of a step before its products, and then has no registers for
// them.
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

CPUSERVE_INLINE void store_quads(uint8_t* p, Q x) { vst1q_u8(p, x.v); }

// The first 8 bytes of both vectors side by side; the last 8 bytes.
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

// Two pairs of bf16 of each of 4 columns: of columns 0 and 1, and of columns 2 and 3.
CPUSERVE_INLINE Q first_pairs(P a, P b) {
  return {vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u16(a.v), vreinterpretq_u32_u16(b.v)))};
}
CPUSERVE_INLINE Q last_pairs(P a, P b) {
  return {vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u16(a.v), vreinterpretq_u32_u16(b.v)))};
}

// {a, a, b, b}: a value of row 0 and one of row 1, in the order of sums.
CPUSERVE_INLINE F of_rows(float a, float b) { return vcombine_f32(vdup_n_f32(a), vdup_n_f32(b)); }
CPUSERVE_INLINE I of_rows(int32_t a, int32_t b) {
  return vcombine_s32(vdup_n_s32(a), vdup_n_s32(b));
}

CPUSERVE_INLINE F as_floats(F x) { return x; }
CPUSERVE_INLINE F as_floats(I x) { return vreinterpretq_f32_s32(x); }
CPUSERVE_INLINE void from_floats(F x, F* to) { *to = x; }
CPUSERVE_INLINE void from_floats(F x, I* to) { *to = vreinterpretq_s32_f32(x); }

// An integer sum that starts from kSumBias and stays within 2^22 of it is, read as a float, 1.5 x
// 2^23 + sum: one subtraction converts it, exactly. SCVTF takes two micro-operations on Neoverse V1
// and V2, and only two of the four pipelines can execute it.
constexpr int32_t kSumBias = 0x4b400000;
CPUSERVE_INLINE F unbiased(I sum) {
  return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(12582912.0f));
}

}  // namespace CPUSERVE_NS
