// The memory of a state unit of recurrent layers: addresses, open rows and prefetching.
// kernels/table/recurrent.h explains the terms chunk, closed state and open row.
#pragma once
#include "kernels/generic/convert.h"
#include "kernels/generic/math.h"
#include "kernels/table.h"

// The steps that compute a state unit are separate functions:
// inlined into one function, they would have too few registers.
#define CPUSERVE_NOINLINE __attribute__((noinline))

namespace CPUSERVE_NS {

// A kernel call with up to kFewVectors vectors (k and q of few tokens) waits for memory.
// Such a call reads kStreams states in turn, some rows of each, because a core
// that reads several pages has more cache lines on their way from memory. Reading 8 states in turn
// is 1.3 times as fast as reading one state, and 2 states 1.1 times (128 KiB at a time,
// 2 cores of an Ice Lake Xeon, November 2026). The sums for all these states stay in L1.
constexpr int64_t kStreams = 8, kFewVectors = kTileRows;

// The arguments for a state unit, and the addresses and sizes that follow from them.
// C is kStateChunk (16 tokens). Row t is a token of this call, and row i is any row of the chunk.
// G_i is the sum of g from the start of the chunk to row i, and G_end the sum over the chunk.
struct Recurrence {
  static constexpr int64_t C = kStateChunk;

  RecurrentArgs a;
  int64_t key_row, value_row;  // floats from one row to the next, padded to whole vectors
  float* keys;                 // keys k [C][key_row], with zeros after key_width
  float* u;                    // [heads][C][value_row]
  float* decay;           // G, the sum of g since the chunk began: [heads][C]; by_row: [C][key_row]
  float* queries;         // queries q [rows][key_row], with zeros after key_width
  float* closing;         // [C][value_row] u times the decay from its row to the chunk's end
  float* sums;            // [heads at a time][vectors][value_row]: closed states times vectors
  float *kk, *kq;         // dot products [rows][C] k_i . k_t (kk) and k_i . q_t (kq)
  float *to_u, *to_out;   // [rows][C] kk and kq times exp(G_t - G_i)
  float* fade;            // [C] exp(G_i), and then [C] exp(G_end - G_i); by_row: ones
  float *faded, *ending;  // by_row: faded [2 * C][key_row] has exp(G_t) k_t, then exp(G_t) q_t;
                          // ending [C][key_row] has exp(G_end - G_i) k_i
  float* row_fade;        // by_row: [key_row] exp(G_end)
  int vectors;            // number of vectors: k of all rows t (delta only), then q of all rows t
  bool closes, whole;     // closes: this call fills the chunk; whole: it has all rows of the chunk
  const float* vector[2 * kStateChunk];

  __attribute__((always_inline)) explicit Recurrence(const RecurrentArgs& args)
      : a(args),
        key_row(recurrent_row_floats(args.shape.key_width)),
        value_row(recurrent_row_floats(args.shape.value_width)) {
    keys = a.open;
    u = keys + C * key_row;
    decay = u + a.shape.heads * C * value_row;
    static_assert(kStreams * kFewVectors <= kRecurrentSums && 2 * C <= kRecurrentSums, "sums fit");
    const uintptr_t scratch = (reinterpret_cast<uintptr_t>(a.scratch) + 63) & ~uintptr_t{63};
    queries = reinterpret_cast<float*>(scratch);
    closing = queries + C * key_row;
    sums = closing + C * value_row;
    kk = sums + kRecurrentSums * value_row;
    kq = kk + C * C;
    to_u = kq + C * C;
    to_out = to_u + C * C;
    fade = to_out + C * C;
    faded = fade + C * C;
    ending = faded + 2 * C * key_row;
    row_fade = ending + C * key_row;
    const int rows = static_cast<int>(a.rows);
    vectors = a.shape.delta ? 2 * rows : rows;
    closes = a.num_open + a.rows == C;
    whole = a.rows == C;
    for (int t = 0; t < rows; t++) {
      const float* q = queries + t * key_row;
      vector[t] = a.shape.by_row ? faded + t * key_row : keys + (a.num_open + t) * key_row;
      vector[vectors - rows + t] = a.shape.by_row ? faded + (C + t) * key_row : q;
    }
  }
};

CPUSERVE_INLINE void copy_padded(float* to, const float* x, int64_t width, int64_t row) {
  copy_f32(to, x, static_cast<int>(width));
  for (int64_t i = width; i < row; i++) to[i] = 0.0f;
}

// by_row: computes G of the rows of this call, and k and q of these rows times exp(G).
static CPUSERVE_NOINLINE void append_row_decays(const Recurrence& r) {
  const RecurrentArgs& a = r.a;
  const int64_t width = a.shape.key_width;
  const F rate = set1(a.rate);
  for (int64_t t = 0; t < a.rows; t++) {
    const int64_t n = a.num_open + t;
    float* sum = r.decay + n * r.key_row;
    const float* g = a.g + t * a.g_stride;
    for (int64_t d = 0; d < r.key_row; d += kLanes) {
      const int left = static_cast<int>(width - d);
      F now = zero();
      if (left > 0) {
        const bool whole = left >= kLanes;
        const F x = add(whole ? load(g + d) : load_n(g + d, left),
                        whole ? load(a.bias + d) : load_n(a.bias + d, left));
        now = sub(zero(), mul(rate, softplus(x)));
        if (n > 0) now = add(now, load(sum - r.key_row + d));
      }
      store(sum + d, now);
      const F fade = decayed(now);
      store(r.faded + t * r.key_row + d, mul(fade, load(r.keys + n * r.key_row + d)));
      store(r.faded + (kStateChunk + t) * r.key_row + d,
            mul(fade, load(r.queries + t * r.key_row + d)));
    }
  }
}

static CPUSERVE_NOINLINE void append_rows(const Recurrence& r) {
  const RecurrentArgs& a = r.a;
  for (int64_t t = 0; t < a.rows; t++) {
    const int64_t n = a.num_open + t;
    copy_padded(r.keys + n * r.key_row, a.k + t * a.k_stride, a.shape.key_width, r.key_row);
    copy_padded(r.queries + t * r.key_row, a.q + t * a.q_stride, a.shape.key_width, r.key_row);
  }
  if (a.shape.by_row) return append_row_decays(r);
  for (int64_t head = 0; head < a.shape.heads; head++) {
    float* decay = r.decay + head * kStateChunk + a.num_open;
    float sum = a.num_open ? decay[-1] : 0.0f;
    for (int64_t t = 0; t < a.rows; t++) decay[t] = sum += a.g[t * a.g_stride + head];
  }
}

// A piece of the memory that a state unit reads or writes, apart from its states:
// `rows` rows of `width` floats from `at` on, which begin `stride` floats apart.
struct Piece {
  const float* at;
  int64_t rows, stride, width;
};
// Returns piece `index` of the memory that a call prefetches, in the order of use: the open keys,
// k, q, v, the results, and u of all heads. A call with a whole chunk probably belongs to a prompt,
// where the next chunk follows in memory. Such a call prefetches k, q, v and the results
// of the next chunk; the call before it has prefetched k, q, v and the results of this chunk.
static inline Piece piece_of(const Recurrence& r, int64_t index) {
  const RecurrentArgs& a = r.a;
  const int64_t values = int64_t{a.shape.heads} * a.shape.value_width;
  const int64_t next = r.whole ? kStateChunk : 0;
  switch (index) {
    case 0:
      return {r.keys, 1, 0, a.num_open * r.key_row};
    case 1:
      return {a.k + next * a.k_stride, next, a.k_stride, a.shape.key_width};
    case 2:
      return {a.q + next * a.q_stride, next, a.q_stride, a.shape.key_width};
    case 3:
      return {a.v + next * a.v_stride, a.rows, a.v_stride, values};
    case 4:
      return {a.out + next * a.out_stride, a.rows, a.out_stride, values};
    default:
      return {r.u, r.whole ? 0 : a.shape.heads, kStateChunk * r.value_row,
              (a.num_open + a.rows) * r.value_row};
  }
}

class UnitFetch;
static void begin_row(UnitFetch& f);

// Prefetches the pieces of a state unit (piece_of) into L2, a few cache lines with every tile.
// Memory then stays busy without more requests than a core can track at the same time.
class UnitFetch {
 public:
  __attribute__((always_inline)) explicit UnitFetch(const Recurrence& r) : r_(r) {
    begin_row(*this);
  }
  __attribute__((always_inline)) inline void few() {
    if (segments_ == 0) return;
#pragma GCC unroll 8
    for (int64_t c = 0; c < kSegment; c += 16) prefetch_l2(at_ + c);
    at_ += kSegment;
    if (--segments_ == 0) begin_row(*this);
  }

 private:
  static constexpr int64_t kSegment = 128;  // floats: 8 cache lines
  friend void begin_row(UnitFetch& f);
  static constexpr int64_t kPieces = 6;
  const Recurrence& r_;
  Piece piece_ = {nullptr, 0, 0, 0};
  const float* at_ = nullptr;
  int64_t index_ = 0, row_ = 0, segments_ = 0;
};

// Continues with the next row to prefetch, if there is one. This is not a member function,
// because the symbol of a member function that is not inlined would leak out of the ISA unit.
static CPUSERVE_NOINLINE void begin_row(UnitFetch& f) {
  while (f.row_ == f.piece_.rows || f.piece_.width == 0) {
    if (f.index_ == UnitFetch::kPieces) return;
    f.piece_ = piece_of(f.r_, f.index_++);
    f.row_ = 0;
  }
  f.at_ = f.piece_.at + f.row_++ * f.piece_.stride;
  f.segments_ = (f.piece_.width + UnitFetch::kSegment - 1) / UnitFetch::kSegment;
}

}  // namespace CPUSERVE_NS
