// How much kernels work on at a time.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpuserve {

// How much a kernel works on at a time, and how far ahead it fetches. These are data because they
// follow from the caches of a core (runtime/work_sizes.h); only the register tile is compiled.
// They decide about time only and never change a bit. The defaults are for 48 KB of L1 and 1 MB of
// L2, where the constants were measured.
constexpr int32_t kMostBlockRows = 512, kMostNearBytes = 24 << 10, kMostPassRows = 16;
constexpr size_t kAttentionScratch = 512 << 10;
struct WorkSizes {
  // Weights of a strip in one K block. They stay in L2 while rows pass over them.
  int32_t strip_bytes = 256 << 10;
  // Rows that pass over it, with sums that stay in L2: an even number up to kMostBlockRows.
  int32_t rows = kMostBlockRows;
  // The bytes that stay in L1 for reuse, of widened rows or of the weights of a strip
  // in one K block (linear/driver.h): up to kMostNearBytes.
  int32_t near_bytes = kMostNearBytes;
  // Weights that one pass over them fetches ahead of those in use, for all panels of a tile
  // together: 40 GB/s and 200 ns of loaded memory latency are 8 KB.
  int32_t ahead_bytes = 8 << 10;
  // Rows of a float kind that take one pass over the weights, at most (LinearKernel::pass_rows).
  int32_t float_pass_rows = kMostPassRows;
  // Rows of a float kind or of int8 with one scale per column, at most, in a pass that fetches
  // weights ahead to L2. A pass of more rows fetches them to L1: with 4 rows of bf16 at AVX2 it
  // reads 4 to 10 % more bytes a second so on Granite Rapids.
  int32_t far_pass_rows = 3;
  // 1: K blocks of few rows, and of int8 with one scale per column, stay in L1, and the next block
  // is fetched to L2. 0: all K blocks stay in L2, and the next one is fetched to L1, from where it
  // reaches L2 (linear/driver.h).
  int32_t near_blocks = 1;
  // Scratch of an attention unit that stays in L2; up to kAttentionScratch.
  int32_t attention_bytes = kAttentionScratch / 2;
};

}  // namespace cpuserve
