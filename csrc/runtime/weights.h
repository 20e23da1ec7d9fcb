// The packed matrices of a program, in one arena per rank, and its fp32 vectors in one more.
#pragma once
#include <vector>

#include "base/buffer.h"
#include "base/span.h"
#include "parallel/partition.h"
#include "parallel/team.h"
#include "runtime/program.h"

namespace cpuserve {

// One tensor of a checkpoint: `rows` rows of `row_bytes` bytes. Packed row i is stored row order[i]
// (nullptr: i).
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

  // Packs a matrix on all threads of the team. Each thread packs, and so first touches, the panels
  // that it will read. Throws std::invalid_argument if the tensors do not make up the matrix.
  void load_matrix(Team& team, Id id, Span<const SourceTensor> parts);
  void load_vector(Id id, Span<const float> data);

  // The part of a matrix that a rank owns: units ranks.share(units, rank), with panels numbered as
  // in the whole matrix.
  const PackedWeight& matrix(Id id, int rank) const {
    return packed_[static_cast<size_t>(id) * static_cast<size_t>(ranks_.count()) +
                   static_cast<size_t>(rank)];
  }
  // The part that contains row `row`.
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

}  // namespace cpuserve
