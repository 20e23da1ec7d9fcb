// The packed matrices of a program, in one arena per rank, and its fp32 vectors in one more.
#pragma once
#include <atomic>
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
  const uint8_t* data = nullptr;
  int64_t rows = 0;
  size_t row_bytes = 0;
  SourceType type{};
  const int32_t* order = nullptr;
};

// A matrix, and the tensors that it is packed from.
struct MatrixSource {
  Id id;
  Span<const SourceTensor> parts;
};

// A file with the arenas of all ranks, each from a multiple of 2 MB on, after 2 MB for whoever
// keeps the file. Its bytes follow from the program and the ranks.
size_t packed_file_bytes(const Program& program, const Ranks& ranks);

// The packed file that the arenas are mapped from; fd -1: they are memory.
struct PackedFile {
  int fd = -1;
  bool writable = false;
};

class Weights {
 public:
  // Throws std::runtime_error if there is no address space, or the file cannot be mapped.
  Weights(const Program& program, const Ranks& ranks, PackedFile file = {});

  // Packs matrices on all threads of the team, in one call of the team. Each thread packs, and so
  // first touches, the panels that it will read. Meanwhile the system reads the bytes of mapped
  // files in `ahead`: the first 64 MB of a matrix, and the rest while that matrix is packed. Throws
  // std::invalid_argument if tensors do not make up their matrix.
  void load_matrices(Team& team, Span<const MatrixSource> matrices,
                     Span<const Span<const uint8_t>> ahead = {});
  void load_matrix(Team& team, Id id, Span<const SourceTensor> parts);
  // The rows of a gathered matrix, which stay where they are.
  void load_table(Id id, const SourceTensor& rows);
  void load_vector(Id id, Span<const float> data);

  // Fills the arenas from a packed file, on all threads like load_matrix. If they are mapped, it
  // reads them. Throws std::runtime_error if the file cannot be read.
  void read_packed(Team& team, int fd);
  // The digest of all matrices as they were packed or read; it does not depend on threads or ranks.
  uint64_t packed_digest() const noexcept { return digest_.load(std::memory_order_relaxed); }
  // From now on nothing is added to the digest. It takes a quarter of the CPU time of packing bf16,
  // and only packed files need it.
  void skip_digest() noexcept { digested_ = false; }
  bool mapped() const { return file_.fd >= 0; }
  // From now on mapped arenas are read-only.
  void seal() noexcept;
  // Of mapped arenas: asks the system to read a matrix ahead, and does not wait for it.
  void will_need(Id id) const noexcept;

  // The part of a matrix that a rank owns: units ranks.share(units, rank), with panels numbered as
  // in the whole matrix.
  const PackedWeight& matrix(Id id, int rank) const {
    return packed_[static_cast<size_t>(id) * static_cast<size_t>(ranks_.count()) +
                   static_cast<size_t>(rank)];
  }
  const SourceTensor& table(Id id) const { return tables_[static_cast<size_t>(id)]; }
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
  void pack_share(const Team& team, int thread, const MatrixSource& source, int64_t ahead) noexcept;
  void pack_panels(const Matrix& m, const PackedWeight& packed, Span<const SourceTensor> parts,
                   Range panels) const noexcept;
  void add_digest(Id id, const PackedWeight& packed, Range panels) noexcept;
  size_t carve_arena(int rank, size_t offset);

  const Program* program_;
  const Ranks ranks_;
  const PackedFile file_;
  std::atomic<uint64_t> digest_{0};
  bool digested_ = true;
  std::vector<Buffer> matrix_arenas_;  // by rank: no two share a huge page
  Buffer vector_arena_;
  std::vector<PackedWeight> packed_;  // [matrix][rank]
  std::vector<SourceTensor> tables_;  // [matrix]; of those that are gathered
  std::vector<float*> vectors_;
};

}  // namespace cpuserve
