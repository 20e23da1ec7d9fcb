// QK and PV for tiles of two or more rows, with the Arm instruction BFMMLA: it multiplies two rows
// of q by two keys over 4 dims, or two rows of probabilities by two value columns over 4 keys.
// The KV cache stores 2 dims (or keys) side by side, or 1 in 8-bit types, so two vectors
// of the cache are interleaved into two operands of BFMMLA, which all pairs of rows of a tile use.
// If the number of rows is odd, only the sums of the first row of the last pair are stored.
#pragma once
#include "kernels/generic/attention_strips.h"
#include "kernels/vec/mmla.h"

namespace CPUSERVE_NS {

constexpr int kPairElements = 8;  // elements of a pair of rows in one operand: 4 from each row

// Adds to the sums c the products of RP pairs of rows (`stride` elements apart)
// and V vectors of 4 keys (QK) or 4 value columns (PV). A product sums 4 dims (QK) or 4 keys (PV);
// x(j, 0) loads the first two of these for vector j, and x(j, 1) the last two.
template <int RP, int V, class Pairs>
CPUSERVE_INLINE void pair_products(F (&c)[RP][2 * V], const uint16_t* left, size_t stride,
                                   const Pairs& x) {
  Q rows[RP];
#pragma GCC unroll 4
  for (int r = 0; r < RP; r++) {
    rows[r] = load_quads(reinterpret_cast<const uint8_t*>(left + static_cast<size_t>(r) * stride));
  }
#pragma GCC unroll 4
  for (int j = 0; j < V; j++) {
    const P low = x(j, 0), high = x(j, 1);
    const Q first = first_pairs(low, high), second = last_pairs(low, high);
#pragma GCC unroll 4
    for (int r = 0; r < RP; r++) {
      c[r][2 * j] = mmla(c[r][2 * j], rows[r], first);
      c[r][2 * j + 1] = mmla(c[r][2 * j + 1], rows[r], second);
    }
  }
}

// Stores the sums in c as R rows of V * kLanes floats; rows begin `stride` floats apart.
template <int R, int V>
CPUSERVE_INLINE void store_pairs(const F (&c)[(R + 1) / 2][2 * V], float* to, size_t stride) {
#pragma GCC unroll 4
  for (int r = 0; r < R; r += 2) {
    float* row = to + static_cast<size_t>(r) * stride;
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) {
      const F first = c[r / 2][2 * j], second = c[r / 2][2 * j + 1];
      store(row + j * kLanes, first_halves(first, second));
      if (r + 1 < R) store(row + stride + j * kLanes, last_halves(first, second));
    }
  }
}

template <class Kv, int R, int V, Ahead kAhead>
static CPUSERVE_IN_ORDER __attribute__((noinline)) void score_pairs(const typename Kv::Left* q,
                                                                    const typename Kv::Elem* a,
                                                                    const typename Kv::Elem* b,
                                                                    int hd, float* s, Fetch& next) {
  constexpr int kVec = kLanes * Kv::kSide, kInBlock = kBlock / kLanes;
  Fetch f = next;
  F c[(R + 1) / 2][2 * V] = {};
  for (int d = 0; d < hd; d += 4) {
    fetch_lines<kAhead>(f, 2 * step_lines<Kv, kAhead, false>(V));
    pair_products<(R + 1) / 2, V>(
        c, q, kPairElements, [&](int j, int i) __attribute__((always_inline)) {
          const typename Kv::Elem* block = j < kInBlock ? a : b;
          return Kv::load(block + i * kBlock * Kv::kStep + j % kInBlock * kVec, kBlock);
        });
    q += R * Kv::kQuerySide;
    a += 2 * kBlock * Kv::kStep;
    b += 2 * kBlock * Kv::kStep;
  }
  next = f;
  store_pairs<R, V>(c, s, kChunk);
}

template <class Kv, int R, int V, Ahead kAhead>
static CPUSERVE_IN_ORDER __attribute__((noinline)) void value_pairs(const ChunkBlocks<Kv>& blocks,
                                                                    const typename Kv::Left* p,
                                                                    int begin, int end, int column,
                                                                    bool fresh, float* o,
                                                                    size_t ldo, Fetch& next) {
  using Values = typename Kv::Values;
  const int width = Values::width(blocks.hd);
  Fetch f = next;
  F c[(R + 1) / 2][2 * V] = {};
  if (!fresh) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r += 2) {
      const float* row = o + static_cast<size_t>(r) * ldo;
      const float* other = r + 1 < R ? row + ldo : row;
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) {
        const F first = load(row + j * kLanes), second = load(other + j * kLanes);
        c[r / 2][2 * j] = first_halves(first, second);
        c[r / 2][2 * j + 1] = last_halves(first, second);
      }
    }
  }
  for (int k = begin; k < end;) {
    const int block_end = (k / kBlock + 1) * kBlock, stop = end < block_end ? end : block_end;
    const typename Kv::Elem* v = blocks.v[k / kBlock] + k % kBlock * width + Values::offset(column);
    for (; k < stop; k += 4, v += 4 * width) {
      fetch_lines<kAhead>(f, 2 * step_lines<Kv, kAhead, true>(V));
      pair_products<(R + 1) / 2, V>(
          c, p + place_in_p<Kv>(0, k),
          2 * kChunk, [&](int j, int i) __attribute__((always_inline)) {
            return Values::template load<V>(v + i * Kv::kStep * width, column, j, width);
          });
    }
  }
  next = f;
  store_pairs<R, V>(c, o, ldo);
}

}  // namespace CPUSERVE_NS
