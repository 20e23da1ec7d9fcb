#include "runtime/work_sizes.h"

#include <algorithm>

#include "base/check.h"

namespace cpuserve {
namespace {

// Lower limits of the block sizes.
// With smaller blocks, loading and storing the sums between blocks would take too much time.
constexpr int64_t kLeastStripBytes = 48 << 10, kLeastRows = 128, kLeastAttentionBytes = 96 << 10;
constexpr int64_t kLeastNearBytes = 8 << 10, kLeastAheadBytes = 2 << 10;
constexpr int64_t kMostStripBytes = 8 << 20, kMostAheadBytes = 64 << 10;
// Intel cores: a pass over the weights (one read of all weights for a few rows) prefetches them
// to L1, where each line occupies one of 16 fill buffers until it arrives from memory
// (170 ns, so 6 GB/s for a core). The hardware prefetcher adds the rest of the bandwidth,
// but only while products keep pace with the reads, up to 6 rows.
// For more rows, K blocks prefetched to L2 are faster: on Granite Rapids 8 and 16 rows
// of bf16 reach 87 and 94 % of the dot-product peak instead of 80 and 84 %.
// Without bf16 products, 8 rows read 71-79 % of the bandwidth instead of 59-63 %.
constexpr std::string_view kIntel = "GenuineIntel";
constexpr int32_t kIntelPassRows = 6;
// AMD cores, measured on Zen 4: a pass over the weights reads at the rate of memory for up to
// 12 rows if it prefetches to L2. Then 8 rows of bf16 run at 81 % of the dot-product peak,
// and at 57 % with prefetches to L1. K blocks need not stay in L1, because L2 feeds tiles fast
// enough, but they have to be prefetched to L1: 24 rows of bf16 then run at 91 to 92 % of the peak,
// and at 82 to 85 % with prefetches to L2. Attention of one token with 7 query heads per KV head
// reads keys and values at 86 to 89 % of the bandwidth with prefetches to L2,
// and at 50 to 67 % with prefetches to L1. On Granite Rapids it is 6 to 9 % faster with L1.
//
// The vendor decides, because no cache size explains the difference. On Granite Rapids, blocks
// for an L1 of 32 KB run at 0.99 to 1.03 times the rate of blocks for 48 KB,
// and bf16 blocks prefetched to L1 run at 0.99 to 1.02 times the rate with prefetches to L2.
// CPUs do not report how many cache misses a core can have in flight.
constexpr std::string_view kAmd = "AuthenticAMD";
constexpr int32_t kAmdPassRows = 12;

// Returns `share` rounded down to a multiple of `unit`, but at least `least` and at most `most`.
int32_t sized(int64_t share, int64_t unit, int64_t least, int64_t most) {
  return static_cast<int32_t>(std::clamp(share / unit * unit, least, most));
}

void check_size(const char* name, int64_t value, int64_t least, int64_t most) {
  check_argument(value >= least && value <= most, "work sizes: ", name, " must be from ", least,
                 " to ", most, ", not ", value);
}

}  // namespace

// No block size becomes larger than its default: a virtual machine may report caches
// that it does not have, and larger sizes were not faster in measurements.
WorkSizes work_sizes_for(const CacheSizes& caches, std::string_view vendor) noexcept {
  WorkSizes sizes;
  if (vendor == kIntel) sizes.float_pass_rows = kIntelPassRows;
  if (vendor == kAmd) {
    sizes.float_pass_rows = kAmdPassRows;
    sizes.far_pass_rows = kMostPassRows;
    sizes.near_blocks = 0;
    sizes.near_keys = 0;
  }
  if (caches.l2 > 0) {
    sizes.strip_bytes = sized(caches.l2 / 4, 16 << 10, kLeastStripBytes, sizes.strip_bytes);
    constexpr int64_t kRowBytes = kStripPanels * kPanel * sizeof(float);  // bytes of sums of a row
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
  check_size("near_keys", s.near_keys, 0, 1);
  check_size("attention_bytes", s.attention_bytes, kLeastAttentionBytes,
             static_cast<int64_t>(kAttentionScratch));
}

}  // namespace cpuserve
