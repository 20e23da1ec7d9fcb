// The formats of rows of activations.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpuserve {

// The format of a row of activations.
// Every value of a Program is a matrix that is stored row by row in one of these formats.
// The weight kind of the linear that reads the value determines its format (program/lower.py).
//   f32    width floats
//   bf16   width bfloat16, round to nearest even
//   q8g32  int8 in groups of 32 columns: int8 q[padded width], then a float scale for each group,
//          then int32 sum(q) for each group. scale = amax / 127, and q = x * (127 / amax) rounded
//          to nearest even, where amax is the largest magnitude of the group; if amax is 0,
//          scale and q are 0. The width is padded with zeros to a multiple of 32.
//   q8g128 like q8g32, in groups of 128; the width is padded to a multiple of 128.
//   q8g256 like q8g32, in groups of 256, but a group has int16 sums: 16 sums over 16 q each,
//          then 8 sums over 32 q each.
//   q8row  like q8g32, but the whole row is one group. Operations that write a row piece by piece
//          (epilogues of linears, attention) cannot write q8g128, q8g256 and q8row; ConvertOp can.
//   q8g32x2 q8g256x2   two rows of q8g32 or q8g256 one after another, each half of the row stride.
//          The first row (term) has the quantized values, the second has the quantized rounding
//          errors of the first: together about 15 bits. A linear adds the products of both terms.
enum class ActFormat : int32_t { f32, bf16, q8g32, q8g32x2, q8g128, q8row, q8g256, q8g256x2 };

constexpr int kPanel = 16;       // output columns of one packed panel, at every ISA level
constexpr int kStripPanels = 4;  // panels of one strip: 64 columns, the widest register tile

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// padded_width returns the number of columns that a row of `width` columns has in memory.
// scale_group returns the number of columns that share one scale (only for q8 formats).
inline int64_t padded_width(ActFormat f, int64_t width) {
  const bool blocks = f == ActFormat::q8g256 || f == ActFormat::q8g256x2;
  return round_up(width, blocks ? 256 : f == ActFormat::q8g128 ? 128 : 32);
}
inline int64_t scale_group(ActFormat f, int64_t width) {
  if (f == ActFormat::q8row) return padded_width(f, width);
  return f == ActFormat::q8g256 || f == ActFormat::q8g256x2 ? 256
         : f == ActFormat::q8g128                           ? 128
                                                            : 32;
}
constexpr int64_t kBlockSums = 48;  // bytes of the sums of a group of q8g256
// two_terms returns whether a row of format f has two terms; term_format, the format of one term.
inline bool two_terms(ActFormat f) { return f == ActFormat::q8g32x2 || f == ActFormat::q8g256x2; }
inline ActFormat term_format(ActFormat f) {
  return f == ActFormat::q8g32x2    ? ActFormat::q8g32
         : f == ActFormat::q8g256x2 ? ActFormat::q8g256
                                    : f;
}

// Returns the number of bytes from one row to the next: a multiple of 64, but never of 4096.
// Rows 4 KB apart would share a set of L1 (48 KB in 12 ways are 64 sets of 64-byte lines).
inline size_t row_bytes(ActFormat f, int64_t width) {
  int64_t p = padded_width(f, width), bytes = 0;
  switch (f) {
    case ActFormat::f32:
      bytes = p * 4;
      break;
    case ActFormat::bf16:
      bytes = p * 2;
      break;
    case ActFormat::q8g32:
    case ActFormat::q8g128:
    case ActFormat::q8row:
      bytes = p + p / scale_group(f, width) * 8;
      break;
    case ActFormat::q8g256:
      bytes = p + p / 256 * (4 + kBlockSums);
      break;
    case ActFormat::q8g32x2:
    case ActFormat::q8g256x2:
      return 2 * row_bytes(term_format(f), width);
  }
  bytes = round_up(bytes, 64);
  return static_cast<size_t>(bytes % 4096 == 0 ? bytes + 64 : bytes);
}

// A matrix [rows, width] of activations; `data` is 64-byte aligned.
struct Rows {
  void* data;
  size_t stride;  // bytes from row to row
  int64_t width;  // columns, without padding
  ActFormat format;
};

}  // namespace cpuserve
