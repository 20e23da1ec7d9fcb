// Packed matrices of a program, in an arena per rank, and its fp32 vectors in one.
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
  Weights(const Program& program, const Ranks& ranks);

  // Packs on all threads of the team; each packs, and so first touches, the strips it will read.
  // Throws std::invalid_argument when the tensors do not make up the matrix.
  void load_matrix(Team& team, Id id, Span<const SourceTensor> parts);
  void load_vector(Id id, Span<const float> data);

  // A rank's part of a matrix: strips ranks.share(strips, rank), numbered as in the whole.
  const PackedWeight& matrix(Id id, int rank) const {
    return packed_[static_cast<size_t>(id) * static_cast<size_t>(ranks_.count()) +
                   static_cast<size_t>(rank)];
  }
  // The part that has row `row`.
  const PackedWeight& with_row(Id id, int64_t row) const;
  // nullptr for kNone.
  const float* vector(Id id) const {
    return id == kNone ? nullptr : vectors_[static_cast<size_t>(id)];
  }
  std::vector<Buffer>& matrix_arenas() { return matrix_arenas_; }
  const std::vector<Buffer>& matrix_arenas() const { return matrix_arenas_; }
  const Buffer& vector_arena() const { return vector_arena_; }

 private:
  void check_parts(Id id, Span<const SourceTensor> parts) const;
  void pack_panels(const Matrix& m, const PackedWeight& packed, Span<const SourceTensor> parts,
                   Range panels) const noexcept;

  void carve_arena(int rank);

  const Program* program_;
  const Ranks ranks_;
  std::vector<Buffer> matrix_arenas_;  // by rank: no two share a huge page
  Buffer vector_arena_;
  std::vector<PackedWeight> packed_;  // [matrix][rank]
  std::vector<float*> vectors_;
};

// Panels of strips [strips.begin, strips.end).
inline Range panels_of(Range strips, int64_t panels) {
  return {std::min(strips.begin * kStripPanels, panels),
          std::min(strips.end * kStripPanels, panels)};
}

}  // namespace cpuserve
