// Finds the ids that a sampling filter (top_k, top_p) keeps in a row of logits,
// without sorting the row.
//
// Ids are ordered by descending logits, and ids with equal logits by ascending id.
// A filter keeps the first ids of this order, so its result is one Cut. The search narrows a band
// (a range of logits) that contains the last kept id: for each of four thresholds,
// a pass over the row sums the masses of the ids with logits at or above the threshold,
// and skips blocks with a maximum below all four thresholds. When the ids of the band fit a list
// of kBandIds ids, a quickselect finds the cut. Loops without intrinsics have fixed trip counts
// and no early exits, so that the compiler can vectorize them.
#pragma once
#include <float.h>

#include "kernels/generic/math.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

constexpr int kBandIds = 4096;  // the most ids in the list for the quickselect
constexpr int kThresholds = 4;

// The last id that a filter keeps: a cut keeps i if logits[i] > logit, or == logit and i <= id.
struct Cut {
  float logit;
  int32_t id;
};

// A row of n logits in `blocks` blocks of `block` ids, with memory for a list of ids,
// and with the largest logit of each block (only an upper bound after ids have been masked).
struct Row {
  const float* logits;
  const float* mass;  // mass of each id; nullptr: every id has the mass 1
  int n, block, blocks;
  const float* block_max;
  int32_t* ids;  // kBandIds ids
};

CPUSERVE_INLINE int block_end(const Row& r, int b) {
  return (b + 1) * r.block < r.n ? (b + 1) * r.block : r.n;
}

// key_of maps floats to integers in the same order; float_of_key maps them back.
CPUSERVE_INLINE int32_t key_of(float x) {
  int32_t i;
  memcpy(&i, &x, sizeof i);
  return i ^ ((i >> 31) & 0x7fffffff);
}
CPUSERVE_INLINE float float_of_key(int32_t k) {
  k ^= (k >> 31) & 0x7fffffff;
  float x;
  memcpy(&x, &k, sizeof x);
  return x;
}

CPUSERVE_INLINE bool before(const float* logits, int32_t a, int32_t b) {
  const bool larger = logits[a] > logits[b], equal = logits[a] == logits[b];
  return larger | (equal & (a < b));
}
CPUSERVE_INLINE double weight_of(const float* mass, int32_t id) {
  return mass ? static_cast<double>(mass[id]) : 1.0;
}

CPUSERVE_INLINE void swap_ids(int32_t* ids, int a, int b) {
  const int32_t x = ids[a];
  ids[a] = ids[b];
  ids[b] = x;
}

// Partitions ids[lo .. hi) around a pivot, the median of the first, middle and last id:
// first the ids that come before the pivot in the order of logits,
// then the pivot, then the other ids. Returns the index of the pivot.
static inline int partition_ids(const float* logits, int32_t* ids, int lo, int hi) {
  const int mid = lo + (hi - lo) / 2, last = hi - 1;
  if (before(logits, ids[mid], ids[lo])) swap_ids(ids, mid, lo);
  if (before(logits, ids[last], ids[lo])) swap_ids(ids, last, lo);
  if (before(logits, ids[mid], ids[last])) swap_ids(ids, mid, last);
  const int32_t median = ids[last];
  int place = lo;
  for (int i = lo; i < last; i++) {  // without branches, because a CPU could not predict them
    const int32_t id = ids[i];
    ids[i] = ids[place];
    ids[place] = id;
    place += before(logits, id, median) ? 1 : 0;
  }
  swap_ids(ids, place, last);
  return place;
}

// Finds the fewest ids with the highest logits that have a total mass of at least `target` (> 0).
// For top-p the mass is a probability; for top-k (`mass` is null) each id has the mass 1.
// Moves these ids to the beginning of `ids`, with the lowest logit of them last, and returns
// the index of this last one. If the mass of all ids is below `target`, returns n - 1.
static inline int quick_cut(const float* logits, const float* mass, int32_t* ids, int n,
                            double target) {
  int lo = 0, hi = n;
  double above = 0;
  while (hi - lo > 1) {
    const int place = partition_ids(logits, ids, lo, hi);
    double sum = above;
    for (int i = lo; i < place; i++) sum += weight_of(mass, ids[i]);
    if (sum >= target) {
      hi = place;
      continue;
    }
    above = sum + weight_of(mass, ids[place]);
    if (above >= target || place + 1 == hi) return place;
    lo = place + 1;
  }
  return lo;
}

// For each of kThresholds descending thresholds: the total mass and the number of ids with logits
// at or above it. A BlockTally counts one block; a Tally counts a row, adding blocks in order.
struct BlockTally {
  float weight[kThresholds];
  int32_t count[kThresholds];
};
struct Tally {
  double weight[kThresholds];
  int64_t count[kThresholds];
};

// Vectors of kLanes lanes, as vector types of the compiler,
// because comparisons of these types return masks at any ISA level.
typedef float TallyFloats __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t TallyInts __attribute__((vector_size(kLanes * sizeof(int32_t))));

template <class To, class From>
CPUSERVE_INLINE To same_lanes(const From& from) {
  To to;
  static_assert(sizeof to == sizeof from, "as many lanes");
  memcpy(&to, &from, sizeof to);
  return to;
}

template <bool kMass>
static inline BlockTally tally_block(const float* x, const float* mass, int n,
                                     const float* thresholds) {
  TallyFloats weight[kThresholds] = {};
  TallyInts count[kThresholds] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    TallyFloats v;
    TallyInts m = {};
    memcpy(&v, x + i, sizeof v);
    if (kMass) memcpy(&m, mass + i, sizeof m);
#pragma GCC unroll 4
    for (int a = 0; a < kThresholds; a++) {
      const TallyInts in = v >= thresholds[a];  // -1 (true) or 0
      count[a] -= in;
      if (kMass) weight[a] += (TallyFloats)(in & m);
    }
  }
  BlockTally t;
  reduce_add4(same_lanes<I>(count[0]), same_lanes<I>(count[1]), same_lanes<I>(count[2]),
              same_lanes<I>(count[3]), t.count);
  reduce_add4(same_lanes<F>(weight[0]), same_lanes<F>(weight[1]), same_lanes<F>(weight[2]),
              same_lanes<F>(weight[3]), t.weight);
  for (int a = 0; a < kThresholds; a++) {
    for (int k = i; k < n; k++) {
      if (x[k] < thresholds[a]) continue;
      t.count[a]++;
      if (kMass) t.weight[a] += mass[k];
    }
    if (!kMass) t.weight[a] = static_cast<float>(t.count[a]);
  }
  return t;
}

// Returns the tally of block b, which is empty if the block maximum is below all thresholds.
CPUSERVE_INLINE BlockTally tally_of(const Row& r, int b, const float* thresholds) {
  if (r.block_max[b] < thresholds[kThresholds - 1]) return {};
  const int i = b * r.block, n = block_end(r, b) - i;
  if (r.mass) return tally_block<true>(r.logits + i, r.mass + i, n, thresholds);
  return tally_block<false>(r.logits + i, nullptr, n, thresholds);
}

CPUSERVE_INLINE void add_tally(const BlockTally& block, Tally& t) {
  for (int a = 0; a < kThresholds; a++) {
    t.count[a] += block.count[a];
    t.weight[a] += static_cast<double>(block.weight[a]);
  }
}

static inline Tally tally_row(const Row& r, const float* thresholds) {
  Tally t = {};
  for (int b = 0; b < r.blocks; b++) add_tally(tally_of(r, b, thresholds), t);
  return t;
}

// A range [lo, hi) of logits that contains the logit of the cut. The ids with logits at or above hi
// have less mass together than the target.
struct Band {
  float lo, hi;
  double above;                // total mass of the ids at or above hi
  int64_t count_lo, count_hi;  // number of ids at or above lo (an upper bound) and at or above hi
};

// Chooses thresholds strictly inside the band, at equal distances of the logit.
// Such thresholds narrow the band slowly if logits differ much in magnitude. After five rounds,
// every other round therefore chooses thresholds at equal distances of key_of(logit).
// key_of numbers all floats in order, so such a round divides the floats of the band equally.
static inline void spread_thresholds(const Band& b, int round, float* t) {
  const int64_t lo = key_of(b.lo), hi = key_of(b.hi);
  const bool linear = (round < 5 || round % 2 == 0) && b.lo > -FLT_MAX && b.hi < FLT_MAX;
  const double value = static_cast<double>(b.lo), width = static_cast<double>(b.hi) - value;
  for (int a = 0; a < kThresholds; a++) {
    const int step = kThresholds - a, steps = kThresholds + 1;
    int64_t key = linear ? key_of(static_cast<float>(value + width * step / steps))
                         : lo + (hi - lo) * step / steps;
    key = key > hi - 1 ? hi - 1 : key;
    key = key < lo + 1 ? lo + 1 : key;
    t[a] = float_of_key(static_cast<int32_t>(key));
  }
}

// Narrows the band with the tally of a row at thresholds t. The new band is between two
// of these thresholds, or between a threshold and an end of the old band.
static inline void narrow_band(const Tally& tally, const float* t, double target, Band& band) {
  int a = 0;
  while (a < kThresholds && tally.weight[a] < target) a++;
  if (a < kThresholds) {
    band.lo = t[a];
    band.count_lo = tally.count[a];
  }
  if (a > 0) {
    band.hi = t[a - 1];
    band.above = tally.weight[a - 1];
    band.count_hi = tally.count[a - 1];
  }
}

// Writes the ids with logits in the band to r.ids, in ascending order, and returns their number.
// Returns kBandIds + 1 if r.ids may be too small for these ids.
static inline int gather_band(const Row& r, const Band& band) {
  const F lo = set1(band.lo), hi = set1(band.hi);
  int found = 0;
  for (int b = 0; b < r.blocks; b++) {
    if (r.block_max[b] < band.lo) continue;
    const int end = block_end(r, b);
    for (int i = b * r.block; i < end; i += kLanes) {
      if (found > kBandIds - kLanes) return kBandIds + 1;
      const int n = end - i < kLanes ? end - i : kLanes;
      const F x = n == kLanes ? load(r.logits + i) : load_n(r.logits + i, n);
      uint32_t in = lanes_between(x, lo, hi) & ((1u << n) - 1);
      for (; in != 0; in &= in - 1) r.ids[found++] = i + __builtin_ctz(in);
    }
  }
  return found;
}

// Returns the cut in a band where all logits are equal, so that the order of the ids decides.
static inline Cut cut_equal(const Row& r, const Band& band, double target) {
  double sum = band.above;
  int32_t last = -1;
  for (int i = 0; i < r.n; i++) {
    if (r.logits[i] != band.lo) continue;
    last = i;
    sum += weight_of(r.mass, i);
    if (sum >= target) break;
  }
  return {band.lo, last};
}

static inline Cut cut_band(const Row& r, Band band, double target) {
  for (int round = 0;; round++) {
    if (band.count_lo - band.count_hi <= kBandIds - kLanes) {
      const int found = gather_band(r, band);
      if (found > 0 && found <= kBandIds) {
        const int32_t id = r.ids[quick_cut(r.logits, r.mass, r.ids, found, target - band.above)];
        return {r.logits[id], id};
      }
      if (found == 0) return {band.hi, r.n};
    }
    if (key_of(band.hi) - static_cast<int64_t>(key_of(band.lo)) <= 1) {
      return cut_equal(r, band, target);
    }
    float t[kThresholds];
    spread_thresholds(band, round, t);
    narrow_band(tally_row(r, t), t, target, band);
  }
}

CPUSERVE_INLINE float above(float x) { return float_of_key(key_of(x) + 1); }

// Returns the cut after the first `k` (>= 1) ids. If fewer than k logits are above -inf,
// the cut keeps all of these. The band starts at the k-th largest block maximum, because at least k
// blocks contain an id at or above this maximum; most searches need no narrower band.
static inline Cut cut_count(Row r, float largest, int k) {
  r.mass = nullptr;
  Band band = {-FLT_MAX, above(largest), 0, r.n, 0};
  if (k <= r.blocks) {
    for (int b = 0; b < r.blocks; b++) r.ids[b] = b;
    const float start = r.block_max[r.ids[quick_cut(r.block_max, nullptr, r.ids, r.blocks, k)]];
    if (start > band.lo) band.lo = start;
  }
  if (band.lo == -FLT_MAX) {
    float t[kThresholds] = {-FLT_MAX, -FLT_MAX, -FLT_MAX, -FLT_MAX};
    band.count_lo = tally_row(r, t).count[0];
    if (band.count_lo <= k) return {-FLT_MAX, r.n};
    // The first thresholds are 1, 2, 4 and 8 times the range of the block maxima below the largest.
    float least = largest;
    for (int b = 0; b < r.blocks; b++) {
      if (r.block_max[b] > -FLT_MAX && r.block_max[b] < least) least = r.block_max[b];
    }
    for (int a = 0; a < kThresholds; a++) {
      t[a] = largest - static_cast<float>(1 << a) * (largest - least);
      if (!(t[a] > -FLT_MAX)) t[a] = -FLT_MAX;
    }
    narrow_band(tally_row(r, t), t, k, band);
  } else if (gather_band(r, band) <= kBandIds) {
    band.count_lo = 1;  // the whole band fits r.ids, so cut_band gathers it immediately
  }
  return cut_band(r, band, k);
}

// The largest number of ids in a sample: a subset of a row's ids, not a token drawn at random.
constexpr int kSampleIds = 2048;

// Writes the ids of a sample to r.ids, and returns their number. The sample has equally many
// neighbouring ids from every block of the row, at an offset that differs from block to block.
CPUSERVE_INLINE int sample_ids(const Row& r) {
  const int each = kSampleIds / r.blocks < r.block ? kSampleIds / r.blocks : r.block;
  int found = 0;
  for (int b = 0; b < r.blocks && each > 0; b++) {
    const int begin = b * r.block, room = block_end(r, b) - begin - each;
    const int at = begin + (room > 0 ? (b * 97) % (room + 1) : 0);
    for (int i = at; i < at + each && i < block_end(r, b); i++) r.ids[found++] = i;
  }
  return found;
}

// Finds the cut in a subset (sample) of the row's ids, and chooses four thresholds near it:
// the logits at ranks that are 0.4 % and 1.5 % of the sample before and after the cut.
// The cut of the sample misses the cut of the row by about 1 % of the ids of the row
// (one standard deviation). The cut of the row is therefore probably between two thresholds,
// and r.ids nearly always has room for the ids between them. Returns false if the sample
// is too small, or if few ids have most of the mass, because a sample may miss these ids.
static inline bool guess_thresholds(const Row& r, double total, double target, float* t) {
  const int n = sample_ids(r);
  if (n < kSampleIds / 2 || n * 16 > r.n) return false;
  double mass = 0;
  for (int i = 0; i < n; i++) mass += weight_of(r.mass, r.ids[i]);
  const double expected = total * n / r.n;
  if (mass < 0.8 * expected || mass > 1.25 * expected) return false;
  const int at = quick_cut(r.logits, r.mass, r.ids, n, target * mass / total);
  constexpr int kNear = kSampleIds / 256, kFar = kSampleIds / 64;
  // Returns the logit with rank `rank`; r.ids[lo .. hi) must be the ids with ranks lo to hi - 1.
  const auto logit_of = [&r](int rank, int lo, int hi) {
    return r.logits[r.ids[lo + quick_cut(r.logits, nullptr, r.ids + lo, hi - lo, rank - lo + 1)]];
  };
  const int first = at > kFar ? at - kFar : 0, last = at + kFar < n ? at + kFar : n - 1;
  t[0] = logit_of(first, 0, at + 1);
  t[1] = logit_of(at > kNear ? at - kNear : 0, first, at + 1);
  t[3] = logit_of(last, at, n);
  t[2] = logit_of(at + kNear < n ? at + kNear : n - 1, at, last + 1);
  return true;
}

// The start of a search for the cut of top-p:
// the band, the mass to reach, and the thresholds for the first pass over the row.
struct MassSearch {
  Band band;
  double target;
  float thresholds[kThresholds];
};

// Starts the search for the cut of top-p: the fewest best ids with a mass of at least `target`,
// in a row with the mass `total`. The mass of an id is exp((logit - largest) / temperature),
// which rounds to 0 for logits more than 104 temperatures below the largest logit.
// Logits below `least` are not read.
static inline MassSearch start_search(const Row& r, float largest, float least, float temperature,
                                      double total, double target) {
  MassSearch s;
  s.target = target > 1e-300 ? target : 1e-300;
  s.band = {largest - 104.0f * temperature, above(largest), 0, r.n, 0};
  if (!(s.band.lo > least)) s.band.lo = least;
  const float depth[kThresholds] = {1.0f, 3.0f, 8.0f, 20.0f};
  float* t = s.thresholds;
  const bool guessed = least == -FLT_MAX && guess_thresholds(r, total, target, t);
  for (int a = 0; a < kThresholds; a++) {
    if (!guessed) t[a] = largest - depth[a] * temperature;
    if (!(t[a] > s.band.lo)) t[a] = s.band.lo;
  }
  return s;
}

// Ends the search and returns the cut. `tally` counts the row at the thresholds of the search.
static inline Cut end_search(const Row& r, MassSearch s, const Tally& tally) {
  narrow_band(tally, s.thresholds, s.target, s.band);
  return cut_band(r, s.band, s.target);
}

}  // namespace CPUSERVE_NS
