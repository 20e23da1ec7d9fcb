// AMX tiles for the chain kinds: bf16, and int8 with one scale per row.
// These weight kinds have no scales along K, so a sum is one chain of additions,
// which stays in an AMX tile during a K block.
#pragma once
#include "kernels/linear/channel.h"
#include "kernels/linear/dense.h"
#include "kernels/linear/tiles/job.h"

namespace CPUSERVE_NS {
namespace {

// Copies the last `lines` lines of K, fewer than an AMX tile has, from the rows and weights
// of a job to its scratch memory, and pads them with zeros. Without the copy, AMX would also read
// the bytes after the end of K, which belong to another panel or are not readable.
template <int NP>
CPUSERVE_INLINE void copy_tails(const TileJob& t, int64_t line, int64_t lines) {
  const size_t bytes = static_cast<size_t>(lines) * 4;
  memset(t.scratch->rows_tail, 0, sizeof t.scratch->rows_tail);
  for (int r = 0; r < t.rows; r++) {
    memcpy(t.scratch->rows_tail[r], row_of(t, r) + line * 4, bytes);
  }
  memset(t.scratch->lines_tail, 0, sizeof t.scratch->lines_tail);
  for (int p = 0; p < NP; p++) {
    memcpy(t.scratch->lines_tail[p],
           t.w + static_cast<size_t>(p) * t.panel_bytes + line * kTileLineBytes,
           static_cast<size_t>(lines) * kTileLineBytes);
  }
}

// Runs the job of a chain kind. The sums stay in AMX tiles from t.line0 to t.line1.
template <class Product, int RT, int NP>
CPUSERVE_INLINE void chain_products(const TileJob& t) {
  const size_t stride = static_cast<size_t>(t.c_stride) * sizeof(float);
  if (t.resume) {
    load_sums<RT, NP>(t.c, stride);
  } else {
    zero_sums<RT, NP>();
  }
  const uint8_t* w = t.w + t.line0 * kTileLineBytes;
  int64_t line = t.line0;
  for (; line + kTileLines <= t.line1; line += kTileLines, w += kTileBytes) {
    tile_products<Product, RT, NP, NP == 2>(t.x + line * 4, t.x_stride, w, w + t.panel_bytes,
                                            kTileLineBytes);
    t.fetch->step();
  }
  if (line < t.line1) {
    copy_tails<NP>(t, line, t.line1 - line);
    tile_products<Product, RT, NP>(t.scratch->rows_tail[0], kTileLineBytes,
                                   t.scratch->lines_tail[0], t.scratch->lines_tail[1],
                                   kTileLineBytes);
  }
  store_sums<RT, NP>(t.c, stride);
}

struct Bf16Tiles {
  using FewRows = Bf16Tiles;
  static constexpr ActFormat kAct = ActFormat::bf16;
  static constexpr bool kGroups = false;
  static constexpr int kShapeLines = kTileLines;
  static constexpr int64_t kBlockLines = 0;  // 0: the size of a K block depends on K
  static int64_t lines(int64_t k) { return (k + 1) / 2; }
  static void unpack(const PackedWeight&, int64_t, int64_t, int64_t, uint8_t*) {}

  template <int RT, int NP>
  static __attribute__((noinline)) void job(const TileJob& t) {
    chain_products<Bf16Product, RT, NP>(t);
  }
};

// w8_channel: integer sums over all of K, finally multiplied by the scales of row and column.
struct ChannelTiles {
  using Vectors = Channel<0>;
  using FewRows = ChannelTiles;
  static constexpr int kVectorRows = kGroupVectorRows;
  static constexpr ActFormat kAct = ActFormat::q8row;
  static constexpr bool kGroups = false;
  static constexpr int kShapeLines = kTileLines;
  static constexpr int64_t kBlockLines = 0;  // 0: the size of a K block depends on K
  static int64_t lines(int64_t k) { return (k + 3) / 4; }
  static void unpack(const PackedWeight&, int64_t, int64_t, int64_t, uint8_t*) {}

  template <int RT, int NP>
  static __attribute__((noinline)) void job(const TileJob& t) {
    chain_products<S8U8Product, RT, NP>(t);
    if (!t.last) return;
    for (int p = 0; p < NP; p++) {
      const uint8_t* scales = t.w + static_cast<size_t>(p + 1) * t.panel_bytes - kChannelScales;
      for (int r = 0; r < t.rows; r++) {
        const uint8_t* of_row = row_of(t, r) + t.x_padded;
        const F s = set1(read_as<float>(of_row));
        const I correction = shl<7>(iload1(reinterpret_cast<const int32_t*>(of_row) + 1));
        float* c = t.c + r * t.c_stride + p * kPanel;
        for (int i = 0; i < kPanel; i += kLanes) {
          const F scale = load(reinterpret_cast<const float*>(scales) + i);
          store(c + i, mul(to_float(isub(load_bits(c + i), correction)), mul(scale, s)));
        }
      }
    }
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
