// The parameters of a tile of a linear: its rows and weights, the lines that it prefetches
// meanwhile, and the width of its sums.
#pragma once
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {
namespace {

// The part of the next K block that a tile prefetches while it computes. The panels of that block
// take turns. With a turn, the tile prefetches one stretch of a panel: `every` pieces of `step`
// bytes, one piece with each of its own next `every` units.
struct UnitShare {
  const uint8_t* at = nullptr;  // the first stretch
  int64_t every = 1, step = 0;
  int64_t panel = 0, panels = 0;  // the panel of the first stretch; the number of panels
  // Whether a turn is due: each `every` units add `panels` to the credit, and a turn costs `calls`.
  int64_t credit = 0, calls = 1;
};

struct LinearTile {
  const uint8_t* x;  // first row, from unit x_u0 on
  size_t x_stride;
  int64_t x_u0;
  int64_t x_padded;  // row width in elements, as stored
  const uint8_t* w;  // first panel
  size_t panel_bytes;
  int64_t unit_bytes;     // of one panel
  int64_t u0, split, u1;  // units of K
  // The prefetches of a tile depend on its use.
  // One pass over the weights (kNear): with unit u, ahead0 + (u - u0) unit_bytes if u is below
  // `split`, otherwise ahead1 + (u - u0) unit_bytes; the same place of the panels after the first.
  // A K block of a kind with kLineUnits: after every `fetch_every` units, one line of each of
  // `fetch_panels` panels of the next block, beginning with the line at ahead0.
  // For a K block of another kind, `share` has the part of the next block to prefetch.
  const uint8_t *ahead0, *ahead1;
  int64_t fetch_every, fetch_panels;
  UnitShare share;
  bool fetch_near = false;  // in a pass and with kLineUnits: to L1, otherwise to L2
  float* c;                 // sums, row stride sums_stride<kNear>()
  bool resume;              // c holds the sums of the units below u0
  bool last;                // u1 is the end of K
};

// Says where a tile of a kind without kLineUnits prefetches from. Units of a panel have
// `unit_bytes` bytes.
template <bool kNear>
class TileFetch {
 public:
  __attribute__((always_inline)) inline TileFetch(const LinearTile& t, int64_t unit_bytes)
      : t_(t),
        unit_bytes_(unit_bytes),
        at_(t.share.at),
        panel_(t.share.panel),
        credit_(t.share.credit) {}

  // Bytes between the prefetches of one unit and of the next one.
  __attribute__((always_inline)) inline int64_t step() const {
    return kNear ? unit_bytes_ : t_.share.step;
  }

  // Sets `ahead` to the prefetch of unit u, with weights at `w`. Returns the end of
  // the units that `ahead` then advances with, by step() each.
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
  // Returns the next stretch of the tile's share if a turn is due, otherwise `used`: weights that
  // the tile has just read. They are in L1, so prefetching them costs nothing. To prefetch nothing
  // instead, a tile would need its code a second time.
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

// Hides the origin of a pointer from the compiler. A tile has a few pointers that advance along K
// and adds constant row offsets to them. Without this, gcc keeps a separate pointer for every row
// and stream, and spills.
template <class T>
CPUSERVE_INLINE void opaque(T*& p) {
  asm("" : "+r"(p));
}

// Keeps loads and prefetches before this point before it, and later ones after it. Otherwise gcc
// moves most fetches of a group after its products, where they come all at once: on Granite Rapids
// one row of w4_g32 then reads 82 % of the bandwidth instead of 91 %, and one of q6_k 76 % instead
// of 95 %.
CPUSERVE_INLINE void keep_here() { asm volatile("" ::: "memory"); }

// gcc allocates registers loop by loop. If sums live longer than a short inner loop, it keeps the
// operands of that loop on the stack, which halves the rate of the tile. With the whole function as
// one region it keeps them in registers.
#if defined(__GNUC__) && !defined(__clang__)
#define CPUSERVE_ONE_REGION __attribute__((optimize("ira-region=one")))
#else
#define CPUSERVE_ONE_REGION
#endif

// Whether the quads of a group are a loop, in a tile with so many products of a quad. Where a
// product takes several instructions, the eight quads of a tile would be thousands of them, which
// take long to compile and do not run faster.
constexpr bool loops_over_quads(int products) { return kEmulatesDots && products >= 4; }

// Prefetches a line to L1 or to L2.
CPUSERVE_INLINE void fetch_to(bool near, const uint8_t* line) {
  near ? prefetch(line) : prefetch_l2(line);
}

// Prefetches `left` lines, `a_step` of them with every step of a tile, so that memory works while
// the tile computes.
struct LineFetch {
  const uint8_t* at = nullptr;
  int64_t left = 0, a_step = 0;
  bool near = false;  // into L1

  __attribute__((always_inline)) inline void step() {
    constexpr int kLine = 64;
    const int64_t n = a_step < left ? a_step : left;
    for (int64_t i = 0; i < n; i++, at += kLine) fetch_to(near, at);
    left -= n;
  }
};

// Prefetches a line of each panel of `t`, `from` of the first one.
CPUSERVE_INLINE void fetch_ahead_lines(const LinearTile& t, const uint8_t* from) {
  for (int64_t p = 0; p < t.fetch_panels; p++) {
    fetch_to(t.fetch_near, from + static_cast<size_t>(p) * t.panel_bytes);
  }
}

// Number of panels of the whole matrix. A call also prefetches beyond its last panel, because the
// next call of the same thread usually needs that.
CPUSERVE_INLINE int64_t panels_of(const PackedWeight& w) { return (w.n + kPanel - 1) / kPanel; }

// Bytes of one panel per unit of K, on average where units share headers.
template <class Kind>
CPUSERVE_INLINE int64_t unit_bytes(const PackedWeight& w) {
  if constexpr (!Kind::kSharesHeaders) return Kind::kUnitBytes;
  return static_cast<int64_t>(w.panel_bytes) / Kind::units(w.k);
}

// Number of panels that a one-pass linear collects before the epilogue; divisible by 1..4.
constexpr int kSpanPanels = kMostPanels;
// Floats from one row of the sums of a tile to the next: the width of a span in one-pass linears,
// otherwise of a strip.
template <bool kNear>
constexpr int sums_stride() {
  return (kNear ? kSpanPanels : kStripPanels) * kPanel;
}
constexpr int64_t kSumsFloats = int64_t{kMostBlockRows} * kStripPanels * kPanel;
static_assert(kSumsFloats * 4 + 2 * kMostNearBytes <= static_cast<int64_t>(kLinearScratch),
              "the sums of one row block and widened rows must fit the scratch");

}  // namespace
}  // namespace CPUSERVE_NS
