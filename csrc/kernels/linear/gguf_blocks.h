// Reads blocks of GGUF: k-quants, the 5-bit types, the 4-bit types with a table of values,
// and the types of 1 to 3 bits where a code selects 4 or 8 weights from a grid (iq_grids.h).
//
// A block has kUnit weights w. Every kSub weights share a scale and, with kMin, a minimum:
//   w = scale * value(code) + minimum
// Blocks of 32 weights store the scale (and the minimum) directly. Blocks of 256 weights store
// both as small integers, with an fp16 factor d for all scales and an fp16 factor m for all minima:
//   scale = d * scales[j]      minimum = -(m * leasts[j])
// Types with a grid are stored as the values that the grid has, not as the codes that select them.
#pragma once
#include "kernels/linear/iq_grids.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {
namespace {

// How the factors (scales and minima) of a block are stored in a panel (plane_layout.h).
enum class Factors { half, exponent, bytes, nibbles, odd_nibbles, deltas, zero_points };
// Whether two small scales share a byte.
constexpr bool two_in_byte(Factors form) {
  return form == Factors::odd_nibbles || form == Factors::deltas;
}
// Whether each sub-block of kSub weights has a small integer scale,
// in addition to the fp16 factor of the block.
constexpr bool has_small(Factors form) {
  return form == Factors::bytes || form == Factors::nibbles || two_in_byte(form);
}

// The contents of a block, unpacked. The codes q of the weights are not negative.
struct BlockCodes {
  uint16_t d, m;  // fp16; with Factors::exponent d is a byte, with zero_points m is the zero point
  int8_t scales[16];
  uint8_t leasts[16];
  uint8_t q[256];
};

inline uint16_t half_at(const uint8_t* p) {
  uint16_t x;
  memcpy(&x, p, sizeof x);
  return x;
}
// Codes are written in words of 4 bytes or more, because pack_column reads them in words:
// a CPU waits if it loads a word that was stored byte by byte.

// Reads 2 n codes of 4 bits, where n is a multiple of 8.
// The low nibble of byte i is code i, and its high nibble is code i + n.
inline void take_nibbles(const uint8_t* from, int n, uint8_t* q) {
  constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0fu;
  for (int i = 0; i < n; i += 8) {
    uint64_t bytes;
    memcpy(&bytes, from + i, sizeof bytes);
    const uint64_t low = bytes & kLow, high = bytes >> 4 & kLow;
    memcpy(q + i, &low, sizeof low);
    memcpy(q + i + n, &high, sizeof high);
  }
}

// Returns the four codes in the lowest 4 * kBits bits of `bits` as the four bytes of a word.
template <int kBits>
inline uint32_t spread_codes(uint32_t bits) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  if constexpr (kBits <= 2) {  // the four codes are in one byte, so shifted copies do not overlap
    constexpr int kStep = 8 - kBits;
    const uint32_t b = bits & ((1u << 4 * kBits) - 1);
    return (b | b << kStep | b << 2 * kStep | b << 3 * kStep) & kMask * 0x01010101u;
  }
  return (bits & kMask) | (bits >> kBits & kMask) << 8 | (bits >> 2 * kBits & kMask) << 16 |
         (bits >> 3 * kBits & kMask) << 24;
}

// Adds kBits bits to each code in q, at bit kTo. Byte i of `from` (i < 32) has bits of the codes
// i, 32 + i, 64 + i, ...: code i has its lowest kBits bits, code 32 + i the bits above, and so on.
template <int kBits, int kTo>
inline void add_runs(const uint8_t* __restrict from, int runs, uint8_t* __restrict q) {
  for (int s = 0; s < runs; s++, q += 32) {
    for (int i = 0; i < 32; i++) {
      q[i] = static_cast<uint8_t>(q[i] | (from[i] >> s * kBits & ((1 << kBits) - 1)) << kTo);
    }
  }
}

// Adds bit 4 to each of the 32 codes in q. Bit 4 of code i is bit i % 8 of byte i / 8 of `from`.
inline void add_bits(const uint8_t* from, uint8_t* q) {
  uint32_t bits, codes[8];
  memcpy(&bits, from, sizeof bits);
  memcpy(codes, q, sizeof codes);
  for (int i = 0; i < 8; i++) codes[i] |= spread_codes<1>(bits >> 4 * i) << 4;
  memcpy(q, codes, sizeof codes);
}

// Reads eight small scales and eight small minima, of 6 bits each, from the 12 bytes at s.
inline void take_scales6(const uint8_t* s, BlockCodes& c) {
  for (int j = 0; j < 4; j++) {
    c.scales[j] = s[j] & 63;
    c.leasts[j] = s[j + 4] & 63;
    c.scales[j + 4] = static_cast<int8_t>((s[j + 8] & 15) | s[j] >> 6 << 4);
    c.leasts[j + 4] = static_cast<uint8_t>(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
  }
}

struct GgufQ4K {
  static constexpr int kUnit = 256, kBytes = 144, kSub = 32, kLow = 4, kHigh = 0, kZero = 0;
  static constexpr int kMostScale = 63;
  static constexpr Factors kFactors = Factors::bytes;
  static constexpr bool kMin = true, kTable = false;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    c.m = half_at(b + 2);
    take_scales6(b + 4, c);
    for (int p = 0; p < 4; p++) take_nibbles(b + 16 + 32 * p, 32, c.q + 64 * p);
  }
};

struct GgufQ5K {
  static constexpr int kUnit = 256, kBytes = 176, kSub = 32, kLow = 4, kHigh = 1, kZero = 0;
  static constexpr int kMostScale = 63;
  static constexpr Factors kFactors = Factors::bytes;
  static constexpr bool kMin = true, kTable = false;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    c.m = half_at(b + 2);
    take_scales6(b + 4, c);
    for (int p = 0; p < 4; p++) take_nibbles(b + 48 + 32 * p, 32, c.q + 64 * p);
    add_runs<1, 4>(b + 16, 8, c.q);
  }
};

struct GgufQ6K {
  static constexpr int kUnit = 256, kBytes = 210, kSub = 16, kLow = 4, kHigh = 2, kZero = 32;
  static constexpr int kMostScale = 128;
  static constexpr Factors kFactors = Factors::bytes;
  static constexpr bool kMin = false, kTable = false;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b + 208);
    memcpy(c.scales, b + 192, 16);
    for (int h = 0; h < 2; h++) {
      take_nibbles(b + 64 * h, 64, c.q + 128 * h);
      add_runs<2, 4>(b + 128 + 32 * h, 4, c.q + 128 * h);
    }
  }
};

struct GgufQ3K {
  static constexpr int kUnit = 256, kBytes = 110, kSub = 16, kLow = 2, kHigh = 1, kZero = 4;
  static constexpr int kMostScale = 32;
  static constexpr Factors kFactors = Factors::bytes;
  static constexpr bool kMin = false, kTable = false;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b + 108);
    for (int j = 0; j < 16; j++) {
      const int low = b[96 + j % 8] >> j / 8 * 4 & 15, high = b[104 + j % 4] >> j / 4 * 2 & 3;
      c.scales[j] = static_cast<int8_t>((low | high << 4) - 32);
    }
    memset(c.q, 0, sizeof c.q);
    for (int h = 0; h < 2; h++) add_runs<2, 0>(b + 32 + 32 * h, 4, c.q + 128 * h);
    add_runs<1, 2>(b, 8, c.q);
  }
};

struct GgufQ2K {
  static constexpr int kUnit = 256, kBytes = 84, kSub = 16, kLow = 2, kHigh = 0, kZero = 0;
  static constexpr int kMostScale = 15;
  static constexpr Factors kFactors = Factors::nibbles;
  static constexpr bool kMin = true, kTable = false;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b + 80);
    c.m = half_at(b + 82);
    for (int j = 0; j < 16; j++) {
      c.scales[j] = b[j] & 15;
      c.leasts[j] = b[j] >> 4;
    }
    memset(c.q, 0, sizeof c.q);
    for (int h = 0; h < 2; h++) add_runs<2, 0>(b + 16 + 32 * h, 4, c.q + 128 * h);
  }
};

template <bool kMinimum>
struct GgufQ5 {
  static constexpr int kUnit = 32, kBytes = kMinimum ? 24 : 22, kSub = 32, kLow = 4, kHigh = 1;
  static constexpr int kZero = kMinimum ? 0 : 16;
  static constexpr Factors kFactors = Factors::half;
  static constexpr bool kMin = kMinimum, kTable = false;
  static void take(const uint8_t* b, BlockCodes& c) {
    const uint8_t* bits = b + (kMin ? 4 : 2);
    c.d = half_at(b);
    c.m = kMin ? half_at(b + 2) : uint16_t{0};
    take_nibbles(bits + 4, 16, c.q);
    add_bits(bits, c.q);
  }
};

// The values of the codes 0 to 15 in IQ4_NL and IQ4_XS, plus 128.
constexpr uint8_t kIq4Values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                    129, 141, 153, 166, 181, 197, 217, 241};
// The values of the codes 0 to 15 in E2M1 (FP4), times 2, plus 16. With 16, not 128, the operands
// of products are at most 28, so that four quads fit a 16-bit sum (plane_layout.h).
constexpr uint8_t kFp4Values[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

struct GgufIq4Nl {
  static constexpr int kUnit = 32, kBytes = 18, kSub = 32, kLow = 4, kHigh = 0, kZero = 128;
  static constexpr Factors kFactors = Factors::half;
  static constexpr bool kMin = false, kTable = true;
  static constexpr const uint8_t* values() { return kIq4Values; }
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    take_nibbles(b + 2, 16, c.q);
  }
};

struct GgufIq4Xs {
  static constexpr int kUnit = 256, kBytes = 136, kSub = 32, kLow = 4, kHigh = 0, kZero = 128;
  static constexpr int kMostScale = 32;
  static constexpr Factors kFactors = Factors::bytes;
  static constexpr bool kMin = false, kTable = true;
  static constexpr const uint8_t* values() { return kIq4Values; }
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    for (int j = 0; j < 8; j++) {
      const int low = b[4 + j / 2] >> j % 2 * 4 & 15, high = half_at(b + 2) >> 2 * j & 3;
      c.scales[j] = static_cast<int8_t>((low | high << 4) - 32);
      take_nibbles(b + 8 + 16 * j, 16, c.q + 32 * j);
    }
  }
};

struct GgufMxfp4 {
  static constexpr int kUnit = 32, kBytes = 17, kSub = 32, kLow = 4, kHigh = 0, kZero = 16;
  static constexpr Factors kFactors = Factors::exponent;
  static constexpr bool kMin = false, kTable = true;
  static constexpr const uint8_t* values() { return kFp4Values; }
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = b[0];
    take_nibbles(b + 1, 16, c.q);
  }
};

// Types with a grid. An entry of a grid has 4 or 8 magnitudes, and each weight has a sign bit.
// A code is the number of the magnitude and, above it, the sign. d is multiplied by kFactor
// (a constant of the type), which is not folded into the stored fp16: a small d would lose bits.

// Returns the 8 bits of `bits` as the lowest bits of 8 bytes.
inline uint64_t spread_bits(uint64_t bits) {
  const uint64_t one_each = bits * 0x0101010101010101u & 0x8040201008040201u;
  return (one_each + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}
// Returns the eight 2-bit numbers of an entry as 8 bytes.
inline uint64_t spread_twos(uint64_t entry) {
  entry = (entry | entry << 24) & 0x000000ff000000ffu;
  entry = (entry | entry << 12) & 0x000f000f000f000fu;
  return (entry | entry << 6) & 0x0303030303030303u;
}
// Returns the four 4-bit numbers of each of two entries as 8 bytes.
inline uint64_t spread_fours(uint64_t first, uint64_t second) {
  uint64_t entry = first | second << 32;
  entry = (entry | entry << 8) & 0x00ff00ff00ff00ffu;
  return (entry | entry << 4) & 0x0f0f0f0f0f0f0f0fu;
}
// Returns 8 signs from the 7 that are stored: the number of negative weights is even.
inline uint64_t eighth_sign(uint32_t seven) {
  seven &= 127;
  return seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7;
}
inline void put_codes(uint64_t codes, uint8_t* q) { memcpy(q, &codes, sizeof codes); }
// Reads `n` scales 2 s + 1, where each byte has two numbers s of 4 bits, the lower one first.
inline void take_odd_scales(const uint8_t* from, int n, BlockCodes& c) {
  for (int j = 0; j < n; j++) {
    c.scales[j] = static_cast<int8_t>(2 * (from[j / 2] >> j % 2 * 4 & 15) + 1);
  }
}

// The values of codes in IQ2_XXS, IQ2_XS and IQ2_S, plus 64; the codes 3 and 7 do not occur.
constexpr uint8_t kIq2Values[16] = {72, 89, 107, 64, 56, 39, 21, 64,
                                    72, 89, 107, 64, 56, 39, 21, 64};
// The values of codes in IQ3_XXS, plus 64, and in IQ3_S, plus 16.
constexpr uint8_t kIq3XxsValues[16] = {68, 76, 84, 92, 100, 108, 116, 126,
                                       60, 52, 44, 36, 28,  20,  12,  2};
constexpr uint8_t kIq3SValues[16] = {17, 19, 21, 23, 25, 27, 29, 31, 15, 13, 11, 9, 7, 5, 3, 1};
// The values of codes in IQ1_M, plus 16: 8 t + 1, and 8 t - 1 from code 4 on, for t = -1, 0 and 1.
constexpr uint8_t kIq1Values[16] = {9, 17, 25, 16, 7, 15, 23, 16, 9, 17, 25, 16, 7, 15, 23, 16};

struct Iq2Planes {
  static constexpr int kUnit = 256, kLow = 2, kHigh = 1, kZero = 64;
  static constexpr int kMostScale = 31;
  static constexpr Factors kFactors = Factors::odd_nibbles;
  static constexpr bool kMin = false, kTable = true;
  static constexpr const uint8_t* values() { return kIq2Values; }
  static void put(uint64_t entry, uint64_t signs, uint8_t* q) {
    put_codes(spread_twos(entry) | spread_bits(signs) << 2, q);
  }
};

struct GgufIq2Xxs : Iq2Planes {
  static constexpr int kBytes = 66, kSub = 32;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    for (int g = 0; g < 8; g++) {
      uint32_t words[2];  // four indices; four times seven signs, and the scale
      memcpy(words, b + 2 + g * 8, sizeof words);
      c.scales[g] = static_cast<int8_t>(2 * (words[1] >> 28) + 1);
      for (int e = 0; e < 4; e++) {
        put(kIq2XxsGrid[words[0] >> 8 * e & 255], eighth_sign(words[1] >> 7 * e),
            c.q + g * 32 + e * 8);
      }
    }
  }
};

struct GgufIq2Xs : Iq2Planes {
  static constexpr int kBytes = 74, kSub = 16;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    for (int e = 0; e < 32; e++) {
      const uint32_t word = half_at(b + 2 + e * 2);  // 9 bits of the index, and seven signs
      put(kIq2XsGrid[word & 511], eighth_sign(word >> 9), c.q + e * 8);
    }
    take_odd_scales(b + 66, 16, c);
  }
};

struct GgufIq2S : Iq2Planes {
  static constexpr int kBytes = 82, kSub = 16;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    for (int e = 0; e < 32; e++) {
      const int high = b[66 + e / 4] >> e % 4 * 2 & 3;
      put(kIq2SGrid[b[2 + e] | high << 8], b[34 + e], c.q + e * 8);
    }
    take_odd_scales(b + 74, 16, c);
  }
};

struct Iq3Planes {
  static constexpr int kUnit = 256, kSub = 32, kLow = 4, kHigh = 0;
  static constexpr int kMostScale = 31;
  static constexpr Factors kFactors = Factors::odd_nibbles;
  static constexpr bool kMin = false, kTable = true;
  static void put(uint64_t first, uint64_t second, uint64_t signs, uint8_t* q) {
    put_codes(spread_fours(first, second) | spread_bits(signs) << 3, q);
  }
};

struct GgufIq3Xxs : Iq3Planes {
  static constexpr int kBytes = 98, kZero = 64;
  static constexpr const uint8_t* values() { return kIq3XxsValues; }
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    for (int g = 0; g < 8; g++) {
      uint32_t word;  // four times seven signs, and the scale
      memcpy(&word, b + 66 + g * 4, sizeof word);
      c.scales[g] = static_cast<int8_t>(2 * (word >> 28) + 1);
      const uint8_t* index = b + 2 + g * 8;
      for (int e = 0; e < 4; e++, index += 2) {
        put(kIq3XxsGrid[index[0]], kIq3XxsGrid[index[1]], eighth_sign(word >> 7 * e),
            c.q + g * 32 + e * 8);
      }
    }
  }
};

struct GgufIq3S : Iq3Planes {
  static constexpr int kBytes = 110, kZero = 16;
  static constexpr const uint8_t* values() { return kIq3SValues; }
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    for (int e = 0; e < 32; e++) {
      const uint8_t* index = b + 2 + e * 2;
      const int high = b[66 + e / 4] >> e % 4 * 2;
      put(kIq3SGrid[index[0] | (high & 1) << 8], kIq3SGrid[index[1] | (high & 2) << 7], b[74 + e],
          c.q + e * 8);
    }
    take_odd_scales(b + 106, 8, c);
  }
};

// Ternary weights t with a common delta of 1/8 or -1/8 for 32 weights: w = d (2 s + 1) (t + delta).
// With the code t + 1, that is a scale d (2 s + 1) and a minimum -(d / 8) (2 s + 1) (8 - 8 delta).
struct GgufIq1S {
  static constexpr int kUnit = 256, kBytes = 50, kSub = 32, kLow = 2, kHigh = 0, kZero = 0;
  static constexpr int kMostScale = 15;
  static constexpr Factors kFactors = Factors::deltas;
  static constexpr bool kMin = true, kTable = false;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    for (int g = 0; g < 8; g++) {
      const uint32_t word = half_at(b + 34 + g * 2);  // four times 3 bits, scale, sign of the delta
      c.scales[g] = static_cast<int8_t>(2 * (word >> 12 & 7) + 1);
      c.leasts[g] = static_cast<uint8_t>(c.scales[g] * (word >> 15 ? 9 : 7));
      for (int e = 0; e < 4; e++) {
        const uint32_t high = word >> 3 * e & 7;
        put_codes(spread_twos(kIq1Grid[b[2 + g * 4 + e] | high << 8]), c.q + g * 32 + e * 8);
      }
    }
  }
};

// As IQ1_S, but 8 weights share a delta, and the bits of d are in the upper bits of the scales.
struct GgufIq1M {
  static constexpr int kUnit = 256, kBytes = 56, kSub = 16, kLow = 2, kHigh = 1, kZero = 16;
  static constexpr int kMostScale = 15;
  static constexpr Factors kFactors = Factors::odd_nibbles;
  static constexpr bool kMin = false, kTable = true;
  static constexpr const uint8_t* values() { return kIq1Values; }
  static void take(const uint8_t* b, BlockCodes& c) {
    uint32_t d = 0;
    for (int i = 0; i < 4; i++) {
      const uint32_t word = half_at(b + 48 + i * 2);  // four times 3 bits, and 4 bits of d
      d |= word >> 12 << 4 * i;
      for (int j = 0; j < 4; j++) {
        c.scales[i * 4 + j] = static_cast<int8_t>(2 * (word >> 3 * j & 7) + 1);
      }
    }
    c.d = static_cast<uint16_t>(d);
    for (int e = 0; e < 32; e++) {
      const uint32_t high = b[32 + e / 2] >> e % 2 * 4;  // 3 bits of the index, sign of the delta
      const uint64_t delta = (high & 8) * 0x0101010101010101u >> 1;
      put_codes(spread_twos(kIq1Grid[b[e] | (high & 7) << 8]) | delta, c.q + e * 8);
    }
  }
};

// The constant that multiplies d, in the scales of a type.
template <class G>
constexpr float kFactor = 1.0f;
template <>
constexpr float kFactor<GgufIq2Xxs> = 0.125f;
template <>
constexpr float kFactor<GgufIq2Xs> = 0.125f;
template <>
constexpr float kFactor<GgufIq2S> = 0.125f;
template <>
constexpr float kFactor<GgufIq3Xxs> = 0.25f;
template <>
constexpr float kFactor<GgufIq1M> = 0.125f;
// With Factors::deltas, minima are multiples of d times this constant.
constexpr float kDelta = 0.125f;

// Returns the largest operand of a product that the kind has: a code, or a value of its table.
template <class G>
constexpr int largest_code() {
  if constexpr (!G::kTable) return (1 << (G::kLow + G::kHigh)) - 1;
  if constexpr (G::kTable) {
    int largest = 0;
    for (int i = 0; i < 16; i++) largest = G::values()[i] > largest ? G::values()[i] : largest;
    return largest > 127 ? 255 : largest;
  }
}

inline float factor_of(Factors form, uint16_t d) {
  float out[kLanes];
  if (form == Factors::exponent) {
    uint8_t bytes[16] = {static_cast<uint8_t>(d)};
    store(out, load_e8m0(bytes));
  } else {
    uint16_t halves[kLanes] = {d};
    store(out, load_f16(halves));
  }
  return out[0];
}

// Writes the weights of a block as fp32: s * (value - zero) + min, as table/weights.h defines them.
template <class G>
inline void block_floats(const BlockCodes& c, float* out) {
  constexpr bool kScaled = has_small(G::kFactors), kZeros = G::kFactors == Factors::zero_points;
  constexpr bool kAdds = G::kMin && !kZeros;
  const float d = factor_of(G::kFactors, c.d) * kFactor<G>;
  const float m = !kAdds                           ? 0.0f
                  : G::kFactors == Factors::deltas ? d * kDelta
                                                   : factor_of(Factors::half, c.m);
  const int zero = kZeros ? c.m : G::kZero;
  for (int j = 0; j < G::kUnit / G::kSub; j++) {
    const float scale = kScaled ? d * static_cast<float>(c.scales[j]) : d;
    const float least = kScaled ? -(m * static_cast<float>(c.leasts[j])) : m;
    for (int i = j * G::kSub; i < (j + 1) * G::kSub; i++) {
      int q = c.q[i];
      if constexpr (G::kTable) q = G::values()[q];
      const float x = scale * static_cast<float>(q - zero);
      out[i] = kAdds ? x + least : x;
    }
  }
}

// Writes elements [k0, k0 + n) of a source row (GGUF blocks) as fp32; k0 and n: multiples of 32.
template <class G>
inline void read_blocks(const void* row, int64_t k0, int n, float* out) {
  for (int i = 0; i < n;) {
    const int64_t block = (k0 + i) / G::kUnit;
    const int at = static_cast<int>((k0 + i) % G::kUnit);
    const int some = n - i < G::kUnit - at ? n - i : G::kUnit - at;
    BlockCodes c{};
    float x[G::kUnit];
    G::take(static_cast<const uint8_t*>(row) + block * G::kBytes, c);
    block_floats<G>(c, x);
    memcpy(out + i, x + at, sizeof(float) * static_cast<size_t>(some));
    i += some;
  }
}

}  // namespace
}  // namespace CPUSERVE_NS
