// The tiles of the weight kinds with codes in planes of bits (linear/plane_layout.h): int8 rows
// times units of 32 weights (q8g32 rows) or of 256 weights (q8g256 rows) of each column.
// Kinds with zero points (q8g32 rows) have units of 32 to 256 weights: a header and then
// groups of 32 weights. linear/driver.h explains the other terms, such as tile and quad.
//
// A unit of 256 weights is added to an fp32 sum in one step: its small scales and small minima,
// and the sums of the codes of a row, are integers, so the sum over all 256 weights is an integer.
#pragma once
#include "kernels/linear/plane_layout.h"
#include "kernels/linear/unpacked.h"

namespace CPUSERVE_NS {
namespace {

// The addresses of the group of 32 weights that a tile computes next: in its rows and its panels.
struct PlaneAt {
  const uint8_t *x, *scales, *sums;  // in the first row: codes, their scale, the sums of codes
  size_t x_stride;
  const uint8_t *unit, *lines;  // in the first panel: the unit, and the lines of the group
  size_t panel_bytes;
  const uint8_t* ahead;  // in the first panel: the address to prefetch during this group
  int64_t left, groups;  // number of remaining groups of this unit; number of groups of a unit
  const int32_t* starts = nullptr;  // the starts of the sums of the first row (unpacked codes)
};

// Returns how many numbers the sums of a row start from, in a unit: 0 if they start from 0.
template <class W>
constexpr int starts_of() {
  if constexpr (!W::kCentred) return 0;
  if constexpr (W::kCentred) return W::kUnit / W::kStartCodes;
}

// Returns the bytes from the first columns of a tile to the columns of its vector v, in a line.
template <class W>
CPUSERVE_INLINE size_t vector_at(const PlaneAt& at, int v) {
  const size_t apart = W::kUnpacked ? kCodesBytes : at.panel_bytes;
  return static_cast<size_t>(v / kVecs) * apart + v % kVecs * kLanes * 4;
}

// Adds the products of quad i (4 elements of K) of a group for MR rows x NV vectors of columns.
// take(lines, v) returns the quad of the columns of vector v. Each of the first kFetch quads
// prefetches one cache line of later weights to L2 (see fetch_line in linear/group.h),
// because prefetching all lines together would fill the miss buffers of the core.
template <class W, int NPF, int kFetch, int MR, int NV, class Take>
CPUSERVE_INLINE void plane_quad(typename W::Sum (&acc)[MR][NV], const PlaneAt& at, int i,
                                const Take& take) {
  // Each quad has one base pointer; otherwise gcc keeps offsets for each quad and row on the stack.
  const uint8_t* lines = at.lines;
  const uint8_t* quads = at.x + i * 4;
  opaque(lines);
  opaque(quads);
  if (i < kFetch) {
    const uint8_t* ahead = at.ahead + i * 64;
    opaque(ahead);
#pragma GCC unroll 4
    for (int p = 0; p < NPF; p++) {
      prefetch_l2(ahead + static_cast<size_t>(p) * at.panel_bytes);
    }
    keep_here();
  }
  Q wq[NV];
#pragma GCC unroll 16
  for (int v = 0; v < NV; v++) {
    wq[v] = take(lines + vector_at<W>(at, v), v);
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
    const Q a =
        set1_quad(reinterpret_cast<const int8_t*>(quads + static_cast<size_t>(r) * at.x_stride));
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) acc[r][v] = add_product<W, MR * NV>(acc[r][v], wq[v], a);
  }
}

// Adds the products of quads [kQuad, 4) of one half of a group (a group has 8 quads of 4 weights).
// `at` points to this half, and `high` has the high bits of the codes in this half.
template <class W, int NPF, int kQuad, int MR, int NV>
CPUSERVE_INLINE void half_products(typename W::Sum (&acc)[MR][NV], const PlaneAt& at,
                                   const Q (&high)[NV]) {
  if constexpr (kQuad < 4) {
    plane_quad<W, NPF, (W::kFetchLines + 1) / 2>(
        acc, at, kQuad, [&](const uint8_t* lines, int v) __attribute__((always_inline)) {
          return W::template quad_of_half<kQuad>(lines, high[v]);
        });
    half_products<W, NPF, kQuad + 1>(acc, at, high);
  }
}

// Adds the products of quads [kQuad, kEnd) of a group (quad: 4 weights): with unrolled code
// for each quad, or with a loop over the two halves of the group.
template <class W, int NPF, int kQuad, int kEnd, int MR, int NV>
CPUSERVE_INLINE void plane_products(typename W::Sum (&acc)[MR][NV], const PlaneAt& at) {
  if constexpr (kEnd - kQuad == 8 && !W::kUnpacked && loops_over_halves(MR * NV)) {
    PlaneAt half = at;
#pragma GCC unroll 1
    for (int number = 0; number < 2; number++) {
      opaque(number);  // hides the counter: otherwise gcc unrolls the loop
      Q high[NV];
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) high[v] = W::high_bits(at.lines + vector_at<W>(at, v), number);
      half_products<W, NPF, 0>(acc, half, high);
      opaque(half.x += 16);
      opaque(half.lines += W::kHalfBytes);
      opaque(half.ahead += (W::kFetchLines + 1) / 2 * 64);
    }
  } else if constexpr (kQuad < kEnd) {
    plane_quad<W, NPF, W::kFetchLines>(
        acc, at, kQuad, [](const uint8_t* lines, int) __attribute__((always_inline)) {
          return W::template quad<kQuad>(lines);
        });
    plane_products<W, NPF, kQuad + 1, kEnd>(acc, at);
  }
}

// Computes the sums of the products of quads [kQuad, kEnd) of a group for MR x NV vectors,
// W::kSumQuads quads at a time, and calls add(sums) for each of these parts.
// The sums of row r that begin with quad i start from first(r, i).
template <class W, int NPF, int kQuad, int kEnd, int MR, int NV, class First, class Add>
CPUSERVE_INLINE void plane_sums(const PlaneAt& at, const First& first, const Add& add) {
  if constexpr (kQuad < kEnd) {
    constexpr int kNext = kQuad + W::kSumQuads < kEnd ? kQuad + W::kSumQuads : kEnd;
    typename W::Sum acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const typename W::Sum from = first(r, kQuad);
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] = from;
    }
    plane_products<W, NPF, kQuad, kNext>(acc, at);
    add(acc);
    plane_sums<W, NPF, kNext, kEnd, MR, NV>(at, first, add);
  }
}

// The code that PlaneGroups (units of 32 weights) and PlaneBlocks (units of 256 weights) share.
template <class W>
struct PlaneShape {
  static constexpr int64_t kUnitBytes = W::kUnitBytes;
  static constexpr bool kSharesHeaders = W::kZeros;
  static constexpr int64_t kWholeUnits = kSharesHeaders ? 8 : 1;  // at most 8 groups share a header
  static constexpr bool kWidens = false, kNearBlocks = false, kSizesCutPasses = false;
  static constexpr bool kLineUnits = false;
  static constexpr int kUnitCodes = W::kUnit, kUnitSums = W::kSumBytes;
  static constexpr bool kUnpacks = kUnpacksCodes && (W::kCostly || (kScalesWords && W::kScaled));
  // 0: panels are not prefetched in turn. With units of 256 weights, computing takes so much longer
  // than reading that the order of prefetches makes no difference (q4_k, 9 to 24 rows).
  // With emulated dot products, prefetching panels in turn only costs time (linear/group.h).
  static constexpr int kTurns = W::kUnit < 256 && !kEmulatesDots ? 3 : 0;
  // Tiles have as many sums as in kernels/linear/group.h.
  // In builds with sanitizers, tiles have fewer rows, because a tile of six rows takes seconds
  // to compile, and each of ten weight kinds has a dozen such tiles.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr int kGroupVecsUsed = 2 * kVecs;
#else
  static constexpr int kGroupVecsUsed = kGroupVecs;
#endif
  static constexpr int kInRegisters = kGroupVecsUsed / 2 / kVecs;
  static constexpr int kInMemory = kGroupVecsUsed / kVecs;
  static constexpr int stream_panels(int) { return 1; }
  static constexpr int kRows = kVecs == 1 && kInMemory > 6 ? 6 : kInMemory < 2 ? 2 : kInMemory;
  static constexpr int kStreamRows = kInRegisters < 12 ? kRows : 8;
  static constexpr int kPanels = kInMemory / kRows < 2 ? 1 : 2;
  // The rows of two or three tiles are multiplied by packed codes: unpacking these takes longer.
  // With emulated dot products it does not, nor if vectors of 512 bits sum products
  // (UnpackedPlanes): there, 9 rows of Q2_K and Q3_K run 1.1 to 1.2 times as fast unpacked.
  static constexpr int kPackedRows = kEmulatesDots || (kVecs == 1 && UnpackedPlanes<W>::kProducts)
                                         ? 0
                                     : W::kScaled ? 2 * kRows
                                                  : 3 * kRows;
  static constexpr int kHalfRows = kRows;
  static int64_t units(int64_t k) { return (k + W::kUnit - 1) / W::kUnit; }

  // Returns the addresses where tile t starts.
  // A row of activations has all codes, then the scales of all groups, then the sums of all groups.
  static PlaneAt at(const LinearTile& t) {
    const uint8_t* scales = t.x + t.x_padded;
    const uint8_t* sums = scales + t.x_padded / W::kUnit * 4;
    const uint8_t* unit = t.w + t.u0 * (kSharesHeaders ? t.unit_bytes : kUnitBytes);
    // If groups share a header, t.unit_bytes is the bytes of one group and of its part of a header.
    const int64_t groups = kSharesHeaders ? W::kHeader / (t.unit_bytes - W::kPackedLines * 64) : 1;
    return {t.x + t.u0 * W::kUnit,
            scales + t.u0 * 4,
            sums + t.u0 * W::kSumBytes,
            t.x_stride,
            unit,
            W::kUnpacked ? t.codes : unit + W::kHeader,
            t.panel_bytes,
            nullptr,
            groups,
            groups,
            t.starts};
  }
  CPUSERVE_INLINE void next_unit(PlaneAt& at) {
    opaque(at.scales += 4);
    opaque(at.sums += W::kSumBytes);
    if constexpr (!kSharesHeaders) {
      opaque(at.unit += kUnitBytes);
      if constexpr (!W::kUnpacked) at.lines = at.unit + W::kHeader;
    } else if (--at.left == 0) {
      at.left = at.groups;
      if constexpr (W::kUnpacked) {
        opaque(at.unit += W::kHeader + at.groups * W::kPackedLines * 64);
      } else {
        at.unit = at.lines;
        opaque(at.lines += W::kHeader);
      }
    }
  }
  CPUSERVE_INLINE void next_group(PlaneAt& at) {
    opaque(at.x += 32);
    opaque(at.lines += W::kLines * 64);
    opaque(at.ahead += W::kFetchLines * 64);
  }
  // Calls run() for every unit of K of tile t, with the addresses of the unit in `at`.
  // at.ahead is the address to prefetch while the unit is computed.
  template <bool kNear, class Run>
  CPUSERVE_INLINE void over_units(const LinearTile& t, PlaneAt& at, const Run& run) {
    const int64_t bytes = kSharesHeaders ? t.unit_bytes : kUnitBytes;
    TileFetch<kNear> fetch(t, bytes);
    const int64_t ahead_step = fetch.step();
    for (int64_t u = t.u0; u < t.u1;) {
      const uint8_t* ahead;
      const uint8_t* used = W::kUnpacked ? at.unit : at.lines;
      for (const int64_t end = fetch.next(u, used, ahead); u < end; u++) {
        at.ahead = ahead;
        run();
        next_unit(at);
        opaque(ahead += ahead_step);
      }
    }
  }

  // Writes the codes of units [t.u0, t.u1) of the first panel of t as bytes.
  static __attribute__((noinline)) void unpack(const LinearTile& t, uint8_t* to) {
    PlaneAt from = at(t);
    for (int64_t u = t.u0; u < t.u1; u++) {
      for (int g = 0; g < W::kGroups; g++, to += 8 * 64) {
        unpack_group<W>(from.unit, g, from.lines, to);
        next_group(from);
      }
      next_unit(from);
    }
  }

  // How many numbers the sums of a row start from, in a unit (linear/unpacked.h).
  static constexpr int kStarts = starts_of<W>();
  static void put_starts(const uint8_t* x, const uint8_t* sums, int64_t units, int rows,
                         int32_t* to) {
    put_row_starts<W>(x, sums, units, rows, to);
  }
};

// Tiles for kinds with units of 32 weights. The products of each unit are added to the fp32 sums,
// which are in registers or in memory.
template <class W>
struct PlaneGroups : PlaneShape<W> {
  static constexpr ActFormat kAct = ActFormat::q8g32;
  using Unpacked = PlaneGroups<UnpackedPlanes<W>>;

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((noinline)) void tile(const LinearTile& t) {
    constexpr int NV = NP * kVecs, kStride = sums_stride<kNear>();
    constexpr bool kKept = MR * NP <= PlaneShape<W>::kInRegisters;
    F f[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        float* c = t.c + r * kStride + v * kLanes;
        f[r][v] = t.resume ? load(c) : zero();
        if constexpr (!kKept) store(c, f[r][v]);
      }
    }
    float* const c = t.c;
    PlaneAt at = PlaneShape<W>::at(t);
    PlaneShape<W>::template over_units<kNear>(
        t, at, [&]() __attribute__((always_inline)) {
          add_unit<NPF, kKept, kStride>(f, at, c);
          PlaneShape<W>::next_group(at);
          if constexpr (W::kCentred) opaque(at.starts += MR);
        });
    if constexpr (kKept) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) store(t.c + r * kStride + v * kLanes, f[r][v]);
      }
    }
  }

  template <int NPF, bool kKept, int kStride, int MR, int NV>
  CPUSERVE_INLINE void add_unit(F (&f)[MR][NV], const PlaneAt& at, float* c) {
    constexpr bool kZero = W::kZero != 0, kStart = kZero && (W::kStartsFromAny || W::kCentred);
    const auto sum_of = [&](int r) __attribute__((always_inline)) {
      const uint8_t* sum = at.sums + static_cast<size_t>(r) * at.x_stride;
      return iload1(reinterpret_cast<const int32_t*>(sum));
    };
    const auto zero_term = [&](int r) __attribute__((always_inline)) {
      return isub(izero(), shl<log2_of(W::kZero)>(sum_of(r)));
    };
    I dot[MR][NV];
    bool added = false;  // the compiler knows its value, because plane_sums is unrolled
    plane_sums<W, NPF, 0, 8, MR, NV>(
        at,
        [&](int r, int) __attribute__((always_inline)) {
          if constexpr (W::kCentred) {
            return W::Starts::start(at.starts + r);
          } else if constexpr (kStart) {
            return zero_term(r);
          } else {
            return W::start();
          }
        },
        [&](const typename W::Sum(&sums)[MR][NV]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) {
              const I x = W::finish(sums[r][v]);
              dot[r][v] = added ? iadd(dot[r][v], x) : x;
            }
          }
          added = true;
        });
    F scale[NV], least[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      W::factors(at.unit + static_cast<size_t>(v / kVecs) * at.panel_bytes, v % kVecs * kLanes,
                 &scale[v], &least[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const size_t row = static_cast<size_t>(r) * at.x_stride;
      const F s = set1(*reinterpret_cast<const float*>(at.scales + row));
      F m = zero();
      if constexpr (W::kMin) m = mul(s, to_float(sum_of(r)));
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        float* kept = c + r * kStride + v * kLanes;
        F sum = kKept ? f[r][v] : load(kept);
        I products = dot[r][v];
        if constexpr (kZero && !kStart) products = iadd(products, zero_term(r));
        sum = fma(to_float(products), mul(scale[v], s), sum);
        if constexpr (W::kMin) sum = fma(least[v], m, sum);
        if constexpr (kKept) {
          f[r][v] = sum;
        } else {
          store(kept, sum);
        }
      }
    }
  }
};

// Tiles for kinds with units of 256 weights. The integer sums of a unit are in registers
// or in memory; the fp32 sums are in memory.
template <class W>
struct PlaneBlocks : PlaneShape<W> {
  static constexpr ActFormat kAct = ActFormat::q8g256;
  using Unpacked = PlaneBlocks<UnpackedPlanes<W>>;

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((noinline)) void tile(const LinearTile& t) {
    constexpr int NV = NP * kVecs, kStride = sums_stride<kNear>();
    constexpr bool kKept = MR * NP <= PlaneShape<W>::kInRegisters;
    if (!t.resume) {
      for (int r = 0; r < MR; r++) {
        for (int v = 0; v < NV; v++) store(t.c + r * kStride + v * kLanes, zero());
      }
    }
    float* const c = t.c;
    alignas(64) float memory[kKept ? 1 : MR * NV * kLanes];
    I sum[MR][NV];
    PlaneAt at = PlaneShape<W>::at(t);
    PlaneShape<W>::template over_units<kNear>(
        t, at, [&]() __attribute__((always_inline)) {
          if constexpr (W::kProducts) {
            sum_products<NPF>(sum, at);
            return add_unit<kStride>(sum, at, c);
          }
#pragma GCC unroll 16
          for (int v = 0; v < NV; v++) {
            const I from = first_sum(panel_of(at, v), v % kVecs * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++) {
              sum[r][v] = from;
              if constexpr (!kKept) store_bits(memory + (r * NV + v) * kLanes, from);
            }
          }
          const uint8_t* pairs = at.sums + kPairs;
#pragma GCC unroll 1
          for (int64_t i = 0; i < W::kSubs / 2; i++) {
            Q scales[NV];
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) {
              scales[v] = W::scale_words(panel_of(at, v), i, v % kVecs * kLanes);
            }
            if constexpr (kPacked) {
              add_pair<NPF, kKept>(sum, memory, at, scales, pairs);
              PlaneShape<W>::next_group(at);
              opaque(pairs += 4);
              continue;
            }
            constexpr int kQuads = W::kSub / 4;
            add_sub<NPF, kKept, 0, kQuads, false>(sum, memory, at, scales, pairs);
            if constexpr (kQuads == 8) PlaneShape<W>::next_group(at);
            add_sub<NPF, kKept, kQuads % 8, kQuads % 8 + kQuads, true>(sum, memory, at, scales,
                                                                       pairs);
            PlaneShape<W>::next_group(at);
            opaque(pairs += 4);
            if constexpr (W::kCentred) opaque(at.starts += 2 * W::kSub / W::kStartCodes);
          }
          if constexpr (W::kCentred) at.starts += (MR - 1) * PlaneShape<W>::kStarts;
          if constexpr (!kKept) {
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
              for (int v = 0; v < NV; v++) sum[r][v] = load_bits(memory + (r * NV + v) * kLanes);
            }
          }
          add_unit<kStride>(sum, at, c);
        });
  }

  // The byte offset of the sums over sub-blocks (kSub weights) in the sums of a unit of a row.
  // These are kBlockSums bytes (table/rows.h): the sums over 16 codes, then the sums over 32 codes.
  static constexpr int kPairs = W::kSub == 32 ? 32 : 0;
  CPUSERVE_INLINE const uint8_t* panel_of(const PlaneAt& at, int v) {
    return at.unit + static_cast<size_t>(v / kVecs) * at.panel_bytes;
  }

  // Returns the sums over the codes of two sub-blocks in row r; every lane has both sums.
  CPUSERVE_INLINE Q pair_of(const PlaneAt& at, const uint8_t* pairs, int r) {
    return set1_quad(reinterpret_cast<const int8_t*>(pairs + static_cast<size_t>(r) * at.x_stride));
  }

  // Adds the products of one sub-block, which has quads [kQuad, kEnd) of its group, multiplied
  // by the first scale of a pair of sub-blocks, or by the second scale if kSecond is true.
  // With kSecond, it also subtracts the zero points of the codes in both sub-blocks of the pair.
  template <int NPF, bool kKept, int kQuad, int kEnd, bool kSecond, int MR, int NV>
  CPUSERVE_INLINE void add_sub(I (&sum)[MR][NV], float* memory, const PlaneAt& at,
                               const Q (&scales)[NV], const uint8_t* pairs) {
    const auto update = [&](const auto& add) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        const auto factor = factor_of<kSecond>(scales[v]);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
          float* to = memory + (r * NV + v) * kLanes;
          const I x = add(kKept ? sum[r][v] : load_bits(to), factor, r, v);
          if constexpr (kKept) {
            sum[r][v] = x;
          } else {
            store_bits(to, x);
          }
        }
      }
    };
    int left = kEnd - kQuad;  // the compiler knows its value, because plane_sums is unrolled
    plane_sums<W, NPF, kQuad, kEnd, MR, NV>(
        at,
        [&](int r, int quad) __attribute__((always_inline)) {
          if constexpr (W::kCentred) {
            const int part = ((quad - kQuad) * 4 + kSecond * W::kSub) / W::kStartCodes;
            return W::Starts::start(at.starts + r * PlaneShape<W>::kStarts + part);
          } else {
            return W::start();
          }
        },
        [&](const typename W::Sum(&sums)[MR][NV]) __attribute__((always_inline)) {
          left -= W::kSumQuads;
          update([&](I x, auto factor, int r, int v) __attribute__((always_inline)) {
            x = scaled(x, sums[r][v], factor);
            if constexpr (kSecond && W::kZero != 0 && !W::kCentred) {
              if (left > 0) return x;
              x = dot_words(x, minus_shifted<log2_of(W::kZero)>(scales[v]), pair_of(at, pairs, r));
            }
            return x;
          });
        });
  }

  // Returns the first or the second scale of a pair, and adds a sum times such a scale.
  template <bool kSecond>
  CPUSERVE_INLINE auto factor_of(Q scales) {
    if constexpr (W::kWords) return W::Scales::template one<kSecond>(scales);
    if constexpr (!W::kWords) return W::template factor<kSecond>(scales);
  }
  template <class Factor>
  CPUSERVE_INLINE I scaled(I acc, typename W::Sum sum, Factor factor) {
    if constexpr (W::kWords) return W::Scales::add(acc, sum, factor);
    if constexpr (!W::kWords) return W::scaled(acc, sum, factor);
  }

  // Sums a unit of unpacked products (UnpackedPlanes): no sub-block is left to be scaled.
  template <int NPF, int MR, int NV>
  CPUSERVE_INLINE void sum_products(I (&sum)[MR][NV], PlaneAt& at) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const I from = W::kCentred ? W::Starts::start(at.starts + r) : izero();
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) sum[r][v] = from;
    }
#pragma GCC unroll 1
    for (int64_t g = 0; g < W::kGroups; g++) {
      plane_products<W, NPF, 0, 8>(sum, at);
      PlaneShape<W>::next_group(at);
    }
    if constexpr (!W::kCentred) return;
    at.starts += MR;  // the bytes have the products with their sign changed
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) sum[r][v] = isub(izero(), sum[r][v]);
    }
  }

  // Whether a pair of sub-blocks is multiplied by both scales at once, with its sums as the words
  // of a lane: a sum of 16 products with codes of 2 or 3 bits fits a word. VPMULLD takes two
  // operations on Intel CPUs, so that a pair takes 11 operations for each vector instead of 14.
  static constexpr int kLargestSum = W::kSub * largest_code<typename W::Block>() * 127;
  static constexpr int kBias = 1 << 14;
  static constexpr bool kPacked = kWordPairs && W::kSub == 16 && kLargestSum < kBias;

  // Returns the sum from which a unit starts: 0, or minus the bias of all its pairs (add_pair).
  CPUSERVE_INLINE I first_sum(const uint8_t* panel, int column) {
    I sum = izero();
    if constexpr (kPacked) {
      const Q bias = as_words(iset1(-kBias & 0xffff));  // the first word of a pair
#pragma GCC unroll 8
      for (int i = 0; i < W::kSubs / 2; i++) {
        sum = dot_words(sum, W::scale_words(panel, i, column), bias);
      }
    }
    return sum;
  }

  // Adds the products of a pair of sub-blocks (one group), like two calls of add_sub. The second
  // sub-block is summed first and moved to the second word of the lane. The first word then sums
  // kBias and the first sub-block: it is never negative, so nothing is borrowed from the second.
  template <int NPF, bool kKept, int MR, int NV>
  CPUSERVE_INLINE void add_pair(I (&sum)[MR][NV], float* memory, const PlaneAt& at,
                                const Q (&scales)[NV], const uint8_t* pairs) {
    I both[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) both[r][v] = izero();
    }
    plane_products<W, NPF, 4, 8>(both, at);
    const I bias = iset1(kBias);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) both[r][v] = iadd(shl<16>(both[r][v]), bias);
    }
    plane_products<W, NPF, 0, 4>(both, at);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        float* to = memory + (r * NV + v) * kLanes;
        I x = dot_words(kKept ? sum[r][v] : load_bits(to), as_words(both[r][v]), scales[v]);
        if constexpr (W::kZero != 0) {
          x = dot_words(x, minus_shifted<log2_of(W::kZero)>(scales[v]), pair_of(at, pairs, r));
        }
        if constexpr (kKept) {
          sum[r][v] = x;
        } else {
          store_bits(to, x);
        }
      }
    }
  }

  // Adds to the fp32 sums: the integer sums of a unit times its scales,
  // and the minima of the unit times the sums of the codes of the rows.
  template <int kStride, int MR, int NV>
  CPUSERVE_INLINE void add_unit(I (&sum)[MR][NV], const PlaneAt& at, float* c) {
    I low[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) low[r][v] = izero();
    }
    if constexpr (W::kMin) {
#pragma GCC unroll 8
      for (int i = 0; i < W::kSubs / 2; i++) {
        const uint8_t* pairs = at.sums + kPairs + i * 4;
        Q words[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) {
          words[v] = W::least_words(panel_of(at, v), i, v % kVecs * kLanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
          const Q x = pair_of(at, pairs, r);
#pragma GCC unroll 16
          for (int v = 0; v < NV; v++) low[r][v] = dot_words(low[r][v], words[v], x);
        }
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      F scale, least;
      W::factors(panel_of(at, v), v % kVecs * kLanes, &scale, &least);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const size_t row = static_cast<size_t>(r) * at.x_stride;
        float* to = c + r * kStride + v * kLanes;
        F x = mul(to_float(sum[r][v]), scale);
        if constexpr (W::kMin) x = fnma(least, to_float(low[r][v]), x);
        store(to, fma(x, set1(*reinterpret_cast<const float*>(at.scales + row)), load(to)));
      }
    }
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
