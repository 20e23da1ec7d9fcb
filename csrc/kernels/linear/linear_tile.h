// The parameters of a tile of a linear: its rows and weights, the weights that it prefetches
// while it computes, and the width of its sums. linear/driver.h explains the terms, such as unit.
#pragma once
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {
namespace {

// The part of the next K block that a tile prefetches while it computes (share_units).
// In a turn, the tile computes `every` units of K and prefetches a stretch: `every` * `step` bytes
// of one panel of the next K block. The next turn prefetches a stretch of the next panel.
struct UnitShare {
  const uint8_t* at = nullptr;  // the address of the first stretch to prefetch
  int64_t every = 1, step = 0;
  int64_t panel = 0, panels = 0;  // panel of the first stretch; number of panels
  // A K block is computed in `calls` calls of tile functions, which prefetch equally many stretches
  // of the next K block, so only some turns prefetch. Each turn adds `panels` to the credit. If it
  // is then at least `calls`, the turn prefetches, and `calls` is subtracted from the credit.
  int64_t credit = 0, calls = 1;
};

struct LinearTile {
  const uint8_t* x;  // the first row of activations, at unit x_u0 of K
  size_t x_stride;
  int64_t x_u0;
  int64_t x_padded;  // elements of a row, including padding
  const uint8_t* w;  // the first panel of weights
  size_t panel_bytes;
  int64_t unit_bytes;     // bytes of a unit of one panel
  int64_t u0, split, u1;  // the tile computes units [u0, u1) of K; see below for `split`
  // The prefetches of a tile depend on its use:
  // - One pass over the weights (kNear): with each unit u, the tile prefetches a later unit,
  //   at a fixed distance from u. While u is before `split`, the later unit is in the same panels,
  //   at ahead0 + (u - u0) unit_bytes. From `split` on, the later unit is in the next panels,
  //   at ahead1 + (u - u0) unit_bytes.
  // - A K block of a kind with kLineUnits: after every `fetch_every` units the tile prefetches one
  //   line of each of `fetch_panels` panels of the next K block, beginning at ahead0.
  // - A K block of another kind: `share` is the part of the next K block to prefetch.
  const uint8_t *ahead0, *ahead1;
  int64_t fetch_every, fetch_panels;
  UnitShare share;
  bool fetch_near = false;  // a pass or a tile with kLineUnits prefetches: true to L1, false to L2
  // For tiles on unpacked codes (linear/unpacked.h): the codes of units [u0, u1) in the first
  // panel, and the sums that the products of the rows start from.
  const uint8_t* codes = nullptr;
  const int32_t* starts = nullptr;
  float* c;     // the sums, with sums_stride<kNear>() floats from row to row
  bool resume;  // whether c has the sums of the units before u0
  bool last;    // whether u1 is the end of K
};

// Computes the addresses to prefetch, for the tiles of kinds without kLineUnits.
// unit_bytes: the bytes of a unit of K in one panel.
template <bool kNear>
class TileFetch {
 public:
  __attribute__((always_inline)) inline TileFetch(const LinearTile& t, int64_t unit_bytes)
      : t_(t),
        unit_bytes_(unit_bytes),
        at_(t.share.at),
        panel_(t.share.panel),
        credit_(t.share.credit) {}

  // Returns the bytes from the prefetch address of a unit to the address of the next unit.
  __attribute__((always_inline)) inline int64_t step() const {
    return kNear ? unit_bytes_ : t_.share.step;
  }

  // Sets `ahead` to the prefetch address of unit u, which has its weights at `w`. Returns the next
  // unit that needs a new address: before this unit, `ahead` advances by step() from unit to unit.
  __attribute__((always_inline)) inline int64_t next(int64_t u, const uint8_t* w,
                                                     const uint8_t*& ahead) {
    if constexpr (kNear) {
      ahead = (u < t_.split ? t_.ahead0 : t_.ahead1) + (u - t_.u0) * unit_bytes_;
      return u < t_.split ? t_.split : t_.u1;
    } else {
      const int64_t every = t_.share.every;
      ahead = take_turn(w - every * unit_bytes_);
      return t_.u1 - u > every ? u + every : t_.u1;
    }
  }

 private:
  // Begins a turn (`every` units of K). If it prefetches, returns the address to prefetch.
  // Otherwise returns `used`, the address of weights that the tile has just read: they are in L1,
  // so prefetching them costs nothing. (A tile without prefetches would need code of its own.)
  __attribute__((always_inline)) inline const uint8_t* take_turn(const uint8_t* used) {
    const UnitShare& share = t_.share;
    credit_ += share.panels;
    if (credit_ < share.calls) return used;
    credit_ -= share.calls;
    const uint8_t* const now = at_;
    at_ += t_.panel_bytes;
    if (++panel_ == share.panels) {
      panel_ = 0;
      at_ += share.every * share.step - share.panels * static_cast<int64_t>(t_.panel_bytes);
    }
    return now;
  }

  const LinearTile& t_;
  const int64_t unit_bytes_;
  const uint8_t* at_;
  int64_t panel_, credit_;
};

// Hides the origin of a pointer or counter from the compiler. A tile has a few pointers
// that advance along K, and adds constant row offsets to them. Without this function gcc keeps
// a separate pointer for every row and panel, more than there are registers.
template <class T>
CPUSERVE_INLINE void opaque(T& x) {
  asm("" : "+r"(x));
}

// Keeps the compiler from moving loads and prefetches across a call of this function.
// Otherwise gcc moves most prefetches of a group after its products, where they come all together:
// on Granite Rapids one row of w4_g32 then reads 82 % of the bandwidth instead of 91 %,
// and one row of q6_k 76 % instead of 95 %.
CPUSERVE_INLINE void keep_here() { asm volatile("" ::: "memory"); }

// gcc allocates registers loop by loop. If a tile also uses its sums outside its short inner loop,
// gcc keeps the operands of the inner loop on the stack, which halves the rate of the tile.
// If the whole function is one region for register allocation, gcc keeps the operands in registers.
#if defined(__GNUC__) && !defined(__clang__)
#define CPUSERVE_ONE_REGION __attribute__((optimize("ira-region=one")))
#else
#define CPUSERVE_ONE_REGION
#endif

// Whether a tile has a loop over pairs of quads, instead of unrolled code for all eight quads
// of a group (a quad is 4 elements of K). `products` is the number of products
// of the tile for each quad. If a product takes several instructions, unrolled code would
// have thousands of instructions, which take long to compile. Measured on Cascade Lake at AVX-512,
// a loop multiplies 8-bit codes 1.05 to 1.3 times as fast as unrolled code. For 4-bit codes
// (octet_products in group.h), a loop is 1.02 to 1.2 times as fast in tiles of at least 8 products
// if the kind has more than 32 weights in a unit, and 0.87 to 0.96 times as fast in other tiles.
// With the 16 registers of AVX2 (two vectors a panel), unrolled code is 1.03 to 1.1 times as fast.
constexpr bool loops_over_quads(int products) {
  return kEmulatesDots && kVecs != 2 && products >= 4;
}
// Whether a tile has a loop over the two halves of a group (instead of unrolled code),
// for kinds that store the low and the high bits of codes separately (plane_layout.h).
// The pointers of such a loop cost 5 to 25 % of the rate of small tiles. With the 16 registers
// of AVX2 (two vectors a panel), they cost 5 to 15 % of the rate of all tiles.
constexpr bool loops_over_halves(int products) {
  constexpr bool kShort = kTileVecs == 1;  // level scalar, where only the compile time matters
  return kEmulatesDots && kVecs != 2 && (products >= 8 || kShort);
}

// Adds the products of a quad to a sum of a tile that has `kSums` sums. If a product takes several
// instructions, gcc computes several products before it adds them, and spills sums in the meantime:
// the tile of 4 rows of q4_k at AVX2 had 125 stores and as many loads of spilled vectors. in_order
// makes it add each product at once: 1.1 to 1.6 times as fast at AVX2 and AVX-512.
// Up to 4 sums fit the 32 registers of AVX-512, and are 0.94 to 0.98 times as fast in order.
template <class W, int kSums>
CPUSERVE_INLINE typename W::Sum add_product(typename W::Sum sum, Q weights, Q row) {
  constexpr int kUnordered = kVecs == 1 ? 4 : 0;
  sum = W::dot(sum, weights, row);
  return kEmulatesDots && kSums > kUnordered ? in_order(sum) : sum;
}

constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

// Prefetches a cache line to L1 (if `near`) or to L2.
CPUSERVE_INLINE void fetch_to(bool near, const uint8_t* line) {
  near ? prefetch(line) : prefetch_l2(line);
}

// Prefetches `left` cache lines from `at` on: a_step lines with every step of a tile along K,
// so that memory is busy while the tile computes.
struct LineFetch {
  const uint8_t* at = nullptr;
  int64_t left = 0, a_step = 0;
  bool near = false;  // whether to prefetch to L1, not L2

  __attribute__((always_inline)) inline void step() {
    constexpr int kLine = 64;
    const int64_t n = a_step < left ? a_step : left;
    for (int64_t i = 0; i < n; i++, at += kLine) fetch_to(near, at);
    left -= n;
  }
};

// Prefetches one cache line of each of t.fetch_panels panels:
// `from` in the first panel, and the lines at the same offset in the other panels.
CPUSERVE_INLINE void fetch_ahead_lines(const LinearTile& t, const uint8_t* from) {
  for (int64_t p = 0; p < t.fetch_panels; p++) {
    fetch_to(t.fetch_near, from + static_cast<size_t>(p) * t.panel_bytes);
  }
}

// Returns the number of panels of the whole matrix. Kernels prefetch beyond the last panel
// of their task, because the next task of the same thread usually needs the next panels.
CPUSERVE_INLINE int64_t panels_of(const PackedWeight& w) { return (w.n + kPanel - 1) / kPanel; }

// Returns the bytes of a unit of K in one panel, or their mean if units share headers.
template <class Kind>
CPUSERVE_INLINE int64_t unit_bytes(const PackedWeight& w) {
  if constexpr (!Kind::kSharesHeaders) return Kind::kUnitBytes;
  return static_cast<int64_t>(w.panel_bytes) / Kind::units(w.k);
}

// The number of panels of a span: one pass over the weights computes a span,
// and then runs the epilogue of its sums. The number is divisible by 1, 2, 3 and 4.
constexpr int kSpanPanels = kMostPanels;
// Returns the number of floats from one row of the sums of a tile to the next: the width of a span
// in a pass over the weights (kNear), otherwise the width of a strip (64 columns).
template <bool kNear>
constexpr int sums_stride() {
  return (kNear ? kSpanPanels : kStripPanels) * kPanel;
}
constexpr int64_t kSumsFloats = int64_t{kMostBlockRows} * kStripPanels * kPanel;
static_assert(kSumsFloats * 4 + 2 * kMostNearBytes <= static_cast<int64_t>(kLinearScratch),
              "the sums of one row block and widened rows must fit the scratch");

}  // namespace
}  // namespace CPUSERVE_NS
