// A tile of attention: the blocks of its chunk of keys, its prefetches, and its rows.
#pragma once
#include "kernels/generic/attention_kv.h"

namespace CPUSERVE_NS {

constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kSlack = 64;      // floats after the scores that a last strip may touch
constexpr int kValueSpan = 64;  // keys after which strips of columns alternate in decode
constexpr float kLog2E = 1.44269504f;

// Vectors of keys or columns that R rows take side by side.
constexpr int strip_vecs(int R) { return R <= kTileRows ? kWide : kWide / 2; }
constexpr int half_strip_vecs(int R) { return strip_vecs(R) > 1 ? strip_vecs(R) / 2 : 1; }

// The blocks of one chunk of one KV head: block b's keys at k[b], values at v[b].
template <class Kv>
struct ChunkBlocks {
  const typename Kv::Elem* k[kChunkBlocks];
  const typename Kv::Elem* v[kChunkBlocks];
  int hd;  // padded
};

// Prefetches lines of K and V in the order of use, a few with every step of a
// tile, so that memory always has work. Only a few at a time, because a core drops prefetches that
// arrive faster than memory delivers. Decode prefetches into L1, where the accesses of one sequence
// also train the hardware prefetcher (6 to 9 % faster than into L2 at group 8). Prefill, which
// returns to a chunk with every tile, prefetches into L2. After the last piece, `at` stays on one
// line.
struct Fetch {
  const uint8_t* at;
  const uint8_t* stop;
  size_t step;                             // bytes from line to line, 0 = nothing left
  const uint8_t* piece[4 * kChunkBlocks];  // of this chunk, then of the next
  int index, count, now;                   // now: pieces of this chunk
  size_t bytes;                            // of a piece
  const uint8_t* idle;
};
constexpr int kLead = 2;  // number of pieces prefetched ahead of their use: one strip of keys

static inline void begin_piece(Fetch& f, int index, size_t into) {
  f.index = index;
  if (index < f.count) {
    f.at = f.piece[index] + into;
    f.stop = f.piece[index] + f.bytes;
    f.step = 64;
  } else {
    f.at = f.idle;
    f.step = 0;
    f.stop = reinterpret_cast<const uint8_t*>(UINTPTR_MAX);
  }
}

// How many lines a step of scores or values prefetches. full: as many as it uses, for decode (one
// tile per chunk). light: fewer, for prefill, which has many tiles per chunk.
enum class Ahead { light, full };

template <Ahead kAhead>
CPUSERVE_INLINE void fetch_lines(Fetch& f, int lines) {
  if (lines == 0) return;
  for (int i = 0; i < lines; i++, f.at += f.step) {
    kAhead == Ahead::full ? prefetch(f.at) : prefetch_l2(f.at);
  }
  if (f.at >= f.stop) begin_piece(f, f.index + 1, 0);
}

template <class Kv, Ahead kAhead, bool kValues>
static constexpr int step_lines(int vecs) {
  if (kAhead == Ahead::light) return kValues ? 0 : 1;
  const int lines = vecs * kLanes * Kv::kStep * static_cast<int>(sizeof(typename Kv::Elem)) / 64;
  return lines > 1 ? lines : 1;
}

// Everything a tile reads and writes besides the cache. Row r sees keys [lo[r], hi[r]) of the chunk
// (lo == hi: none).
template <class Kv>
struct Tile {
  const typename Kv::Left* q;  // [hd / side][R][side]; on matrix tiles [R][hd in whole tiles]
  float* s;                    // [R][kChunk] scores, then kSlack floats a last strip may touch
  typename Kv::Left* p;        // probabilities (place_in_p)
  float* o;                    // [R] rows of hd floats, ldo apart
  size_t ldo;
  int lo[Kv::kMostRows], hi[Kv::kMostRows];
  int position[Kv::kMostRows];  // of the row's token, from the chunk's first key
  float slope[Kv::kMostRows];
  float m[Kv::kMostRows], l[Kv::kMostRows];
  uint8_t* spare;  // memory of spare_bytes(hd), for matrix tiles
  float scale;     // of a score, without kLog2E
  float factor;    // the factor that makes a score, after softcap and alibi, an exponent of 2
  float softcap;
  bool alibi;
};

}  // namespace CPUSERVE_NS
