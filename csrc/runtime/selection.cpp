#include "runtime/selection.h"

#include <algorithm>
#include <cstring>

#include "parallel/partition.h"

namespace cpuserve {
namespace {

// Maps floats to integers with the same order: a larger float gets a larger integer.
// 0 and -0 get the same integer.
uint32_t order_of(float x) noexcept {
  const float y = x + 0.0f;  // -0 becomes 0
  uint32_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Copies one value of type `Unit` from each of `rows` rows, which begin `stride` values apart.
template <class Unit>
void copy_column(const uint8_t* from, uint8_t* to, int64_t rows, int64_t stride) noexcept {
  const size_t step = static_cast<size_t>(stride) * sizeof(Unit);
  for (int64_t i = 0; i < rows; i++, from += step, to += step) std::memcpy(to, from, sizeof(Unit));
}

// Copies the scale of a key or value, which comes after the codes of its block (`row` bytes a
// token).
void copy_scale(const uint8_t* from, int slot, uint8_t* to, int at, size_t row) noexcept {
  const size_t codes = row * kBlock, size = sizeof(float);
  std::memcpy(to + codes + static_cast<size_t>(at) * size,
              from + codes + static_cast<size_t>(slot) * size, size);
}

// Copies the key in slot `slot` of a block to slot `at` of another block.
void copy_key(const KvLayer& kv, const uint8_t* from, int slot, uint8_t* to, int at) noexcept {
  const auto offset = [](int index, size_t unit) { return static_cast<size_t>(index) * unit; };
  switch (kv.type) {
    case KvType::bf16:  // the two columns of a pair are adjacent
    case KvType::f32: {
      const int64_t rows = kv.type == KvType::f32 ? kv.hd_pad : kv.hd_pad / 2;
      return copy_column<uint32_t>(from + offset(slot, 4), to + offset(at, 4), rows, kBlock);
    }
    case KvType::f16:
      return copy_column<uint16_t>(from + offset(slot, 2), to + offset(at, 2), kv.hd_pad, kBlock);
    default:
      copy_column<uint8_t>(from + slot, to + at, kv.hd_pad, kBlock);
      copy_scale(from, slot, to, at, static_cast<size_t>(kv.hd_pad));
  }
}

// Copies the value in slot `slot` of a block to slot `at` of another block.
void copy_value(const KvLayer& kv, const uint8_t* from, int slot, uint8_t* to, int at) noexcept {
  const size_t row = kv_value_row_bytes(kv.type, kv.hd_pad);
  if (kv.type == KvType::bf16) {  // the columns of two tokens alternate
    const auto place = [&](int s) { return static_cast<size_t>(s / 2) * 2 * row + (s % 2) * 2u; };
    return copy_column<uint16_t>(from + place(slot), to + place(at), kv.hd_pad, 2);
  }
  std::memcpy(to + static_cast<size_t>(at) * row, from + static_cast<size_t>(slot) * row, row);
  if (kv_scaled(kv.type)) copy_scale(from, slot, to, at, row);
}

size_t block_bytes(const KvLayer& kv) noexcept {
  return kv_key_bytes(kv.type, kv.hd_pad) +
         (kv.value_offset ? kv_value_bytes(kv.type, kv.hd_pad) : 0);
}

}  // namespace

LateTokens::LateTokens(const StepInput& in, int64_t most) noexcept : in_(in), most_(most) {
  for (int64_t s = 0; s < in.seqs; s++) {
    const int64_t late = in.query_start[s + 1] - first_of(s);
    count_ += late;
    if (late > 0) longest_ = std::max<int64_t>(longest_, in.kv_len[s]);
  }
}

// Returns the first token of a sequence that sees more than `most` keys, or the end of its tokens.
int64_t LateTokens::first_of(int64_t seq) const noexcept {
  const int64_t begin = in_.query_start[seq], end = in_.query_start[seq + 1];
  return std::clamp(begin + most_ - in_.positions[begin], begin, end);
}

SequenceToken LateTokens::operator[](int64_t i) const noexcept {
  for (int64_t s = 0;; s++) {
    const int64_t first = first_of(s), late = in_.query_start[s + 1] - first;
    if (i < late) return {s, first + i};
    i -= late;
  }
}

void select_highest(const float* scores, int64_t n, int64_t keep, int32_t pool, float* out,
                    void* scratch) noexcept {
  auto* counts = static_cast<int32_t*>(scratch);
  uint32_t known = 0, mask = 0;  // the bits of the lowest selected score that are known so far
  int64_t left = keep;           // the number of selected scores that begin with these bits
  for (const int shift : {21, 10, 0}) {
    const uint32_t values = shift ? 2048 : 1024;
    std::fill_n(counts, values, 0);
    for (int64_t i = 0; i < n; i++) {
      const uint32_t order = order_of(scores[i]);
      if ((order & mask) == known) counts[order >> shift & (values - 1)]++;
    }
    uint32_t value = values - 1;
    for (; value > 0 && counts[value] < left; value--) left -= counts[value];
    known |= value << shift;
    mask |= (values - 1) << shift;
  }
  for (int64_t i = 0; i < n; i++) {
    const uint32_t order = order_of(scores[i]);
    if (order < known || (order == known && left-- <= 0)) continue;
    for (int32_t p = 0; p < pool; p++) *out++ = static_cast<float>(i * pool + p);
  }
}

size_t selected_bytes(const KvLayer& kv, int64_t keys) {
  const auto blocks = static_cast<size_t>(ceil_div(keys, kBlock));
  return blocks * block_bytes(kv) + (blocks * sizeof(int32_t) + 63) / 64 * 64;
}

SelectedKeys copy_selected(const KvLayer& kv, int head, const int32_t* block_table,
                           const float* positions, int64_t n, uint8_t* to) noexcept {
  const size_t block = block_bytes(kv);
  KvLayer copy = kv;
  copy.base = to;
  copy.block_stride = copy.value_stride = block;
  copy.slab_stride = kSlabBlocks * block;
  copy.head_stride = 0;
  if (kv.value_offset) copy.value_offset = kv_key_bytes(kv.type, kv.hd_pad);
  const int64_t blocks = ceil_div(n, kBlock);
  for (int64_t i = 0; i < n; i++) {
    const auto position = static_cast<int64_t>(positions[i]);
    const int32_t block_from = block_table[position / kBlock];
    const int slot = static_cast<int>(position % kBlock), at = static_cast<int>(i % kBlock);
    copy_key(kv, kv_block(kv, block_from, head), slot, kv_block(copy, i / kBlock, 0), at);
    if (kv.value_offset) {
      copy_value(kv, kv_values(kv, block_from, head), slot, kv_values(copy, i / kBlock, 0), at);
    }
  }
  auto* table = reinterpret_cast<int32_t*>(to + static_cast<size_t>(blocks) * block);
  for (int64_t b = 0; b < blocks; b++) table[b] = static_cast<int32_t>(b);
  return {copy, table};
}

}  // namespace cpuserve
