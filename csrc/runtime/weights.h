// The packed matrices of a program, in one piece of memory (arena) for each rank,
// and the fp32 vectors of the program, in another arena.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "base/span.h"
#include "parallel/partition.h"
#include "parallel/team.h"
#include "runtime/declarations.h"
#include "runtime/expert_pool.h"

namespace cpuserve {

// One tensor of a checkpoint: `rows` rows of `row_bytes` bytes each.
// If `order` is not null, packed row i comes from row order[i] of the tensor.
struct SourceTensor {
  const uint8_t* data = nullptr;
  int64_t rows = 0;
  size_t row_bytes = 0;
  SourceType type{};
  const int32_t* order = nullptr;
};

// A matrix of the program, and the checkpoint tensors that it is packed from.
struct MatrixSource {
  Id id;
  Span<const SourceTensor> parts;
};

// Returns the size of a packed file: 2 MB for a header, which loader/packed_files.py writes,
// then the arenas of all ranks, each at a multiple of 2 MB.
size_t packed_file_bytes(const Declarations& program, const Ranks& ranks);

// The packed file that the arenas of matrices are mapped from. fd -1: they are anonymous memory.
// If `pool` is not 0, nothing is mapped: the matrices of experts are in an ExpertPool of at most
// `pool` bytes that reads this file, and all others are in anonymous memory.
struct PackedFile {
  int fd = -1;
  bool writable = false;
  size_t offset = 0;  // where the 2 MB before the arenas begin, a multiple of 2 MB
  size_t pool = 0;
  ExpertPool::Read read{};  // how the pool reads, for tests
};

// The memory of the matrices of a program if its experts are in a pool.
struct PooledBytes {
  size_t others, experts, least_pool;  // the smallest pool has one slot for each shelf
};
PooledBytes pooled_bytes(const Declarations& program, const Ranks& ranks);

class Weights {
 public:
  // Throws std::runtime_error if address space is missing or the file cannot be mapped.
  Weights(const Declarations& program, const Ranks& ranks, PackedFile file = {});

  // Packs matrices on all threads, in one call of the team.
  // Each thread packs the panels that it will read in a step, so these pages are on its NUMA node.
  // `ahead` lists ranges of mapped files that later calls need: the system starts to read them now.
  // The system reads the first 64 MB of a matrix before packing begins, the other bytes meanwhile.
  // Throws std::invalid_argument if the tensors do not make up their matrix.
  void load_matrices(Team& team, Span<const MatrixSource> matrices,
                     Span<const Span<const uint8_t>> ahead = {});
  void load_matrix(Team& team, Id id, Span<const SourceTensor> parts);
  // Sets the rows of a gathered matrix. The rows are not copied and must outlive this object.
  void load_table(Id id, const SourceTensor& rows);
  void load_vector(Id id, Span<const float> data);

  // Reads the arenas from a packed file and computes their digest, on all threads.
  // For `offset` see PackedFile. If the arenas are mapped from the file, only computes the
  // digest. Throws std::runtime_error if the file cannot be read.
  void read_packed(Team& team, int fd, size_t offset = 0);
  // Returns the digest of all packed matrices,
  // which is the same for any number of threads or ranks.
  uint64_t packed_digest() const noexcept { return digest_.load(std::memory_order_relaxed); }
  // Switches the digest off. Computing it takes a quarter of the CPU time of packing bf16,
  // and only packed files need it.
  void skip_digest() noexcept { digested_ = false; }
  bool mapped() const { return file_.fd >= 0 && file_.pool == 0; }
  // Whether a matrix is in the pool. `matrix()` then has no data.
  bool pooled(size_t matrix) const { return file_.pool > 0 && is_expert_[matrix]; }
  // Returns the pool of experts, or nullptr if all matrices are in memory or mapped.
  ExpertPool* pool() const { return pool_.get(); }
  // Makes mapped arenas read-only.
  void seal() noexcept;
  // Asks the system to read a matrix of a mapped arena from disk, and does not wait for it.
  void will_need(Id id) const noexcept;

  // Returns the part of a matrix that a rank owns: its share of the grains of the matrix
  // (Matrix::units). Panels are numbered as in the whole matrix.
  const PackedWeight& matrix(Id id, int rank) const {
    return packed_[static_cast<size_t>(id) * static_cast<size_t>(ranks_.count()) +
                   static_cast<size_t>(rank)];
  }
  const SourceTensor& table(Id id) const { return tables_[static_cast<size_t>(id)]; }
  // Returns the part of a matrix that contains row `row`. Each part is owned by one rank.
  const PackedWeight& with_row(Id id, int64_t row) const;
  // Returns the elements of a vector, or nullptr if `id` is kNone.
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
  int read_share(Team& team, int thread, int fd, const std::vector<size_t>& offsets) noexcept;

  const Declarations* program_;
  const Ranks ranks_;
  const PackedFile file_;
  std::atomic<uint64_t> digest_{0};
  bool digested_ = true;
  std::vector<bool> is_expert_;  // by matrix: whether a RouteOp decides if a token needs it
  std::unique_ptr<ExpertPool> pool_;
  std::vector<Buffer> matrix_arenas_;  // by rank; two arenas never share a huge page
  Buffer vector_arena_;
  std::vector<PackedWeight> packed_;  // [matrix][rank]
  std::vector<SourceTensor> tables_;  // [matrix]; set only for gathered matrices
  std::vector<float*> vectors_;
};

}  // namespace cpuserve
