// Vector primitives with Advanced SIMD of Armv8.0-A,
// and with the dot products of Armv8.2 and BF16 where they are enabled.
#pragma once
#include <arm_neon.h>

#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

using F = float32x4_t;
using I = int32x4_t;
struct P {
  uint16x8_t v;
};
struct Q {
  uint8x16_t v;
};
constexpr int kLanes = 4, kVecs = 4, kTileRows = 6, kTileVecs = 4;

CPUSERVE_INLINE F zero() { return vdupq_n_f32(0); }
CPUSERVE_INLINE F set1(float x) { return vdupq_n_f32(x); }
CPUSERVE_INLINE F load(const float* p) { return vld1q_f32(p); }
CPUSERVE_INLINE F load_n(const float* p, int n) {
  if (n >= kLanes) return load(p);
  float lanes[kLanes] = {};
  if (n > 0) memcpy(lanes, p, (size_t)n * sizeof(float));
  return load(lanes);
}
CPUSERVE_INLINE void store(float* p, F x) { vst1q_f32(p, x); }
CPUSERVE_INLINE void store_n(float* p, F x, int n) {
  if (n >= kLanes) return store(p, x);
  float lanes[kLanes];
  store(lanes, x);
  if (n > 0) memcpy(p, lanes, (size_t)n * sizeof(float));
}
CPUSERVE_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
CPUSERVE_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
CPUSERVE_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
CPUSERVE_INLINE F div(F a, F b) { return vdivq_f32(a, b); }
CPUSERVE_INLINE F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
CPUSERVE_INLINE F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
CPUSERVE_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
CPUSERVE_INLINE F fnma(F a, F b, F c) { return vfmsq_f32(c, a, b); }
CPUSERVE_INLINE F round(F x) { return vrndnq_f32(x); }
CPUSERVE_INLINE F scale2(F p, F n) {
  const int32x4_t e = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
}
// The lowest bits of x + kMagic are n + 127 with n = round(x);
// add_exponent shifts them into the exponent of a float.
constexpr float kMagic = 12582912.0f + 127.0f;  // 1.5 2^23 + 127
constexpr bool kSplitsDown = false;
CPUSERVE_INLINE F split_exponent(F x, F* e) {
  *e = add(x, set1(kMagic));
  return sub(x, sub(*e, set1(kMagic)));
}
CPUSERVE_INLINE F add_exponent(F p, F e) {
  return mul(p, vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(e), 23)));
}
// The exponent of one float cannot hold every n in [-252, 252],
// so p is multiplied by two powers of 2 with about half of n each.
CPUSERVE_INLINE F scale2_far(F p, F n) {
  const F half = round(mul(n, set1(0.5f)));
  return scale2(scale2(p, half), sub(n, half));
}
CPUSERVE_INLINE F keep(F x, int lo, int hi, F other) {
  const int32_t lanes[kLanes] = {0, 1, 2, 3};
  const int32x4_t i = vld1q_s32(lanes);
  const uint32x4_t m = vandq_u32(vcgeq_s32(i, vdupq_n_s32(lo)), vcltq_s32(i, vdupq_n_s32(hi)));
  return vbslq_f32(m, x, other);
}
CPUSERVE_INLINE float reduce_add(F x) {
  const float32x2_t s = vadd_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(vpadd_f32(s, s), 0);
}
CPUSERVE_INLINE void reduce_add4(F a, F b, F c, F d, float* out) {
  const F ab = vcombine_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a)),
                            vadd_f32(vget_low_f32(b), vget_high_f32(b)));
  const F cd = vcombine_f32(vadd_f32(vget_low_f32(c), vget_high_f32(c)),
                            vadd_f32(vget_low_f32(d), vget_high_f32(d)));
  vst1q_f32(out, vpaddq_f32(ab, cd));
}
CPUSERVE_INLINE float reduce_max(F x) {
  const F y = max(x, vextq_f32(x, x, 2));
  return vgetq_lane_f32(max(y, vextq_f32(y, y, 1)), 0);
}
CPUSERVE_INLINE uint32_t lanes_between(F x, F lo, F hi) {
  const uint32_t bits[4] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vandq_u32(vcgeq_f32(x, lo), vcltq_f32(x, hi)), vld1q_u32(bits)));
}
CPUSERVE_INLINE F in_order(F sum) {
  asm("" : "+w"(sum));
  return sum;
}
CPUSERVE_INLINE I in_order(I sum) {
  asm("" : "+w"(sum));
  return sum;
}
CPUSERVE_INLINE I izero() { return vdupq_n_s32(0); }
CPUSERVE_INLINE I iset1(int x) { return vdupq_n_s32(x); }
CPUSERVE_INLINE I iadd(I a, I b) { return vaddq_s32(a, b); }
CPUSERVE_INLINE I isub(I a, I b) { return vsubq_s32(a, b); }
CPUSERVE_INLINE I imad(I a, I b, I c) { return vmlaq_s32(c, a, b); }
template <int n>
CPUSERVE_INLINE I shl(I a) {
  return vshlq_n_s32(a, n);
}
CPUSERVE_INLINE I iload1(const int32_t* p) { return vld1q_dup_s32(p); }
CPUSERVE_INLINE I round_to_int(F x) { return vcvtnq_s32_f32(x); }
CPUSERVE_INLINE I abs_bits(F x) { return vreinterpretq_s32_f32(vabsq_f32(x)); }
CPUSERVE_INLINE I imax(I a, I b) { return vmaxq_s32(a, b); }
CPUSERVE_INLINE void reduce_add4(I a, I b, I c, I d, int32_t* out) {
  vst1q_s32(out, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)));
}
CPUSERVE_INLINE void reduce_max4(I a, I b, I c, I d, int32_t* out) {
  vst1q_s32(out, vpmaxq_s32(vpmaxq_s32(a, b), vpmaxq_s32(c, d)));
}
CPUSERVE_INLINE void store_bytes(int8_t* p, I x) {
  const int16x4_t h = vmovn_s32(x);
  vst1_lane_s32((int32_t*)p, vreinterpret_s32_s8(vmovn_s16(vcombine_s16(h, h))), 0);
}
CPUSERVE_INLINE F to_float(I x) { return vcvtq_f32_s32(x); }
CPUSERVE_INLINE I load_bits(const float* p) { return vreinterpretq_s32_f32(vld1q_f32(p)); }
CPUSERVE_INLINE void store_bits(float* p, I x) { vst1q_f32(p, vreinterpretq_f32_s32(x)); }

CPUSERVE_INLINE P load_pairs(const uint16_t* p) { return {vld1q_u16(p)}; }
CPUSERVE_INLINE void store_pairs(uint16_t* p, P x) { vst1q_u16(p, x.v); }
CPUSERVE_INLINE P set1_pair(const uint16_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return {vreinterpretq_u16_u32(vdupq_n_u32(x))};
}
// A bf16 is the upper half of a float. An even element of a pair is shifted to the upper half.
// An odd element is already there, and only the even element in the lower half is cleared.
CPUSERVE_INLINE F even(P a) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(a.v), 16));
}
CPUSERVE_INLINE F odd(P a) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(a.v), vdupq_n_u32(0xffff0000u)));
}
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
constexpr bool kNativeDot2 = true;
CPUSERVE_INLINE F dot2(F acc, P a, P b) {
  return vbfdotq_f32(acc, vreinterpretq_bf16_u16(a.v), vreinterpretq_bf16_u16(b.v));
}
#else
constexpr bool kNativeDot2 = false;
CPUSERVE_INLINE F dot2(F acc, P a, P b) { return fma(odd(a), odd(b), fma(even(a), even(b), acc)); }
#endif
CPUSERVE_INLINE F load_bf16(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
CPUSERVE_INLINE F load_f16(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
CPUSERVE_INLINE int16x4_t load_bytes(const uint8_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(x))));
}
CPUSERVE_INLINE uint32x4_t load_u8(const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
CPUSERVE_INLINE F load_e8m0(const uint8_t* p) {
  const uint32x4_t least = vdupq_n_u32(1u << 22);  // byte 0 means 2^-127, a denormal float
  const uint32x4_t bits = vmaxq_u32(vshlq_n_u32(load_u8(p), 23), least);
  return vmulq_n_f32(vreinterpretq_f32_u32(bits), 0.5f);
}
CPUSERVE_INLINE F load_nibbles(const uint8_t* p, int at) {
  const uint32x4_t x = vshlq_u32(load_u8(p + at % 8), vdupq_n_s32(at / 8 * -4));
  return vcvtq_f32_u32(vandq_u32(x, vdupq_n_u32(15)));
}
CPUSERVE_INLINE F load_s8(const uint8_t* p) { return vcvtq_f32_s32(vmovl_s16(load_bytes(p))); }
// The bytes of level i are bytes 4 i to 4 i + 3 of the table.
CPUSERVE_INLINE F load_levels(const float* levels, const uint8_t* p, int shift) {
  const uint32x4_t bytes = vshlq_u32(load_u8(p), vdupq_n_s32(-shift));
  const uint32x4_t index = vandq_u32(bytes, vdupq_n_u32(15));
  const uint32x4_t four = vmlaq_n_u32(vdupq_n_u32(0x03020100), index, 0x04040404);
  const uint8x16x4_t table = vld1q_u8_x4((const uint8_t*)levels);
  return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(four)));
}
// The bits of the code are moved into an fp16, but the exponent keeps the bias 7 of E4M3.
// fp16 has the bias 15, so the result is 1/256 of the value.
CPUSERVE_INLINE F load_e4m3(const uint8_t* p) {
  const int16x4_t x = vand_s16(vshl_n_s16(load_bytes(p), 7), vdup_n_s16((int16_t)0xbfff));
  return vcvt_f32_f16(vreinterpret_f16_s16(x));
}
// Rounds to nearest even. A NaN keeps its top bits and becomes quiet.
CPUSERVE_INLINE uint32x4_t bf16_bits(F x) {
  const uint32x4_t u = vreinterpretq_u32_f32(x);
  const uint32x4_t lsb = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t r = vaddq_u32(u, vaddq_u32(lsb, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
  return vshrq_n_u32(vbslq_u32(vceqq_f32(x, x), r, quiet), 16);
}
CPUSERVE_INLINE void store_bf16(uint16_t* p, F x) { vst1_u16(p, vmovn_u32(bf16_bits(x))); }
CPUSERVE_INLINE F round_bf16_normal(F x) {
  const uint32x4_t rounded = vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000));
  return odd({vreinterpretq_u16_u32(rounded)});
}
CPUSERVE_INLINE void store_bf16_normal(uint16_t* p, F x) {
  const uint32x4_t rounded = vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000));
  vst1_u16(p, vshrn_n_u32(rounded, 16));
}
CPUSERVE_INLINE void store_bf16_normal2(uint16_t* p, F x, F y) {
  store_bf16_normal(p, x);
  store_bf16_normal(p + kLanes, y);
}
CPUSERVE_INLINE void widen_e4m3(const uint8_t* from, uint16_t* to) {
  store_bf16_normal2(to, load_e4m3(from), load_e4m3(from + kLanes));
}
CPUSERVE_INLINE void store_f16(uint16_t* p, F x) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
CPUSERVE_INLINE P interleave_bf16(F even, F odd) {
  return {vreinterpretq_u16_u32(vorrq_u32(bf16_bits(even), vshlq_n_u32(bf16_bits(odd), 16)))};
}
CPUSERVE_INLINE P interleave_top(F even, F odd) {
  return {vtrn2q_u16(vreinterpretq_u16_f32(even), vreinterpretq_u16_f32(odd))};
}

struct Entries {
  uint8x16_t low, high;  // the low and the high bytes of the 16 entries
};
CPUSERVE_INLINE Entries load_entries(const uint16_t* p) {
  const uint8x16x2_t bytes = vld2q_u8((const uint8_t*)p);
  return {bytes.val[0], bytes.val[1]};
}
CPUSERVE_INLINE P lookup_pairs(const Entries& entries, const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  const uint8x8_t x = vcreate_u8(four);
  const uint8x8_t index = vzip1_u8(vand_u8(x, vdup_n_u8(15)), vshr_n_u8(x, 4));
  const uint8x16_t low = vcombine_u8(vqtbl1_u8(entries.low, index), vdup_n_u8(0));
  const uint8x16_t high = vcombine_u8(vqtbl1_u8(entries.high, index), vdup_n_u8(0));
  return {vreinterpretq_u16_u8(vzip1q_u8(low, high))};
}

CPUSERVE_INLINE Q load_quads(const uint8_t* p) { return {vld1q_u8(p)}; }
CPUSERVE_INLINE void store_quads(uint8_t* p, Q x) { vst1q_u8(p, x.v); }
CPUSERVE_INLINE Q set1_quad(const int8_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return {vreinterpretq_u8_u32(vdupq_n_u32(x))};
}
CPUSERVE_INLINE Q load_words_u8(const uint8_t* p) {
  return {vreinterpretq_u8_u16(vmovl_u8(vld1_u8(p)))};
}
CPUSERVE_INLINE Q load_words_s8(const uint8_t* p) {
  return {vreinterpretq_u8_s16(vmovl_s8(vld1_s8((const int8_t*)p)))};
}
template <int kTo, int kBits>
CPUSERVE_INLINE Q load_words_u4(const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  const uint32x4_t x = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
  const uint32x4_t both = vorrq_u32(vshlq_n_u32(x, kTo), vshlq_n_u32(x, 12 + kTo));
  return {vandq_u8(vreinterpretq_u8_u32(both),
                   vreinterpretq_u8_u16(vdupq_n_u16(((1 << kBits) - 1) << kTo)))};
}
CPUSERVE_INLINE Q add_words(Q x, Q y) {
  return {vreinterpretq_u8_u16(vaddq_u16(vreinterpretq_u16_u8(x.v), vreinterpretq_u16_u8(y.v)))};
}
template <int n>
CPUSERVE_INLINE Q minus_shifted(Q x) {
  return {vreinterpretq_u8_s16(vnegq_s16(vshlq_n_s16(vreinterpretq_s16_u8(x.v), n)))};
}
CPUSERVE_INLINE I even_words(Q x) {
  return vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u8(x.v), 16), 16);
}
CPUSERVE_INLINE I odd_words(Q x) { return vshrq_n_s32(vreinterpretq_s32_u8(x.v), 16); }
CPUSERVE_INLINE I dot_words(I acc, Q x, Q y) {
  const int16x8_t a = vreinterpretq_s16_u8(x.v), b = vreinterpretq_s16_u8(y.v);
  const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
  return vaddq_s32(acc, vpaddq_s32(low, vmull_high_s16(a, b)));
}
CPUSERVE_INLINE Q as_words(I x) { return {vreinterpretq_u8_s32(x)}; }
constexpr bool kWordPairs = false;
struct WordScales {
  static constexpr bool kHas = false;
  static constexpr int kParts = 0;
};
CPUSERVE_INLINE Q low_nibbles(Q x) { return {vandq_u8(x.v, vdupq_n_u8(15))}; }
CPUSERVE_INLINE Q high_nibbles(Q x) { return {vshrq_n_u8(x.v, 4)}; }
CPUSERVE_INLINE Q either(Q x, Q y) { return {vorrq_u8(x.v, y.v)}; }
template <int kFrom, int kTo, int kBits>
CPUSERVE_INLINE Q take_bits(Q x) {
  if constexpr (kFrom > kTo) x.v = vshrq_n_u8(x.v, kFrom - kTo);
  if constexpr (kFrom < kTo) x.v = vshlq_n_u8(x.v, kTo - kFrom);
  return {vandq_u8(x.v, vdupq_n_u8((uint8_t)(((1 << kBits) - 1) << kTo)))};
}
CPUSERVE_INLINE Q shift_right(Q x, int n) { return {vshlq_u8(x.v, vdupq_n_s8((int8_t)-n))}; }
CPUSERVE_INLINE Q lookup16(const uint8_t* table, Q index) {
  return {vqtbl1q_u8(vld1q_u8(table), index.v)};
}
// Returns the bytes u - 128 as signed bytes. as_signed() returns bytes below 128 unchanged.
CPUSERVE_INLINE int8x16_t less128(Q u) {
  return vreinterpretq_s8_u8(veorq_u8(u.v, vdupq_n_u8(0x80)));
}
CPUSERVE_INLINE int8x16_t as_signed(Q x) { return vreinterpretq_s8_u8(x.v); }

constexpr bool kUnpacksCodes = false;
struct SumStarts {
  static constexpr bool kHas = false;
};
#ifdef __ARM_FEATURE_DOTPROD
CPUSERVE_INLINE I dot_signed(I acc, int8x16_t a, int8x16_t b) { return vdotq_s32(acc, a, b); }
constexpr int kGroupVecs = 16;
constexpr bool kWideS = true, kEmulatesDots = false;
constexpr int kProductsOfQuad = 4;
using S = I;
CPUSERVE_INLINE S szero() { return izero(); }
CPUSERVE_INLINE S sdot(S acc, Q u, Q s) { return vdotq_s32(acc, as_signed(u), as_signed(s)); }
CPUSERVE_INLINE I widen(S x) { return x; }
#else
// The product of two bytes fits 16 bits (128 * 128 = 16,384).
// Pairs of products are added to int32 lanes.
CPUSERVE_INLINE I dot_signed(I acc, int8x16_t a, int8x16_t b) {
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
  const int16x8_t high = vmull_high_s8(a, b);
  return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
constexpr int kGroupVecs = 8;
constexpr bool kWideS = false, kEmulatesDots = true;
constexpr int kProductsOfQuad = 1;
struct S {
  int16x8_t low, high;
};
CPUSERVE_INLINE S in_order(S sums) { return sums; }  // VMLAL adds its products at once
CPUSERVE_INLINE S szero() { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
CPUSERVE_INLINE S sdot(S acc, Q u, Q s) {
  const int8x16_t a = as_signed(u), b = as_signed(s);
  return {vmlal_s8(acc.low, vget_low_s8(a), vget_low_s8(b)), vmlal_high_s8(acc.high, a, b)};
}
CPUSERVE_INLINE I widen(S x) { return vpaddq_s32(vpaddlq_s16(x.low), vpaddlq_s16(x.high)); }
#endif
CPUSERVE_INLINE I first_factor(Q words) { return even_words(words); }
CPUSERVE_INLINE I second_factor(Q words) { return odd_words(words); }
CPUSERVE_INLINE I add_scaled(I acc, S x, I factor) { return imad(widen(x), factor, acc); }
constexpr int kDot8Zero = 0;
CPUSERVE_INLINE I dot8(I acc, Q u, Q s) { return dot_signed(acc, less128(u), as_signed(s)); }
CPUSERVE_INLINE I dot4_small(I acc, Q u, Q s) {
  return dot_signed(acc, as_signed(u), as_signed(s));
}
CPUSERVE_INLINE I dot4(I acc, Q u, Q s) {  // u s = (u - 128) s + 2 * 64 s
  const int8x16_t half = vdupq_n_s8(64);
  acc = dot_signed(acc, less128(u), as_signed(s));
  return dot_signed(dot_signed(acc, half, as_signed(s)), half, as_signed(s));
}
CPUSERVE_INLINE void sums_of_16(const int8_t* x, int32_t* out) {
  for (int i = 0; i < 16; i++) out[i] = vaddlvq_s8(vld1q_s8(x + i * 16));
}
// x is clamped before the conversion; NaN becomes 127, as at every level.
CPUSERVE_INLINE void store_s8(int8_t* p, F x) {
  x = max(min(x, set1(127.0f)), set1(-127.0f));
  const int16x4_t h = vqmovn_s32(vcvtnq_s32_f32(x));
  const int8x8_t b = vqmovn_s16(vcombine_s16(h, h));
  vst1_lane_s32((int32_t*)p, vreinterpret_s32_s8(b), 0);
}
CPUSERVE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
CPUSERVE_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace CPUSERVE_NS
