// Vector primitives in plain C without intrinsics: four lanes in loops.
// Tests compare other levels with this level, which is never chosen by default.
#pragma once
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

constexpr int kLanes = 4, kVecs = 4, kTileRows = 4, kTileVecs = 1;
constexpr int kGroupVecs = 4, kDot8Zero = 128;
constexpr bool kNativeDot2 = false, kWideS = true, kEmulatesDots = true, kUnpacksCodes = false;
struct SumStarts {
  static constexpr bool kHas = false;
};
constexpr int kProductsOfQuad = 4;
// A vector type of the compiler (GCC's vector extensions):
// each sum or product of four floats is one instruction, so it is cheap to inline.
struct F {
  float v __attribute__((vector_size(kLanes * sizeof(float))));
};
struct I {
  int32_t v[kLanes];
};
struct P {
  uint16_t v[kLanes][2];
};
struct Q {
  uint8_t v[kLanes][4];
};

// Functions of more than a few instructions are not inlined, because only tests use this level,
// and inlining them into every tile would increase the compile time from 25 to 100 s.
#define CPUSERVE_CALL static __attribute__((noinline, unused))

#define CPUSERVE_LANES for (int i = 0; i < kLanes; i++)

CPUSERVE_INLINE float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
CPUSERVE_INLINE uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

CPUSERVE_INLINE F set1(float x) {
  F r;
  CPUSERVE_LANES r.v[i] = x;
  return r;
}
CPUSERVE_INLINE F zero() { return set1(0.0f); }
CPUSERVE_INLINE F load(const float* p) {
  F r;
  memcpy(&r.v, p, sizeof r.v);
  return r;
}
CPUSERVE_CALL F load_n(const float* p, int n) {
  F r;
  CPUSERVE_LANES r.v[i] = i < n ? p[i] : 0.0f;
  return r;
}
CPUSERVE_INLINE void store(float* p, F x) { memcpy(p, &x.v, sizeof x.v); }
CPUSERVE_CALL void store_n(float* p, F x, int n) {
  for (int i = 0; i < kLanes && i < n; i++) p[i] = x.v[i];
}
CPUSERVE_INLINE F add(F a, F b) { return {a.v + b.v}; }
CPUSERVE_INLINE F sub(F a, F b) { return {a.v - b.v}; }
CPUSERVE_INLINE F mul(F a, F b) { return {a.v * b.v}; }
CPUSERVE_INLINE F div(F a, F b) { return {a.v / b.v}; }
CPUSERVE_INLINE F max(F a, F b) { return {a.v > b.v ? a.v : b.v}; }
CPUSERVE_INLINE F min(F a, F b) { return {a.v < b.v ? a.v : b.v}; }
CPUSERVE_INLINE F fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
CPUSERVE_INLINE F fnma(F a, F b, F c) { return {c.v - a.v * b.v}; }
CPUSERVE_CALL F round(F x) {
  CPUSERVE_LANES x.v[i] = __builtin_rintf(x.v[i]);
  return x;
}
CPUSERVE_CALL F scale2(F p, F n) {
  CPUSERVE_LANES p.v[i] *= float_of((uint32_t)((int32_t)n.v[i] + 127) << 23);
  return p;
}
constexpr bool kSplitsDown = false;
CPUSERVE_CALL F split_exponent(F x, F* e) {
  *e = round(x);
  return sub(x, *e);
}
CPUSERVE_CALL F add_exponent(F p, F e) { return scale2(p, e); }
// The exponent of one float cannot hold every n in [-252, 252],
// so p is multiplied by two powers of 2 with about half of n each.
CPUSERVE_CALL F scale2_far(F p, F n) {
  const F half = round(mul(n, set1(0.5f)));
  return scale2(scale2(p, half), sub(n, half));
}
CPUSERVE_CALL F keep(F x, int lo, int hi, F other) {
  CPUSERVE_LANES x.v[i] = lo <= i && i < hi ? x.v[i] : other.v[i];
  return x;
}
CPUSERVE_CALL float reduce_add(F x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }
CPUSERVE_CALL void reduce_add4(F a, F b, F c, F d, float* out) {
  const F of[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++) out[i] = reduce_add(of[i]);
}
CPUSERVE_CALL float reduce_max(F x) {
  float m = x.v[0];
  for (int i = 1; i < kLanes; i++) m = m > x.v[i] ? m : x.v[i];
  return m;
}
CPUSERVE_CALL uint32_t lanes_between(F x, F lo, F hi) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) {
    bits |= (uint32_t)(x.v[i] >= lo.v[i] && x.v[i] < hi.v[i]) << i;
  }
  return bits;
}
CPUSERVE_INLINE I iset1(int x) {
  I r;
  CPUSERVE_LANES r.v[i] = x;
  return r;
}
CPUSERVE_INLINE I izero() { return iset1(0); }
CPUSERVE_CALL I iadd(I a, I b) {
  CPUSERVE_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]);
  return a;
}
CPUSERVE_CALL I isub(I a, I b) {
  CPUSERVE_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]);
  return a;
}
template <int n>
CPUSERVE_CALL I shl(I a) {
  CPUSERVE_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] << n);
  return a;
}
CPUSERVE_INLINE I iload1(const int32_t* p) { return iset1(*p); }
CPUSERVE_INLINE I load_bits(const float* p) {
  I r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
CPUSERVE_INLINE void store_bits(float* p, I x) { memcpy(p, x.v, sizeof x.v); }
CPUSERVE_CALL F to_float(I x) {
  F r;
  CPUSERVE_LANES r.v[i] = (float)x.v[i];
  return r;
}

// bfloat16 and half, rounded to nearest even. A NaN keeps its top bits and becomes quiet.
CPUSERVE_INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }
CPUSERVE_CALL uint16_t to_bf16(float f) {
  uint32_t u = bits_of(f);
  if (f != f) return (uint16_t)((u | 0x400000u) >> 16);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
CPUSERVE_CALL float from_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff;
  if (e == 31) return float_of(sign | 0x7f800000u | m << 13 | (m ? 0x400000u : 0));
  if (e == 0) return float_of(sign | bits_of((float)m * 0x1p-24f));
  return float_of(sign | (e + 112) << 23 | m << 13);
}
CPUSERVE_CALL uint16_t to_f16(float f) {
  uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // 65520 and above round to infinity
  if (a < 0x38800000u) {  // subnormal: adding 0.5 rounds to a multiple of 2^-24
    return (uint16_t)(sign | (bits_of(float_of(a) + 0.5f) - 0x3f000000u));
  }
  a += 0xc8000fffu + (a >> 13 & 1);  // changes the exponent bias from 127 to 15, and rounds
  return (uint16_t)(sign | a >> 13);
}

CPUSERVE_INLINE P load_pairs(const uint16_t* p) {
  P r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
CPUSERVE_INLINE void store_pairs(uint16_t* p, P x) { memcpy(p, x.v, sizeof x.v); }
CPUSERVE_INLINE P set1_pair(const uint16_t* p) {
  P r;
  CPUSERVE_LANES memcpy(r.v[i], p, 4);
  return r;
}
// A pair of bf16 is a word of 32 bits:
// the first element is its lower half, the second its upper half.
// A word with a bf16 in its upper half and zeros in its lower half is an fp32 of the same value.
typedef uint32_t PairBits __attribute__((vector_size(sizeof(P))));
CPUSERVE_INLINE PairBits pair_bits(P a) {
  PairBits r;
  memcpy(&r, &a, sizeof r);
  return r;
}
CPUSERVE_INLINE F floats_of(PairBits a) {
  F r;
  memcpy(&r, &a, sizeof r);
  return r;
}
CPUSERVE_INLINE F even(P a) { return floats_of(pair_bits(a) << 16); }
CPUSERVE_INLINE F odd(P a) { return floats_of(pair_bits(a) & 0xffff0000u); }
CPUSERVE_INLINE F dot2(F acc, P a, P b) { return fma(odd(a), odd(b), fma(even(a), even(b), acc)); }
CPUSERVE_CALL F load_bf16(const uint16_t* p) {
  F r;
  CPUSERVE_LANES r.v[i] = from_bf16(p[i]);
  return r;
}
CPUSERVE_CALL F load_f16(const uint16_t* p) {
  F r;
  CPUSERVE_LANES r.v[i] = from_f16(p[i]);
  return r;
}
CPUSERVE_CALL F load_e8m0(const uint8_t* p) {
  F r;
  CPUSERVE_LANES r.v[i] = 0.5f * float_of(p[i] ? (uint32_t)p[i] << 23 : 1u << 22);
  return r;
}
CPUSERVE_CALL F load_s8(const uint8_t* p) {
  F r;
  CPUSERVE_LANES r.v[i] = (float)(int8_t)p[i];
  return r;
}
CPUSERVE_CALL F load_nibbles(const uint8_t* p, int at) {
  F r;
  CPUSERVE_LANES r.v[i] = (float)(p[at % 8 + i] >> at / 8 * 4 & 15);
  return r;
}
CPUSERVE_CALL F load_levels(const float* levels, const uint8_t* p, int shift) {
  F r;
  CPUSERVE_LANES r.v[i] = levels[p[i] >> shift & 15];
  return r;
}
// The bits of the code are moved into an fp16, but the exponent keeps the bias 7 of E4M3.
// fp16 has the bias 15, so the result is 1/256 of the value.
CPUSERVE_CALL F load_e4m3(const uint8_t* p) {
  F r;
  CPUSERVE_LANES r.v[i] = from_f16((uint16_t)((p[i] & 0x7f) << 7 | (p[i] & 0x80) << 8));
  return r;
}
CPUSERVE_CALL void store_bf16(uint16_t* p, F x) { CPUSERVE_LANES p[i] = to_bf16(x.v[i]); }
CPUSERVE_CALL F round_bf16_normal(F x) {
  CPUSERVE_LANES x.v[i] = from_bf16(to_bf16(x.v[i]));
  return x;
}
CPUSERVE_CALL void store_bf16_normal(uint16_t* p, F x) { store_bf16(p, x); }
CPUSERVE_CALL void store_bf16_normal2(uint16_t* p, F x, F y) {
  store_bf16_normal(p, x);
  store_bf16_normal(p + kLanes, y);
}
CPUSERVE_CALL void widen_e4m3(const uint8_t* from, uint16_t* to) {
  store_bf16_normal2(to, load_e4m3(from), load_e4m3(from + kLanes));
}
CPUSERVE_CALL void store_f16(uint16_t* p, F x) { CPUSERVE_LANES p[i] = to_f16(x.v[i]); }
CPUSERVE_CALL P interleave_bf16(F even, F odd) {
  P r;
  CPUSERVE_LANES {
    r.v[i][0] = to_bf16(even.v[i]);
    r.v[i][1] = to_bf16(odd.v[i]);
  }
  return r;
}
CPUSERVE_CALL P interleave_top(F even, F odd) {
  P r;
  CPUSERVE_LANES {
    r.v[i][0] = (uint16_t)(bits_of(even.v[i]) >> 16);
    r.v[i][1] = (uint16_t)(bits_of(odd.v[i]) >> 16);
  }
  return r;
}

struct Entries {
  uint16_t v[16];
};
CPUSERVE_INLINE Entries load_entries(const uint16_t* p) {
  Entries r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
CPUSERVE_CALL P lookup_pairs(const Entries& entries, const uint8_t* p) {
  P r;
  CPUSERVE_LANES {
    r.v[i][0] = entries.v[p[i] & 15];
    r.v[i][1] = entries.v[p[i] >> 4];
  }
  return r;
}

CPUSERVE_INLINE Q load_quads(const uint8_t* p) {
  Q r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
CPUSERVE_INLINE void store_quads(uint8_t* p, Q x) { memcpy(p, x.v, sizeof x.v); }
CPUSERVE_INLINE Q set1_quad(const int8_t* p) {
  Q r;
  CPUSERVE_LANES memcpy(r.v[i], p, 4);
  return r;
}
CPUSERVE_CALL I words_of(Q x, int at) {
  I r;
  CPUSERVE_LANES {
    int16_t word;
    memcpy(&word, x.v[i] + at, 2);
    r.v[i] = word;
  }
  return r;
}
template <int n>
CPUSERVE_CALL Q minus_shifted(Q x) {
  CPUSERVE_LANES for (int j = 0; j < 4; j += 2) {
    int16_t word;
    memcpy(&word, x.v[i] + j, 2);
    word = (int16_t)(-word * (1 << n));
    memcpy(x.v[i] + j, &word, 2);
  }
  return x;
}
CPUSERVE_CALL I even_words(Q x) { return words_of(x, 0); }
CPUSERVE_CALL I odd_words(Q x) { return words_of(x, 2); }
CPUSERVE_CALL I imad(I a, I b, I c) {
  CPUSERVE_LANES c.v[i] += a.v[i] * b.v[i];
  return c;
}
CPUSERVE_CALL Q as_words(I x) {
  Q r;
  memcpy(r.v, x.v, sizeof r.v);
  return r;
}
constexpr bool kWordPairs = false;
struct WordScales {
  static constexpr bool kHas = false;
  static constexpr int kParts = 0;
};
CPUSERVE_CALL I dot_words(I acc, Q x, Q y) {
  return imad(even_words(x), even_words(y), imad(odd_words(x), odd_words(y), acc));
}
template <class T>
CPUSERVE_CALL Q load_words(const T* p) {
  Q r;
  CPUSERVE_LANES {
    const int16_t words[2] = {p[2 * i], p[2 * i + 1]};
    memcpy(r.v[i], words, 4);
  }
  return r;
}
CPUSERVE_CALL Q load_words_u8(const uint8_t* p) { return load_words(p); }
CPUSERVE_CALL Q load_words_s8(const uint8_t* p) { return load_words((const int8_t*)p); }
template <int kTo, int kBits>
CPUSERVE_CALL Q load_words_u4(const uint8_t* p) {
  Q r;
  CPUSERVE_LANES {
    const uint32_t both = (uint32_t)p[i] | (uint32_t)p[i] << 12;
    const uint32_t words = (both & ((1u << kBits) - 1) * 0x00010001u) << kTo;
    memcpy(r.v[i], &words, 4);
  }
  return r;
}
CPUSERVE_CALL Q add_words(Q x, Q y) {
  CPUSERVE_LANES for (int j = 0; j < 4; j += 2) {
    uint16_t a, b;
    memcpy(&a, x.v[i] + j, 2);
    memcpy(&b, y.v[i] + j, 2);
    a = (uint16_t)(a + b);
    memcpy(x.v[i] + j, &a, 2);
  }
  return x;
}
CPUSERVE_CALL Q low_nibbles(Q x) {
  CPUSERVE_LANES for (int j = 0; j < 4; j++) x.v[i][j] &= 15;
  return x;
}
CPUSERVE_CALL Q high_nibbles(Q x) {
  CPUSERVE_LANES for (int j = 0; j < 4; j++) x.v[i][j] = (uint8_t)(x.v[i][j] >> 4);
  return x;
}
CPUSERVE_CALL Q either(Q x, Q y) {
  CPUSERVE_LANES for (int j = 0; j < 4; j++) x.v[i][j] |= y.v[i][j];
  return x;
}
template <int kFrom, int kTo, int kBits>
CPUSERVE_CALL Q take_bits(Q x) {
  CPUSERVE_LANES for (int j = 0; j < 4; j++) {
    x.v[i][j] = (uint8_t)((x.v[i][j] >> kFrom & ((1 << kBits) - 1)) << kTo);
  }
  return x;
}
CPUSERVE_CALL Q shift_right(Q x, int n) {
  CPUSERVE_LANES for (int j = 0; j < 4; j++) x.v[i][j] = (uint8_t)(x.v[i][j] >> n);
  return x;
}
CPUSERVE_CALL Q lookup16(const uint8_t* table, Q x) {
  CPUSERVE_LANES for (int j = 0; j < 4; j++) x.v[i][j] = table[x.v[i][j]];
  return x;
}
CPUSERVE_CALL void sums_of_16(const int8_t* x, int32_t* out) {
  for (int g = 0; g < 16; g++) {
    out[g] = 0;
    for (int i = 0; i < 16; i++) out[g] += x[g * 16 + i];
  }
}
CPUSERVE_CALL I dot4(I acc, Q u, Q s) {
  CPUSERVE_LANES for (int j = 0; j < 4; j++) acc.v[i] += u.v[i][j] * (int8_t)s.v[i][j];
  return acc;
}
CPUSERVE_CALL I dot4_small(I acc, Q u, Q s) { return dot4(acc, u, s); }
CPUSERVE_CALL I dot8(I acc, Q u, Q s) { return dot4(acc, u, s); }
using S = I;
CPUSERVE_INLINE S szero() { return izero(); }
CPUSERVE_INLINE F in_order(F sum) { return sum; }
CPUSERVE_INLINE I in_order(I sum) { return sum; }
CPUSERVE_CALL S sdot(S acc, Q u, Q s) { return dot4(acc, u, s); }
CPUSERVE_INLINE I widen(S x) { return x; }
CPUSERVE_INLINE I first_factor(Q words) { return even_words(words); }
CPUSERVE_INLINE I second_factor(Q words) { return odd_words(words); }
CPUSERVE_INLINE I add_scaled(I acc, S x, I factor) { return imad(x, factor, acc); }
CPUSERVE_CALL I round_to_int(F x) {
  I r;
  CPUSERVE_LANES {
    const float v = __builtin_rintf(x.v[i]);
    r.v[i] = v > -2e9f && v < 2e9f ? (int)v : 0;
  }
  return r;
}
CPUSERVE_CALL I abs_bits(F x) {
  I r;
  CPUSERVE_LANES {
    memcpy(&r.v[i], &x.v[i], 4);
    r.v[i] &= 0x7fffffff;
  }
  return r;
}
CPUSERVE_CALL I imax(I a, I b) {
  CPUSERVE_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
CPUSERVE_CALL void reduce_add4(I a, I b, I c, I d, int32_t* out) {
  const I* of[4] = {&a, &b, &c, &d};
  for (int g = 0; g < 4; g++) {
    out[g] = 0;
    CPUSERVE_LANES out[g] += of[g]->v[i];
  }
}
CPUSERVE_CALL void reduce_max4(I a, I b, I c, I d, int32_t* out) {
  const I* of[4] = {&a, &b, &c, &d};
  for (int g = 0; g < 4; g++) {
    out[g] = of[g]->v[0];
    CPUSERVE_LANES out[g] = out[g] > of[g]->v[i] ? out[g] : of[g]->v[i];
  }
}
CPUSERVE_CALL void store_bytes(int8_t* p, I x) { CPUSERVE_LANES p[i] = (int8_t)x.v[i]; }
CPUSERVE_CALL void store_s8(int8_t* p, F x) {
  CPUSERVE_LANES {
    float r = __builtin_rintf(x.v[i]);
    p[i] = (int8_t)(r < 127.0f ? r > -127.0f ? (int)r : -127 : 127);  // NaN -> 127 at every level
  }
}
CPUSERVE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
CPUSERVE_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

#undef CPUSERVE_CALL
#undef CPUSERVE_LANES

}  // namespace CPUSERVE_NS
