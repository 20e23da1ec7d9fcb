#include "runtime/program.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace cpuserve {
namespace {

template <class E>
struct Name {
  const char* text;
  E value;
};

constexpr Name<ActFormat> kFormats[] = {
    {"f32", ActFormat::f32},         {"bf16", ActFormat::bf16},        {"q8g32", ActFormat::q8g32},
    {"q8g32x2", ActFormat::q8g32x2}, {"q8g128", ActFormat::q8g128},    {"q8row", ActFormat::q8row},
    {"q8g256", ActFormat::q8g256},   {"q8g256x2", ActFormat::q8g256x2}};
constexpr bool quantized(ActFormat f) { return f >= ActFormat::q8g32; }
// Formats that only an op that has the whole row can write.
constexpr bool whole_row(ActFormat f) { return f >= ActFormat::q8g128; }
// Up to this K, the sum of products 127 x 255 over a whole row fits an int32.
constexpr int64_t kMostChannelK = 65536;

constexpr Name<WeightKind> kKinds[] = {
#define NAME(name, ...) {#name, WeightKind::name},
    CPUSERVE_WEIGHT_KINDS(NAME, NAME)
#undef NAME
};
constexpr Name<SourceType> kSources[] = {
#define NAME(name, ...) {#name, SourceType::name},
#define OWN_NAME(name, source, ...) {#source, SourceType::source},
    CPUSERVE_SHARED_SOURCES(NAME) CPUSERVE_WEIGHT_KINDS(CPUSERVE_NOTHING, OWN_NAME)
#undef NAME
#undef OWN_NAME
};
constexpr Name<Activation> kActivations[] = {
    {"none", Activation::none}, {"relu", Activation::relu},
    {"gelu", Activation::gelu}, {"gelu_tanh", Activation::gelu_tanh},
    {"silu", Activation::silu}, {"clamped_swiglu", Activation::clamped_swiglu}};
constexpr Name<KvType> kKvTypes[] = {{"bf16", KvType::bf16},     {"f16", KvType::f16},
                                     {"f32", KvType::f32},       {"int8", KvType::int8},
                                     {"fp8_e4m3", KvType::e4m3}, {"fp8_e5m2", KvType::e5m2}};

constexpr Name<Score> kScores[] = {{"softmax", Score::softmax},
                                   {"sigmoid", Score::sigmoid},
                                   {"chosen_softmax", Score::chosen_softmax}};
// Expert ids are stored in rows of floats, which are exact far beyond this.
constexpr int32_t kMostExperts = 4096;
constexpr int32_t kMostGroups = 255;  // of layers; a step has a block table for each

template <class E, size_t N>
E parse(const Name<E> (&names)[N], const std::string& text, const char* what) {
  std::string known;
  for (const Name<E>& n : names) {
    if (text == n.text) return n.value;
    known += std::string(known.empty() ? "" : ", ") + n.text;
  }
  fail_argument("unknown ", what, " '", text, "'; known: ", known);
}

template <class T>
const T& at(const std::vector<T>& items, Id id, const char* what) {
  check_argument(id >= 0 && static_cast<size_t>(id) < items.size(), "no ", what, " ", id);
  return items[static_cast<size_t>(id)];
}

Id last_id(size_t size) { return static_cast<Id>(size) - 1; }

void check_gated(const char* op, Activation activation, bool glu) {
  check_argument(glu || activation != Activation::clamped_swiglu, op,
                 ": clamped_swiglu needs a gate and an up");
}

}  // namespace

ActFormat parse_format(const std::string& name) { return parse(kFormats, name, "row format"); }
WeightKind parse_kind(const std::string& name) { return parse(kKinds, name, "weight kind"); }
SourceType parse_source(const std::string& name) { return parse(kSources, name, "source type"); }
Activation parse_activation(const std::string& name) {
  return parse(kActivations, name, "activation");
}
KvType parse_kv_type(const std::string& name) { return parse(kKvTypes, name, "KV type"); }
Score parse_score(const std::string& name) { return parse(kScores, name, "router score"); }
const char* kind_name(WeightKind kind) {
  for (const auto& n : kKinds) {
    if (n.value == kind) return n.text;
  }
  return "?";
}

const char* op_name(const Op& op) {
  struct Namer {
    const char* operator()(const EmbedOp&) { return "embed"; }
    const char* operator()(const PositionEmbedOp&) { return "position_embed"; }
    const char* operator()(const NormOp& o) { return o.centered ? "layer_norm" : "rms_norm"; }
    const char* operator()(const PartNormOp&) { return "part_norm"; }
    const char* operator()(const ConvertOp&) { return "convert"; }
    const char* operator()(const LinearOp&) { return "linear"; }
    const char* operator()(const RouteOp&) { return "route"; }
    const char* operator()(const AdapterOp&) { return "adapter"; }
    const char* operator()(const SpreadOp&) { return "spread"; }
    const char* operator()(const ExpertLinearOp&) { return "expert_linear"; }
    const char* operator()(const CombineOp&) { return "combine"; }
    const char* operator()(const RopeStoreOp&) { return "rope_store_kv"; }
    const char* operator()(const HeadLinearOp&) { return "head_linear"; }
    const char* operator()(const LatentStoreOp&) { return "latent_store_kv"; }
    const char* operator()(const AttentionOp&) { return "attention"; }
    const char* operator()(const SplitGatesOp&) { return "split_gates"; }
    const char* operator()(const GateOp&) { return "gate"; }
    const char* operator()(const GatedNormOp&) { return "gated_norm"; }
    const char* operator()(const GatedDeltaOp&) { return "gated_delta"; }
    const char* operator()(const ShortConvOp&) { return "short_conv"; }
    const char* operator()(const Mamba2Op&) { return "mamba2"; }
    const char* operator()(const AddOp&) { return "add"; }
    const char* operator()(const ScaleOp&) { return "scale"; }
    const char* operator()(const ColumnsOp&) { return "columns"; }
    const char* operator()(const MixPartsOp&) { return "mix_parts"; }
    const char* operator()(const MatchRmsOp&) { return "match_rms"; }
    const char* operator()(const KeepTopOp&) { return "keep_top"; }
    const char* operator()(const ActivationOp&) { return "activation"; }
    const char* operator()(const LogitsOp&) { return "logits"; }
    const char* operator()(const HiddenOp&) { return "hidden"; }
  };
  return std::visit(Namer{}, op);
}

int64_t Matrix::panels() const {
  if (gathered) return 0;
  const auto ceil_panels = [](int64_t rows) { return (rows + kPanel - 1) / kPanel; };
  return glu ? 2 * ceil_panels(n / 2) : ceil_panels(n);
}

Program::Program(const KernelTable& table, int64_t max_tokens, int64_t max_seqs)
    : table_(&table), max_tokens_(max_tokens), max_seqs_(max_seqs) {
  check_argument(max_tokens >= 1, "max_tokens must be at least 1, not ", max_tokens);
  check_argument(max_seqs >= 1, "max_seqs must be at least 1, not ", max_seqs);
}

Id Program::add_value(std::string name, int64_t width, ActFormat format, int32_t copies) {
  check_argument(width >= 1, "value ", name, " has width ", width, ", which must be at least 1");
  check_argument(copies >= 1, "value ", name, " has ", copies,
                 " rows for each token, but must have at least 1");
  values_.push_back({std::move(name), width, format, copies});
  return last_id(values_.size());
}

Id Program::add_matrix(std::string name, WeightKind kind, int64_t n, int64_t k,
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

Id Program::add_table(std::string name, WeightKind kind, int64_t n, int64_t k) {
  const Id id = add_matrix(std::move(name), kind, n, k, {n}, false);
  matrices_.back().gathered = true;
  return id;
}

size_t Program::packed_bytes(WeightKind kind, int64_t n, int64_t k) const {
  return Matrix{"", kind, n, k, {n}, false, table_->linear[static_cast<int>(kind)].panel_bytes(k),
                1}
      .bytes();
}

Id Program::add_vector(std::string name, int64_t count) {
  check_argument(count >= 1, "vector ", name, " has ", count,
                 " elements, but must have at least 1");
  vectors_.push_back({std::move(name), count});
  return last_id(vectors_.size());
}

Id Program::add_kv_layer(int32_t kv_heads, int32_t head_dim, int32_t group, bool latent) {
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

const Value& Program::value(Id id) const { return at(values_, id, "value"); }
const Matrix& Program::matrix(Id id) const { return at(matrices_, id, "matrix"); }
const Vector& Program::vector(Id id) const { return at(vectors_, id, "vector"); }
const CacheLayer& Program::kv_layer(Id id) const { return at(kv_layers_, id, "KV layer"); }

const Value& Program::f32_value(Id id, const char* role) const {
  const Value& v = value(id);
  check_argument(v.format == ActFormat::f32, role, " (value ", v.name, ") must be f32");
  return v;
}

void Program::check_vector(Id id, int64_t count, const char* role) const {
  if (id == kNone) return;
  check_argument(vector(id).count == count, role, " (vector ", vector(id).name, ") has ",
                 vector(id).count, " elements, not ", count);
}

void Program::check_columns(Id id, int64_t column, int64_t count, const char* role) const {
  const int64_t width = f32_value(id, role).width;
  check_argument(column >= 0 && column <= width - count, role, " has width ", width,
                 ", which does not hold ", count, " columns from column ", column, " on");
}

void Program::check_multiplies(Id x, const Matrix& m) const {
  const Value& v = value(x);
  check_argument(!m.gathered, m.name, " is a table for embed() alone; nothing multiplies it");
  check_argument(v.width == m.k, "matrix ", m.name, " multiplies rows of ", m.k, ", value ", v.name,
                 " has ", v.width);
  const ActFormat act = table_->linear[static_cast<int>(m.kind)].act;
  check_argument(v.format == act || term_format(v.format) == act, "value ", v.name,
                 " is not in the format that ", kind_name(m.kind), " multiplies");
}

void Program::embed(Id out, Id matrix_id, float scale) {
  const Matrix& m = matrix(matrix_id);
  check_tokens("embed", {out});
  check_argument(!m.glu && f32_value(out, "embed out").width == m.k,
                 "embed: value and matrix differ in width");
  embed_rows_ = std::max(embed_rows_, m.n);
  ops_.emplace_back(EmbedOp{out, matrix_id, scale});
}

void Program::position_embed(Id x, Id table, int64_t rows, int64_t offset) {
  check_tokens("position_embed", {x});
  check_argument(table != kNone && rows > offset && offset >= 0, "position_embed: a table of ",
                 rows, " rows cannot have the offset ", offset);
  check_vector(table, rows * f32_value(x, "position_embed x").width, "position table");
  max_positions_ = std::min(max_positions_, rows - offset);
  ops_.emplace_back(PositionEmbedOp{x, table, rows, offset});
}

void Program::norm(const NormOp& op) {
  check_tokens("norm", {op.x, op.out});
  const int64_t width = f32_value(op.x, "norm x").width;
  check_argument(value(op.out).width == width, "norm: x and out differ in width");
  check_argument(op.weight != kNone, "norm: the weight is missing");
  check_argument(op.centered || op.bias == kNone, "rms_norm has no bias");
  check_vector(op.weight, width, "norm weight");
  check_vector(op.bias, width, "norm bias");
  ops_.emplace_back(op);
}

void Program::part_norm(const PartNormOp& op) {
  check_tokens("part_norm", {op.x});
  check_argument(op.weight != kNone, "part_norm: the weight is missing");
  check_argument(op.parts >= 1, "part_norm: there must be at least 1 part, not ", op.parts);
  check_columns(op.x, op.column, op.parts * vector(op.weight).count, "part_norm x");
  ops_.emplace_back(op);
}

void Program::convert(const ConvertOp& op) {
  const int64_t width = f32_value(op.x, "convert x").width;
  check_argument(width == value(op.out).width, "convert: x and out differ in width");
  check_argument(value(op.x).copies == value(op.out).copies, "convert: x and out differ in rows");
  check_argument(op.routing == kNone || op.order != kNone, "convert: experts need an order");
  int64_t orders = 1;
  if (op.routing != kNone) {
    routed_value(op.x, op.routing, "convert x");
    orders = experts_of(op.routing, "convert").count;
  }
  check_vector(op.order, orders * width, "order of columns");
  if (op.order != kNone) vectors_[static_cast<size_t>(op.order)].columns = width;
  ops_.emplace_back(op);
}

// The bias in packed column order. Without glu that is its own order (its storage is padded with
// zeros).
Id Program::packed_bias(Id bias, const Matrix& m) {
  check_vector(bias, m.n, "linear bias");
  if (bias == kNone || !m.glu) return bias;
  for (size_t i = 0; i < vectors_.size(); i++) {
    if (vectors_[i].packed_from == bias) return static_cast<Id>(i);
  }
  return pack_bias(bias, m);
}

Id Program::pack_bias(Id bias, const Matrix& m) {
  vectors_.push_back({vector(bias).name + " (packed)", m.panels() * kPanel, bias});
  return last_id(vectors_.size());
}

// The first of the experts' biases in packed column order, which follow one another.
Id Program::expert_biases(const std::vector<Id>& biases, const Matrix& m) {
  Id first = kNone;
  for (size_t e = 0; e < biases.size(); e++) {
    check_argument(biases[e] == biases[0] + static_cast<Id>(e), "expert_linear: bias ", e,
                   " does not follow that of the expert before");
    check_argument(vector(biases[e]).count == m.n, "expert_linear: bias ", e, " has ",
                   vector(biases[e]).count, " elements, not ", m.n);
    const Id packed = m.glu ? pack_bias(biases[e], m) : biases[e];
    if (e == 0) first = packed;
  }
  return first;
}

void Program::linear(LinearOp op, bool glu) {
  const Matrix& m = matrix(op.matrix);
  check_argument(m.glu == glu, "linear: matrix ", m.name, glu ? " is not" : " is",
                 " packed as glu");
  check_multiplies(op.x, m);
  const Value& out = value(op.out);
  check_tokens("linear", {op.x, op.out});
  check_argument(op.out != op.x, "linear: x and out are the same value");
  check_argument(op.out_column >= 0 && op.out_column + m.out_width() <= out.width,
                 "linear: ", m.out_width(), " columns from ", op.out_column,
                 " on do not fit value ", out.name, " of width ", out.width);
  // Other formats pad rows or store groups, and would overwrite the columns of other matrices.
  const bool part = m.out_width() != out.width;
  check_argument(out.format == ActFormat::f32 || (!part && !op.add),
                 "linear: adding and writing some columns need an f32 value");
  check_argument(!whole_row(out.format), "linear: value ", out.name,
                 " has scales wider than a tile; only convert can write such rows");
  check_gated("linear", op.activation, glu);
  op.bias = packed_bias(op.bias, m);
  set_grain(op.matrix, out.format);
  ops_.emplace_back(op);
}

// Panels of a gate and its up stay together, and so do panels with 32 results that share a scale.
void Program::set_grain(Id id, ActFormat out) {
  Matrix& m = matrices_[static_cast<size_t>(id)];
  m.grain = std::max(m.grain, int64_t{m.glu ? 2 : 1} * (quantized(out) ? 2 : 1));
}

void Program::check_tokens(const char* op, std::initializer_list<Id> ids) const {
  for (const Id id : ids) {
    check_argument(value(id).copies == 1, op, ": value ", value(id).name,
                   " has several rows for each token");
  }
}

// The experts, or adapters, of a routing, which must come from the last op that makes one.
Program::Experts Program::experts_of(Id routing, const char* role) const {
  Id last = kNone;
  Experts experts{};
  for (const Op& op : ops_) {
    if (const auto* r = std::get_if<RouteOp>(&op)) {
      last = r->out;
      experts = {r->experts, r->chosen};
    } else if (const auto* a = std::get_if<AdapterOp>(&op)) {
      last = a->out;
      experts = {a->adapters, 1};
    }
  }
  check_argument(last != kNone && last == routing, role, ": value ", routing,
                 " is not the routing of the last route op");
  return experts;
}

// A value with one row for each token and expert of a routing.
const Value& Program::routed_value(Id id, Id routing, const char* role) const {
  const int32_t chosen = experts_of(routing, role).chosen;
  const Value& v = value(id);
  check_argument(v.copies == chosen, role, ": value ", v.name, " has ", v.copies,
                 " rows for each token, not ", chosen);
  return v;
}

void Program::route(const RouteOp& op) {
  check_tokens("route", {op.x, op.out});
  check_argument(op.experts >= 1 && op.experts <= kMostExperts, "route: ", op.experts,
                 " experts are not between 1 and ", kMostExperts);
  check_argument(op.chosen >= 1 && op.chosen <= op.experts, "route: cannot choose ", op.chosen,
                 " of ", op.experts, " experts");
  check_argument(f32_value(op.x, "route x").width == op.experts, "route: x has width ",
                 value(op.x).width, ", but there are ", op.experts, " experts");
  check_argument(f32_value(op.out, "route out").width == 2 * op.chosen,
                 "route: out must hold an id and a weight for each chosen expert");
  check_vector(op.bias, op.experts, "router bias");
  check_vector(op.factors, op.experts, "factors of experts");
  check_argument(op.groups >= 1 && op.experts % op.groups == 0, "route: ", op.experts,
                 " experts are not ", op.groups, " equal groups");
  const int32_t size = op.experts / op.groups;
  check_argument(op.kept >= 1 && op.kept <= op.groups && op.kept * size >= op.chosen &&
                     op.best >= 1 && op.best <= std::min(size, 2),
                 "route: cannot choose ", op.chosen, " experts from ", op.kept, " groups of ", size,
                 " by their best ", op.best);
  ops_.emplace_back(op);
}

void Program::adapter(const AdapterOp& op) {
  check_tokens("adapter", {op.out});
  check_argument(adapters_ == 0, "a program can have only one adapter op");
  check_argument(op.adapters >= 1 && op.adapters <= kMostExperts, "adapter: ", op.adapters,
                 " adapters are not between 1 and ", kMostExperts);
  check_argument(f32_value(op.out, "adapter out").width == 2,
                 "adapter: out must hold an id and a weight");
  check_argument(op.scales != kNone, "adapter: the scales are missing");
  check_vector(op.scales, op.adapters, "adapter scales");
  adapters_ = op.adapters;
  ops_.emplace_back(op);
}

void Program::spread(const SpreadOp& op) {
  check_tokens("spread", {op.x});
  const Value &x = value(op.x), &out = routed_value(op.out, op.routing, "spread out");
  check_argument(x.width == out.width && x.format == out.format,
                 "spread: x and out differ in width or format");
  ops_.emplace_back(op);
}

void Program::expert_linear(ExpertLinearOp op, const std::vector<Id>& matrices,
                            const std::vector<Id>& biases, bool glu) {
  routed_value(op.x, op.routing, "expert_linear x");
  const Value& out = routed_value(op.out, op.routing, "expert_linear out");
  const int32_t experts = experts_of(op.routing, "expert_linear").count;
  check_argument(static_cast<int32_t>(matrices.size()) == experts,
                 "expert_linear: ", matrices.size(), " matrices for ", experts, " experts");
  check_argument(biases.empty() || biases.size() == matrices.size(),
                 "expert_linear: ", biases.size(), " biases for ", experts, " experts");
  check_gated("expert_linear", op.activation, glu);
  op.first = matrices[0];
  op.experts = experts;
  const Matrix& one = matrix(op.first);
  for (size_t e = 0; e < matrices.size(); e++) {
    const Matrix& m = matrix(matrices[e]);
    check_argument(matrices[e] == op.first + static_cast<Id>(e), "expert_linear: matrix ", m.name,
                   " does not follow that of the expert before");
    check_argument(m.n == one.n && m.k == one.k && m.kind == one.kind && m.glu == glu,
                   "expert_linear: matrices ", one.name, " and ", m.name, " differ in shape");
    set_grain(matrices[e], out.format);
  }
  check_multiplies(op.x, one);
  check_argument(op.x != op.out && one.out_width() == out.width, "expert_linear: value ", out.name,
                 " has width ", out.width, ", not ", one.out_width());
  check_argument(!whole_row(out.format), "expert_linear: value ", out.name,
                 " has scales wider than a tile; only convert can write such rows");
  op.bias = expert_biases(biases, one);
  ops_.emplace_back(op);
}

void Program::combine(const CombineOp& op) {
  const Value& x = routed_value(op.x, op.routing, "combine x");
  check_tokens("combine", {op.out});
  check_argument(x.format == ActFormat::f32 || x.format == ActFormat::bf16, "combine: x, value ",
                 x.name, ", must be f32 or bf16");
  check_argument(x.width == f32_value(op.out, "combine out").width,
                 "combine: x and out differ in width");
  ops_.emplace_back(op);
}

void Program::rope_store(const RopeStoreOp& op) {
  const CacheLayer& kv = kv_layer(op.layer);
  check_tokens("rope_store_kv", {op.qkv, op.q});
  const Value& qkv = f32_value(op.qkv, "rope_store_kv qkv");
  check_argument(op.q_heads >= 1 && op.q_heads % kv.kv_heads == 0, "rope_store_kv: ", op.q_heads,
                 " query heads over ", kv.kv_heads, " KV heads");
  const int32_t stored = op.stores ? 2 * kv.kv_heads : 0;
  check_argument(qkv.width >= int64_t{op.q_heads + stored} * kv.head_dim, "rope_store_kv: value ",
                 qkv.name, " of width ", qkv.width, " does not hold q, k and v");
  check_argument(
      value(op.q).width == int64_t{op.q_heads} * kv.hd_pad && !quantized(value(op.q).format),
      "rope_store_kv: q must be f32 or bf16 of q_heads padded heads");
  check_argument(op.rotary >= 0 && op.rotary % 2 == 0 && op.rotary <= kv.head_dim,
                 "rope_store_kv: cannot rotate ", op.rotary, " of ", kv.head_dim, " dimensions");
  check_argument(!kv.latent, "rope_store_kv: layer ", op.layer, " keeps no values");
  if (op.rotary > 0) check_rope("rope_store_kv", op.rotary, op.cos, op.sin);
  check_vector(op.q_norm, kv.head_dim, "q norm");
  check_vector(op.k_norm, kv.head_dim, "k norm");
  ops_.emplace_back(op);
}

void Program::check_rope(const char* op, int32_t rotary, Id cos, Id sin) {
  const int64_t half = rotary / 2, count = vector(cos).count;
  check_argument(count % half == 0, op, ": a table of ", count,
                 " elements does not hold whole rows of ", half);
  check_vector(sin, count, "rope sin");
  check_argument(sin != kNone, op, ": cos is given, but sin is missing");
  max_positions_ = std::min(max_positions_, count / half);
}

void Program::head_linear(HeadLinearOp op, const std::vector<Id>& matrices) {
  check_argument(!matrices.empty(), "head_linear: there are no matrices");
  check_tokens("head_linear", {op.x, op.out});
  op.first = matrices[0];
  op.heads = static_cast<int32_t>(matrices.size());
  const Matrix& one = matrix(op.first);
  for (size_t h = 0; h < matrices.size(); h++) {
    const Matrix& m = matrix(matrices[h]);
    check_argument(matrices[h] == op.first + static_cast<Id>(h), "head_linear: matrix ", m.name,
                   " does not follow that of the head before");
    check_argument(m.n == one.n && m.k == one.k && m.kind == one.kind && !m.glu,
                   "head_linear: matrices ", one.name, " and ", m.name, " differ in shape");
  }
  const Value &x = value(op.x), &out = value(op.out);
  // The columns of two heads must not share a scale.
  check_argument(x.format == table_->linear[static_cast<int>(one.kind)].act &&
                     !quantized(x.format) && !quantized(out.format),
                 "head_linear: values ", x.name, " and ", out.name,
                 " must be f32 or bf16, as the matrices multiply them");
  // A store of fp32 keeps to its columns; one of bf16 also zeroes those up to a multiple of 32.
  check_argument(one.n % 32 == 0 || out.format == ActFormat::f32, "head_linear: matrix ", one.name,
                 " has ", one.n, " rows, so value ", out.name, " must be f32");
  // A product reads k rounded up to 32, with weights of 0.
  check_argument(
      op.step >= round_up(one.k, 32) && op.step % 2 == 0 && x.width == op.heads * op.step,
      "head_linear: value ", x.name, " of width ", x.width, " is not ", op.heads, " heads of ",
      op.step);
  check_argument(op.x != op.out && out.width == op.heads * one.n, "head_linear: value ", out.name,
                 " has width ", out.width, ", not ", op.heads * one.n);
  ops_.emplace_back(op);
}

void Program::latent_store(const LatentStoreOp& op) {
  const CacheLayer& kv = kv_layer(op.layer);
  check_tokens("latent_store_kv", {op.q, op.latent, op.kv, op.out});
  check_argument(
      op.q_heads >= 1 && op.nope >= 0 && op.rank >= 1 && op.rotary >= 2 && op.rotary % 2 == 0,
      "latent_store_kv: cannot have ", op.q_heads, " heads of ", op.nope, ", ", op.rank, " and ",
      op.rotary, " columns");
  check_argument(kv.kv_heads == 1 && kv.head_dim == op.rank + op.rotary, "latent_store_kv: layer ",
                 op.layer, " does not keep rows of ", op.rank, " + ", op.rotary);
  const int64_t heads = op.q_heads;
  check_argument(f32_value(op.q, "latent_store_kv q").width == heads * (op.nope + op.rotary) &&
                     f32_value(op.latent, "latent_store_kv latent").width == heads * op.rank &&
                     f32_value(op.kv, "latent_store_kv kv").width == kv.head_dim,
                 "latent_store_kv: values ", value(op.q).name, ", ", value(op.latent).name, " and ",
                 value(op.kv).name, " have other widths than the heads");
  check_argument(value(op.out).width == heads * kv.hd_pad && !quantized(value(op.out).format),
                 "latent_store_kv: out must be f32 or bf16 of q_heads padded heads");
  check_rope("latent_store_kv", op.rotary, op.cos, op.sin);
  check_argument(op.norm != kNone, "latent_store_kv: the norm is missing");
  check_vector(op.norm, op.rank, "latent norm");
  ops_.emplace_back(op);
}

void Program::attention(const AttentionOp& op) {
  const CacheLayer& kv = kv_layer(op.layer);
  check_argument(op.q_heads >= 1 && op.q_heads % kv.kv_heads == 0, "attention: ", op.q_heads,
                 " query heads over ", kv.kv_heads, " KV heads");
  check_argument(value(op.q).width == int64_t{op.q_heads} * kv.hd_pad, "attention: q has width ",
                 value(op.q).width);
  check_tokens("attention", {op.q, op.out});
  const Value& out = value(op.out);
  check_argument(out.width == int64_t{op.q_heads} * kv.head_dim, "attention: out has width ",
                 out.width);
  // Heads are written one by one, so a group of 32 must not contain columns of two heads.
  check_argument(!whole_row(out.format), "attention: value ", out.name,
                 " has scales wider than a head; only convert can write such rows");
  check_argument(!quantized(out.format) || kv.head_dim % 32 == 0,
                 "attention: q8g32 rows need heads of a multiple of 32, not ", kv.head_dim);
  check_argument(op.window >= 0, "attention: window must be at least 0, not ", op.window);
  check_vector(op.slopes, op.q_heads, "ALiBi slopes");
  check_vector(op.sinks, op.q_heads, "attention sinks");
  ops_.emplace_back(op);
}

void Program::add(const AddOp& op) {
  check_tokens("add", {op.x, op.out});
  check_columns(op.out, op.column, f32_value(op.x, "add x").width, "add out");
  ops_.emplace_back(op);
}

void Program::scale(const ScaleOp& op) {
  check_tokens("scale", {op.x});
  const int64_t width = f32_value(op.x, "scale x").width;
  check_argument(op.factor != kNone, "scale: the factor is missing");
  check_vector(op.factor, vector(op.factor).count == 1 ? 1 : width, "scale factor");
  ops_.emplace_back(op);
}

void Program::columns(const ColumnsOp& op) {
  check_tokens("columns", {op.x, op.out});
  int64_t width = f32_value(op.out, "columns out").width;
  if (op.more != kNone) {
    check_tokens("columns", {op.more});
    width -= f32_value(op.more, "columns more").width;
  }
  check_argument(width >= 1, "columns: out has no columns for those of x");
  check_columns(op.x, op.column, width, "columns x");
  check_argument(op.x != op.out && op.more != op.out, "columns: out must not be an input");
  ops_.emplace_back(op);
}

void Program::mix_parts(const MixPartsOp& op) {
  check_tokens("mix_parts", {op.x, op.gates});
  const int64_t width = f32_value(op.x, "mix_parts x").width;
  check_argument(op.parts >= 1 && op.parts <= kMaxParts && width % op.parts == 0,
                 "mix_parts: ", width, " columns cannot form ", op.parts,
                 " equal parts, of at most ", kMaxParts);
  check_argument(op.active >= 0 && op.active < op.parts, "mix_parts: there is no part ", op.active);
  int64_t rows = op.parts;
  if (op.target == kNone) {
    rows *= op.parts;
  } else {
    check_tokens("mix_parts", {op.target});
    check_argument(f32_value(op.target, "mix_parts target").width == width / op.parts,
                   "mix_parts: the target has width ", value(op.target).width,
                   ", not that of a part, ", width / op.parts);
  }
  check_argument(op.x != op.gates && op.x != op.target, "mix_parts: x must not be another input");
  check_argument(op.weight != kNone, "mix_parts: the weight is missing");
  check_vector(op.weight, rows * f32_value(op.gates, "mix_parts gates").width, "mix_parts weight");
  ops_.emplace_back(op);
}

void Program::match_rms(const MatchRmsOp& op) {
  check_tokens("match_rms", {op.x, op.like});
  const int64_t width = f32_value(op.x, "match_rms x").width;
  check_argument(op.x != op.like && width % f32_value(op.like, "match_rms like").width == 0,
                 "match_rms: ", width, " columns are not parts of ", value(op.like).width);
  check_argument(op.floor > 0.0f, "match_rms: the floor must be positive, not ", op.floor);
  ops_.emplace_back(op);
}

void Program::keep_top(const KeepTopOp& op) {
  check_tokens("keep_top", {op.x});
  check_argument(op.width >= 1, "keep_top: there must be at least 1 column, not ", op.width);
  check_columns(op.x, 0, op.width, "keep_top x");
  ops_.emplace_back(op);
}

void Program::activation(const ActivationOp& op) {
  check_tokens("activation", {op.x, op.out});
  const int64_t width = f32_value(op.x, "activation x").width;
  check_argument(width == value(op.out).width * (op.glu ? 2 : 1),
                 "activation: x and out differ in width");
  check_gated("activation", op.activation, op.glu);
  ops_.emplace_back(op);
}

void Program::logits(const LogitsOp& op) {
  const Matrix& m = matrix(op.matrix);
  check_argument(vocab_ == 0 && hidden_width_ == 0,
                 "a program can have only one logits or hidden op");
  check_argument(!m.glu, "logits: matrix ", m.name, " is packed as glu");
  check_tokens("logits", {op.x});
  check_multiplies(op.x, m);
  check_vector(op.bias, m.n, "logits bias");
  vocab_ = m.n;
  ops_.emplace_back(op);
}

void Program::hidden(Id x) {
  check_argument(vocab_ == 0 && hidden_width_ == 0,
                 "a program can have only one logits or hidden op");
  check_tokens("hidden", {x});
  hidden_width_ = f32_value(x, "hidden x").width;
  ops_.emplace_back(HiddenOp{x});
}

void Program::split_gates(const SplitGatesOp& op) {
  check_tokens("split_gates", {op.x, op.out});
  const int64_t width = f32_value(op.x, "split_gates x").width;
  check_argument(op.x != op.out && f32_value(op.out, "split_gates out").width == width,
                 "split_gates: x and out must be two values of one width");
  check_argument(op.heads >= 1 && op.head_dim >= 1 && int64_t{2} * op.heads * op.head_dim <= width,
                 "split_gates: ", op.heads, " heads of ", op.head_dim,
                 " dimensions and as many gates do not fit ", width, " columns");
  ops_.emplace_back(op);
}

void Program::gate(const GateOp& op) {
  check_tokens("gate", {op.x, op.out});
  const int64_t gates = op.single ? 1 : f32_value(op.out, "gate out").width;
  f32_value(op.out, "gate out");
  check_argument(
      op.x != op.out && op.column >= 0 && op.column + gates <= f32_value(op.x, "gate x").width,
      "gate: x has width ", value(op.x).width, ", which does not hold ", gates,
      " gates from column ", op.column, " on");
  ops_.emplace_back(op);
}

void Program::gated_norm(const GatedNormOp& op) {
  check_tokens("gated_norm", {op.x, op.z, op.out});
  const int64_t width = f32_value(op.out, "gated_norm out").width;
  check_argument(f32_value(op.x, "gated_norm x").width == width, "gated_norm: x has width ",
                 value(op.x).width, ", but out has ", width);
  check_columns(op.z, op.column, width, "gated_norm z");
  check_argument(op.z != op.out, "gated_norm: out must not be z");
  check_argument(op.groups >= 1 && width % op.groups == 0, "gated_norm: ", width,
                 " columns cannot form ", op.groups, " equal groups");
  check_argument(op.weight != kNone, "gated_norm: the weight is missing");
  check_vector(op.weight, width, "gated_norm weight");
  ops_.emplace_back(op);
}

void Program::gated_delta(GatedDeltaOp op) {
  check_tokens("gated_delta", {op.x, op.gates, op.out});
  check_argument(op.key_heads >= 1 && op.value_heads >= 1 && op.value_heads % op.key_heads == 0,
                 "gated_delta: ", op.value_heads, " value heads cannot share ", op.key_heads,
                 " key heads evenly");
  check_argument(op.key_width >= 1 && op.value_width >= 1, "gated_delta: heads of ", op.key_width,
                 " and ", op.value_width, " dimensions; both must be at least 1");
  check_argument(op.taps >= 2 && op.taps <= kMaxTaps, "gated_delta: a convolution over ", op.taps,
                 " tokens is not between 2 and ", kMaxTaps);
  const int64_t values = int64_t{op.value_heads} * op.value_width;
  check_argument(f32_value(op.x, "gated_delta x").width == op.key_heads * op.channels() + values,
                 "gated_delta: x has width ", value(op.x).width, ", not ",
                 op.key_heads * op.channels() + values);
  check_argument(f32_value(op.gates, "gated_delta gates").width == int64_t{2} * op.value_heads,
                 "gated_delta: gates must have two columns for each value head");
  check_argument(f32_value(op.out, "gated_delta out").width == values,
                 "gated_delta: out must have the width of all values, ", values);
  check_argument(op.conv != kNone && op.rates != kNone && op.dt_bias != kNone && op.norm != kNone,
                 "gated_delta: a weight is missing");
  check_vector(op.conv, op.key_heads * op.channels() * op.taps, "gated_delta conv");
  check_vector(op.rates, op.value_heads, "gated_delta rates");
  check_vector(op.dt_bias, op.value_heads, "gated_delta dt_bias");
  check_vector(op.norm, op.value_width, "gated_delta norm");
  op.state = static_cast<Id>(states_.size());
  states_.push_back(op.layer());
  ops_.emplace_back(op);
}

void Program::short_conv(ShortConvOp op) {
  check_tokens("short_conv", {op.x, op.out});
  const int64_t all = f32_value(op.out, "short_conv out").width;
  check_columns(op.x, op.column, all, "short_conv x");
  check_argument(op.x != op.out, "short_conv: out must not be x");
  check_argument(op.taps >= 2 && op.taps <= kMaxTaps, "short_conv: ", op.taps,
                 " tokens are not between 2 and ", kMaxTaps);
  check_argument(op.units >= 1 && all % op.units == 0, "short_conv: ", all,
                 " channels cannot form ", op.units, " equal units");
  check_argument(op.weight != kNone, "short_conv: the weight is missing");
  check_vector(op.weight, all * op.taps, "short_conv weight");
  check_vector(op.bias, all, "short_conv bias");
  op.channels = all / op.units;
  op.state = static_cast<Id>(states_.size());
  states_.push_back(op.layer());
  ops_.emplace_back(op);
}

void Program::mamba2(Mamba2Op op) {
  check_tokens("mamba2", {op.x, op.steps, op.out});
  check_argument(op.groups >= 1 && op.together >= 1 && op.heads >= 1 &&
                     op.heads % (int64_t{op.groups} * op.together) == 0,
                 "mamba2: ", op.heads, " heads cannot form ", op.groups, " groups of units of ",
                 op.together, " heads");
  check_argument(op.key_width >= 1 && op.value_width >= 1, "mamba2: states of ", op.key_width,
                 " and ", op.value_width, " dimensions; both must be at least 1");
  const int64_t width = op.values() + int64_t{2} * op.groups * op.key_width;
  check_argument(f32_value(op.x, "mamba2 x").width == width, "mamba2: x has width ",
                 value(op.x).width, ", not ", width);
  check_columns(op.steps, op.column, op.heads, "mamba2 steps");
  check_argument(f32_value(op.out, "mamba2 out").width == op.values(),
                 "mamba2: out must have the width of all values, ", op.values());
  check_argument(op.x != op.out && op.steps != op.out, "mamba2: out must not be an input");
  check_argument(op.rates != kNone && op.dt_bias != kNone && op.d != kNone,
                 "mamba2: a weight is missing");
  check_vector(op.rates, op.heads, "mamba2 rates");
  check_vector(op.dt_bias, op.heads, "mamba2 dt_bias");
  check_vector(op.d, op.heads, "mamba2 d");
  check_argument(op.low >= 0.0f && op.low <= op.high, "mamba2: steps from ", op.low, " to ",
                 op.high, " are no range of positive numbers");
  op.state = static_cast<Id>(states_.size());
  states_.push_back(op.layer());
  ops_.emplace_back(op);
}

int64_t Program::state_bytes() const {
  int64_t floats = 0;
  for (const StateLayer& s : states_) {
    floats += s.units * (round_up(s.closed, 16) + round_up(s.open, 16));
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

std::vector<std::string> Program::packed_layout() const {
  std::vector<std::string> out;
  for (const Matrix& m : matrices_) {
    std::string line = m.name + " " + kind_name(m.kind) + (m.glu ? " glu" : "");
    for (const int64_t part : m.parts) line += " " + std::to_string(part);
    line += " x " + std::to_string(m.k) + ", " + std::to_string(m.panel_bytes);
    out.push_back(line + " x " + std::to_string(m.grain));
  }
  return out;
}

int64_t Program::weight_bytes() const {
  size_t bytes = 0;
  for (const Matrix& m : matrices_) bytes += m.bytes();
  for (const Vector& v : vectors_) bytes += static_cast<size_t>(v.count) * sizeof(float);
  return static_cast<int64_t>(bytes);
}

int64_t Program::kv_block_bytes(KvType type) const {
  std::vector<int64_t> bytes(static_cast<size_t>(cache_groups_));
  for (const CacheLayer& s : kv_layers_) {
    bytes[static_cast<size_t>(s.group)] +=
        s.halves() * s.kv_heads * static_cast<int64_t>(kv_half_bytes(type, s.hd_pad));
  }
  return *std::max_element(bytes.begin(), bytes.end());
}

}  // namespace cpuserve
