#include "runtime/weights.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/digest.h"

#ifndef MADV_POPULATE_READ
// MADV_POPULATE_READ needs Linux 5.14.
// Older kernels return EINVAL, and pages are then mapped by page faults, one by one.
#define MADV_POPULATE_READ 22
#endif

namespace cpuserve {
namespace {

// Linears read the biases of whole strips (4 panels), so vectors are padded with zeros to strips.
constexpr int64_t kVectorPad = kStripPanels * kPanel;

// A thread packs this many bytes of a file at a time, and computes the digest of the packed panels
// while they are in L2.
constexpr int64_t kBlockBytes = 1 << 20;
// All threads together request this many bytes from the disk before they need them,
// which takes 10 ms at 6 GB/s.
constexpr int64_t kAheadBytes = 64 << 20;

// Returns the row of the checkpoint that packed row `row` of the matrix is made from,
// or nullptr if the packed row is padding.
const void* source_row(const Matrix& m, Span<const SourceTensor> parts, int64_t row) {
  int64_t part = 0;
  if (m.glu) {  // even panels belong to the gate, odd panels to up
    const int64_t panel = row / kPanel;
    part = panel % 2;
    row = panel / 2 * kPanel + row % kPanel;
    if (row >= parts[part].rows) return nullptr;
  } else {
    while (part < parts.size() && row >= parts[part].rows) row -= parts[part++].rows;
    if (part == parts.size()) return nullptr;
  }
  const SourceTensor& t = parts[part];
  return t.data + static_cast<size_t>(t.order ? t.order[row] : row) * t.row_bytes;
}

// Returns the smallest range of rows of tensor `part` of the checkpoint that contains all rows
// to pack the panels `panels` from.
Range stored_rows(const Matrix& m, Span<const SourceTensor> parts, int64_t part, Range panels) {
  const SourceTensor& t = parts[part];
  Range rows{panels.begin * kPanel, panels.end * kPanel};
  if (m.glu) rows = {panels.begin / 2 * kPanel, (panels.end + 1) / 2 * kPanel};
  int64_t before = 0;
  for (int64_t i = 0; !m.glu && i < part; i++) before += parts[i].rows;
  rows.begin = std::clamp(rows.begin - before, int64_t{0}, t.rows);
  rows.end = std::clamp(rows.end - before, int64_t{0}, t.rows);
  if (!t.order || rows.begin == rows.end) return rows;
  const auto [least, most] = std::minmax_element(t.order + rows.begin, t.order + rows.end);
  return {*least, *most + 1};
}

// Calls use(address, bytes) for each tensor, with its rows that `panels` are packed from.
template <class Use>
void stored_bytes(const Matrix& m, Span<const SourceTensor> parts, Range panels, const Use& use) {
  for (int64_t i = 0; i < parts.size(); i++) {
    const Range rows = stored_rows(m, parts, i, panels);
    const size_t row_bytes = parts[i].row_bytes;
    if (rows.size() > 0) {
      use(parts[i].data + static_cast<size_t>(rows.begin) * row_bytes,
          static_cast<size_t>(rows.size()) * row_bytes);
    }
  }
}

// Maps the pages of some bytes of a mapped file into memory in one call.
// Without this call there would be a page fault for every 64 KB.
void populate(const uint8_t* begin, size_t bytes) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));  // 64 KB on some Arm
  const uintptr_t at = reinterpret_cast<uintptr_t>(begin), from = at / page * page;
  madvise(reinterpret_cast<void*>(from), at + bytes - from, MADV_POPULATE_READ);
}

Range panels_of_rank(const Matrix& m, const Ranks& ranks, int rank) {
  return m.panels_of(ranks.share(m.units(), rank));
}

uint8_t* take_panels(Carver& carver, const Matrix& m, Range panels) {
  return carver.take<uint8_t>(panels.size() * static_cast<int64_t>(m.panel_bytes));
}

size_t arena_bytes(const Declarations& program, const Ranks& ranks, int rank) {
  Carver sizes(nullptr);
  for (const Matrix& m : program.matrices()) take_panels(sizes, m, panels_of_rank(m, ranks, rank));
  return sizes.used();
}

// Returns the matrices of each ExpertLinearOp after a RouteOp (not after an AdapterOp),
// without their parts.
std::vector<ExpertGroup> expert_groups(const Declarations& program) {
  std::vector<ExpertGroup> out;
  for (const ExpertMatrices& l : program.expert_matrices()) {
    if (l.position >= 0) out.push_back({l.first, l.experts, l.route, l.position, {}});
  }
  return out;
}

std::vector<bool> experts_among(const Declarations& program) {
  std::vector<bool> out(program.matrices().size());
  for (const ExpertGroup& g : expert_groups(program)) {
    for (int32_t e = 0; e < g.experts; e++) out[static_cast<size_t>(g.first + e)] = true;
  }
  return out;
}

// Returns where the part of each matrix of each rank begins in the file: [matrix][rank].
std::vector<size_t> file_offsets(const Declarations& program, const Ranks& ranks, size_t offset);

// Returns the expert groups with their parts in the file.
std::vector<ExpertGroup> placed_groups(const Declarations& program, const Ranks& ranks,
                                       size_t offset) {
  const std::vector<size_t> offsets = file_offsets(program, ranks, offset);
  std::vector<ExpertGroup> groups = expert_groups(program);
  for (ExpertGroup& g : groups) {
    for (int32_t e = 0; e < g.experts; e++) {
      const auto id = static_cast<size_t>(g.first + e);
      const Matrix& m = program.matrices()[id];
      for (int rank = 0; rank < ranks.count(); rank++) {
        const Range panels = panels_of_rank(m, ranks, rank);
        g.parts.push_back(
            {offsets[id * static_cast<size_t>(ranks.count()) + static_cast<size_t>(rank)],
             static_cast<size_t>(panels.size()) * m.panel_bytes, m.panel_bytes, panels.begin});
      }
    }
  }
  return groups;
}

// Returns the offset in a packed file where the arena of the next rank begins.
size_t behind(size_t offset, size_t bytes) {
  return offset + (bytes + Buffer::kPage - 1) / Buffer::kPage * Buffer::kPage;
}

std::vector<size_t> file_offsets(const Declarations& program, const Ranks& ranks, size_t offset) {
  const auto count = static_cast<size_t>(ranks.count());
  std::vector<size_t> out(program.matrices().size() * count);
  offset += Buffer::kPage;
  for (size_t rank = 0; rank < count; rank++) {
    Carver sizes(nullptr);
    for (size_t i = 0; i < program.matrices().size(); i++) {
      const Matrix& m = program.matrices()[i];
      out[i * count + rank] = offset + sizes.used();
      take_panels(sizes, m, panels_of_rank(m, ranks, static_cast<int>(rank)));
    }
    offset = behind(offset, sizes.used());
  }
  return out;
}

// Reads `bytes` bytes at `offset`. Returns 0, or an errno: EIO if the file is too short.
int read_at(int fd, uint8_t* to, size_t bytes, size_t offset) {
  while (bytes > 0) {
    const ssize_t got = pread(fd, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : EIO;
    to += got;
    offset += static_cast<size_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  return 0;
}

}  // namespace

size_t packed_file_bytes(const Declarations& program, const Ranks& ranks) {
  size_t offset = Buffer::kPage;
  for (int rank = 0; rank < ranks.count(); rank++) {
    offset = behind(offset, arena_bytes(program, ranks, rank));
  }
  return offset;
}

PooledBytes pooled_bytes(const Declarations& program, const Ranks& ranks) {
  PooledBytes out{0, 0, ExpertPool::least_bytes(placed_groups(program, ranks, 0), ranks.count())};
  const std::vector<bool> experts = experts_among(program);
  for (size_t i = 0; i < program.matrices().size(); i++) {
    for (int rank = 0; rank < ranks.count(); rank++) {
      const Matrix& m = program.matrices()[i];
      Carver sizes(nullptr);
      take_panels(sizes, m, panels_of_rank(m, ranks, rank));
      (experts[i] ? out.experts : out.others) += sizes.used();
    }
  }
  return out;
}

Weights::Weights(const Declarations& program, const Ranks& ranks, PackedFile file)
    : program_(&program),
      ranks_(ranks),
      file_(std::move(file)),
      is_expert_(experts_among(program)),
      packed_(program.matrices().size() * static_cast<size_t>(ranks.count())),
      tables_(program.matrices().size()) {
  if (file_.pool > 0) {
    pool_ = std::make_unique<ExpertPool>(placed_groups(program, ranks, file_.offset), ranks.count(),
                                         file_.fd, file_.pool, file_.read);
  }
  size_t offset = file_.offset + Buffer::kPage;
  for (int rank = 0; rank < ranks.count(); rank++) offset = carve_arena(rank, offset);

  Carver sizes(nullptr);
  for (const Vector& v : program.vectors()) sizes.take<float>(round_up(v.count, kVectorPad));
  vector_arena_ = Buffer(sizes.used());
  Carver vectors(vector_arena_.data());
  for (const Vector& v : program.vectors()) {
    vectors_.push_back(vectors.take<float>(round_up(v.count, kVectorPad)));
  }
}

// Creates the arena of a rank (at `offset` of the packed file if there is one) and places
// the matrices of the rank in it. Returns the offset of the next rank's arena in the file.
// The arena has no memory for matrices of the pool.
size_t Weights::carve_arena(int rank, size_t offset) {
  const size_t bytes = arena_bytes(*program_, ranks_, rank);
  Carver own(nullptr);
  for (size_t i = 0; i < program_->matrices().size(); i++) {
    const Matrix& m = program_->matrices()[i];
    if (!pooled(i)) take_panels(own, m, panels_of_rank(m, ranks_, rank));
  }
  matrix_arenas_.push_back(mapped() ? Buffer(bytes, file_.fd, offset, file_.writable)
                                    : Buffer(own.used()));
  Carver carver(matrix_arenas_.back().data());
  for (size_t i = 0; i < program_->matrices().size(); i++) {
    const Matrix& m = program_->matrices()[i];
    const Range panels = panels_of_rank(m, ranks_, rank);
    // The address that panel 0 of the whole matrix would have in this arena,
    // because kernels number panels from 0 on every rank.
    const auto before = static_cast<uintptr_t>(panels.begin) * m.panel_bytes;
    const uint8_t* place = pooled(i) ? nullptr : take_panels(carver, m, panels);
    const auto first = reinterpret_cast<uintptr_t>(place);
    packed_[i * static_cast<size_t>(ranks_.count()) + static_cast<size_t>(rank)] = {
        reinterpret_cast<const uint8_t*>(first - before), m.panel_bytes, m.n, m.k, m.kind};
  }
  return behind(offset, bytes);
}

const PackedWeight& Weights::with_row(Id id, int64_t row) const {
  const Matrix& m = program_->matrices()[static_cast<size_t>(id)];
  return matrix(id, ranks_.owner_of_share(row / (m.grain * kPanel), m.units()));
}

void Weights::check_parts(Id id, Span<const SourceTensor> parts) const {
  check_argument(id >= 0 && static_cast<size_t>(id) < program_->matrices().size(),
                 "there is no matrix ", id);
  const Matrix& m = program_->matrices()[static_cast<size_t>(id)];
  check_argument(parts.size() == static_cast<int64_t>(m.parts.size()), "matrix ", m.name,
                 " consists of ", m.parts.size(), " tensors, not ", parts.size());
  for (int64_t i = 0; i < parts.size(); i++) {
    const SourceTensor& t = parts[i];
    check_argument(t.rows == m.parts[static_cast<size_t>(i)], "matrix ", m.name, ": tensor ", i,
                   " has ", t.rows, " rows, not ", m.parts[static_cast<size_t>(i)]);
    check_argument(t.type == parts[0].type, "matrix ", m.name,
                   ": its tensors have different types");
    const int64_t block = block_shape(t.type).weights;
    check_argument(m.k % block == 0, "matrix ", m.name, ": rows of ", m.k,
                   " are not whole blocks of ", block);
    check_argument(only_source(m.kind) == SourceType::f32 || only_source(m.kind) == t.type,
                   "matrix ", m.name, ": tensor ", i,
                   " is not of the type that its kind is packed from");
    check_argument(t.row_bytes == source_row_bytes(t.type, m.k), "matrix ", m.name, ": tensor ", i,
                   " has rows of ", t.row_bytes, " bytes, not ", source_row_bytes(t.type, m.k));
    for (int64_t r = 0; t.order && r < t.rows; r++) {
      check_argument(t.order[r] >= 0 && t.order[r] < t.rows, "matrix ", m.name,
                     ": the row order has row ", t.order[r], ", but the tensor has ", t.rows,
                     " rows");
    }
  }
}

void Weights::pack_panels(const Matrix& m, const PackedWeight& packed,
                          Span<const SourceTensor> parts, Range panels) const noexcept {
  const LinearKernel& kernel = program_->table().linear[static_cast<int>(m.kind)];
  const void* rows[kPanel];
  for (int64_t p = panels.begin; p < panels.end; p++) {
    for (int64_t c = 0; c < kPanel; c++) rows[c] = source_row(m, parts, p * kPanel + c);
    auto* panel = const_cast<uint8_t*>(packed.data) + static_cast<size_t>(p) * m.panel_bytes;
    kernel.pack({rows, parts[0].type, m.k, panel});
  }
}

void Weights::load_matrices(Team& team, Span<const MatrixSource> matrices,
                            Span<const Span<const uint8_t>> ahead) {
  for (const MatrixSource& source : matrices) {
    check_parts(source.id, source.parts);
    const Matrix& m = program_->matrices()[static_cast<size_t>(source.id)];
    check_argument(!m.gathered, "matrix ", m.name, " is gathered, and not packed");
  }
  team.run_on_all([&](int thread, int threads) {
    const int64_t most = kAheadBytes / threads;
    for (const Span<const uint8_t>& bytes : ahead) {
      const Range mine = split(bytes.size(), thread, threads);
      Buffer::will_need(bytes.data() + mine.begin,
                        static_cast<size_t>(std::min(mine.size(), most)));
    }
    for (const MatrixSource& source : matrices) pack_share(team, thread, source, most);
  });
}

void Weights::load_matrix(Team& team, Id id, Span<const SourceTensor> parts) {
  const MatrixSource one{id, parts};
  load_matrices(team, {&one, 1});
}

void Weights::load_table(Id id, const SourceTensor& rows) {
  check_parts(id, {&rows, 1});
  check_argument(rows.order == nullptr, "a table has its rows in order");
  check_argument(program_->matrices()[static_cast<size_t>(id)].gathered, "matrix ", id,
                 " is not gathered");
  tables_[static_cast<size_t>(id)] = rows;
}

// Packs the panels that belong to one thread. Before, the system was asked to read
// the first `ahead` bytes of the thread's part of the file.
void Weights::pack_share(const Team& team, int thread, const MatrixSource& source,
                         int64_t ahead) noexcept {
  const Matrix& m = program_->matrices()[static_cast<size_t>(source.id)];
  const PackedWeight& packed = matrix(source.id, team.rank_threads(thread).rank);
  const Range panels = m.panels_of(team.share(m.units(), thread));
  const auto panel_bytes = static_cast<int64_t>(source.parts[0].row_bytes) * kPanel;
  const int64_t together = std::max(int64_t{1}, kBlockBytes / panel_bytes);
  const int64_t distance = ahead / panel_bytes;
  for (int64_t p = panels.begin; p < panels.end; p += together) {
    const Range block{p, std::min(p + together, panels.end)};
    const Range later{std::min(block.begin + distance, panels.end),
                      std::min(block.end + distance, panels.end)};
    stored_bytes(m, source.parts, later, Buffer::will_need);
    stored_bytes(m, source.parts, block, populate);
    pack_panels(m, packed, source.parts, block);
    if (digested_) add_digest(source.id, packed, block);
  }
}

// Adds the digests of `panels` to the digest of all panels.
// The order of the panels does not matter, because this digest is a sum.
void Weights::add_digest(Id id, const PackedWeight& packed, Range panels) noexcept {
  uint64_t sum = 0;
  for (int64_t p = panels.begin; p < panels.end; p++) {
    const uint8_t* panel = packed.data + static_cast<size_t>(p) * packed.panel_bytes;
    sum += digest(panel, packed.panel_bytes,
                  (static_cast<uint64_t>(id) << 32) + static_cast<uint64_t>(p));
  }
  digest_.fetch_add(sum, std::memory_order_relaxed);  // read only after all threads have packed
}

void Weights::read_packed(Team& team, int fd, size_t before) {
  const std::vector<size_t> offsets = file_offsets(*program_, ranks_, before);
  digest_.store(0, std::memory_order_relaxed);
  std::atomic<int> failed{0};  // an errno of one thread, which is read when all threads are done
  team.run_on_all([&](int thread, int threads) {
    int error = read_share(team, thread, fd, offsets);
    if (error == 0 && pool_) error = pool_->verify(thread, threads, digest_);
    if (error != 0) failed.store(error, std::memory_order_relaxed);
  });
  const int error = failed.load(std::memory_order_relaxed);
  if (error != 0) fail_system("a file of packed weights cannot be read: ", std::strerror(error));
  if (pool_) pool_->compare();
}

// Reads the panels that belong to one thread, unless they are mapped, and adds their digests.
// Returns 0 or an errno.
int Weights::read_share(Team& team, int thread, int fd,
                        const std::vector<size_t>& offsets) noexcept {
  const int rank = team.rank_threads(thread).rank;
  for (size_t i = 0; i < program_->matrices().size(); i++) {
    if (pooled(i)) continue;
    const Matrix& m = program_->matrices()[i];
    const auto id = static_cast<Id>(i);
    const PackedWeight& packed = matrix(id, rank);
    const Range panels = m.panels_of(team.share(m.units(), thread));
    const int64_t before = panels.begin - panels_of_rank(m, ranks_, rank).begin;
    auto* to =
        const_cast<uint8_t*>(packed.data) + static_cast<size_t>(panels.begin) * m.panel_bytes;
    const size_t bytes = static_cast<size_t>(panels.size()) * m.panel_bytes;
    if (mapped()) {
      populate(to, bytes);
    } else if (bytes > 0) {
      const size_t at =
          offsets[i * static_cast<size_t>(ranks_.count()) + static_cast<size_t>(rank)] +
          static_cast<size_t>(before) * m.panel_bytes;
      const int error = read_at(fd, to, bytes, at);
      if (error != 0) return error;
    }
    add_digest(id, packed, panels);
  }
  return 0;
}

void Weights::seal() noexcept {
  for (Buffer& arena : matrix_arenas_) {
    if (mapped()) arena.protect();
  }
}

void Weights::will_need(Id id) const noexcept {
  const Matrix& m = program_->matrices()[static_cast<size_t>(id)];
  for (int rank = 0; rank < ranks_.count(); rank++) {
    const Range panels = panels_of_rank(m, ranks_, rank);
    Buffer::will_need(matrix(id, rank).data + static_cast<size_t>(panels.begin) * m.panel_bytes,
                      static_cast<size_t>(panels.size()) * m.panel_bytes);
  }
}

void Weights::load_vector(Id id, Span<const float> data) {
  check_argument(id >= 0 && static_cast<size_t>(id) < vectors_.size(), "there is no vector ", id);
  const Vector& v = program_->vectors()[static_cast<size_t>(id)];
  check_argument(v.packed_from == kNone && data.size() == v.count, "vector ", v.name, " has ",
                 v.count, " elements, not ", data.size());
  for (int64_t i = 0; v.columns > 0 && i < data.size(); i++) {
    check_argument(data[i] >= 0.0f && data[i] < static_cast<float>(v.columns), "vector ", v.name,
                   " has the column ", data[i], ", but rows have ", v.columns);
  }
  std::copy(data.begin(), data.end(), vectors_[static_cast<size_t>(id)]);
  for (size_t i = 0; i < vectors_.size(); i++) {
    if (program_->vectors()[i].packed_from != id) continue;
    const int64_t half = v.count / 2;
    for (int64_t c = 0; c < v.count; c++) {  // the first half is the gate, the second half up
      const int64_t column = c % half, up = c / half;
      vectors_[i][column / kPanel * 2 * kPanel + up * kPanel + column % kPanel] = data[c];
    }
  }
}

}  // namespace cpuserve
