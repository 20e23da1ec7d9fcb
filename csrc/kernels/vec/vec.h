// The vector primitives that kernels/generic and kernels/linear are written in.
// One header for each instruction set defines all of these primitives in namespace CPUSERVE_NS;
// an ISA unit includes one of the headers. No other file of the kernels uses intrinsics.
//
//   F  kLanes floats          I  kLanes int32
//   P  kLanes pairs of bf16   Q  kLanes quads of bytes
//
//   F zero() set1(float) load(const float*) load_n(p, n): the first n lanes, 0 in the others
//   void store(float*, F) store_n(p, F, n): the first n lanes     (loads and stores are unaligned)
//   F add sub mul div max min (F, F)    F fma(a, b, c) = a b + c   F fnma(a, b, c) = c - a b
//     max(a, b) and min(a, b) return b if a or b is NaN
//   F round(F): to nearest even         F scale2(F p, F n) = p 2^n, n integral in [-126, 127]
//   F scale2_far(F p, F n) = p 2^n, n integral in [-252, 252], rounded once
//   F split_exponent(F x, F* e): splits x into n + f with n integral, for |x| <= 2^21. Returns f,
//     which is in [0, 1] if kSplitsDown (a constexpr bool), otherwise in [-1/2, 1/2].
//     Sets e to n in the encoding that add_exponent takes.
//   F add_exponent(F p, F e) = p 2^n for the n that e encodes, in [-126, 127].
//     split_exponent and add_exponent take fewer operations than round, sub and scale2.
//   F keep(F x, int lo, int hi, F other): lanes lo <= i < hi of x, lanes of `other` elsewhere
//   float reduce_add(F) reduce_max(F): over all lanes, in one fixed order
//   uint32_t lanes_between(F x, F lo, F hi): bit i is set if lo <= x < hi in lane i
//   void reduce_add4(F, F, F, F, float* out): out[i] = reduce_add of vector i, with the same bits
//   I izero() iset1(int)  I iadd(I, I)   F to_float(I)
//   I round_to_int(F): to nearest even, undefined for NaN     I imax(I, I)
//   I abs_bits(F): the bits of |x|. As integers they have the order of |x|, and NaN is the largest.
//   void reduce_add4(I, I, I, I, int32_t*) reduce_max4: the sum or maximum of each of four vectors
//   void store_bytes(int8_t*, I): stores kLanes integers, each in [-127, 127], as bytes
//   void store_s8(int8_t*, F): to nearest even, saturated to [-127, 127]; NaN becomes 127
//   I load_bits(const float*) void store_bits(float*, I): integers in memory of type float
//   P load_pairs(const uint16_t*) set1_pair(const uint16_t*)   void store_pairs(uint16_t*, P)
//   F dot2(F acc, P a, P b):
//     acc + a.even b.even + a.odd b.odd, in an order of additions that each ISA level fixes
//   F load_bf16(const uint16_t*) load_f16(const uint16_t*): kLanes elements as floats
//   F load_e8m0(const uint8_t*): half of the E8M0 values, which are 2^(byte - 127)
//   F load_s8 load_e4m3 (const uint8_t*): kLanes bytes as floats;
//     load_e4m3 returns 1/256 of the values
//   F load_nibbles(const uint8_t* p, int at): kLanes of the 16 numbers in 8 bytes, from number `at`
//     on. Number i is the low nibble of p[i], number 8 + i its high nibble.
//   F load_levels(const float* levels, const uint8_t* p, int shift): for each of kLanes bytes,
//     levels[i], where i are its 4 bits from bit `shift` (0 or 4) on; levels are aligned to 64
//     bytes
//   void widen_e4m3(const uint8_t*, uint16_t* to): stores 1/256 of 2 kLanes values as bf16
//   Entries load_entries(const uint16_t*): a table of 16 bf16
//   P lookup_pairs(Entries, const uint8_t*): for each of kLanes bytes, the entry of its low nibble
//     (even element) and the entry of its high nibble (odd element)
//   void store_bf16(uint16_t*, F) store_f16(uint16_t*, F)    round to nearest even, NaN stays NaN
//   void store_bf16_normal(uint16_t*, F): store_bf16 with a third of the operations. A lane must
//     be finite and not denormal, or a NaN widened from bf16. Ties round to even or away from 0.
//   void store_bf16_normal2(uint16_t*, F x, F y): stores x, and then y after it
//   F round_bf16_normal(F): what store_bf16_normal stores, as floats (levels without native dot2)
//   P interleave_bf16(F even, F odd): lane i = (bf16(even[i]), bf16(odd[i]))
//   P interleave_top(F even, F odd): like interleave_bf16, but truncates instead of rounding
//   F even(P) odd(P): the even and the odd elements as floats
//   F in_order(F) I in_order(I) S in_order(S): the same value, which the compiler computes before
//   it
//     goes on
//   Q load_quads(const uint8_t*) set1_quad(const int8_t*)   void store_quads(uint8_t*, Q)
//   Q low_nibbles(Q) high_nibbles(Q)  Q either(Q, Q): bitwise or
//   Q take_bits<from, to, n>(Q): moves bits [from, from + n) of each byte to [to, to + n), and
//     clears the others
//   Q shift_right(Q, int n): shifts each byte right by n bits; the upper n bits of the result are
//     undefined
//   Q lookup16(const uint8_t* table, Q index): table[index] for each byte, index <= 15
//   I dot4(I acc, Q u8, Q s8): acc + the sum of four products in each lane, exact for all u8 and s8
//   I dot4_small(I acc, Q u8, Q s8): dot4 for u8 <= 127 and s8 other than -128
//   void sums_of_16(const int8_t* x, int32_t* out): out[i] = sum of x[16 i] to x[16 i + 15], i < 16
//   I isub(I, I)  I shl<n>(I)  iload1(const int32_t*): one value in every lane
//   I imad(I a, I b, I c) = a b + c
//   Q load_words_u8(const uint8_t*) load_words_s8: 2 kLanes bytes, each widened to a 16-bit word
//   Q load_words_u4<to, n>(const uint8_t*): kLanes bytes, each widened to two 16-bit words: the
//     lowest n bits of its low nibble and of its high nibble, moved to bits [to, to + n)
//   Q add_words(Q, Q): sums of 16-bit words
//   Q minus_shifted<n>(Q words): -(word << n)
//   I even_words(Q) odd_words(Q): the first and the second word of each lane
//   I dot_words(I acc, Q x, Q y): acc + x.even y.even + x.odd y.odd
//   Q as_words(I): the same bits
//   void prefetch(const void*) prefetch_l2(const void*)
//
// The fastest way to multiply bytes differs between instruction sets, so the tiles
// of kernels/linear depend on the following constants and functions of each instruction set:
//   constexpr bool kNativeDot2; if false, dot2 is fma(odd a, odd b, fma(even a, even b, acc))
//   constexpr int kDot8Zero; I dot8(I acc, Q u8, Q s8 other than -128): acc + the sum of
//     (u8 - 128 + kDot8Zero) s8
//   S: small sums of 16 or 32 bits. S szero()  S sdot(S, Q u8 <= 127, Q s8): adds products
//     I widen(S): the sums as int32
//     constexpr bool kWideS: S is the type I, so its sums may start from any value
//     constexpr int kProductsOfQuad: how many of the four products sdot adds to one of these sums
//     first_factor(Q words) second_factor(Q words): the first and the second word of each lane,
//       as add_scaled takes them
//     I add_scaled(I acc, S x, factor): acc + widen(x) factor
//   constexpr bool kEmulatesDots: dot4, dot8 and sdot take several instructions
//   constexpr bool kWordPairs: pairs of small sums are scaled by dot_words, not each by imad
//   struct WordScales: static constexpr bool kHas: dot_words is one instruction, and S is the type
//   I.
//     Scales are words, two in a lane, and sums that fit a word are scaled faster than by imad.
//     constexpr int kParts: so many parts of a sub-block that fit a word are scaled faster
//     Q one<kSecond>(Q words): a scale of each lane, for I add(I acc, I sums, Q one)
//     Q both(Q words, bool second): a scale of each lane in both words, for
//       Q products(Q codes, Q both): bytes times scales, if no product leaves its byte
//     Q minus(Q, Q): the differences of words
//   constexpr bool kUnpacksCodes: products of many rows unpack codes to bytes first
//     (linear/unpacked.h), where that is faster
//   struct SumStarts: static constexpr bool kHas: sums may start from numbers in memory. If so:
//     S start(const int32_t* p): sums that begin with *p; if S has sums of 16 bits, *p has two:
//       for the first two products of a quad, and for the others
//     void minus<kPart, kShift>(const int8_t* x, int32_t* out): what start() takes for each kPart
//       of 128 elements: -2^kShift times their sum. kPart is 16 or 32, with WordScales 8
//   constexpr int kLanes, kVecs = kPanel / kLanes
//   constexpr int kTileRows, kTileVecs: the largest register tile of float sums is kTileRows rows
//     by kTileVecs vectors: 6 x 4 with AVX-512, 6 x 2 with AVX2, 6 x 4 with NEON
//   constexpr int kGroupVecs: the most int32 vectors in a register tile of a quantized linear
//
// Every function is `static inline` and always_inline: an ISA unit may export no symbols of these.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CPUSERVE_INLINE static inline __attribute__((always_inline))
