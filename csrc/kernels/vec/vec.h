// The vector primitives that kernels/generic and kernels/linear are written in. One header per
// instruction set defines the same primitives in namespace CPUSERVE_NS (an ISA unit's
// own); nothing else in the kernels refers to an instruction set.
//
//   F  kLanes floats          I  kLanes int32
//   P  kLanes pairs of bf16   Q  kLanes quads of bytes
//
//   F zero() set1(float) load(const float*) load_n(p, n: first n lanes, others 0)
//   void store(float*, F) store_n(p, F, n)                        (all unaligned)
//   F add sub mul div max min (F, F)    F fma(a, b, c) = a b + c   F fnma(a, b, c) = c - a b
//   F round(F) to nearest even          F scale2(F p, F n) = p 2^n, n integral in [-126, 127]
//   F scale2_far(F p, F n) the same for n in [-252, 252], rounded once
//   F split_exponent(F x, F* e): f of x = n + f with n integral, |x| <= 2^21; f is in [0, 1] if
//     kSplitsDown (a constexpr bool), otherwise in [-1/2, 1/2]
//   F add_exponent(F p, F e) = p 2^n, n in [-126, 127]: both together take fewer operations than
//     round, sub and scale2
//   F keep(F x, int lo, int hi, F other): lanes lo <= i < hi of x, `other` elsewhere
//   float reduce_add(F) reduce_max(F): one fixed tree
//   void reduce_add4(F, F, F, F, float*): four of reduce_add at once, with the same bits
//   I izero() iset1(int)  I iadd(I, I)   F to_float(I)
//   I round_to_int(F): rne, undefined for NaN     I imax(I, I)
//   I abs_bits(F): the bits of |x|, in the order of |x|, NaN above infinity
//   void reduce_add4(I, I, I, I, int32_t*) reduce_max4: reduces four vectors at once
//   void store_bytes(int8_t*, I): kLanes of them, each in [-127, 127]
//   I load_bits(const float*) void store_bits(float*, I): integers stored in memory for floats
//   P load_pairs(const uint16_t*) set1_pair(const uint16_t*)   void store_pairs(uint16_t*, P)
//   F dot2(F acc, P a, P b):
//     acc + a.even b.even + a.odd b.odd, in an order fixed for each ISA
//   F load_bf16(const uint16_t*) load_f16(const uint16_t*)   (kLanes elements)
//   F load_e8m0(const uint8_t*): half of 2^(byte - 127)
//   F load_s8(const uint8_t*) load_e5m2(const uint8_t*) load_e4m3(const uint8_t*): 1/256 of it
//   F load_nibbles(const uint8_t* p, int at): numbers from `at` on, of 16 in 8 bytes; number i is
//     the low nibble of p[i], number 8 + i its high nibble
//   void widen_e4m3(const uint8_t*, uint16_t* to): 2 kLanes of them as bf16, again 1/256 of each
//   Entries load_entries(const uint16_t*): a table of 16 bf16   P lookup_pairs(Entries,
//     const uint8_t*): of kLanes bytes, the entries of the low (even) and the high nibbles (odd)
//   void store_bf16(uint16_t*, F) store_f16(uint16_t*, F)    round to nearest even, NaN stays NaN
//   void store_bf16_normal(uint16_t*, F): the same of lanes that are not denormal and finite, or a
//     NaN that was a bf16; ties go to even or away from 0. It takes a third of the operations.
//   void store_bf16_normal2(uint16_t*, F x, F y): of x, and then of y
//   P interleave_bf16(F even, F odd): lane i = (bf16(even[i]), bf16(odd[i]))
//   P interleave_top(F even, F odd): the same, truncated instead of rounded  F even(P) odd(P)
//   Q load_quads(const uint8_t*) set1_quad(const int8_t*)
//   Q low_nibbles(Q) high_nibbles(Q)  Q either(Q, Q): the bits that are set in one of them
//   Q take_bits<from, to, n>(Q): bits [from, from + n) of each byte at [to, to + n), others 0
//   Q shift_right(Q, int n): bits [n, 8) of each byte at [0, 8 - n), others anything
//   Q lookup16(const uint8_t* table, Q index <= 15): entry of 16 for each byte
//   I dot4(I acc, Q u8, Q s8): exact int32 for every u8 and s8
//   I dot4_small(I acc, Q u8, Q s8 not -128): the same where u8 <= 127
//   void sums_of_16(const int8_t* x, int32_t* out): 16 sums of 16 neighbours each
//   I isub(I, I)  I shl<n>(I)  iload1(const int32_t*): one value in every lane
//   I imad(I a, I b, I c) = a b + c
//   Q load_words_u8(const uint8_t*) load_words_s8: 2 kLanes bytes as words of 16 bits
//   Q minus_shifted<n>(Q words): -(word << n)
//   I even_words(Q) odd_words(Q): the first and the second word of each lane
//   I dot_words(I acc, Q x, Q y): acc + x.even y.even + x.odd y.odd
//
// Only kernels/linear uses the following, because instruction sets differ in the cheap operations:
//   constexpr bool kNativeDot2; if false, dot2 is fma(odd a, odd b, fma(even a, even b, acc))
//   constexpr int kDot8Zero; I dot8(I acc, Q u8, Q s8 not -128): acc + sum (u8 - 128 + kDot8Zero)
//   s8 S small accumulators; S szero()  S sdot(S, Q u8 <= 15, Q s8) at most 8 times  I widen(S)
//     constexpr bool kWideS: S is I and may start from any value
//   constexpr bool kEmulatesDots: dot4 and its like are several instructions
//   void store_s8(int8_t*, F): rne, saturate to [-127, 127], NaN 127    (kLanes bytes)
//   max(a, b) and min(a, b) are b when either is NaN
//   void prefetch(const void*) prefetch_l2(const void*)
//   constexpr int kLanes, kVecs = kPanel / kLanes, and the register tile limits
//   kTileRows x kTileVecs (accumulators that fit: avx512 6 x 4; avx2 6 x 2; neon 6 x 4), and for
//   the quantized tiles kGroupVecs int32 accumulators in all
//
// Every function is `static inline` and always_inline: no symbol may leak out of the unit.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CPUSERVE_INLINE static inline __attribute__((always_inline))
