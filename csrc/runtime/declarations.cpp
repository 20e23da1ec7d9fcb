#include "runtime/declarations.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "runtime/names.h"
#include "runtime/rows.h"
#include "runtime/step_input.h"

namespace cpuserve {
namespace {

// The largest K of a w8_channel matrix.
// The sum of K products, each at most 127 x 255, then fits an int32.
constexpr int64_t kMostChannelK = 65536;
constexpr int32_t kMostGroups = 255;  // the most groups of KV layers

template <class T>
const T& at(const std::vector<T>& items, Id id, const char* what) {
  check_argument(id >= 0 && static_cast<size_t>(id) < items.size(), "no ", what, " ", id);
  return items[static_cast<size_t>(id)];
}

Id last_id(size_t size) { return static_cast<Id>(size) - 1; }

}  // namespace

int64_t Matrix::panels() const {
  if (gathered) return 0;
  const auto ceil_panels = [](int64_t rows) { return (rows + kPanel - 1) / kPanel; };
  return glu ? 2 * ceil_panels(n / 2) : ceil_panels(n);
}

Declarations::Declarations(const KernelTable& table, int64_t max_tokens, int64_t max_seqs)
    : table_(&table), max_tokens_(max_tokens), max_seqs_(max_seqs) {
  check_argument(max_tokens >= 1, "max_tokens must be at least 1, not ", max_tokens);
  check_argument(max_seqs >= 1, "max_seqs must be at least 1, not ", max_seqs);
}

Id Declarations::add_value(std::string name, int64_t width, ActFormat format, int32_t copies,
                           int32_t fold) {
  check_argument(width >= 1, "value ", name, " has width ", width, ", which must be at least 1");
  check_argument(copies >= 1, "value ", name, " has ", copies,
                 " rows for each token, but must have at least 1");
  check_argument(fold >= 1 && (fold == 1 || copies == 1), "value ", name, " cannot have ", copies,
                 " rows for every ", fold, " tokens");
  values_.push_back({std::move(name), width, format, copies, fold});
  return last_id(values_.size());
}

Id Declarations::add_matrix(std::string name, WeightKind kind, int64_t n, int64_t k,
                            std::vector<int64_t> parts, bool glu) {
  check_argument(n >= 1 && k >= 1, "matrix ", name, " is ", n, " x ", k,
                 ", but both must be at least 1");
  int64_t sum = 0;
  for (int64_t part : parts) {
    check_argument(part >= 1, "matrix ", name, " has a part of ", part,
                   " rows, but each part must have at least 1");
    sum += part;
  }
  check_argument(sum == n, "matrix ", name, ": its parts have a total of ", sum, " rows, not ", n);
  check_argument(!glu || (parts.size() == 2 && parts[0] == parts[1]), "matrix ", name,
                 ": gate and up must have the same number of rows");
  const LinearKernel& kernel = table_->linear[static_cast<int>(kind)];
  check_argument(kind != WeightKind::w8_channel || k <= kMostChannelK, "matrix ", name,
                 ": rows of ", k, " are too long for one scale; the limit is ", kMostChannelK);
  check_argument(kernel.product != nullptr, "level ", table_->isa, " has no kernel for ",
                 kind_name(kind));
  matrices_.push_back({std::move(name), kind, n, k, std::move(parts), glu, kernel.panel_bytes(k),
                       glu ? int64_t{2} : int64_t{1}});
  return last_id(matrices_.size());
}

Id Declarations::add_table(std::string name, WeightKind kind, int64_t n, int64_t k) {
  const Id id = add_matrix(std::move(name), kind, n, k, {n}, false);
  matrices_.back().gathered = true;
  return id;
}

size_t Declarations::packed_bytes(WeightKind kind, int64_t n, int64_t k) const {
  return Matrix{"", kind, n, k, {n}, false, table_->linear[static_cast<int>(kind)].panel_bytes(k),
                1}
      .bytes();
}

Id Declarations::add_vector(std::string name, int64_t count) {
  check_argument(count >= 1, "vector ", name, " has ", count,
                 " elements, but must have at least 1");
  vectors_.push_back({std::move(name), count});
  return last_id(vectors_.size());
}

Id Declarations::add_kv_layer(int32_t kv_heads, int32_t head_dim, int32_t group, bool latent) {
  check_argument(kv_heads >= 1 && head_dim >= 1, "a KV layer cannot have ", kv_heads, " heads of ",
                 head_dim, " dimensions; both must be at least 1");
  check_argument(head_dim <= kMaxHeadDim, "head_dim ", head_dim, " is above the limit of ",
                 kMaxHeadDim);
  check_argument(group >= 0 && group <= kMostGroups, "KV layer ", kv_layers_.size(),
                 " cannot be in group ", group, "; groups are 0 to ", kMostGroups);
  cache_groups_ = std::max(cache_groups_, group + 1);
  const auto hd_pad = static_cast<int32_t>(round_up(head_dim, 16));
  kv_layers_.push_back({kv_heads, head_dim, hd_pad, group, latent});
  return last_id(kv_layers_.size());
}

const Value& Declarations::value(Id id) const { return at(values_, id, "value"); }
const Matrix& Declarations::matrix(Id id) const { return at(matrices_, id, "matrix"); }
const Vector& Declarations::vector(Id id) const { return at(vectors_, id, "vector"); }
const CacheLayer& Declarations::kv_layer(Id id) const { return at(kv_layers_, id, "KV layer"); }

const Value& Declarations::f32_value(Id id, const char* role) const {
  const Value& v = value(id);
  check_argument(v.format == ActFormat::f32, role, " (value ", v.name, ") must be f32");
  return v;
}

void Declarations::check_vector(Id id, int64_t count, const char* role) const {
  if (id == kNone) return;
  check_argument(vector(id).count == count, role, " (vector ", vector(id).name, ") has ",
                 vector(id).count, " elements, not ", count);
}

void Declarations::check_columns(Id id, int64_t column, int64_t count, const char* role) const {
  const int64_t width = f32_value(id, role).width;
  check_argument(column >= 0 && column <= width - count, role, " has width ", width,
                 ", which does not hold ", count, " columns from column ", column, " on");
}

void Declarations::check_multiplies(Id x, const Matrix& m) const {
  const Value& v = value(x);
  check_argument(!m.gathered, m.name, " is a table for embed() alone; nothing multiplies it");
  check_argument(v.width == m.k, "matrix ", m.name, " multiplies rows of ", m.k, ", value ", v.name,
                 " has ", v.width);
  const ActFormat act = table_->linear[static_cast<int>(m.kind)].act;
  check_argument(v.format == act || term_format(v.format) == act, "value ", v.name,
                 " is not in the format that ", kind_name(m.kind), " multiplies");
}

void Declarations::check_tokens(const char* op, std::initializer_list<Id> ids) const {
  for (const Id id : ids) {
    check_argument(value(id).copies == 1, op, ": value ", value(id).name,
                   " has several rows for each token");
    check_argument(value(id).fold == 1, op, ": value ", value(id).name,
                   " has one row for several tokens");
  }
}

void Declarations::check_rows(const char* op, std::initializer_list<Id> ids) const {
  for (const Id id : ids) {
    check_argument(value(id).copies == 1, op, ": value ", value(id).name,
                   " has several rows for each token");
    check_argument(value(id).fold == value(*ids.begin()).fold, op, ": values ", value(id).name,
                   " and ", value(*ids.begin()).name, " differ in rows");
  }
}

Experts Declarations::experts_of(Id routing, const char* role) const {
  check_argument(routing_ != kNone && routing_ == routing, role, ": value ", routing,
                 " is not the routing of the last route op");
  return experts_;
}

const Value& Declarations::routed_value(Id id, Id routing, const char* role) const {
  const int32_t chosen = experts_of(routing, role).chosen;
  const Value& v = value(id);
  check_argument(v.copies == chosen, role, ": value ", v.name, " has ", v.copies,
                 " rows for each token, not ", chosen);
  return v;
}

// Returns the id of a vector with the elements of `bias` in the column order of the packed matrix
// (Vector::packed_from). Packing keeps the column order without glu, so the id is then `bias`.
Id Declarations::packed_bias(Id bias, const Matrix& m) {
  check_vector(bias, m.n, "linear bias");
  if (bias == kNone || !m.glu) return bias;
  for (size_t i = 0; i < vectors_.size(); i++) {
    if (vectors_[i].packed_from == bias) return static_cast<Id>(i);
  }
  return pack_bias(bias, m);
}

Id Declarations::pack_bias(Id bias, const Matrix& m) {
  vectors_.push_back({vector(bias).name + " (packed)", m.panels() * kPanel, bias});
  return last_id(vectors_.size());
}

// Sets Matrix::grain. One task must compute a panel of the gate and its panel of the up projection,
// and two panels of results if 32 results share a quantization scale.
void Declarations::set_grain(Id id, ActFormat out) {
  Matrix& m = matrices_[static_cast<size_t>(id)];
  m.grain = std::max(m.grain, int64_t{m.glu ? 2 : 1} * (quantized(out) ? 2 : 1));
}

int32_t Declarations::axial_rope(const AxialRope& rope) {
  for (const int32_t axis : rope.axes) {
    check_argument(axis >= 0 && axis < kMostAxes, "a rope cannot turn by axis ", axis);
    limits_.axes = std::max<int64_t>(limits_.axes, axis + 1);
  }
  for (size_t i = 0; i < axial_ropes_.size(); i++) {
    const AxialRope& known = axial_ropes_[i];
    if (known.cos == rope.cos && known.sin == rope.sin && known.axes == rope.axes) {
      return static_cast<int32_t>(i);
    }
  }
  axial_ropes_.push_back(rope);
  return static_cast<int32_t>(axial_ropes_.size()) - 1;
}

Id Declarations::add_state(const StateLayer& layer) {
  states_.push_back(layer);
  return last_id(states_.size());
}

void Declarations::set_routing(Id out, Experts experts, bool routes) {
  limits_.experts = {std::max(limits_.experts.count, experts.count),
                     std::max(limits_.experts.chosen, experts.chosen)};
  routing_ = out;
  experts_ = experts;
  if (routes) route_ = num_ops_;
  position_ = routes ? 0 : -1;
}

void Declarations::add_experts(Id first, int32_t experts) {
  expert_matrices_.push_back({num_ops_, route_, position_, first, experts});
  if (position_ >= 0) position_++;
}

void Declarations::set_columns(Id id, int64_t columns) {
  vectors_[static_cast<size_t>(id)].columns = columns;
}

int64_t Declarations::state_bytes() const {
  int64_t floats = 0;
  for (const StateLayer& s : states_) {
    floats += s.units * (round_up(s.closed, 16) + round_up(s.open, 16));
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

std::vector<std::string> Declarations::packed_layout() const {
  std::vector<std::string> out;
  for (const Matrix& m : matrices_) {
    std::string line = m.name + " " + kind_name(m.kind) + (m.glu ? " glu" : "");
    for (const int64_t part : m.parts) line += " " + std::to_string(part);
    line += " x " + std::to_string(m.k) + ", " + std::to_string(m.panel_bytes);
    out.push_back(line + " x " + std::to_string(m.grain));
  }
  return out;
}

int64_t Declarations::weight_bytes() const {
  size_t bytes = 0;
  for (const Matrix& m : matrices_) bytes += m.bytes();
  for (const Vector& v : vectors_) bytes += static_cast<size_t>(v.count) * sizeof(float);
  return static_cast<int64_t>(bytes);
}

int64_t Declarations::kv_block_bytes(KvType type) const {
  std::vector<int64_t> bytes(static_cast<size_t>(cache_groups_));
  for (const CacheLayer& s : kv_layers_) {
    bytes[static_cast<size_t>(s.group)] += s.kv_heads * static_cast<int64_t>(s.head_bytes(type));
  }
  return *std::max_element(bytes.begin(), bytes.end());
}

}  // namespace cpuserve
