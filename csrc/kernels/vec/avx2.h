// Vector primitives with AVX2, FMA and F16C (base level on x86), and AVX-VNNI where it is enabled.
#pragma once
#include <immintrin.h>

#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

using F = __m256;
using I = __m256i;
struct P {
  __m256i v;
};
struct Q {
  __m256i v;
};
constexpr int kLanes = 8, kVecs = 2, kTileRows = 6, kTileVecs = 2;
constexpr bool kNativeDot2 = false;

CPUSERVE_INLINE F zero() { return _mm256_setzero_ps(); }
CPUSERVE_INLINE F set1(float x) { return _mm256_set1_ps(x); }
CPUSERVE_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
CPUSERVE_INLINE __m256i lane_index() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
CPUSERVE_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_index());
}
CPUSERVE_INLINE F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
CPUSERVE_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
CPUSERVE_INLINE void store_n(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
CPUSERVE_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
CPUSERVE_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
CPUSERVE_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
CPUSERVE_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
CPUSERVE_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
CPUSERVE_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
CPUSERVE_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
CPUSERVE_INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
CPUSERVE_INLINE F round(F x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
CPUSERVE_INLINE F scale2(F p, F n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
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
  return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(e), 23)));
}
// The exponent of one float cannot hold every n in [-252, 252],
// so p is multiplied by two powers of 2 with about half of n each.
CPUSERVE_INLINE F scale2_far(F p, F n) {
  const F half = round(mul(n, set1(0.5f)));
  return scale2(scale2(p, half), sub(n, half));
}
CPUSERVE_INLINE F keep(F x, int lo, int hi, F other) {
  __m256i m = _mm256_andnot_si256(first(lo), first(hi));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(m));
}
CPUSERVE_INLINE float reduce_add(F x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
CPUSERVE_INLINE void reduce_add4(F a, F b, F c, F d, float* out) {
  const F ab = add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  const F cd = add(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
  const F x = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  const F y = add(_mm256_shuffle_ps(x, x, 0x88), _mm256_shuffle_ps(x, x, 0xdd));  // lanes: acacbdbd
  _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
CPUSERVE_INLINE float reduce_max(F x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
CPUSERVE_INLINE uint32_t lanes_between(F x, F lo, F hi) {
  const F in = _mm256_and_ps(_mm256_cmp_ps(x, lo, _CMP_GE_OQ), _mm256_cmp_ps(x, hi, _CMP_LT_OQ));
  return (uint32_t)_mm256_movemask_ps(in);
}
CPUSERVE_INLINE I in_order(I sum) {
  asm("" : "+x"(sum));
  return sum;
}
CPUSERVE_INLINE F in_order(F sum) {
  asm("" : "+x"(sum));
  return sum;
}
CPUSERVE_INLINE I izero() { return _mm256_setzero_si256(); }
CPUSERVE_INLINE I iset1(int x) { return _mm256_set1_epi32(x); }
CPUSERVE_INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
CPUSERVE_INLINE I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
CPUSERVE_INLINE I imad(I a, I b, I c) { return iadd(_mm256_mullo_epi32(a, b), c); }
template <int n>
CPUSERVE_INLINE I shl(I a) {
  return _mm256_slli_epi32(a, n);
}
CPUSERVE_INLINE I iload1(const int32_t* p) {
  return _mm256_castps_si256(_mm256_broadcast_ss((const float*)p));
}
CPUSERVE_INLINE I round_to_int(F x) { return _mm256_cvtps_epi32(x); }
CPUSERVE_INLINE I abs_bits(F x) {
  return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}
CPUSERVE_INLINE I imax(I a, I b) { return _mm256_max_epi32(a, b); }
// Interleaves and reduces two vectors at a time, until each 128-bit lane has one partial result
// of each of a, b, c and d. Then reduces the 128-bit lanes.
template <class Op>
CPUSERVE_INLINE void reduce4(I a, I b, I c, I d, int32_t* out, Op op) {
  const I ab = op(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const I cd = op(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  I x = op(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  x = op(x, _mm256_permute2x128_si256(x, x, 1));
  _mm_storeu_si128((__m128i*)out, _mm256_castsi256_si128(x));
}
CPUSERVE_INLINE void reduce_add4(I a, I b, I c, I d, int32_t* out) {
  reduce4(a, b, c, d, out, [](I x, I y) { return iadd(x, y); });
}
CPUSERVE_INLINE void reduce_max4(I a, I b, I c, I d, int32_t* out) {
  reduce4(a, b, c, d, out, [](I x, I y) { return imax(x, y); });
}
CPUSERVE_INLINE void store_bytes(int8_t* p, I x) {
  const __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(w, w));
}
CPUSERVE_INLINE F to_float(I x) { return _mm256_cvtepi32_ps(x); }
CPUSERVE_INLINE I load_bits(const float* p) { return _mm256_loadu_si256((const __m256i*)p); }
CPUSERVE_INLINE void store_bits(float* p, I x) { _mm256_storeu_si256((__m256i*)p, x); }

CPUSERVE_INLINE P load_pairs(const uint16_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
CPUSERVE_INLINE void store_pairs(uint16_t* p, P x) { _mm256_storeu_si256((__m256i*)p, x.v); }
CPUSERVE_INLINE P set1_pair(const uint16_t* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x)};
}
// A bf16 is the upper half of a float. An even element of a pair is shifted to the upper half.
// An odd element is already there, and only the even element in the lower half is cleared.
CPUSERVE_INLINE F even(P a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a.v, 16)); }
CPUSERVE_INLINE F odd(P a) {
  return _mm256_castsi256_ps(_mm256_and_si256(a.v, _mm256_set1_epi32((int)0xffff0000)));
}
CPUSERVE_INLINE F dot2(F acc, P a, P b) { return fma(odd(a), odd(b), fma(even(a), even(b), acc)); }
CPUSERVE_INLINE F load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
CPUSERVE_INLINE F load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
CPUSERVE_INLINE F load_e8m0(const uint8_t* p) {
  const __m256i bits =
      _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
  const __m256i least = _mm256_set1_epi32(1 << 22);  // byte 0 means 2^-127, a denormal float
  return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_max_epi32(bits, least)), _mm256_set1_ps(0.5f));
}
CPUSERVE_INLINE F load_s8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
CPUSERVE_INLINE F load_nibbles(const uint8_t* p, int at) {
  const __m128i x = _mm_srli_epi16(_mm_loadl_epi64((const __m128i*)p), at / 8 * 4);
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(x, _mm_set1_epi8(15))));
}
CPUSERVE_INLINE F load_levels(const float* levels, const uint8_t* p, int shift) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  const __m256i index = _mm256_srlv_epi32(bytes, _mm256_set1_epi32(shift));
  const F low = _mm256_permutevar8x32_ps(_mm256_load_ps(levels), index);
  const F high = _mm256_permutevar8x32_ps(_mm256_load_ps(levels + 8), index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
// The bits of the code are moved into an fp16, but the exponent keeps the bias 7 of E4M3.
// fp16 has the bias 15, so the result is 1/256 of the value.
CPUSERVE_INLINE F load_e4m3(const uint8_t* p) {
  const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16((short)0xbfff)));
}
// Rounds to nearest even. A NaN keeps its top bits and becomes quiet.
CPUSERVE_INLINE __m256i bf16_bits(F x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(nan));
  return _mm256_srli_epi32(r, 16);
}
CPUSERVE_INLINE void store_bf16(uint16_t* p, F x) {
  __m256i r = bf16_bits(x);
  _mm_storeu_si128((__m128i*)p,
                   _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
}
CPUSERVE_INLINE __m256i bf16_bits_normal(F x) {
  const __m256i rounded = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000));
  return _mm256_srli_epi32(rounded, 16);
}
CPUSERVE_INLINE F round_bf16_normal(F x) {
  return odd({_mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000))});
}
CPUSERVE_INLINE void store_bf16_normal(uint16_t* p, F x) {
  const __m256i r = bf16_bits_normal(x);
  _mm_storeu_si128((__m128i*)p,
                   _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
}
CPUSERVE_INLINE void store_bf16_normal2(uint16_t* p, F x, F y) {
  const __m256i mixed = _mm256_packus_epi32(bf16_bits_normal(x), bf16_bits_normal(y));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
CPUSERVE_INLINE void widen_e4m3(const uint8_t* from, uint16_t* to) {
  store_bf16_normal2(to, load_e4m3(from), load_e4m3(from + kLanes));
}
CPUSERVE_INLINE void store_f16(uint16_t* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
CPUSERVE_INLINE P interleave_bf16(F even, F odd) {
  return {_mm256_or_si256(bf16_bits(even), _mm256_slli_epi32(bf16_bits(odd), 16))};
}
CPUSERVE_INLINE P interleave_top(F even, F odd) {
  return {_mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16),
                             _mm256_castps_si256(odd), 0xaa)};
}

struct Entries {
  __m256i low, high;  // the low and the high bytes of the 16 entries, in both 128-bit lanes
};
CPUSERVE_INLINE Entries load_entries(const uint16_t* p) {
  const __m128i a = _mm_loadu_si128((const __m128i*)p);
  const __m128i b = _mm_loadu_si128((const __m128i*)(p + 8));
  const __m128i byte = _mm_set1_epi16(0xff);
  return {
      _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte))),
      _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)))};
}
CPUSERVE_INLINE P lookup_pairs(const Entries& entries, const uint8_t* p) {
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  const __m256i index = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 12)),
                                         _mm256_set1_epi32(0x000f000f));  // one index in each word
  const __m256i low =
      _mm256_and_si256(_mm256_shuffle_epi8(entries.low, index), _mm256_set1_epi16(0xff));
  const __m256i high = _mm256_slli_epi16(_mm256_shuffle_epi8(entries.high, index), 8);
  return {_mm256_or_si256(low, high)};
}

CPUSERVE_INLINE Q load_quads(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
CPUSERVE_INLINE void store_quads(uint8_t* p, Q x) { _mm256_storeu_si256((__m256i*)p, x.v); }
CPUSERVE_INLINE Q set1_quad(const int8_t* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x)};
}
CPUSERVE_INLINE Q load_words_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p))};
}
CPUSERVE_INLINE Q load_words_s8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p))};
}
template <int kTo, int kBits>
CPUSERVE_INLINE Q load_words_u4(const uint8_t* p) {
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  const __m256i both = _mm256_or_si256(_mm256_slli_epi32(x, kTo), _mm256_slli_epi32(x, 12 + kTo));
  return {_mm256_and_si256(both, _mm256_set1_epi16(((1 << kBits) - 1) << kTo))};
}
CPUSERVE_INLINE Q add_words(Q x, Q y) { return {_mm256_add_epi16(x.v, y.v)}; }
template <int n>
CPUSERVE_INLINE Q minus_shifted(Q x) {
  return {_mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(x.v, n))};
}
CPUSERVE_INLINE I even_words(Q x) { return _mm256_srai_epi32(_mm256_slli_epi32(x.v, 16), 16); }
CPUSERVE_INLINE I odd_words(Q x) { return _mm256_srai_epi32(x.v, 16); }
CPUSERVE_INLINE Q as_words(I x) { return {x}; }
CPUSERVE_INLINE Q low_nibbles(Q x) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(15))}; }
CPUSERVE_INLINE Q high_nibbles(Q x) {
  return {_mm256_and_si256(_mm256_srli_epi16(x.v, 4), _mm256_set1_epi8(15))};
}
CPUSERVE_INLINE Q either(Q x, Q y) { return {_mm256_or_si256(x.v, y.v)}; }
template <int kFrom, int kTo, int kBits>
CPUSERVE_INLINE Q take_bits(Q x) {
  if constexpr (kFrom > kTo) x.v = _mm256_srli_epi16(x.v, kFrom - kTo);
  if constexpr (kFrom < kTo) x.v = _mm256_slli_epi16(x.v, kTo - kFrom);
  return {_mm256_and_si256(x.v, _mm256_set1_epi8((char)(((1 << kBits) - 1) << kTo)))};
}
CPUSERVE_INLINE Q shift_right(Q x, int n) { return {_mm256_srl_epi16(x.v, _mm_cvtsi32_si128(n))}; }
CPUSERVE_INLINE Q lookup16(const uint8_t* table, Q index) {
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(entries, index.v)};
}
// VPMADDUBSW would saturate with u8 up to 255,
// so even and odd bytes are widened to 16-bit words before the multiplication.
CPUSERVE_INLINE I exact_dot4(I acc, Q u, Q s) {
  const __m256i even = _mm256_set1_epi16(0xff);
  __m256i a = _mm256_madd_epi16(_mm256_and_si256(u.v, even),
                                _mm256_srai_epi16(_mm256_slli_epi16(s.v, 8), 8));
  __m256i b = _mm256_madd_epi16(_mm256_srli_epi16(u.v, 8), _mm256_srai_epi16(s.v, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(a, b));
}
// Returns the first word of each lane in both words (from = 0), or the second word (from = 2).
CPUSERVE_INLINE Q both_words(Q words, int from) {
  const __m256i at = _mm256_setr_epi32(0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c, 0x01000100,
                                       0x05040504, 0x09080908, 0x0d0c0d0c);
  return {_mm256_shuffle_epi8(words.v, _mm256_add_epi8(at, _mm256_set1_epi8((char)from)))};
}
#if defined(__AVXVNNI__) || defined(CPUSERVE_VNNI_MODEL)
// CPUSERVE_VNNI_MODEL computes the same sums without the instruction, for tests on other CPUs.
CPUSERVE_INLINE I dot4(I acc, Q u, Q s) {
#ifdef CPUSERVE_VNNI_MODEL
  return exact_dot4(acc, u, s);
#else
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u.v), "x"(s.v));
  return acc;
#endif
}
CPUSERVE_INLINE I dot4_small(I acc, Q u, Q s) { return dot4(acc, u, s); }
CPUSERVE_INLINE I dot_words(I acc, Q x, Q y) {
#ifdef CPUSERVE_VNNI_MODEL
  return _mm256_add_epi32(acc, _mm256_madd_epi16(x.v, y.v));
#else
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(x.v), "x"(y.v));
  return acc;
#endif
}
constexpr bool kWordPairs = true;
struct WordScales {
  static constexpr bool kHas = true;
  static constexpr int kParts = 0;  // the sums of a unit are in memory, as each part would add
  template <bool kSecond>
  CPUSERVE_INLINE Q one(Q words) {
    if constexpr (kSecond) return {_mm256_srli_epi32(words.v, 16)};
    return {_mm256_and_si256(words.v, _mm256_set1_epi32(0xffff))};
  }
  CPUSERVE_INLINE I add(I acc, I sums, Q one) { return dot_words(acc, {sums}, one); }
  CPUSERVE_INLINE Q both(Q words, bool second) { return both_words(words, second ? 2 : 0); }
  CPUSERVE_INLINE Q products(Q codes, Q both) { return {_mm256_mullo_epi16(codes.v, both.v)}; }
  CPUSERVE_INLINE Q minus(Q x, Q y) { return {_mm256_sub_epi16(x.v, y.v)}; }
};
constexpr int kGroupVecs = 12, kDot8Zero = 128;
CPUSERVE_INLINE I dot8(I acc, Q u, Q s) { return dot4(acc, u, s); }
constexpr bool kWideS = true, kEmulatesDots = false, kUnpacksCodes = true;
constexpr int kProductsOfQuad = 4;
using S = I;
struct SumStarts {
  static constexpr bool kHas = true;
  CPUSERVE_INLINE S start(const int32_t* p) { return iload1(p); }
  template <int kPart, int kShift>
  CPUSERVE_INLINE void minus(const int8_t* x, int32_t* out) {
    static_assert(kPart == 8, "the sums of more codes are stored in the rows");
    const Q factor = {_mm256_set1_epi8(1 << kShift)};
    for (int i = 0; i < 128; i += 64) {
      const I low = dot4_small(izero(), factor, load_quads((const uint8_t*)x + i));
      const I high = dot4_small(izero(), factor, load_quads((const uint8_t*)x + i + 32));
      // The sums of neighbours: their parts of 64 bits are in the order 0, 2, 1, 3.
      const I sums = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
      _mm256_storeu_si256((__m256i*)(out + i / 8), isub(izero(), sums));
    }
  }
};
CPUSERVE_INLINE S szero() { return izero(); }
CPUSERVE_INLINE S sdot(S acc, Q u, Q s) { return dot4(acc, u, s); }
CPUSERVE_INLINE I widen(S x) { return x; }
CPUSERVE_INLINE I first_factor(Q words) { return even_words(words); }
CPUSERVE_INLINE I second_factor(Q words) { return odd_words(words); }
CPUSERVE_INLINE I add_scaled(I acc, S x, I factor) { return imad(x, factor, acc); }
#else
CPUSERVE_INLINE I dot_words(I acc, Q x, Q y) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(x.v, y.v));
}
constexpr bool kWordPairs = false;
struct WordScales {
  static constexpr bool kHas = false;
  static constexpr int kParts = 0;
};
constexpr int kGroupVecs = 8, kDot8Zero = 0;
CPUSERVE_INLINE I dot4(I acc, Q u, Q s) { return exact_dot4(acc, u, s); }
CPUSERVE_INLINE I dot4_small(I acc, Q u, Q s) {  // two products fit in 16 bits: 2 * 127 * 127
  const __m256i p = _mm256_maddubs_epi16(u.v, s.v);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
}
// w = u8 - 128 is a weight, and s8 is in [-127, 127]. VPMADDUBSW multiplies |w| by s8 with the sign
// of w, and its sums of two products fit 16 bits: 2 * 128 * 127 = 32,512.
CPUSERVE_INLINE I dot8(I acc, Q u, Q s) {
  const __m256i w = _mm256_xor_si256(u.v, _mm256_set1_epi8((char)0x80));
  const __m256i p = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(s.v, w));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
}
constexpr bool kWideS = false, kEmulatesDots = true, kUnpacksCodes = true;
constexpr int kProductsOfQuad = 2;
struct S {
  __m256i v;
};
CPUSERVE_INLINE S in_order(S sums) { return {in_order(sums.v)}; }
CPUSERVE_INLINE S szero() { return {_mm256_setzero_si256()}; }
CPUSERVE_INLINE S sdot(S acc, Q u, Q s) {
  return {_mm256_add_epi16(acc.v, _mm256_maddubs_epi16(u.v, s.v))};
}
CPUSERVE_INLINE I widen(S x) { return _mm256_madd_epi16(x.v, _mm256_set1_epi16(1)); }
struct SumStarts {
  static constexpr bool kHas = true;
  CPUSERVE_INLINE S start(const int32_t* two) {
    return {_mm256_castps_si256(_mm256_broadcast_ss((const float*)two))};
  }
  template <int kPart, int kShift>
  CPUSERVE_INLINE void minus(const int8_t* x, int32_t* out) {
    __m256i s[4];
    for (int i = 0; i < 4; i++) {
      s[i] = _mm256_maddubs_epi16(_mm256_set1_epi8(1), load_quads((const uint8_t*)x + i * 32).v);
    }
    const __m256i ab =
        _mm256_add_epi16(_mm256_unpacklo_epi32(s[0], s[1]), _mm256_unpackhi_epi32(s[0], s[1]));
    const __m256i cd =
        _mm256_add_epi16(_mm256_unpacklo_epi32(s[2], s[3]), _mm256_unpackhi_epi32(s[2], s[3]));
    const __m256i sums =
        _mm256_add_epi16(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    const __m256i all = minus_shifted<kShift>(Q{sums}).v;
    if constexpr (kPart == 16) {
      const __m256i ascending = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(all, ascending));
    } else {
      _mm_storeu_si128((__m128i*)out, _mm_add_epi16(_mm256_castsi256_si128(all),
                                                    _mm256_extracti128_si256(all, 1)));
    }
  }
};
// A factor of 16-bit sums is in both words of a lane, because VPMADDWD multiplies and widens both.
CPUSERVE_INLINE Q first_factor(Q words) { return both_words(words, 0); }
CPUSERVE_INLINE Q second_factor(Q words) { return both_words(words, 2); }
CPUSERVE_INLINE I add_scaled(I acc, S x, Q factor) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(x.v, factor.v));
}
#endif
// Each 32-bit lane sums four bytes. Then the four sums of each 128-bit lane are added,
// for four vectors together, and `ascending` puts the results in order.
CPUSERVE_INLINE void sums_of_16(const int8_t* x, int32_t* out) {
  const Q ones = {_mm256_set1_epi8(1)};
  for (int half = 0; half < 2; half++, x += 128, out += 8) {
    __m256i s[4];
    for (int i = 0; i < 4; i++) {
      s[i] = dot4_small(izero(), ones, load_quads((const uint8_t*)x + i * 32));
    }
    const __m256i ab = iadd(_mm256_unpacklo_epi32(s[0], s[1]), _mm256_unpackhi_epi32(s[0], s[1]));
    const __m256i cd = iadd(_mm256_unpacklo_epi32(s[2], s[3]), _mm256_unpackhi_epi32(s[2], s[3]));
    const __m256i all = iadd(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    const __m256i ascending = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(all, ascending));
  }
}
// x is clamped before the conversion, because VCVTPS2DQ turns values outside int32 into INT_MIN.
CPUSERVE_INLINE void store_s8(int8_t* p, F x) {
  x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-127.0f));
  __m256i i = _mm256_cvtps_epi32(x);
  __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(w, w));
}
CPUSERVE_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
CPUSERVE_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace CPUSERVE_NS
