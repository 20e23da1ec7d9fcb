// The block sizes of the kernels.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpuserve {

// How many bytes or rows a kernel processes at a time, and how far ahead it prefetches.
// These sizes are data, because they follow from the caches of a core (runtime/work_sizes.h);
// only register tiles are constants of the compiled code. The sizes affect only time and never
// change a bit of a result. The defaults were measured on cores with 48 KB of L1 and 1 MB of L2.
constexpr int32_t kMostBlockRows = 512, kMostNearBytes = 24 << 10, kMostPassRows = 16;
constexpr size_t kAttentionScratch = 512 << 10;
struct WorkSizes {
  // Bytes of a K block: of the weights of a strip (4 panels, 64 columns) for a part of K.
  // The K block stays in L2 while rows are multiplied by it.
  int32_t strip_bytes = 256 << 10;
  // The number of rows that are multiplied by a K block while their sums stay in L2:
  // an even number up to kMostBlockRows.
  int32_t rows = kMostBlockRows;
  // Bytes of data that stays in L1 for reuse, at most kMostNearBytes: rows that were widened
  // to fp32, or a K block of a strip if K blocks stay in L1 (linear/driver.h).
  int32_t near_bytes = kMostNearBytes;
  // A pass over the weights (for few rows) prefetches this many bytes ahead of its reads, in all
  // panels of a tile together. Memory under load takes 200 ns; at 40 GB/s it sends 8 KB meanwhile.
  int32_t ahead_bytes = 8 << 10;
  // The most rows that float kinds multiply in one pass over the weights (LinearKernel::pass_rows).
  int32_t float_pass_rows = kMostPassRows;
  // The most rows of a pass that prefetches weights to L2, for float kinds and for int8
  // with one scale per column. A pass with more rows prefetches to L1:
  // on Granite Rapids, passes of 4 rows of bf16 at AVX2 then read 4 to 10 % more bytes a second.
  int32_t far_pass_rows = 3;
  // 1: K blocks of linears with few rows, and of int8 weights with one scale per column,
  // stay in L1, and the next K block is prefetched to L2. 0: all K blocks stay in L2,
  // and the next K block is prefetched to L1, from where it is evicted to L2 (linear/driver.h).
  int32_t near_blocks = 1;
  // 1: attention with few rows (decode) prefetches keys and values to L1; 0: to L2.
  int32_t near_keys = 1;
  // Bytes of scratch memory that an attention unit keeps in L2; at most kAttentionScratch.
  int32_t attention_bytes = kAttentionScratch / 2;
};

}  // namespace cpuserve
