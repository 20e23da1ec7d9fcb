#include "runtime/weights.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

#ifndef MADV_POPULATE_READ
// Linux 5.14; older kernels return EINVAL, and pages fault one by one.
#define MADV_POPULATE_READ 22
#endif

namespace cpuserve {
namespace {

// Linears read vectors (biases) in whole strips, so they are padded with zeros to one.
constexpr int64_t kVectorPad = kStripPanels * kPanel;

// Returns the source of packed row `row` of the matrix, or nullptr for padding.
const void* source_row(const Matrix& m, Span<const SourceTensor> parts, int64_t row) {
  int64_t part = 0;
  if (m.glu) {  // panels alternate gate, up
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

// Maps the pages of one part of a file in one call, instead of with one fault per 64 KB.
void populate(const uint8_t* begin, const uint8_t* end) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));  // 64 KB on some Arm
  const uintptr_t from = reinterpret_cast<uintptr_t>(begin) / page * page;
  madvise(reinterpret_cast<void*>(from), reinterpret_cast<uintptr_t>(end) - from,
          MADV_POPULATE_READ);
}

}  // namespace

Weights::Weights(const Program& program, const Ranks& ranks)
    : program_(&program),
      ranks_(ranks),
      packed_(program.matrices().size() * static_cast<size_t>(ranks.count())) {
  for (int rank = 0; rank < ranks.count(); rank++) carve_arena(rank);

  Carver sizes(nullptr);
  for (const Vector& v : program.vectors()) sizes.take<float>(round_up(v.count, kVectorPad));
  vector_arena_ = Buffer(sizes.used());
  Carver vectors(vector_arena_.data());
  for (const Vector& v : program.vectors()) {
    vectors_.push_back(vectors.take<float>(round_up(v.count, kVectorPad)));
  }
}

void Weights::carve_arena(int rank) {
  const auto panels = [&](const Matrix& m) { return m.panels_of(ranks_.share(m.units(), rank)); };
  const auto take = [&](Carver& c, const Matrix& m) {
    return c.take<uint8_t>(panels(m).size() * static_cast<int64_t>(m.panel_bytes));
  };
  Carver sizes(nullptr);
  for (const Matrix& m : program_->matrices()) take(sizes, m);
  matrix_arenas_.emplace_back(sizes.used());
  Carver carver(matrix_arenas_.back().data());
  for (size_t i = 0; i < program_->matrices().size(); i++) {
    const Matrix& m = program_->matrices()[i];
    // The address that panel 0 would have: kernels count panels from the first one of the matrix.
    const auto before = static_cast<uintptr_t>(panels(m).begin) * m.panel_bytes;
    const auto first = reinterpret_cast<uintptr_t>(take(carver, m));
    packed_[i * static_cast<size_t>(ranks_.count()) + static_cast<size_t>(rank)] = {
        reinterpret_cast<const uint8_t*>(first - before), m.panel_bytes, m.n, m.k, m.kind};
  }
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

void Weights::load_matrix(Team& team, Id id, Span<const SourceTensor> parts) {
  check_parts(id, parts);
  const Matrix& m = program_->matrices()[static_cast<size_t>(id)];
  team.dispatch([&](int thread, int threads) {
    for (const SourceTensor& t : parts) {
      const Range rows = split(t.rows, thread, threads);
      populate(t.data + static_cast<size_t>(rows.begin) * t.row_bytes,
               t.data + static_cast<size_t>(rows.end) * t.row_bytes);
    }
    pack_panels(m, matrix(id, team.crew(thread).rank), parts,
                m.panels_of(team.share(m.units(), thread)));
  });
}

void Weights::load_vector(Id id, Span<const float> data) {
  check_argument(id >= 0 && static_cast<size_t>(id) < vectors_.size(), "there is no vector ", id);
  const Vector& v = program_->vectors()[static_cast<size_t>(id)];
  check_argument(v.packed_from == kNone && data.size() == v.count, "vector ", v.name, " has ",
                 v.count, " elements, not ", data.size());
  std::copy(data.begin(), data.end(), vectors_[static_cast<size_t>(id)]);
  for (size_t i = 0; i < vectors_.size(); i++) {
    if (program_->vectors()[i].packed_from != id) continue;
    const int64_t half = v.count / 2;
    for (int64_t c = 0; c < v.count; c++) {  // column c of gate (first half) or up
      const int64_t column = c % half, up = c / half;
      vectors_[i][column / kPanel * 2 * kPanel + up * kPanel + column % kPanel] = data[c];
    }
  }
}

}  // namespace cpuserve
