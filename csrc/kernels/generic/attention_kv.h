// How attention multiplies the elements of each KV cache type, and the layout of probabilities.
// The header generic/attention.h explains the terms of attention kernels.
#pragma once
#include "kernels/generic/math.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

// A register tile of attention has up to kTileRows rows and kWide vectors of keys (in QK)
// or of value columns (in PV), or up to kTallRows rows and kWide / 2 vectors. With tiles of 8 rows,
// the 7 or 8 query heads of a KV head (GQA) read each key from L1 once. A step of 8 rows
// and 2 vectors has 10 loads (8 + 2) for 16 multiply-adds. A core begins two multiply-adds a cycle,
// and 16 independent sums hide the latency of a multiply-add.
// kWide is a power of two, so that whole tiles cover the 32 keys of a KV block.
constexpr int kWide = kTileVecs >= 4 ? 4 : kTileVecs >= 2 ? 2 : 1;
constexpr int kTallRows = kWide == 4 ? 8 : kTileRows;
// The fewest rows of a tile, if there are several tiles: tile_rows() in attention.h divides
// the remaining rows equally between the last two tiles, so each tile is about half full or more.
constexpr int kLeastOfMany = (kTallRows + 1) / 2;

// Whether tiles of two or more rows multiply the rows in pairs, with BFMMLA (attention_pairs.h).
#ifdef CPUSERVE_UNIT_BFMMLA
constexpr bool kBf16Pairs = true;
#else
constexpr bool kBf16Pairs = false;
#endif

// One struct for each KvType defines how products are formed:
//   kStep         dims (QK) or keys (PV) that a lane sums in one multiply-add; 2: pairs of bf16
//   kSide         how many of these kStep elements are adjacent in a KV block. If kSide is 1,
//                 the second of two elements is kBlock (K) or hd (V) elements after the first
//   kMatrixTiles  whether both products run on AMX tiles (attention_matrix.h)
//   kRowPairs     whether tiles multiply two or more rows in pairs (attention_pairs.h);
//                 place_in_p() then interleaves the probabilities of two rows
//   kSplit        whether a step of two elements multiplies the first ones, then the second ones,
//   as
//                 single floats (first(), second()), because no instruction multiplies pairs of
//                 bf16. The left operand then has floats, rounded to bf16: the products are the
//                 same
//   kQuerySide    how many dims of a row of q are adjacent in the q of a tile
//   kMostRows     the most rows of a tile
//   kScaled       whether keys and values are codes with a scale for each token
//   Values        how values are read: ValuesLikeKeys, or FourBitValues
#ifdef CPUSERVE_UNIT_TILES
constexpr bool kSplitsPairs = false;  // AMX tiles read pairs, also where a model computes them
#else
constexpr bool kSplitsPairs = !kNativeDot2;
#endif

template <bool kSplits>
struct PairProducts {
  static constexpr bool kSplit = false;
  using Left = uint16_t;  // element of the left operand: q, or probabilities (store_p)
  CPUSERVE_INLINE P broadcast(const Left* p) { return set1_pair(p); }
  CPUSERVE_INLINE F mac(F acc, P a, P b) { return dot2(acc, a, b); }
  CPUSERVE_INLINE void store_left(Left* p, F x) { store_bf16(p, x); }
  CPUSERVE_INLINE void store_p(Left* p, F x) { store_bf16_normal(p, x); }
  CPUSERVE_INLINE void store_p2(Left* p, F x, F y) { store_bf16_normal2(p, x, y); }
};
template <>
struct PairProducts<true> {
  static constexpr bool kSplit = true;
  using Left = float;
  CPUSERVE_INLINE void store_left(Left* p, F x) { store(p, even(interleave_bf16(x, zero()))); }
  CPUSERVE_INLINE void store_p(Left* p, F x) { store(p, round_bf16_normal(x)); }
  CPUSERVE_INLINE void store_p2(Left* p, F x, F y) {
    store_p(p, x);
    store_p(p + kLanes, y);
  }
};
template <bool kSplits>
struct KvPairs : PairProducts<kSplits> {
  static constexpr bool kMatrixTiles = false;
  static constexpr bool kRowPairs = kBf16Pairs;
  static constexpr int kQuerySide = kBf16Pairs ? 4 : 2;
  static constexpr int kMostRows = kTallRows;
  using Vec = P;
  static constexpr int kStep = 2;
  // keep_first sets the second element of each pair to 0; keep_second sets the first element to 0.
  CPUSERVE_INLINE Vec keep_first(Vec x) { return interleave_top(even(x), zero()); }
  CPUSERVE_INLINE Vec keep_second(Vec x) { return interleave_top(zero(), odd(x)); }
  CPUSERVE_INLINE F exp2(F x) { return exp2_coarse(x); }
};
// Reads the values of a token (with bf16: of a pair of tokens) as load() reads keys.
//   width(hd)       elements from the values of a token to those of the next token
//   offset(column)  elements from the first column of a token's values to `column`
//   load<V>(p, column, j, next)  vector j of the V vectors from `column` on, which begins at p,
//     for kStep tokens; the second token is `next` elements after the first one
//   first<V>, second<V>  the same for one of two tokens, as floats (kSplit)
//   kCodes          values of an element
template <class Kv>
struct ValuesLikeKeys {
  static constexpr int kCodes = 1;
  static constexpr int width(int hd) { return hd; }
  static constexpr int offset(int column) { return column * Kv::kSide; }
  template <int V, class Elem>
  CPUSERVE_INLINE auto load(const Elem* p, int, int j, int next) {
    return Kv::load(p + j * kLanes * Kv::kSide, next);
  }
  template <int V, class Elem>
  CPUSERVE_INLINE F first(const Elem* p, int, int j, int next) {
    return Kv::first(p + j * kLanes * Kv::kSide, next);
  }
  template <int V, class Elem>
  CPUSERVE_INLINE F second(const Elem* p, int, int j, int next) {
    return Kv::second(p + j * kLanes * Kv::kSide, next);
  }
};

// Splitting costs a load of each pair. With the 16 registers of AVX2, it gains 1.10 to 1.15 x for
// prompts; with 32 registers, tiles do not spill, and it loses 0.90 x (one thread of a Zen 5).
struct KvBf16 : KvPairs<kSplitsPairs && kTileVecs == 2> {
  using Elem = uint16_t;  // element of the KV cache
  using Values = ValuesLikeKeys<KvBf16>;
  static constexpr int kSide = 2;
  static constexpr bool kScaled = false;
  CPUSERVE_INLINE Vec load(const Elem* p, int) { return load_pairs(p); }
  CPUSERVE_INLINE F first(const Elem* p, int) { return even(load_pairs(p)); }
  CPUSERVE_INLINE F second(const Elem* p, int) { return odd(load_pairs(p)); }
};
// Products of single floats: a vector holds one dim of kLanes keys in QK,
// or kLanes columns of the value of one key in PV.
struct SingleProducts {
  static constexpr bool kMatrixTiles = false;
  static constexpr bool kRowPairs = false, kSplit = false;
  static constexpr int kQuerySide = 1;
  static constexpr int kMostRows = kTallRows;
  using Left = float;
  using Vec = F;
  static constexpr int kStep = 1, kSide = 1;
  static constexpr bool kScaled = false;
  CPUSERVE_INLINE Vec broadcast(const Left* p) { return set1(*p); }
  CPUSERVE_INLINE F mac(F acc, Vec a, Vec b) { return fma(a, b, acc); }
  CPUSERVE_INLINE Vec keep_first(Vec x) { return x; }
  CPUSERVE_INLINE Vec keep_second(Vec x) { return x; }
  CPUSERVE_INLINE F exp2(F x) { return exp2_nonpositive(x); }
  CPUSERVE_INLINE void store_left(Left* p, F x) { store(p, x); }
  CPUSERVE_INLINE void store_p(Left* p, F x) { store(p, x); }
  CPUSERVE_INLINE void store_p2(Left* p, F x, F y) {
    store(p, x);
    store(p + kLanes, y);
  }
};
struct KvF16 : SingleProducts {
  using Elem = uint16_t;
  using Values = ValuesLikeKeys<KvF16>;
  CPUSERVE_INLINE Vec load(const Elem* p, int) { return load_f16(p); }
};
struct KvF32 : SingleProducts {
  using Elem = float;
  using Values = ValuesLikeKeys<KvF32>;
  CPUSERVE_INLINE Vec load(const Elem* p, int) { return CPUSERVE_NS::load(p); }
};

// 8-bit codes are widened to pairs of bf16, or to floats with kSplit; both are exact, and floats
// take fewer operations (1.04 to 1.4 x). The scale of a key multiplies the score, and the scale of
// a value multiplies the probability before it is rounded to bf16. kLargest is the largest value of
// a code. load() returns the values of codes divided by kWiden, so the scales in the KV cache are
// kWiden times as large.
struct ScaledProducts : KvPairs<kSplitsPairs> {
  using Elem = uint8_t;
  static constexpr int kSide = 1;
  static constexpr bool kScaled = true;
};
struct KvInt8 : ScaledProducts {
  using Values = ValuesLikeKeys<KvInt8>;
  static constexpr float kLargest = 127.0f, kWiden = 1.0f;
  CPUSERVE_INLINE Vec load(const Elem* p, int row) {
    return interleave_top(load_s8(p), load_s8(p + row));
  }
  CPUSERVE_INLINE F first(const Elem* p, int) { return load_s8(p); }
  CPUSERVE_INLINE F second(const Elem* p, int row) { return load_s8(p + row); }
};
struct KvE4m3 : ScaledProducts {
  using Values = ValuesLikeKeys<KvE4m3>;
  static constexpr float kLargest = 448.0f, kWiden = 256.0f;
  CPUSERVE_INLINE Vec load(const Elem* p, int row) {
    return interleave_top(load_e4m3(p), load_e4m3(p + row));
  }
  CPUSERVE_INLINE F first(const Elem* p, int) { return load_e4m3(p); }
  CPUSERVE_INLINE F second(const Elem* p, int row) { return load_e4m3(p + row); }
};

// The levels of 4-bit values, in the order of their codes. They are the levels of least squared
// error for a normal distribution, which mixed values have nearly, as whole numbers: exact in bf16.
alignas(64) constexpr float kValueLevels[16] = {-127, -97, -76, -59, -45, -31, -18, -6,
                                                6,    18,  31,  45,  59,  76,  97,  127};
struct FourBitValues {
  static constexpr int kCodes = 2;
  static constexpr int width(int hd) { return (hd + 31) / 32 * 16; }
  static constexpr int offset(int column) { return column / 32 * 16 + column % 16; }
  // Strips of 32 columns begin at a multiple of 32, and narrower ones are part of 16 columns.
  template <int V>
  CPUSERVE_INLINE F first(const uint8_t* p, int column, int j, int) {
    if constexpr (V * kLanes >= 32) {
      const uint8_t* const codes = p + offset(j * kLanes);
      return j * kLanes / 16 % 2 ? load_levels(kValueLevels, codes, 4)
                                 : load_levels(kValueLevels, codes, 0);
    }
    return load_levels(kValueLevels, p + j * kLanes, column / 16 % 2 * 4);
  }
  template <int V>
  CPUSERVE_INLINE F second(const uint8_t* p, int column, int j, int next) {
    return first<V>(p + next, column, j, next);
  }
  template <int V>
  CPUSERVE_INLINE P load(const uint8_t* p, int column, int j, int next) {
    return interleave_top(first<V>(p, column, j, next), second<V>(p, column, j, next));
  }
};
struct KvInt8V4 : KvInt8 {
  using Values = FourBitValues;
};

// Calls run(x), where x is of the struct above for KV caches of type `type`, such as KvBf16.
template <class Run>
static inline void with_kv(KvType type, const Run& run) noexcept {
  switch (type) {
    case KvType::bf16:
      return run(KvBf16{});
    case KvType::f16:
      return run(KvF16{});
    case KvType::f32:
      return run(KvF32{});
    case KvType::int8:
      return run(KvInt8{});
    case KvType::e4m3:
      return run(KvE4m3{});
    case KvType::int8_v4:
      return run(KvInt8V4{});
    case KvType::count:
      return;
  }
}

// Return the fp32 scales [kBlock], one per token, of the K half of a KV block, or of its V half.
// The scales are stored after the codes that they multiply.
CPUSERVE_INLINE float* key_scales(uint8_t* half, int hd) {
  return reinterpret_cast<float*>(half + hd * kBlock);
}
CPUSERVE_INLINE const float* key_scales(const uint8_t* half, int hd) {
  return reinterpret_cast<const float*>(half + hd * kBlock);
}
template <class Kv>
CPUSERVE_INLINE const float* value_scales(const uint8_t* half, int hd) {
  return key_scales(half, Kv::Values::width(hd));
}

// Returns the index in Tile::p of the probability of row r and key k. The layout is [R][kChunk].
// If rows are multiplied in pairs, the layout is [R / 2][kChunk / 4][2][4]: four keys of one row,
// then the same four keys of the other row of the pair. For AMX tiles, the bf16 probabilities
// of a row overwrite its fp32 scores, so rows begin 2 * kChunk bf16 elements apart.
template <class Kv>
constexpr int place_in_p(int r, int k) {
  if (Kv::kMatrixTiles) return r * 2 * kChunk + k;
  if (!Kv::kRowPairs) return r * kChunk + k;
  return r / 2 * 2 * kChunk + k / 4 * 8 + r % 2 * 4 + k % 4;
}

}  // namespace CPUSERVE_NS
