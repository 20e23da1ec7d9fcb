// Packed matrices and fp32 vectors of a program, in one arena each.
#pragma once
#include <vector>

#include "base/buffer.h"
#include "base/span.h"
#include "parallel/partition.h"
#include "parallel/team.h"
#include "runtime/program.h"

namespace cpuserve {

// One checkpoint tensor: `rows` rows of `row_bytes` bytes. Packed row i is stored row order[i]
// (nullptr = i).
struct SourceTensor {
  const uint8_t* data;
  int64_t rows;
  size_t row_bytes;
  SourceType type;
  const int32_t* order;
};

class Weights {
 public:
  explicit Weights(const Program& program);

  // Packs on all threads of the team; each packs, and so first touches, the strips it will read.
  // Throws std::invalid_argument when the tensors do not make up the matrix.
  void load_matrix(Team& team, Id id, Span<const SourceTensor> parts);
  void load_vector(Id id, Span<const float> data);

  const PackedWeight& matrix(Id id) const { return packed_[static_cast<size_t>(id)]; }
  // nullptr for kNone.
  const float* vector(Id id) const {
    return id == kNone ? nullptr : vectors_[static_cast<size_t>(id)];
  }
  const Buffer& matrix_arena() const { return matrix_arena_; }
  const Buffer& vector_arena() const { return vector_arena_; }

 private:
  void check_parts(Id id, Span<const SourceTensor> parts) const;
  void pack_panels(const Matrix& m, const PackedWeight& packed, Span<const SourceTensor> parts,
                   Range panels) const noexcept;

  const Program* program_;
  Buffer matrix_arena_, vector_arena_;
  std::vector<PackedWeight> packed_;
  std::vector<float*> vectors_;
};

// Panels of strips [strips.begin, strips.end).
inline Range panels_of(Range strips, int64_t panels) {
  return {strips.begin * kStripPanels, std::min(strips.end * kStripPanels, panels)};
}

}  // namespace cpuserve
