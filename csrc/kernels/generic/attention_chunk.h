// The data of one tile of attention: the KV blocks of its chunk, its prefetches, and its rows. The
// terms are in generic/attention.h.
#pragma once
#include "kernels/generic/attention_kv.h"

namespace CPUSERVE_NS {

constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kSlack = 64;      // floats after the scores that the last strip of keys may write
constexpr int kValueSpan = 64;  // decode: keys that PV adds to one strip of columns at a time
constexpr float kLog2E = 1.44269504f;

// The number of vectors of keys or columns in a register tile of R rows.
constexpr int strip_vecs(int R) { return R <= kTileRows ? kWide : kWide / 2; }
constexpr int half_strip_vecs(int R) { return strip_vecs(R) > 1 ? strip_vecs(R) / 2 : 1; }

// The addresses of the KV blocks of one chunk and KV head: the keys and values of block b.
template <class Kv>
struct ChunkBlocks {
  const typename Kv::Elem* k[kChunkBlocks];
  const typename Kv::Elem* v[kChunkBlocks];
  int hd;  // head_dim padded to a multiple of 16
};

// Prefetches cache lines of K and V in the order of use, a few with every step of a tile, so that
// memory is always busy. More lines at a time would be lost: a core drops prefetches that arrive
// faster than memory delivers. Decode prefetches into L1, where the accesses of one sequence also
// train the hardware prefetcher (6 to 9 % faster than into L2 with 8 query heads per KV head).
// Prefill reads a chunk again with every tile, and prefetches into L2. A piece is the K or V half
// of one block for one KV head. After the last piece, `at` stays on one line.
struct Fetch {
  const uint8_t* at;
  const uint8_t* stop;
  size_t step;                             // bytes to the next line; 0: nothing left
  const uint8_t* piece[4 * kChunkBlocks];  // pieces of this chunk, then of the next one
  int index, count, now;                   // current piece; all pieces; pieces of this chunk
  size_t bytes;                            // bytes of a piece
  const uint8_t* idle;                     // a line to prefetch when nothing is left
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

// How many cache lines a step of QK or PV prefetches.
//   full   as many lines as the step reads, for decode (one tile reads a chunk)
//   light  fewer lines, for prefill (many tiles read a chunk)
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

// Everything that a tile reads and writes except for the KV cache. Row r sees keys [lo[r], hi[r])
// of the chunk; it sees no key if lo[r] == hi[r]. An exponent is a score times log2 e, so that
// probabilities are powers of 2.
template <class Kv>
struct Tile {
  const typename Kv::Left* q;  // [hd / side][R][side]; on matrix tiles [R][hd in whole tiles]
  float* s;                    // [R][kChunk] scores, then kSlack floats
  typename Kv::Left* p;        // probabilities; place_in_p returns the index of each
  float* o;                    // result: R rows of hd floats, ldo floats apart
  size_t ldo;
  int lo[Kv::kMostRows], hi[Kv::kMostRows];
  int position[Kv::kMostRows];  // position of the row's token minus position of the first key
  float slope[Kv::kMostRows];
  // For each row: m is the largest exponent, and l is the sum of 2^(exponent - m).
  float m[Kv::kMostRows], l[Kv::kMostRows];
  uint8_t* spare;  // memory of spare_bytes(hd), for matrix tiles
  float scale;     // softmax scale of the scores, without kLog2E
  float factor;    // converts a score, after softcap and ALiBi, to an exponent of 2
  float softcap;
  bool alibi;
};

}  // namespace CPUSERVE_NS
