// The data of one tile of attention (some query rows, one chunk of 256 keys): the KV blocks of its
// chunk, its prefetches and its rows. generic/attention.h explains the terms.
#pragma once
#include "kernels/generic/attention_kv.h"

namespace CPUSERVE_NS {

constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kSlack = 64;      // floats after the scores, which the last strip of keys may write
constexpr int kValueSpan = 64;  // in decode, PV adds this many keys to a strip of columns at a time
constexpr float kLog2E = 1.44269504f;

// The number of vectors in a register tile of R rows: vectors of keys in QK, of columns in PV.
constexpr int strip_vecs(int R) { return R <= kTileRows ? kWide : kWide / 2; }
constexpr int half_strip_vecs(int R) { return strip_vecs(R) > 1 ? strip_vecs(R) / 2 : 1; }

// The addresses of the KV blocks of one chunk and KV head: the keys and values of block b.
template <class Kv>
struct ChunkBlocks {
  const typename Kv::Elem* k[kChunkBlocks];
  const typename Kv::Elem* v[kChunkBlocks];
  int hd;  // head_dim padded to a multiple of 16
};

// Prefetches cache lines of K and V in the order of use, a few lines with every step of a tile.
// These few lines keep memory busy; a core would drop prefetches that memory cannot deliver.
// Decode prefetches into L1 or L2, whichever is faster (WorkSizes::near_keys). On Intel
// it prefetches into L1, so that reads of one sequence also train the hardware prefetcher.
// Prefill prefetches into L2, because every tile of rows reads the chunk. A piece is the K half
// or V half of one block and KV head. After the last piece, `at` stays on one cache line (`idle`).
struct Fetch {
  struct Half {
    const uint8_t* begin;
    size_t bytes;
  };
  const uint8_t* at;
  const uint8_t* stop;
  size_t step;                   // bytes to the next cache line; 0 after the last piece
  Half piece[4 * kChunkBlocks];  // the pieces of this and the next chunk
  int index, count, now;  // index of the current piece; number of pieces; pieces of this chunk
  const uint8_t* idle;    // the cache line to prefetch after the last piece
  bool near;              // whether decode prefetches into L1
};
constexpr int kLead = 2;  // each piece is prefetched while the piece kLead before it is in use

static inline void begin_piece(Fetch& f, int index, size_t into) {
  f.index = index;
  if (index < f.count) {
    f.at = f.piece[index].begin + into;
    f.stop = f.piece[index].begin + f.piece[index].bytes;
    f.step = 64;
  } else {
    f.at = f.idle;
    f.step = 0;
    f.stop = reinterpret_cast<const uint8_t*>(UINTPTR_MAX);
  }
}

// How many cache lines a step of QK or PV prefetches.
//   full   as many lines as the step reads: in decode, only one tile reads a chunk
//   light  fewer lines: in prefill, many tiles read a chunk
enum class Ahead { light, full };

template <Ahead kAhead>
CPUSERVE_INLINE void fetch_lines(Fetch& f, int lines) {
  if (lines == 0) return;
  for (int i = 0; i < lines; i++, f.at += f.step) {
    if (kAhead == Ahead::full && f.near) {
      prefetch(f.at);
    } else {
      prefetch_l2(f.at);
    }
  }
  if (f.at >= f.stop) begin_piece(f, f.index + 1, 0);
}

template <class Kv, Ahead kAhead, bool kValues>
static constexpr int step_lines(int vecs) {
  if (kAhead == Ahead::light) return kValues ? 0 : 1;
  const int bytes = vecs * kLanes * Kv::kStep * static_cast<int>(sizeof(typename Kv::Elem));
  const int lines = bytes / (kValues ? Kv::Values::kCodes : 1) / 64;
  return lines > 1 ? lines : 1;
}

// The data of a tile of attention, except for the KV cache.
// Row r sees keys [lo[r], hi[r]) of the chunk, and no key if lo[r] == hi[r].
// A score times log2 e is called an exponent, because 2 to this power is a probability.
template <class Kv>
struct Tile {
  const typename Kv::Left* q;  // [hd / side][R][side], side = kQuerySide; AMX: [R][hd padded to 32]
  float* s;                    // scores [R][kChunk], then kSlack floats of padding
  typename Kv::Left* p;        // probabilities, at the indexes that place_in_p returns
  float* o;                    // result: R rows of hd floats, ldo floats apart
  size_t ldo;
  int lo[Kv::kMostRows], hi[Kv::kMostRows];
  int position[Kv::kMostRows];  // position of the row's token minus position of the first key
  float slope[Kv::kMostRows];
  // For each row: m is the largest exponent, and l is the sum of 2^(exponent - m).
  float m[Kv::kMostRows], l[Kv::kMostRows];
  uint8_t* spare;  // scratch memory of spare_bytes(hd) bytes, for AMX tiles
  float scale;     // softmax scale of the scores; does not include the factor log2 e
  float factor;    // converts a score, after softcap and ALiBi, to an exponent of 2
  float softcap;
  bool alibi;
};

}  // namespace CPUSERVE_NS
