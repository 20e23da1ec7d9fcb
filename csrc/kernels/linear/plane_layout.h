// The layout of a panel with codes stored as planes of bits,
// for the kinds that are packed from the blocks of kernels/linear/gguf_blocks.h.
//
// A unit of a panel is { factors (scales and minima); groups of 32 weights for each column }.
// A group has kLow lines with the low bits of its codes, and kHigh lines with the higher bits.
// A line has four bytes of each column. Byte j of column c in line r has bits of these elements k:
//   4 low bits   k = 8 r + j in the low nibble, k = 8 r + 4 + j in the high nibble of the byte
//   2 bits       bits 2 i and 2 i + 1 of the byte belong to k = 16 r + 4 i + j
//   1 bit        bit i of the byte belongs to k = 4 i + j (there is only line r = 0)
// The layout of the factors of a unit depends on the enum Factors:
//   half            { fp16 d[16]; fp16 m[16] }
//   exponent        { u8 exponent[16] }
//   bytes           { fp16 d[16]; fp16 m[16]; s8 scale[pairs][16][2]; u8 least[pairs][16][2] }
//   nibbles         { fp16 d[16]; fp16 m[16]; u8 both[pairs][16][2] }, the scale in the low nibble
//   odd_nibbles     { fp16 d[16]; u8 both[pairs][16] }: the low nibble s of a byte is the scale
//                   2 s + 1 of the first sub-block of a pair, the high nibble that of the second
//   deltas          as odd_nibbles, but s has 3 bits, and the fourth bit is the sign of the delta:
//                   the small minimum is 7 (2 s + 1), or 9 (2 s + 1) with the sign; m is d / 8
//   zero_points     { fp16 d[16]; u8 zero[8] }: byte c has the zero points of column c (low nibble)
//                   and column c + 8 (high nibble); the minimum is -zero * d
// In kinds without minima, the fields m and least are left out. kFactor multiplies d in the scales.
// A sub-block is 16 or 32 weights with a common small scale (`scale`) and small minimum (`least`).
// Sub-blocks 2 i and 2 i + 1 are a pair: their small scales are adjacent, and their small minima.
#pragma once
#include "kernels/linear/gguf_blocks.h"
#include "kernels/linear/source.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {
namespace {

// Returns how many of the eight quads of a group a small sum can add, a power of two. A sum
// of 16 bits adds kProductsOfQuad products of a quad, each at most `largest` (a code) times 127:
// 8 quads of 4-bit codes (8 * 2 * 15 * 127 = 30,480), 4 of 5-bit codes, 2 of 6-bit codes.
constexpr int quads_of_small_sum(int largest) {
  int quads = 8;
  while (!kWideS && quads * kProductsOfQuad * largest * 127 > 32767) quads /= 2;
  return quads;
}

constexpr bool kScalesWords = WordScales::kHas;
// Returns how many quads (1, 2, 4 or 8) of codes of at most `largest` have sums that fit a word.
constexpr int quads_of_word(int largest) {
  int quads = 8;
  while (quads > 1 && quads * 4 * largest * 127 > 32767) quads /= 2;
  return quads;
}
// Whether sub-blocks of `sub` codes are summed in parts that fit a word, each of which dot_words
// multiplies by its scale. imad multiplies a whole sub-block, but takes as long as three parts.
constexpr bool sums_words(int largest, int sub) {
  return 4 * largest * 127 <= 32767 && 4 * quads_of_word(largest) * WordScales::kParts >= sub;
}

// How the products of codes are summed: in small sums of kSumQuads quads each. Codes from a table
// of bytes, where 128 represents 0, need sums of 32 bits.
template <int kLargest, int kScaledSub>
struct SmallCodes {
  using Sum = S;
  static constexpr bool kStartsFromAny = kWideS, kWords = sums_words(kLargest, kScaledSub);
  static constexpr int kSumQuads = kWords ? quads_of_word(kLargest) : quads_of_small_sum(kLargest);
  CPUSERVE_INLINE S start() { return szero(); }
  CPUSERVE_INLINE I finish(S x) { return widen(x); }
  CPUSERVE_INLINE S dot(S acc, Q w, Q a) { return sdot(acc, w, a); }
  template <bool kSecond>
  CPUSERVE_INLINE auto factor(Q words) {
    return kSecond ? second_factor(words) : first_factor(words);
  }
  template <class Factor>
  CPUSERVE_INLINE I scaled(I acc, S x, Factor f) {
    return add_scaled(acc, x, f);
  }
};
struct TableCodes {
  using Sum = I;
  static constexpr bool kStartsFromAny = true, kWords = false;
  static constexpr int kSumQuads = 8;
  CPUSERVE_INLINE I start() { return izero(); }
  CPUSERVE_INLINE I finish(I x) { return x; }
  CPUSERVE_INLINE I dot(I acc, Q w, Q a) { return dot8(acc, w, a); }
  template <bool kSecond>
  CPUSERVE_INLINE I factor(Q words) {
    return kSecond ? odd_words(words) : even_words(words);
  }
  CPUSERVE_INLINE I scaled(I acc, I x, I f) { return imad(x, f, acc); }
};
template <class G, int kLargest>
struct CodesOf {
  // Without small scales, sums of a group are not scaled as words.
  using Type = SmallCodes<kLargest, has_small(G::kFactors) ? G::kSub : 1 << 16>;
};
template <class G>
struct CodesOf<G, 255> {
  using Type = TableCodes;
};

// Whether products of a small scale and numbers of magnitude `most` fit a byte: with their sign
// changed, because those of Q3_K are from -124 to 128.
template <class G>
constexpr bool fits_byte(int most) {
  if constexpr (!has_small(G::kFactors)) return false;
  if constexpr (has_small(G::kFactors)) return most * G::kMostScale <= 128;
}

template <class G>
struct Planes : CodesOf<G, largest_code<G>()>::Type {
  using Block = G;
  static constexpr int kUnit = G::kUnit, kGroups = kUnit / 32, kSub = G::kSub;
  static constexpr int kSubs = kUnit / kSub, kLines = G::kLow + G::kHigh, kPackedLines = kLines;
  static constexpr int kLargest = largest_code<G>();
  static constexpr bool kUnpacked = false, kCentred = false, kProducts = false;
  // Unpacking takes more than a mask and a shift: products of many rows unpack the codes first.
  static constexpr bool kCostly = G::kHigh != 0 || G::kTable;
  using Starts = SumStarts;
  using Scales = WordScales;
  // The code of a weight of 0, in the operands of the dot product.
  static constexpr int kZero = kLargest == 255 ? kDot8Zero : G::kZero;
  static constexpr bool kMin = G::kMin, kScaled = has_small(G::kFactors);
  static constexpr bool kZeros = G::kFactors == Factors::zero_points;
  static constexpr bool kTwoInByte = two_in_byte(G::kFactors);
  // The largest magnitude of code - kZero, and whether its products with small scales fit a byte.
  static constexpr int kMost = kLargest - G::kZero > G::kZero ? kLargest - G::kZero : G::kZero;
  static constexpr bool kFitsByte = fits_byte<G>(kMost);
  static constexpr int kHalves = G::kFactors == Factors::exponent ? 16
                                 : kZeros                         ? 40
                                 : kMin && !kTwoInByte            ? 64
                                                                  : 32;
  static constexpr int kScaleBytesOfUnit = !kScaled                          ? 0
                                           : kTwoInByte                      ? kSubs / 2 * kPanel
                                           : G::kFactors == Factors::nibbles ? kSubs * kPanel
                                           : kMin                            ? 2 * kSubs * kPanel
                                                                             : kSubs * kPanel;
  static constexpr int kHeader = kHalves + kScaleBytesOfUnit;
  static constexpr int64_t kUnitBytes = kHeader + kGroups * kLines * 64;
  static constexpr int kSumBytes = kScaled ? kBlockSums : 4;  // bytes of a row's sums for a unit
  // The number of cache lines that a tile prefetches while it computes a group.
  static constexpr int kFetchLines =
      static_cast<int>((kUnitBytes + kGroups * 64 - 1) / (kGroups * 64));
  static_assert(kFetchLines <= 8, "a line with each quad");

  // Returns the codes of quad i (elements 4 i to 4 i + 3) of a group, for the columns of a vector.
  // `line` points to these columns in the first line of the group.
  template <int i>
  CPUSERVE_INLINE Q quad(const uint8_t* line) {
    Q x;
    if constexpr (G::kLow == 4) {
      x = load_quads(line + i / 2 * 64);
      x = i % 2 ? high_nibbles(x) : low_nibbles(x);
    } else {
      x = take_bits<i % 4 * 2, 0, 2>(load_quads(line + i / 4 * 64));
    }
    if constexpr (G::kHigh == 1) {
      x = either(x, take_bits<i, G::kLow, 1>(load_quads(line + G::kLow * 64)));
    }
    if constexpr (G::kHigh == 2) {
      x = either(x, take_bits<i % 4 * 2, G::kLow, 2>(load_quads(line + (G::kLow + i / 4) * 64)));
    }
    if constexpr (G::kTable) x = lookup16(G::values(), x);
    return x;
  }

  // The bytes of the lines with the low bits of half a group (four quads, 16 elements of K).
  static constexpr int kHalfBytes = G::kLow / 2 * 64;

  // Returns the high bits of half 0 or 1 (`number`) of a group. The high bits of quad i
  // of the half are bit i (kHigh = 1) or bits 2 i and 2 i + 1 (kHigh = 2) of each byte.
  // `line` points to the columns of a vector in the first line of the group.
  CPUSERVE_INLINE Q high_bits(const uint8_t* line, int number) {
    if constexpr (G::kHigh == 1) return shift_right(load_quads(line + G::kLow * 64), 4 * number);
    return load_quads(line + (G::kLow + number) * 64);
  }

  // Returns quad i (0 to 3) of a half group. `line` points to its columns in the half's first line.
  template <int i>
  CPUSERVE_INLINE Q quad_of_half(const uint8_t* line, Q high) {
    Q x;
    if constexpr (G::kLow == 4) {
      x = load_quads(line + i / 2 * 64);
      x = i % 2 ? high_nibbles(x) : low_nibbles(x);
    } else {
      x = take_bits<2 * i, 0, 2>(load_quads(line));
    }
    if constexpr (G::kHigh != 0) {
      x = either(x, take_bits<i * G::kHigh, G::kLow, G::kHigh>(high));
    }
    if constexpr (G::kTable) x = lookup16(G::values(), x);
    return x;
  }

  // Sets the scales and the minima of columns [column, column + kLanes) of a unit.
  CPUSERVE_INLINE void factors(const uint8_t* unit, int column, F* scale, F* least) {
    const auto* halves = reinterpret_cast<const uint16_t*>(unit) + column;
    if constexpr (G::kFactors == Factors::exponent) {
      *scale = load_e8m0(unit + column);
    } else {
      *scale = load_f16(halves);
    }
    if constexpr (kFactor<G> != 1.0f) *scale = mul(*scale, set1(kFactor<G>));
    if constexpr (kZeros) {
      *least = mul(sub(zero(), *scale), load_nibbles(unit + 32, column));
    } else if constexpr (G::kFactors == Factors::deltas) {
      *least = mul(*scale, set1(kDelta));
    } else if constexpr (kMin) {
      *least = load_f16(halves + kPanel);
    }
  }

  // Return the small scales (or the small minima) of sub-blocks 2 i and 2 i + 1 of each column.
  CPUSERVE_INLINE Q scale_words(const uint8_t* unit, int64_t i, int column) {
    if constexpr (kTwoInByte) {
      constexpr int kBits = G::kFactors == Factors::deltas ? 3 : 4;
      const uint8_t* both = unit + kHalves + i * kPanel + column;
      return either(load_words_u4<1, kBits>(both), as_words(iset1(0x00010001)));
    }
    const uint8_t* small = unit + kHalves + (i * kPanel + column) * 2;
    if constexpr (G::kFactors == Factors::nibbles) return low_nibbles(load_words_u8(small));
    return load_words_s8(small);
  }
  CPUSERVE_INLINE Q least_words(const uint8_t* unit, int64_t i, int column) {
    if constexpr (G::kFactors == Factors::deltas) {
      const Q both = load_words_u4<0, 4>(unit + kHalves + i * kPanel + column);
      return add_words(lookup16(kLeastsLess7, both), as_words(iset1(0x00070007)));
    }
    const uint8_t* small = unit + kHalves + (i * kPanel + column) * 2;
    if constexpr (G::kFactors == Factors::nibbles) return high_nibbles(load_words_u8(small));
    return load_words_u8(small + kSubs * kPanel);
  }
  // The small minima of Factors::deltas, less 7: bytes of a word that are 0 stay 0 in lookup16.
  static constexpr uint8_t kLeastsLess7[16] = {0, 14, 28, 42, 56, 70, 84,  98,
                                               2, 20, 38, 56, 74, 92, 110, 128};
  // Returns the offset in a unit of the small scale of sub-block j of a column.
  static constexpr int small_at(int j, int column) {
    if constexpr (kTwoInByte) return kHalves + j / 2 * kPanel + column;
    return kHalves + (j / 2 * kPanel + column) * 2 + j % 2;
  }

  static void pack_column(const BlockCodes& c, int column, uint8_t* unit) {
    if constexpr (G::kFactors == Factors::exponent) {
      unit[column] = static_cast<uint8_t>(c.d);
    } else {
      memcpy(unit + column * 2, &c.d, 2);
      if constexpr (kMin && !kZeros && !kTwoInByte) memcpy(unit + 32 + column * 2, &c.m, 2);
    }
    if constexpr (kZeros) {  // column c is packed before column c + 8, so it sets the whole byte
      uint8_t& zeros = unit[32 + column % 8];
      zeros = static_cast<uint8_t>(column < 8 ? c.m : zeros | c.m << 4);
    }
    for (int j = 0; kScaled && j < kSubs; j++) {
      uint8_t* small = unit + small_at(j, column);
      if constexpr (kTwoInByte) {
        int s = c.scales[j] >> 1;
        if constexpr (kMin) s |= (c.leasts[j] > 8 * c.scales[j]) << 3;
        *small = static_cast<uint8_t>(j % 2 ? *small | s << 4 : s);
      } else if constexpr (G::kFactors == Factors::nibbles) {
        *small = static_cast<uint8_t>(c.scales[j] | c.leasts[j] << 4);
      } else {
        *small = static_cast<uint8_t>(c.scales[j]);
        if constexpr (kMin) small[kSubs * kPanel] = c.leasts[j];
      }
    }
    for (int g = 0; g < kGroups; g++) {
      uint32_t words[kLines] = {};
      for (int i = 0; i < 8; i++) {
        const uint32_t q = read_as<uint32_t>(c.q + g * 32 + i * 4);
        if constexpr (G::kLow == 4) words[i / 2] |= (q & 0x0f0f0f0fu) << i % 2 * 4;
        if constexpr (G::kLow == 2) words[i / 4] |= (q & 0x03030303u) << i % 4 * 2;
        const uint32_t high = q >> G::kLow;
        if constexpr (G::kHigh == 1) words[G::kLow] |= (high & 0x01010101u) << i;
        if constexpr (G::kHigh == 2) words[G::kLow + i / 4] |= (high & 0x03030303u) << i % 4 * 2;
      }
      uint8_t* lines = unit + kHeader + g * kLines * 64 + column * 4;
      for (int i = 0; i < kLines; i++) memcpy(lines + i * 64, words + i, 4);
    }
  }
  static void read_column(const uint8_t* unit, int column, BlockCodes& c) {
    if constexpr (G::kFactors == Factors::exponent) {
      c.d = unit[column];
    } else {
      c.d = half_at(unit + column * 2);
      if constexpr (kMin && !kZeros && !kTwoInByte) c.m = half_at(unit + 32 + column * 2);
      if constexpr (kZeros) c.m = unit[32 + column % 8] >> column / 8 * 4 & 15;
    }
    for (int j = 0; kScaled && j < kSubs; j++) {
      const uint8_t* small = unit + small_at(j, column);
      if constexpr (kTwoInByte) {
        const int s = *small >> j % 2 * 4 & 15;
        c.scales[j] = static_cast<int8_t>(2 * (kMin ? s & 7 : s) + 1);
        if constexpr (kMin) c.leasts[j] = static_cast<uint8_t>(7 + kLeastsLess7[s]);
      } else if constexpr (G::kFactors == Factors::nibbles) {
        c.scales[j] = *small & 15;
        c.leasts[j] = *small >> 4;
      } else {
        c.scales[j] = static_cast<int8_t>(*small);
        if constexpr (kMin) c.leasts[j] = small[kSubs * kPanel];
      }
    }
    for (int g = 0; g < kGroups; g++) {
      const uint8_t* lines = unit + kHeader + g * kLines * 64 + column * 4;
      uint32_t words[kLines];
      for (int i = 0; i < kLines; i++) words[i] = read_as<uint32_t>(lines + i * 64);
      for (int i = 0; i < 8; i++) {
        uint32_t q = 0;
        if constexpr (G::kLow == 4) q = words[i / 2] >> i % 2 * 4 & 0x0f0f0f0fu;
        if constexpr (G::kLow == 2) q = words[i / 4] >> i % 4 * 2 & 0x03030303u;
        if constexpr (G::kHigh == 1) q |= (words[G::kLow] >> i & 0x01010101u) << G::kLow;
        if constexpr (G::kHigh == 2) {
          q |= (words[G::kLow + i / 4] >> i % 4 * 2 & 0x03030303u) << G::kLow;
        }
        memcpy(c.q + g * 32 + i * 4, &q, 4);
      }
    }
  }
};

// The codes of W, unpacked: a line for each quad of a group, apart from the headers of units.
// Sums of kStartCodes codes start from the numbers that put_starts() stores (linear/unpacked.h).
// With kProducts, the bytes are products: code * scale, or 128 - (code - kZero) * scale.
template <class W>
struct UnpackedPlanes : W {
  static constexpr bool kUnpacked = true, kProducts = kScalesWords && W::kFitsByte;
  static constexpr int kLines = 8;
  static constexpr bool kCentred =
      W::kZero != 0 && (kScalesWords ? W::kScaled
                                     : SumStarts::kHas && W::kLargest < 128 &&
                                           4 * quads_of_small_sum(W::kMost) >= W::kSub);
  static constexpr bool kWords =
      kScalesWords && kCentred ? sums_words(W::kMost, W::kSub) : W::kWords;
  static constexpr int kSumQuads = !kCentred ? W::kSumQuads
                                   : kWords && 4 * quads_of_word(W::kMost) < W::kSub
                                       ? quads_of_word(W::kMost)
                                       : W::kSub / 4;
  static constexpr int kStartCodes = kProducts ? W::kUnit : kScalesWords ? 4 * kSumQuads : W::kSub;
  static constexpr int kStartZero = kProducts ? 128 : W::kZero;
  // A call of a tile prefetches at most half of the next K block, because there are two tiles.
  static constexpr int kFetchLines = (W::kFetchLines + 1) / 2;
  template <int i>
  CPUSERVE_INLINE Q quad(const uint8_t* line) {
    return load_quads(line + i * 64);
  }
};

// Writes quads [i, kEnd) of the group at `line` as bytes: put(codes, v) of the codes of vector v.
template <class W, int i, int kEnd, class Put>
CPUSERVE_INLINE void unpack_quads(const uint8_t* line, uint8_t* to, const Put& put) {
  if constexpr (i < kEnd) {
    for (int v = 0; v < kVecs; v++) {
      const int column = v * kLanes * 4;
      store_quads(to + i * 64 + column, put(W::template quad<i>(line + column), v));
    }
    unpack_quads<W, i + 1, kEnd>(line, to, put);
  }
}

// Writes quads [kQuad, kEnd) of the group at `line`, which are sub-block `sub` of its unit,
// as the products of UnpackedPlanes.
template <class W, int kQuad, int kEnd>
CPUSERVE_INLINE void unpack_products(const uint8_t* unit, int64_t sub, const uint8_t* line,
                                     uint8_t* to) {
  using Scales = typename W::Scales;
  const Q middle = as_words(iset1(0x00800080)), each_byte = as_words(iset1(0x01010101));
  Q scales[kVecs], of_zero[kVecs];
  for (int v = 0; v < kVecs; v++) {
    scales[v] = Scales::both(W::scale_words(unit, sub / 2, v * kLanes), sub % 2 != 0);
    const Q minus_zero = minus_shifted<log2_of(W::kZero)>(scales[v]);
    of_zero[v] = Scales::products(Scales::minus(middle, minus_zero), each_byte);
  }
  unpack_quads<W, kQuad, kEnd>(
      line, to, [&](Q codes, int v) __attribute__((always_inline)) {
        const Q products = Scales::products(codes, scales[v]);
        return W::kZero == 0 ? products : Scales::minus(of_zero[v], products);
      });
}

// Writes group g of a unit as bytes; its lines are at `line`.
template <class W>
CPUSERVE_INLINE void unpack_group(const uint8_t* unit, int64_t g, const uint8_t* line,
                                  uint8_t* to) {
  if constexpr (!UnpackedPlanes<W>::kProducts) {
    unpack_quads<W, 0, 8>(
        line, to, [](Q codes, int) __attribute__((always_inline)) { return codes; });
  } else if constexpr (W::kSub == 32) {
    unpack_products<W, 0, 8>(unit, g, line, to);
  } else {
    unpack_products<W, 0, 4>(unit, 2 * g, line, to);
    unpack_products<W, 4, 8>(unit, 2 * g + 1, line, to);
  }
}

}  // namespace
}  // namespace CPUSERVE_NS
