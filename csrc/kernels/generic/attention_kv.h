// How attention multiplies the elements of each type of cache, and where it stores probabilities.
#pragma once
#include "kernels/generic/math.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

// Tile shapes on vectors: up to kTileRows rows by kWide vectors; up to kTallRows rows by half of
// that, so that a group of 7 or 8 heads reads each key from L1 once (8 x 2 accumulators cover the
// latency of two multiply-adds a cycle, and 10 loads feed 16 of them). kWide is a power of two so
// that strips tile the 32 keys of a block.
constexpr int kWide = kTileVecs >= 4 ? 4 : kTileVecs >= 2 ? 2 : 1;
constexpr int kTallRows = kWide == 4 ? 8 : kTileRows;
// Rows of a tile, at least, where a unit has more than one: then the last two are equal parts
// (tile_rows in attention.h).
constexpr int kLeastOfMany = (kTallRows + 1) / 2;

// Whether two and more rows are multiplied in pairs, by BFMMLA (attention_pairs.h).
#ifdef CPUSERVE_UNIT_BFMMLA
constexpr bool kBf16Pairs = true;
#else
constexpr bool kBf16Pairs = false;
#endif

// How products are formed for each KvType: kStep dims (QK) or keys (PV) enter one multiply-add,
// kSide of them stored side by side, the others one row of the block further. kMatrixTiles: both
// products run on matrix tiles (attention_matrix.h), of up to kMostRows rows. kRowPairs: on rows in
// pairs: q has kQuerySide dims, and `p` as many keys, next to each other.
struct KvBf16 {
  static constexpr bool kMatrixTiles = false;
  static constexpr bool kRowPairs = kBf16Pairs;
  static constexpr int kQuerySide = kBf16Pairs ? 4 : 2;
  static constexpr int kMostRows = kTallRows;
  using Elem = uint16_t;  // cache element
  using Left = uint16_t;  // q, and probabilities (store_p)
  using Vec = P;
  static constexpr int kStep = 2, kSide = 2;
  static constexpr bool kScaled = false;
  CPUSERVE_INLINE Vec load(const Elem* p, int) { return load_pairs(p); }
  CPUSERVE_INLINE Vec broadcast(const Left* p) { return set1_pair(p); }
  CPUSERVE_INLINE F mac(F acc, Vec a, Vec b) { return dot2(acc, a, b); }
  CPUSERVE_INLINE Vec keep_first(Vec x) { return interleave_top(even(x), zero()); }
  CPUSERVE_INLINE Vec keep_second(Vec x) { return interleave_top(zero(), odd(x)); }
  CPUSERVE_INLINE F exp2(F x) { return exp2_coarse(x); }
  CPUSERVE_INLINE void store_left(Left* p, F x) { store_bf16(p, x); }
  CPUSERVE_INLINE void store_p(Left* p, F x) { store_bf16_normal(p, x); }
  CPUSERVE_INLINE void store_p2(Left* p, F x, F y) { store_bf16_normal2(p, x, y); }
};
// Products of single floats: every vector holds one dim or one key.
struct SingleProducts {
  static constexpr bool kMatrixTiles = false;
  static constexpr bool kRowPairs = false;
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
  CPUSERVE_INLINE Vec load(const Elem* p, int) { return load_f16(p); }
};
struct KvF32 : SingleProducts {
  using Elem = float;
  CPUSERVE_INLINE Vec load(const Elem* p, int) { return CPUSERVE_NS::load(p); }
};

// 8-bit codes become pairs of bf16, exactly. The scale of a token multiplies its score, and for
// values its probability before that is rounded.
struct ScaledProducts : KvBf16 {
  using Elem = uint8_t;
  static constexpr int kSide = 1;
  static constexpr bool kScaled = true;
};
struct KvInt8 : ScaledProducts {
  static constexpr float kLargest = 127.0f, kWiden = 1.0f;
  CPUSERVE_INLINE Vec load(const Elem* p, int row) {
    return interleave_top(load_s8(p), load_s8(p + row));
  }
};
struct KvE4m3 : ScaledProducts {
  static constexpr float kLargest = 448.0f, kWiden = 256.0f;
  CPUSERVE_INLINE Vec load(const Elem* p, int row) {
    return interleave_top(load_e4m3(p), load_e4m3(p + row));
  }
};
struct KvE5m2 : ScaledProducts {
  static constexpr float kLargest = 57344.0f, kWiden = 1.0f;
  CPUSERVE_INLINE Vec load(const Elem* p, int row) {
    return interleave_top(load_e5m2(p), load_e5m2(p + row));
  }
};

// Calls run(products) for the products of a cache of `type`.
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
    case KvType::e5m2:
      return run(KvE5m2{});
    case KvType::count:
      return;
  }
}

// The scales of the tokens in K or V of a block, [kBlock]: their codes are multiplied with them.
CPUSERVE_INLINE float* key_scales(uint8_t* half, int hd) {
  return reinterpret_cast<float*>(half + hd * kBlock);
}
CPUSERVE_INLINE const float* key_scales(const uint8_t* half, int hd) {
  return reinterpret_cast<const float*>(half + hd * kBlock);
}

// The place of key k of row r in the probabilities: [R][kChunk], or with rows in pairs [R /
// 2][kChunk / 4][2][4]. On matrix tiles a row begins where its scores begin, which are twice as
// wide.
template <class Kv>
constexpr int place_in_p(int r, int k) {
  if (Kv::kMatrixTiles) return r * 2 * kChunk + k;
  if (!Kv::kRowPairs) return r * kChunk + k;
  return r / 2 * 2 * kChunk + k / 4 * 8 + r % 2 * 4 + k % 4;
}

}  // namespace CPUSERVE_NS
