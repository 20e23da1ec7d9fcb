#include "runtime/work_sizes.h"

#include <algorithm>

#include "base/check.h"

namespace cpuserve {
namespace {

// The least that is still worth the sums that a K block or a row block reads and writes again.
constexpr int64_t kLeastStripBytes = 48 << 10, kLeastRows = 128, kLeastAttentionBytes = 96 << 10;
constexpr int64_t kLeastNearBytes = 8 << 10, kLeastAheadBytes = 2 << 10;
constexpr int64_t kMostStripBytes = 8 << 20, kMostAheadBytes = 64 << 10;
// Cores of Intel: one pass fetches weights to L1, where each line holds one of 16 buffers until
// data arrive from memory (170 ns: 6 GB/s a core). The core's own prefetcher adds the rest, but
// only while products keep pace. From 7 rows on they do not, and K blocks, which are fetched to L2,
// are faster: on Granite Rapids 8 and 16 rows of bf16 reach 87 and 94 % of the dot-product peak
// instead of 80 and 84 %, and without bf16 products 8 rows read 71-79 % of the bandwidth instead of
// 59-63 %.
constexpr std::string_view kIntel = "GenuineIntel";
constexpr int32_t kIntelPassRows = 6;
// AMD's cores, measured on Zen 4. One pass reads at the rate of memory up to 12 rows, if it fetches
// to L2: 8 rows of bf16 run at 81 % of the dot-product peak, and at 57 % with fetches to L1. L2
// feeds tiles fast enough, so blocks need not stay in L1, but fetches have to go through L1: with
// fetches to L2 alone 24 rows of bf16 run at 82 to 85 % of the peak, and so at 91 to 92 %.
//
// The vendor decides, because no size that a CPU states explains the difference. On Granite Rapids,
// blocks for 32 KB of L1 run at 0.99 to 1.03 times the rate of those for 48 KB, and bf16 blocks
// that are fetched through L1 at 0.99 to 1.02 times the rate. How many misses a core can hold, CPUs
// do not state.
constexpr std::string_view kAmd = "AuthenticAMD";
constexpr int32_t kAmdPassRows = 12;

// `share` rounded down to a multiple of `unit`, between `least` and `most`.
int32_t sized(int64_t share, int64_t unit, int64_t least, int64_t most) {
  return static_cast<int32_t>(std::clamp(share / unit * unit, least, most));
}

void check_size(const char* name, int64_t value, int64_t least, int64_t most) {
  check_argument(value >= least && value <= most, "work sizes: ", name, " must be from ", least,
                 " to ", most, ", not ", value);
}

}  // namespace

// No part is larger than by default, because a virtual machine may report caches that it does not
// have, and larger ones were not measured to be faster.
WorkSizes work_sizes_for(const CacheSizes& caches, std::string_view vendor) noexcept {
  WorkSizes sizes;
  if (vendor == kIntel) sizes.float_pass_rows = kIntelPassRows;
  if (vendor == kAmd) {
    sizes.float_pass_rows = kAmdPassRows;
    sizes.far_pass_rows = kMostPassRows;
    sizes.near_blocks = 0;
  }
  if (caches.l2 > 0) {
    sizes.strip_bytes = sized(caches.l2 / 4, 16 << 10, kLeastStripBytes, sizes.strip_bytes);
    constexpr int64_t kRowBytes = kStripPanels * kPanel * sizeof(float);  // sums of a row
    sizes.rows = sized(caches.l2 / 8 / kRowBytes, 32, kLeastRows, sizes.rows);
    sizes.attention_bytes =
        sized(caches.l2 / 4, 16 << 10, kLeastAttentionBytes, sizes.attention_bytes);
  }
  if (caches.l1d > 0) {
    sizes.near_bytes = sized(caches.l1d / 2, 4 << 10, kLeastNearBytes, sizes.near_bytes);
    sizes.ahead_bytes = sized(caches.l1d / 4, 1 << 10, kLeastAheadBytes, sizes.ahead_bytes);
  }
  return sizes;
}

void check_work_sizes(const WorkSizes& s) {
  check_size("strip_bytes", s.strip_bytes, 1 << 10, kMostStripBytes);
  check_size("rows", s.rows, 2, kMostBlockRows);
  check_argument(s.rows % 2 == 0, "work sizes: rows must be even, not ", s.rows);
  check_size("near_bytes", s.near_bytes, 1 << 10, kMostNearBytes);
  check_size("ahead_bytes", s.ahead_bytes, 0, kMostAheadBytes);
  check_size("float_pass_rows", s.float_pass_rows, 1, kMostPassRows);
  check_size("far_pass_rows", s.far_pass_rows, 0, kMostPassRows);
  check_size("near_blocks", s.near_blocks, 0, 1);
  check_size("attention_bytes", s.attention_bytes, kLeastAttentionBytes,
             static_cast<int64_t>(kAttentionScratch));
}

}  // namespace cpuserve
