// Vector primitives with AVX-512 F, BW, DQ and VL, and with VNNI and BF16 where they are enabled.
#pragma once
// gcc 12's own header reads an uninitialized vector on purpose (_mm512_undefined_ps).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

using F = __m512;
using I = __m512i;
struct P {
  __m512i v;
};
struct Q {
  __m512i v;
};
constexpr int kLanes = 16, kVecs = 1, kTileRows = 6, kTileVecs = 4;
constexpr int kDot8Zero = 128;

CPUSERVE_INLINE F zero() { return _mm512_setzero_ps(); }
CPUSERVE_INLINE F set1(float x) { return _mm512_set1_ps(x); }
CPUSERVE_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
CPUSERVE_INLINE __mmask16 first(int n) {
  return n >= 16 ? (__mmask16)0xffff : n <= 0 ? (__mmask16)0 : (__mmask16)((1u << n) - 1);
}
CPUSERVE_INLINE F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
CPUSERVE_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
CPUSERVE_INLINE void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
CPUSERVE_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
CPUSERVE_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
CPUSERVE_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
CPUSERVE_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
CPUSERVE_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
CPUSERVE_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
CPUSERVE_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
CPUSERVE_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
CPUSERVE_INLINE F round(F x) { return _mm512_roundscale_ps(x, 0); }
CPUSERVE_INLINE F scale2(F p, F n) { return _mm512_scalef_ps(p, n); }
CPUSERVE_INLINE F scale2_far(F p, F n) { return scale2(p, n); }
// split_exponent rounds x down: VREDUCEPS subtracts the largest integer <= x,
// and VSCALEFPS in add_exponent rounds the exponent down by itself.
// Together they take three operations on Intel; rounding, subtracting and scaling would take five.
constexpr bool kSplitsDown = true;
CPUSERVE_INLINE F split_exponent(F x, F* e) {
  *e = x;
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
CPUSERVE_INLINE F add_exponent(F p, F e) { return _mm512_scalef_ps(p, e); }
CPUSERVE_INLINE F keep(F x, int lo, int hi, F other) {
  __mmask16 m = (__mmask16)(first(hi) & ~first(lo));
  return _mm512_mask_blend_ps(m, other, x);
}
CPUSERVE_INLINE float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
CPUSERVE_INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
CPUSERVE_INLINE uint32_t lanes_between(F x, F lo, F hi) {
  return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, lo, _CMP_GE_OQ), x, hi, _CMP_LT_OQ);
}
CPUSERVE_INLINE void reduce_add4(F a, F b, F c, F d, float* out) {
  const F ab = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const F cd = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  F x = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  x = add(x, _mm512_permute_ps(x, 0x4e));
  x = add(x, _mm512_permute_ps(x, 0xb1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, x)));
}
CPUSERVE_INLINE F in_order(F sum) {
  asm("" : "+v"(sum));
  return sum;
}
CPUSERVE_INLINE I in_order(I sum) {
  asm("" : "+v"(sum));
  return sum;
}
CPUSERVE_INLINE I izero() { return _mm512_setzero_si512(); }
CPUSERVE_INLINE I iset1(int x) { return _mm512_set1_epi32(x); }
CPUSERVE_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
CPUSERVE_INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
CPUSERVE_INLINE I imad(I a, I b, I c) { return iadd(_mm512_mullo_epi32(a, b), c); }
template <int n>
CPUSERVE_INLINE I shl(I a) {
  return _mm512_slli_epi32(a, n);
}
CPUSERVE_INLINE I iload1(const int32_t* p) {
  return _mm512_castps_si512(_mm512_broadcastss_ps(_mm_load_ss((const float*)p)));
}
CPUSERVE_INLINE I round_to_int(F x) { return _mm512_cvtps_epi32(x); }
CPUSERVE_INLINE I abs_bits(F x) { return _mm512_castps_si512(_mm512_abs_ps(x)); }
CPUSERVE_INLINE I imax(I a, I b) { return _mm512_max_epi32(a, b); }
// Interleaves and reduces two vectors at a time, until each 128-bit lane has one partial result
// of each of a, b, c and d. Then reduces the 128-bit lanes.
template <class Op>
CPUSERVE_INLINE void reduce4(I a, I b, I c, I d, int32_t* out, Op op) {
  const I ab = op(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const I cd = op(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  I x = op(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  x = op(x, _mm512_shuffle_i32x4(x, x, 0x4e));
  x = op(x, _mm512_shuffle_i32x4(x, x, 0xb1));
  _mm_storeu_si128((__m128i*)out, _mm512_castsi512_si128(x));
}
CPUSERVE_INLINE void reduce_add4(I a, I b, I c, I d, int32_t* out) {
  reduce4(a, b, c, d, out, [](I x, I y) { return iadd(x, y); });
}
CPUSERVE_INLINE void reduce_max4(I a, I b, I c, I d, int32_t* out) {
  reduce4(a, b, c, d, out, [](I x, I y) { return imax(x, y); });
}
CPUSERVE_INLINE void store_bytes(int8_t* p, I x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x));
}
CPUSERVE_INLINE F to_float(I x) { return _mm512_cvtepi32_ps(x); }
CPUSERVE_INLINE I load_bits(const float* p) { return _mm512_loadu_si512(p); }
CPUSERVE_INLINE void store_bits(float* p, I x) { _mm512_storeu_si512(p, x); }

CPUSERVE_INLINE P load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
CPUSERVE_INLINE void store_pairs(uint16_t* p, P x) { _mm512_storeu_si512(p, x.v); }
CPUSERVE_INLINE P set1_pair(const uint16_t* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
// A bf16 is the upper half of a float. An even element of a pair is shifted to the upper half.
// An odd element is already there, and only the even element in the lower half is cleared.
CPUSERVE_INLINE F even(P a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)); }
CPUSERVE_INLINE F odd(P a) {
  return _mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32((int)0xffff0000)));
}
#ifdef __AVX512BF16__
constexpr bool kNativeDot2 = true;
CPUSERVE_INLINE F dot2(F acc, P a, P b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a.v, (__m512bh)b.v);
}
#else
constexpr bool kNativeDot2 = false;
CPUSERVE_INLINE F dot2(F acc, P a, P b) { return fma(odd(a), odd(b), fma(even(a), even(b), acc)); }
#endif
CPUSERVE_INLINE F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
CPUSERVE_INLINE F load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
CPUSERVE_INLINE F load_s8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
CPUSERVE_INLINE F load_nibbles(const uint8_t* p, int) {
  const __m128i low = _mm_loadl_epi64((const __m128i*)p);
  const __m128i x = _mm_unpacklo_epi64(low, _mm_srli_epi16(low, 4));
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(x, _mm_set1_epi8(15))));
}
CPUSERVE_INLINE F load_e8m0(const uint8_t* p) {
  const __m512i bits =
      _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
  const __m512i least = _mm512_set1_epi32(1 << 22);  // for byte 0: its 2^-127 is a denormal float
  return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_max_epi32(bits, least)), _mm512_set1_ps(0.5f));
}
CPUSERVE_INLINE F load_levels(const float* levels, const uint8_t* p, int shift) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  // The permutation ignores the bits above the index. gcc does not simplify a shift by 0.
  const bool low = __builtin_constant_p(shift) && shift == 0;
  const __m512i index = low ? bytes : _mm512_srlv_epi32(bytes, _mm512_set1_epi32(shift));
  return _mm512_permutexvar_ps(index, _mm512_load_ps(levels));
}
// The bits of the code are moved into an fp16, but the exponent keeps the bias 7 of E4M3.
// fp16 has the bias 15, so the result is 1/256 of the value.
CPUSERVE_INLINE F load_e4m3(const uint8_t* p) {
  const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  return _mm512_cvtph_ps(
      _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16((short)0xbfff)));
}
// Rounds to nearest even in integer arithmetic at every AVX-512 level:
// VCVTNEPS2BF16 flushes denormals, so levels that use this instruction would return other bits.
// A NaN keeps its top bits and becomes quiet.
CPUSERVE_INLINE __m512i bf16_bits(F x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_srli_epi32(r, 16);
}
CPUSERVE_INLINE void store_bf16(uint16_t* p, F x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bf16_bits(x)));
}
CPUSERVE_INLINE F round_bf16_normal(F x) {
  return odd({_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000))});
}
#ifdef __AVX512BF16__
CPUSERVE_INLINE void store_bf16_normal(uint16_t* p, F x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
}
CPUSERVE_INLINE void store_bf16_normal2(uint16_t* p, F x, F y) {
#ifdef CPUSERVE_NO_VCVTNE2PS2BF16  // for an emulator that computes it wrong (tests/in_bochs.py)
  store_bf16_normal(p, x);
  store_bf16_normal(p + kLanes, y);
#else
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(y, x));
#endif
}
#else
CPUSERVE_INLINE void store_bf16_normal2(uint16_t* p, F x, F y) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i odd_words =
      _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                       25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  _mm512_storeu_si512(
      p, _mm512_permutex2var_epi16(_mm512_add_epi32(_mm512_castps_si512(x), half), odd_words,
                                   _mm512_add_epi32(_mm512_castps_si512(y), half)));
}
CPUSERVE_INLINE void store_bf16_normal(uint16_t* p, F x) {
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif
// Stores 1/256 of the values (see vec.h). The sign, exponent and fraction of each code move
// to their places in a bf16. 0x3800 adds 112 to the exponent: 127 - 7 for the different biases,
// less 8 for the division by 256. Denormal codes are looked up in a table.
CPUSERVE_INLINE void widen_e4m3(const uint8_t* from, uint16_t* to) {
  const __m512i denormals = _mm512_broadcast_i32x4(
      _mm_setr_epi16(0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860));
  const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
  const __m512i bits = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16((short)0x87f0));
  const __mmask32 denormal = _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78));
  __m512i r = _mm512_add_epi16(bits, _mm512_set1_epi16(0x3800));
  const __m512i found = _mm512_permutexvar_epi16(x, denormals);
  const __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi16((short)0x8000));
  r = _mm512_mask_blend_epi16(denormal, r, _mm512_or_si512(found, sign));
  _mm512_storeu_si512(to, r);
}
CPUSERVE_INLINE void store_f16(uint16_t* p, F x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
CPUSERVE_INLINE P interleave_bf16(F even, F odd) {
  return {_mm512_or_si512(bf16_bits(even), _mm512_slli_epi32(bf16_bits(odd), 16))};
}
CPUSERVE_INLINE P interleave_top(F even, F odd) {
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                  _mm512_castps_si512(odd))};
}

struct Entries {
  __m512i v;
};
CPUSERVE_INLINE Entries load_entries(const uint16_t* p) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p))};
}
CPUSERVE_INLINE P lookup_pairs(const Entries& entries, const uint8_t* p) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m512i index = _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 12)),
                                         _mm512_set1_epi32(0x000f000f));  // one index in each word
  return {_mm512_permutexvar_epi16(index, entries.v)};
}

CPUSERVE_INLINE Q load_quads(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
CPUSERVE_INLINE void store_quads(uint8_t* p, Q x) { _mm512_storeu_si512(p, x.v); }
CPUSERVE_INLINE Q set1_quad(const int8_t* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
CPUSERVE_INLINE Q load_words_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p))};
}
CPUSERVE_INLINE Q load_words_s8(const uint8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))};
}
template <int kTo, int kBits>
CPUSERVE_INLINE Q load_words_u4(const uint8_t* p) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m512i both = _mm512_or_si512(_mm512_slli_epi32(x, kTo), _mm512_slli_epi32(x, 12 + kTo));
  return {_mm512_and_si512(both, _mm512_set1_epi16(((1 << kBits) - 1) << kTo))};
}
CPUSERVE_INLINE Q add_words(Q x, Q y) { return {_mm512_add_epi16(x.v, y.v)}; }
template <int n>
CPUSERVE_INLINE Q minus_shifted(Q x) {
  return {_mm512_sub_epi16(_mm512_setzero_si512(), _mm512_slli_epi16(x.v, n))};
}
CPUSERVE_INLINE I even_words(Q x) { return _mm512_srai_epi32(_mm512_slli_epi32(x.v, 16), 16); }
CPUSERVE_INLINE I odd_words(Q x) { return _mm512_srai_epi32(x.v, 16); }
CPUSERVE_INLINE Q as_words(I x) { return {x}; }
CPUSERVE_INLINE Q low_nibbles(Q x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
CPUSERVE_INLINE Q high_nibbles(Q x) {
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))};
}
CPUSERVE_INLINE Q either(Q x, Q y) { return {_mm512_or_si512(x.v, y.v)}; }
template <int kFrom, int kTo, int kBits>
CPUSERVE_INLINE Q take_bits(Q x) {
  if constexpr (kFrom > kTo) x.v = _mm512_srli_epi16(x.v, kFrom - kTo);
  if constexpr (kFrom < kTo) x.v = _mm512_slli_epi16(x.v, kTo - kFrom);
  return {_mm512_and_si512(x.v, _mm512_set1_epi8((char)(((1 << kBits) - 1) << kTo)))};
}
CPUSERVE_INLINE Q shift_right(Q x, int n) { return {_mm512_srl_epi16(x.v, _mm_cvtsi32_si128(n))}; }
CPUSERVE_INLINE Q lookup16(const uint8_t* table, Q index) {
  const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return {_mm512_shuffle_epi8(entries, index.v)};
}
// Returns the first word of each lane in both words (from = 0), or the second word (from = 2).
CPUSERVE_INLINE Q both_words(Q words, int from) {
  const __m512i at =
      _mm512_broadcast_i32x4(_mm_setr_epi32(0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c));
  return {_mm512_shuffle_epi8(words.v, _mm512_add_epi8(at, _mm512_set1_epi8((char)from)))};
}
#ifdef __AVX512VNNI__
// Uses inline assembly, because with the intrinsic gcc 12 keeps the accumulators of a tile
// in memory (785 instead of 2,050 GOP/s).
CPUSERVE_INLINE I dot4(I acc, Q u, Q s) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u.v), "v"(s.v));
  return acc;
}
CPUSERVE_INLINE I dot4_small(I acc, Q u, Q s) { return dot4(acc, u, s); }
CPUSERVE_INLINE I dot_words(I acc, Q x, Q y) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(x.v), "v"(y.v));
  return acc;
}
constexpr bool kWordPairs = false;  // 0.82-0.97 x with up to 8 rows of Q3_K on Zen 5
struct WordScales {
  static constexpr bool kHas = true;
  static constexpr int kParts = 2;
  template <bool kSecond>
  CPUSERVE_INLINE Q one(Q words) {
    if constexpr (kSecond) return {_mm512_srli_epi32(words.v, 16)};
    return {_mm512_and_si512(words.v, _mm512_set1_epi32(0xffff))};
  }
  CPUSERVE_INLINE I add(I acc, I sums, Q one) { return dot_words(acc, {sums}, one); }
  CPUSERVE_INLINE Q both(Q words, bool second) { return both_words(words, second ? 2 : 0); }
  CPUSERVE_INLINE Q products(Q codes, Q both) { return {_mm512_mullo_epi16(codes.v, both.v)}; }
  CPUSERVE_INLINE Q minus(Q x, Q y) { return {_mm512_sub_epi16(x.v, y.v)}; }
};
constexpr bool kUnpacksCodes = true;
constexpr int kGroupVecs = 24;
constexpr bool kWideS = true, kEmulatesDots = false;
constexpr int kProductsOfQuad = 4;
using S = I;
CPUSERVE_INLINE S szero() { return izero(); }
CPUSERVE_INLINE S sdot(S acc, Q u, Q s) { return dot4(acc, u, s); }
CPUSERVE_INLINE I widen(S x) { return x; }
CPUSERVE_INLINE I first_factor(Q words) { return even_words(words); }
CPUSERVE_INLINE I second_factor(Q words) { return odd_words(words); }
CPUSERVE_INLINE I add_scaled(I acc, S x, I factor) { return imad(x, factor, acc); }
struct SumStarts {
  static constexpr bool kHas = true;
  CPUSERVE_INLINE S start(const int32_t* p) { return iload1(p); }
  template <int kPart, int kShift>
  CPUSERVE_INLINE void minus(const int8_t* x, int32_t* out) {
    static_assert(kPart == 8, "the sums of more codes are stored in the rows");
    const Q factor = {_mm512_set1_epi8(1 << kShift)};
    const I a = dot4_small(izero(), factor, load_quads((const uint8_t*)x));
    const I b = dot4_small(izero(), factor, load_quads((const uint8_t*)x + 64));
    const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const I odd = iadd(even, iset1(1));
    _mm512_storeu_si512(out, isub(isub(izero(), _mm512_permutex2var_epi32(a, even, b)),
                                  _mm512_permutex2var_epi32(a, odd, b)));
  }
};
#else
// VPMADDUBSW would saturate with u8 up to 255,
// so even and odd bytes are widened to 16-bit words before the multiplication.
CPUSERVE_INLINE I dot4(I acc, Q u, Q s) {
  const __m512i even = _mm512_set1_epi16(0xff);
  __m512i a = _mm512_madd_epi16(_mm512_and_si512(u.v, even),
                                _mm512_srai_epi16(_mm512_slli_epi16(s.v, 8), 8));
  __m512i b = _mm512_madd_epi16(_mm512_srli_epi16(u.v, 8), _mm512_srai_epi16(s.v, 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(a, b));
}
CPUSERVE_INLINE I dot4_small(I acc, Q u, Q s) {  // two products fit in 16 bits: 2 * 127 * 127
  const __m512i p = _mm512_maddubs_epi16(u.v, s.v);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(p, _mm512_set1_epi16(1)));
}
CPUSERVE_INLINE I dot_words(I acc, Q x, Q y) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(x.v, y.v));
}
constexpr bool kWordPairs = false;
struct WordScales {
  static constexpr bool kHas = false;
  static constexpr int kParts = 0;
};
constexpr bool kUnpacksCodes = false;
struct SumStarts {
  static constexpr bool kHas = false;
};
constexpr int kGroupVecs = 12;  // the other registers hold products while these are emulated
constexpr bool kWideS = false, kEmulatesDots = true;
constexpr int kProductsOfQuad = 2;
struct S {
  __m512i v;
};
CPUSERVE_INLINE S in_order(S sums) { return {in_order(sums.v)}; }
CPUSERVE_INLINE S szero() { return {_mm512_setzero_si512()}; }
CPUSERVE_INLINE S sdot(S acc, Q u, Q s) {
  return {_mm512_add_epi16(acc.v, _mm512_maddubs_epi16(u.v, s.v))};
}
CPUSERVE_INLINE I widen(S x) { return _mm512_madd_epi16(x.v, _mm512_set1_epi16(1)); }
// A factor of 16-bit sums is in both words of a lane, because VPMADDWD multiplies and widens both.
CPUSERVE_INLINE Q first_factor(Q words) { return both_words(words, 0); }
CPUSERVE_INLINE Q second_factor(Q words) { return both_words(words, 2); }
CPUSERVE_INLINE I add_scaled(I acc, S x, Q factor) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(x.v, factor.v));
}
#endif
CPUSERVE_INLINE I dot8(I acc, Q u, Q s) { return dot4(acc, u, s); }
// Each 32-bit lane sums four bytes. Then the four sums of each 128-bit lane are added,
// for four vectors together, and `ascending` puts the results in order.
CPUSERVE_INLINE void sums_of_16(const int8_t* x, int32_t* out) {
  const Q ones = {_mm512_set1_epi8(1)};
  __m512i s[4];
  for (int i = 0; i < 4; i++) {
    s[i] = dot4_small(izero(), ones, load_quads((const uint8_t*)x + i * 64));
  }
  const __m512i ab = iadd(_mm512_unpacklo_epi32(s[0], s[1]), _mm512_unpackhi_epi32(s[0], s[1]));
  const __m512i cd = iadd(_mm512_unpacklo_epi32(s[2], s[3]), _mm512_unpackhi_epi32(s[2], s[3]));
  const __m512i all = iadd(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m512i ascending = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(ascending, all));
}
// x is clamped before the conversion, because VCVTPS2DQ turns values outside int32 into INT_MIN.
CPUSERVE_INLINE void store_s8(int8_t* p, F x) {
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-127.0f));
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
CPUSERVE_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
CPUSERVE_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace CPUSERVE_NS
