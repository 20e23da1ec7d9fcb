// The formats of rows of activations.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpuserve {

// Activation rows. Every program value is a matrix [tokens, width] stored row by row in one of
// these formats; the weight kind of the consumer decides which one (program/lower.py).
//   f32    width floats
//   bf16   width bfloat16, round to nearest even
//   q8g32  groups of 32 along the row: width_padded int8 q, then groups float scale, then groups
//          int32 sum(q). scale = amax / 127, q = rne(x * (127 / amax)), amax == 0 -> scale 0, q 0.
//          width_padded = width rounded up to 32; padding holds zeros.
//   q8g128 the same in groups of 128; width_padded = width rounded up to 128.
//   q8g256 the same in groups of 256, with sums { int16 sum(q of 16)[16], sum(q of 32)[8] }.
//   q8row  the same with one group, the whole row. Ops that write a row piece by piece (a linear's
//          epilogue, attention) cannot write q8g128, q8g256 and q8row; convert writes them.
//   q8g32x2 q8g256x2   two rows of q8g32 or q8g256 one after another (each half the row stride),
//          called terms: the value, and the rest that quantizing it lost; together about 15 bits. A
//          linear runs on both terms as on two rows and adds the two results.
enum class ActFormat : int32_t { f32, bf16, q8g32, q8g32x2, q8g128, q8row, q8g256, q8g256x2 };

constexpr int kPanel = 16;       // output columns of one packed panel, at every ISA level
constexpr int kStripPanels = 4;  // panels of one strip: 64 columns, the widest register tile

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Number of columns that a row of `width` is stored with, and how many of them share a scale in the
// q8 formats.
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
constexpr int64_t kBlockSums = 48;  // bytes of the sums of a group of 256
// Whether a row of activations has two terms, and the format of each of them.
inline bool two_terms(ActFormat f) { return f == ActFormat::q8g32x2 || f == ActFormat::q8g256x2; }
inline ActFormat term_format(ActFormat f) {
  return f == ActFormat::q8g32x2    ? ActFormat::q8g32
         : f == ActFormat::q8g256x2 ? ActFormat::q8g256
                                    : f;
}

// Bytes from one row to the next: a multiple of 64 and never a multiple of 4096, so that rows of a
// register tile do not share an L1 set (48 KB, 12 ways, 64 sets of 64 bytes = 4 KB period).
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
  int64_t width;  // logical columns
  ActFormat format;
};

}  // namespace cpuserve
