// Attention on AMX tiles: QK and PV of up to 32 query rows at a time. Keys and values are bf16,
// or 8-bit codes that are widened to bf16 once for all rows that use a chunk.
// The header generic/attention.h explains the terms of attention kernels.
//
// Keys are multiplied in KV blocks of 32 keys, because an AMX product in PV sums over 32 keys.
// The sums of a row do not depend on the other rows of its tile:
// for keys that only other rows see, the row adds products with probabilities of 0,
// which are 0 if all values are finite. If the values of a KV block that some rows do not see
// completely contain an infinity or NaN, rows that see different keys are multiplied separately.
// Values in the cache that no row of the tile sees may be stale, so zeros replace them.
//
// The vector units need more time for probabilities than the AMX unit for QK and PV:
// with heads of 64, for 32 rows and one chunk, about 3,500 cycles against 2,048 cycles.
// If many tiles of rows use a chunk, both work in parallel: while vectors compute the softmax
// of one tile, AMX multiplies the values of the tile before it and the keys of the tile after it.
#pragma once
#include "kernels/generic/attention_tile.h"
#include "kernels/generic/matrix_job.h"

namespace CPUSERVE_NS {
namespace {

template <class Kv>
struct OnTiles : Kv {
  static constexpr bool kMatrixTiles = true;
  static constexpr int kMostRows = kJobRows;
};
// The widest head of an 8-bit cache on AMX tiles. The scratch memory is too small for widened keys
// and values of wider heads, so attention with such heads uses the kernel of the ISA level below.
constexpr int kWidestScaledHead = 256;

// The addresses of the KV blocks of a chunk as pairs of bf16:
// blocks in the KV cache, or widened copies of 8-bit blocks.
struct PairBlocks {
  const uint16_t* k[kChunkBlocks];
  const uint16_t* v[kChunkBlocks];
};

// The number of cache lines that a step of QK prefetches if many tiles of rows use a chunk:
// with 256 rows at hd 64, 8 tiles of 16 steps each prefetch the 1,024 lines of the next chunk.
constexpr int kLightLines = 8;

// The number of elements in the K half of a KV block, and in its V half.
inline size_t half_size(int hd) { return static_cast<size_t>(kBlock * hd); }
// spare_bytes returns the bytes of Tile::spare: copies of the values of two blocks (masked_values),
// and two AMX tiles of keys with the last 16 dims of a head.
inline size_t value_copy_bytes(int hd) { return half_size(hd) * sizeof(uint16_t); }
inline size_t spare_bytes(int hd) { return 2 * value_copy_bytes(hd) + kJobColumns * kTileBytes; }
template <class Kv>
inline size_t widened_bytes(int hd) {
  return Kv::kScaled ? 2 * kChunkBlocks * half_size(hd) * sizeof(uint16_t) : 0;
}

// Widens rows of codes, `bytes` bytes each, to bf16 [rows / 2][width][2]; load(from, i) reads
// columns [i, i + kLanes) of two rows. Decode prefetches one cache line for every two lines that it
// widens; the steps of QK and PV prefetch the other cache lines.
template <Ahead kAhead, class Load>
static inline void widen_half(const uint8_t* from, int rows, int width, int bytes, uint16_t* to,
                              Fetch& f, const Load& load) {
  int read = 0;
  for (int r = 0; r < rows; r += 2, from += 2 * bytes) {
    for (int i = 0; i < width; i += kLanes, to += 2 * kLanes) store_pairs(to, load(from, i));
    if (kAhead == Ahead::light) continue;
    for (read += 2 * bytes; read >= 2 * kTileLineBytes; read -= 2 * kTileLineBytes) {
      fetch_lines<kAhead>(f, 1);
    }
  }
}

// Returns the addresses of KV blocks [first, last) of a chunk. 8-bit blocks are widened into `to`.
template <class Kv, Ahead kAhead>
static inline PairBlocks pair_blocks(const ChunkBlocks<Kv>& c, int first, int last, uint16_t* to,
                                     Fetch& f) {
  using Values = typename Kv::Values;
  PairBlocks pairs = {};
  const int bytes = Values::width(c.hd);
  for (int i = first; i < last; i++) {
    if constexpr (Kv::kScaled) {
      widen_half<kAhead>(c.k[i], c.hd, kBlock, kBlock, to, f,
                         [](const uint8_t* p, int at) { return Kv::load(p + at, kBlock); });
      widen_half<kAhead>(c.v[i], kBlock, c.hd, bytes, to + half_size(c.hd), f,
                         [&](const uint8_t* p, int at) {
                           return Values::template load<1>(p + Values::offset(at), at, 0, bytes);
                         });
      pairs.k[i] = to;
      pairs.v[i] = to + half_size(c.hd);
      to += 2 * half_size(c.hd);
    } else {
      pairs.k[i] = c.k[i];
      pairs.v[i] = c.v[i];
    }
  }
  return pairs;
}

// Returns the number of cache lines that a call of step() prefetches in the products of QK or PV
// if it reads `lines` lines of bf16. 8-bit blocks have half as many lines in the KV cache,
// and widen_half prefetches half of these. The calls prefetch a bit more than the other half,
// because the prefetches of the first chunk begin late and have to catch up.
template <class Kv, Ahead kAhead>
CPUSERVE_INLINE int step_fetches(int lines) {
  if (kAhead == Ahead::light) return kLightLines;
  return Kv::kScaled ? lines * 3 / 8 : lines;
}

// The number of rows that the AMX tiles are configured for. Configuring them takes longer
// than a call of step(), so set() configures them only if the number of rows changes.
struct Shape {
  int rows = 0;
  void set(int n) {
    if (n != rows) configure_job(n, kTileLines);
    rows = n;
  }
};

// Computes the scores of all rows of a tile for the keys of KV blocks [block, last). A call of
// step() multiplies 32 dims of one block. A lane is one key, so a stale key spoils only its lane.
template <class Kv>
struct KeySteps {
  const Tile<Kv>* t;
  const PairBlocks* blocks;
  int rows, hd, block, last, d = 0;

  static int a_block(int hd) { return static_cast<int>(round_up(hd, 32)) / 32; }
  bool done() const { return block == last; }

  template <Ahead kAhead>
  void step(Fetch& f) {
    rows > kTileRows16 ? tile_step<2, kAhead>(f) : tile_step<1, kAhead>(f);
  }

 private:
  template <int RT, Ahead kAhead>
  __attribute__((always_inline)) inline void tile_step(Fetch& f) {
    constexpr size_t kKeyBytes = kBlock * 4;  // bytes of one pair of dims of all keys of a block
    const size_t width = static_cast<size_t>(round_up(hd, 32)) * 2;
    const uint8_t* k =
        reinterpret_cast<const uint8_t*>(blocks->k[block]) + static_cast<size_t>(d / 2) * kKeyBytes;
    const uint8_t* q = reinterpret_cast<const uint8_t*>(t->q + d);
    if (d == 0) zero_sums<RT, 2>();
    if (d + 32 <= hd) {
      fetch_lines<kAhead>(f, step_fetches<Kv, kAhead>(2 * kTileLines));
      tile_products<Bf16Product, RT, 2>(q, width, k, k + kTileLineBytes, kKeyBytes);
    } else {  // only 16 dims are left: the memory after them belongs to another head
      uint8_t* tail = t->spare + 2 * value_copy_bytes(hd);
      memset(tail, 0, kJobColumns * kTileBytes);
      for (int line = 0; line < 8; line++) {
        for (int half = 0; half < 2; half++) {
          memcpy(tail + half * kTileBytes + line * kTileLineBytes,
                 k + static_cast<size_t>(line) * kKeyBytes + half * kTileLineBytes, kTileLineBytes);
        }
      }
      tile_products<Bf16Product, RT, 2>(q, width, tail, tail + kTileBytes, kTileLineBytes);
    }
    d += 32;
    if (d < hd) return;
    store_sums<RT, 2>(t->s + block * kBlock, kChunk * sizeof(float));
    block++;
    d = 0;
  }
};

// Copies the values of a KV block to `spare`, with zeros for keys outside [begin, end).
// Keys are numbered from 0 in the block. Returns the address of the copy.
static inline const uint16_t* masked_values(const uint16_t* v, int hd, int begin, int end,
                                            uint8_t* spare) {
  uint16_t* to = reinterpret_cast<uint16_t*>(spare);
  const size_t pair = static_cast<size_t>(hd) * 2;
  for (int k = 0; k < kBlock; k += 2, v += pair, to += pair) {
    if (begin <= k && k + 2 <= end) {
      memcpy(to, v, pair * sizeof(*v));
    } else {
      memset(to, 0, pair * sizeof(*v));
      // Only one of the keys k and k + 1, with interleaved values, is in the range: key k + `one`.
      const int one = begin == k + 1 && end > k + 1 ? 1 : 0;
      if ((begin <= k && end == k + 1) || one) {
        for (size_t i = static_cast<size_t>(one); i < pair; i += 2) to[i] = v[i];
      }
    }
  }
  return reinterpret_cast<const uint16_t*>(spare);
}

// Computes o = probabilities times values for `rows` rows from `row` on and a range of keys.
// A call of step() multiplies the values of one KV block in 32 columns.
template <class Kv>
struct ValueSteps {
  const Tile<Kv>* t;
  const uint16_t* v[kChunkBlocks];  // the values of each block, or their copy by masked_values
  int row, rows, hd, first, last, block, column = 0;

  ValueSteps() = default;
  ValueSteps(const Tile<Kv>& tile, const PairBlocks& blocks, int head_dim, int from, int n,
             KeyRange keys)
      : t(&tile),
        row(from),
        rows(n),
        hd(head_dim),
        first(keys.begin / kBlock),
        last((keys.end + kBlock - 1) / kBlock),
        block(first) {
    uint8_t* spare = tile.spare;
    for (int i = first; i < last; i++) {
      const int begin = keys.begin - i * kBlock, end = keys.end - i * kBlock;
      v[i] = blocks.v[i];
      if (begin <= 0 && end >= kBlock) continue;
      v[i] = masked_values(v[i], hd, begin > 0 ? begin : 0, end < kBlock ? end : kBlock, spare);
      spare += value_copy_bytes(hd);
    }
  }

  static int a_block(int hd) { return static_cast<int>(round_up(hd, 32)) / 32; }
  bool done() const { return column >= hd; }

  template <Ahead kAhead>
  void step(Fetch& f) {
    const bool tall = rows > kTileRows16;
    if (hd - column >= 32) {
      tall ? tile_step<2, 2, kAhead>(f) : tile_step<1, 2, kAhead>(f);
    } else {
      tall ? tile_step<2, 1, kAhead>(f) : tile_step<1, 1, kAhead>(f);
    }
  }

 private:
  template <int RT, int NP, Ahead kAhead>
  __attribute__((always_inline)) inline void tile_step(Fetch& f) {
    const size_t line = static_cast<size_t>(hd) * 4;
    const uint8_t* p = reinterpret_cast<const uint8_t*>(t->p + place_in_p<Kv>(row, block * kBlock));
    const uint8_t* values = reinterpret_cast<const uint8_t*>(v[block]) + column * 4;
    if (block == first) zero_sums<RT, NP>();
    if (kAhead == Ahead::full) fetch_lines<kAhead>(f, step_fetches<Kv, kAhead>(NP * kTileLines));
    tile_products<Bf16Product, RT, NP>(p, kChunk * sizeof(float), values, values + kTileLineBytes,
                                       line);
    if (++block < last) return;
    store_sums<RT, NP>(t->o + static_cast<size_t>(row) * t->ldo + column, t->ldo * sizeof(float));
    block = first;
    column += 32;
  }
};

template <Ahead kAhead, class Steps>
CPUSERVE_INLINE void run_all(Steps steps, Fetch& f) {
  while (!steps.done()) steps.template step<kAhead>(f);
}

// Sets the probabilities of keys in [begin, end) that row r does not see to 0.
// The range consists of whole blocks. exp_scores() has already cleared the masked lanes
// of the first and the last vector of visible keys.
template <class Kv>
static inline void clear_unseen(const Tile<Kv>& t, int r, int begin, int end) {
  if (t.lo[r] >= t.hi[r]) return;  // all probabilities of this row are 0 already
  uint16_t* p = t.p + place_in_p<Kv>(r, 0);
  const int lo = t.lo[r] / kLanes * kLanes, hi = static_cast<int>(round_up(t.hi[r], kLanes));
  if (begin < lo) memset(p + begin, 0, static_cast<size_t>(lo - begin) * sizeof(*p));
  if (hi < end) memset(p + hi, 0, static_cast<size_t>(end - hi) * sizeof(*p));
}

// Returns whether the value vectors of key positions [begin, end) of a block are finite.
// v is the V half of the block; the vectors of positions 2j and 2j + 1 are interleaved.
static inline bool values_are_finite(const uint16_t* v, int hd, int begin, int end) {
  int found = 0;
  for (int k = begin; k < end; k++) {
    const uint16_t* pair = v + k / 2 * 2 * hd + k % 2;
    for (int i = 0; i < 2 * hd; i += 2) found |= (pair[i] & 0x7f80) == 0x7f80;
  }
  return !found;
}

// Returns whether the R rows may be multiplied together although some rows do not see all `keys`:
// whether all values that a row does not see are finite. The values of 8-bit codes always are.
template <class Kv>
static inline bool may_mix(const Tile<Kv>& t, const PairBlocks& c, int hd, int R, KeyRange keys) {
  if (Kv::kScaled) return true;
  // In most cases all rows see all keys, and no block has to be searched for infinities.
  bool whole = true;
  for (int r = 0; r < R; r++) whole &= t.lo[r] <= keys.begin && keys.end <= t.hi[r];
  if (whole) return true;
  for (int i = keys.begin / kBlock; i * kBlock < keys.end; i++) {
    const int from = at_least(keys.begin - i * kBlock, 0);
    const int to = at_most(keys.end - i * kBlock, kBlock);
    bool all = true;
    for (int r = 0; r < R; r++) {
      all &= t.lo[r] <= i * kBlock + from && i * kBlock + to <= t.hi[r];
    }
    if (!all && !values_are_finite(c.v[i], hd, from, to)) return false;
  }
  return true;
}

// Computes o of R rows that must not be multiplied together (may_mix returns false):
// each run of rows that see the same keys is multiplied separately.
template <class Kv>
static inline void value_runs(Tile<Kv>& t, const PairBlocks& c, int hd, int R, Shape& shape,
                              Fetch& f) {
  clear_rows(t, R, hd, false);
  for (int r = 0, n; r < R; r += n) {
    n = 1;
    while (r + n < R && t.lo[r + n] == t.lo[r] && t.hi[r + n] == t.hi[r]) n++;
    if (t.lo[r] >= t.hi[r]) continue;
    shape.set(n);
    run_all<Ahead::light>(ValueSteps<Kv>(t, c, hd, r, n, {t.lo[r], t.hi[r]}), f);
  }
}

// Rounds a range of keys outward to whole blocks.
inline KeyRange whole_blocks(KeyRange keys) {
  return {keys.begin / kBlock * kBlock, static_cast<int>(round_up(keys.end, kBlock))};
}

// Sets m, l and o of R rows that see no key of the chunk.
template <class Kv>
static inline void attend_nothing(Tile<Kv>& t, int R, int hd) {
  for (int r = 0; r < R; r++) {
    t.m[r] = -INFINITY;
    t.l[r] = 0.0f;
  }
  clear_rows(t, R, hd, true);
}

// Computes m, l and o of the only tile of rows that uses a chunk, as in decode.
// Memory bandwidth limits this case, so the products and the softmax do not overlap.
template <class Kv>
static inline void attend_alone(Tile<Kv>& t, int R, const ChunkBlocks<Kv>& c,
                                const PairBlocks& pairs, Fetch& f) {
  const KeyRange keys = visible_keys(t, R);
  if (keys.begin >= keys.end) return attend_nothing(t, R, c.hd);
  const KeyRange whole = whole_blocks(keys);
  if constexpr (Kv::kScaled) fetch_value_scales(c);
  Shape shape;
  shape.set(R);
  run_all<Ahead::full>(KeySteps<Kv>{&t, &pairs, R, c.hd, whole.begin / kBlock, whole.end / kBlock},
                       f);
  soften_scores(t, c, R);
  for (int r = 0; r < R; r++) clear_unseen(t, r, whole.begin, whole.end);
  if (!may_mix(t, pairs, c.hd, R, keys)) return value_runs(t, pairs, c.hd, R, shape, f);
  run_all<Ahead::full>(ValueSteps<Kv>(t, pairs, c.hd, 0, R, keys), f);
}

// One of the two tiles of rows that are computed at the same time.
template <class Kv>
struct TileSlot {
  Tile<Kv>* t;
  int index = 0, rows = 0;  // rows 0: the slot is empty
  KeyRange keys = {};
};

// What AMX does while vectors compute the softmax of another tile, row by row. There are two slots
// for tiles. AMX first computes PV of the tile in `slot`, then QK of the next tile,
// which takes the place of the tile in `slot`. The softmax is for the tile in the other slot.
//   begin(index, tile): prepares a tile and returns its number of rows,
//                       or 0 if the tile has nothing to compute
//   end(index, tile, rows): merges or stores m, l and o of a tile
template <class Kv, class Begin, class End>
struct Between {
  const ChunkBlocks<Kv>& c;
  const PairBlocks& pairs;
  const Begin& begin;
  const End& end;
  int next, count;  // index of the next tile, and number of tiles
  Shape shape = {};
  TileSlot<Kv>* slot = nullptr;
  KeySteps<Kv> keys = {};
  ValueSteps<Kv> values = {};
  enum { kValues, kKeys, kNothing } now = kNothing;

  // Prepares the next tile of rows with a visible key, and puts it into the empty slot.
  void take_next() {
    now = kNothing;
    while (next < count && slot->rows == 0) {
      slot->index = next++;
      slot->rows = begin(slot->index, *slot->t);
      if (slot->rows == 0) continue;
      slot->keys = visible_keys(*slot->t, slot->rows);
      if (slot->keys.begin < slot->keys.end) break;
      attend_nothing(*slot->t, slot->rows, c.hd);
      finish();
    }
    if (slot->rows == 0) return;
    now = kKeys;
    shape.set(slot->rows);
    const KeyRange whole = whole_blocks(slot->keys);
    keys = {slot->t, &pairs, slot->rows, c.hd, whole.begin / kBlock, whole.end / kBlock};
  }
  void finish() {
    end(slot->index, *slot->t, slot->rows);
    slot->rows = 0;
  }
  void start(TileSlot<Kv>& s, Fetch& f) {
    slot = &s;
    if (s.rows == 0) return take_next();
    if (may_mix(*s.t, pairs, c.hd, s.rows, s.keys)) {
      now = kValues;
      shape.set(s.rows);
      values = ValueSteps<Kv>(*s.t, pairs, c.hd, 0, s.rows, s.keys);
    } else {
      value_runs(*s.t, pairs, c.hd, s.rows, shape, f);
      finish();
      take_next();
    }
  }
  __attribute__((noinline)) void step(Fetch& f) {
    if (now == kValues) {
      values.template step<Ahead::light>(f);
      if (!values.done()) return;
      finish();
      take_next();
    } else if (now == kKeys) {
      keys.template step<Ahead::light>(f);
      if (keys.done()) now = kNothing;
    }
  }
};

template <class Kv>
static __attribute__((noinline)) void soften_one(Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r,
                                                 KeyRange whole) {
  soften_row(t, c, r);
  clear_unseen(t, r, whole.begin, whole.end);
}

// Computes `count` tiles of rows for one chunk, two tiles at a time.
template <class Kv, class Begin, class End>
static inline void attend_many(int count, Tile<Kv> (&tiles)[2], const ChunkBlocks<Kv>& c,
                               const PairBlocks& pairs, Fetch& f, const Begin& begin,
                               const End& end) {
  TileSlot<Kv> slots[2] = {{&tiles[0]}, {&tiles[1]}};
  Between<Kv, Begin, End> between{c, pairs, begin, end, 0, count};
  between.start(slots[0], f);
  while (between.now != between.kNothing) between.step(f);
  for (int at = 0; slots[at].rows > 0; at ^= 1) {
    TileSlot<Kv>& slot = slots[at];
    Tile<Kv>& t = *slot.t;
    const KeyRange whole = whole_blocks(slot.keys);
    const int blocks = (whole.end - whole.begin) / kBlock;
    const int steps = blocks * (KeySteps<Kv>::a_block(c.hd) + ValueSteps<Kv>::a_block(c.hd));
    const int a_row = (steps + slot.rows - 1) / slot.rows;
    between.start(slots[at ^ 1], f);
    find_top(t, c, 0);
    for (int r = 0; r < slot.rows; r++) {
      for (int i = 0; i < a_row; i++) between.step(f);
      if (r + 1 < slot.rows) find_top(t, c, r + 1);  // the reduction overlaps with the exp of row r
      soften_one(t, c, r, whole);
    }
    while (between.now != between.kNothing) between.step(f);
    if (slots[at ^ 1].rows > 0) continue;
    between.start(slot, f);  // PV of the last tile
    while (between.now != between.kNothing) between.step(f);
  }
}

}  // namespace
}  // namespace CPUSERVE_NS
