// A lowered program: values, weights and ops as plain data. They are checked when they are added,
// so that the step needs no checks of its own.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <variant>
#include <vector>

#include "kernels/table.h"
#include "parallel/partition.h"

namespace cpuserve {

using Id = int32_t;
constexpr Id kNone = -1;

// A matrix [max_tokens * copies, width] of activations: with `copies` rows for each token of the
// step.
struct Value {
  std::string name;
  int64_t width;
  ActFormat format;
  int32_t copies = 1;
};

// A packed weight matrix. Without glu, the rows of its parts follow one another. With glu, it has
// two parts with the same number of rows, each padded to whole panels, and their panels alternate.
// Threads and ranks share it in units of `grain` panels: a gate and its up stay together, and so do
// panels with results that share a scale.
struct Matrix {
  std::string name;
  WeightKind kind;
  int64_t n, k;
  std::vector<int64_t> parts;
  bool glu;
  size_t panel_bytes;
  int64_t grain;
  // A table that stays where its checkpoint is mapped: it has no panels, and a row is packed when
  // it is looked up.
  bool gathered = false;

  int64_t panels() const;
  int64_t units() const { return (panels() + grain - 1) / grain; }
  Range panels_of(Range units) const {
    return {std::min(units.begin * grain, panels()), std::min(units.end * grain, panels())};
  }
  size_t bytes() const { return static_cast<size_t>(panels()) * panel_bytes; }
  int64_t out_width() const { return glu ? n / 2 : n; }
};

// An fp32 vector [count]. It is a copy of vector `packed_from` in the packed
// column order of a glu matrix, with zeros in the padding; `packed_from` is kNone if the vector is
// loaded.
struct Vector {
  std::string name;
  int64_t count;
  Id packed_from = kNone;
  int64_t columns = 0;  // its numbers are columns below this one, if it is not 0
};

// The cache of one attention layer: keys and values of these heads, in the blocks of its group.
// Each group has its own block tables.
struct CacheLayer {
  int32_t kv_heads, head_dim, hd_pad;
  int32_t group = 0;
  bool latent = false;  // the keys are the values, and are stored once
  int64_t halves() const { return latent ? 1 : 2; }
};

// The state of a sequence in one recurrent layer: for each of its independent units, the
// floats of the closed state and of the open rows.
struct StateLayer {
  int32_t units;
  int64_t closed, open;
};

struct EmbedOp {  // ids that the matrix has no row for take its first one
  Id out, matrix;
  float scale;
};
struct PositionEmbedOp {
  Id x, table;
  int64_t rows, offset;
};
struct NormOp {
  Id x, out, weight, bias;
  float eps;
  bool centered;  // layer_norm, else rms_norm
};
// RMS norm of each of `parts` equal parts of the columns of x from `column` on, in place. Each has
// a mean of its own, and the width of the weight.
struct PartNormOp {
  Id x, weight;
  int64_t column;
  int32_t parts;
  float eps;
};
// Writes x in another format. `order`: column i of out is column order[i] of x. With a `routing`
// there is an order for each of its experts, one after another, and a row uses the order of its
// expert.
struct ConvertOp {
  Id x, out;
  Id order = kNone, routing = kNone;
};
struct LinearOp {
  Id x, out, matrix, bias;
  Activation activation;
  bool add;
  int64_t out_column;
};
enum class Score : int32_t { softmax = 0, sigmoid, chosen_softmax };
struct RouteOp {  // sets the routing that the ops up to the next RouteOp use
  Id x, out;
  int32_t experts, chosen;
  Score score;
  bool renormalize;
  float scale;
  Id bias;
  // Only experts of the `kept` best of `groups` equal groups are chosen, by the sums of their
  // `best` highest scores.
  int32_t groups = 1, kept = 1, best = 1;
  Id factors = kNone;  // by expert: the last factor of its weight
};
// Routes each token to its sequence's adapter, or nowhere. Row t of out: the adapter (-1: none) and
// its scale.
struct AdapterOp {
  Id out;
  int32_t adapters;
  Id scales;
};
struct SpreadOp {
  Id x, routing, out;
};
// Expert e multiplies matrix `first` + e and adds vector `bias` + e, if there are biases.
struct ExpertLinearOp {
  Id x, routing, out, first, bias;
  int32_t experts;
  Activation activation;
};
struct CombineOp {
  Id x, routing, out;
  bool add = true;  // to out
};
struct RopeStoreOp {
  Id qkv, q, layer;
  int32_t q_heads, rotary;
  Id cos, sin, q_norm, k_norm;
  float eps;
  bool stores = true;  // else there are only queries, and an earlier op stores keys and values
};
// Head h multiplies matrix `first` + h and the columns of x from h * step on; its result begins at
// column h * n of out.
struct HeadLinearOp {
  Id x, out, first;
  int32_t heads;
  int64_t step;
};
struct LatentStoreOp {
  Id q, latent, kv, out, layer;
  int32_t q_heads, nope, rank, rotary;
  Id cos, sin, norm;
  float eps;
  bool interleaved;
};
struct AttentionOp {
  Id q, out, layer;
  int32_t q_heads, window;
  float scale, softcap;
  Id slopes, sinks;
  bool causal = true;
};
struct SplitGatesOp {  // x: [query, gate] of each head, then more; out: queries, the rest, gates
  Id x, out;
  int32_t heads, head_dim;
};
// Multiplies out by the sigmoid of x, from `column` on; `single`: of one gate; `plain`: by x
// itself.
struct GateOp {
  Id x, out;
  int64_t column;
  bool single, plain;
};
// RMS norm of x times silu(z, from `column` on); each of `groups` parts of a row has its own mean.
struct GatedNormOp {
  Id x, z, out, weight;
  int32_t groups;
  int64_t column;
  float eps;
};
// conv: [key_heads][taps][channels of a key head: q, k, v]. rates: by value head, -exp(A_log).
// tiled: one value head of every key head, then the next of each; else a key head's together.
struct GatedDeltaOp {
  Id x, gates, out, state;
  int32_t key_heads, value_heads, key_width, value_width, taps;
  Id conv, rates, dt_bias, norm;
  float eps;
  bool tiled;

  int64_t value_head(int64_t key_head, int64_t h) const {  // the value head h of a key head
    return tiled ? h * key_heads + key_head : key_head * (value_heads / key_heads) + h;
  }
  RecurrentShape shape() const {  // of a unit, which is a key head
    return {key_width, value_width, value_heads / key_heads, true};
  }
  int64_t channels() const { return 2 * key_width + shape().heads * int64_t{value_width}; }
  StateLayer layer() const {
    const RecurrentShape s = shape();
    return {key_heads, s.heads * int64_t{key_width} * value_width + (taps - 1) * channels(),
            recurrent_open_floats(s) + kStateChunk * channels()};
  }
};
// weight: [taps][channels of out]. A unit is an equal part of the channels.
struct ShortConvOp {
  Id x, out, state;
  int64_t column;
  int32_t units, taps;
  Id weight, bias;
  bool silu;
  int64_t channels = 0;  // of a unit; set by Program

  StateLayer layer() const { return {units, (taps - 1) * channels, kStateChunk * channels}; }
};
// rates: by head, -exp(A_log). A unit is `together` heads of one group.
struct Mamba2Op {
  Id x, steps, out, state;
  int32_t heads, groups, key_width, value_width, together;
  int64_t column;  // of steps
  Id rates, dt_bias, d;
  float low, high;  // limits of a step

  RecurrentShape shape() const { return {key_width, value_width, together, false}; }
  int32_t units() const { return heads / together; }
  int64_t values() const { return int64_t{heads} * value_width; }
  StateLayer layer() const {
    return {units(), int64_t{together} * key_width * value_width, recurrent_open_floats(shape())};
  }
};
struct AddOp {  // to columns of out from `column` on
  Id x, out;
  int64_t column = 0;
};
constexpr int32_t kMaxParts = 8;  // of a row that MixPartsOp mixes

struct ScaleOp {  // multiplies x by the only number of a vector, or columns by one number each
  Id x, factor;
};
struct ColumnsOp {  // out: columns of x from `column` on, then all of `more`, if it is a value
  Id x, more, out;
  int64_t column;
};
// x: `parts` equal parts of a row. The k gates of a token determine coefficients: rows of `weight`
// [parts * parts][k], or [parts][k] if `target` is a value, times their tanh. Without a target, a
// part grows by the sum of all parts, each times its coefficient, otherwise by 1 + its coefficient
// times (scale target - part `active`).
struct MixPartsOp {
  Id x, gates, target, weight;
  int32_t parts, active;
  float scale;
};
struct MatchRmsOp {  // parts of x get the root mean square of `like`; their own counts from floor
  Id x, like;
  float floor;
};
struct KeepTopOp {  // the first `width` columns minus (mean + deviations standard deviations), or 0
  Id x;
  int64_t width;
  float deviations;
};
struct ActivationOp {
  Id x, out;
  Activation activation;
  bool glu;
};
struct LogitsOp {
  Id x, matrix, bias;
  float scale, softcap;
};
// The vectors of an embedding model: the rows of x that the step asks for, as they are.
struct HiddenOp {
  Id x;
};
using Op = std::variant<EmbedOp, PositionEmbedOp, NormOp, PartNormOp, ConvertOp, LinearOp, RouteOp,
                        AdapterOp, SpreadOp, ExpertLinearOp, CombineOp, RopeStoreOp, HeadLinearOp,
                        LatentStoreOp, AttentionOp, SplitGatesOp, GateOp, GatedNormOp, GatedDeltaOp,
                        ShortConvOp, Mamba2Op, AddOp, ScaleOp, ColumnsOp, MixPartsOp, MatchRmsOp,
                        KeepTopOp, ActivationOp, LogitsOp, HiddenOp>;

const char* op_name(const Op& op);

class Program {
 public:
  // `table` must outlive the program. All add_* functions throw std::invalid_argument with
  // the name of the argument that does not fit.
  Program(const KernelTable& table, int64_t max_tokens, int64_t max_seqs);

  Id add_value(std::string name, int64_t width, ActFormat format, int32_t copies = 1);
  Id add_matrix(std::string name, WeightKind kind, int64_t n, int64_t k, std::vector<int64_t> parts,
                bool glu);
  // A matrix that is gathered; only embed() takes it.
  Id add_table(std::string name, WeightKind kind, int64_t n, int64_t k);
  size_t packed_bytes(WeightKind kind, int64_t n,
                      int64_t k) const;  // of a matrix that is not added
  Id add_vector(std::string name, int64_t count);
  Id add_kv_layer(int32_t kv_heads, int32_t head_dim, int32_t group = 0, bool latent = false);

  void embed(Id out, Id matrix, float scale);
  void position_embed(Id x, Id table, int64_t rows, int64_t offset);
  void norm(const NormOp& op);
  void part_norm(const PartNormOp& op);
  void convert(const ConvertOp& op);
  void linear(LinearOp op, bool glu);
  void route(const RouteOp& op);
  void adapter(const AdapterOp& op);
  void spread(const SpreadOp& op);
  // matrices: one for each expert, in order, of equal shape and kind. biases: as many, or none.
  void expert_linear(ExpertLinearOp op, const std::vector<Id>& matrices,
                     const std::vector<Id>& biases, bool glu);
  void combine(const CombineOp& op);
  void rope_store(const RopeStoreOp& op);
  // matrices: one for each head, in order, of equal shape and kind.
  void head_linear(HeadLinearOp op, const std::vector<Id>& matrices);
  void latent_store(const LatentStoreOp& op);
  void attention(const AttentionOp& op);
  void split_gates(const SplitGatesOp& op);
  void gate(const GateOp& op);
  void gated_norm(const GatedNormOp& op);
  void gated_delta(GatedDeltaOp op);
  void short_conv(ShortConvOp op);
  void mamba2(Mamba2Op op);
  void add(const AddOp& op);
  void scale(const ScaleOp& op);
  void columns(const ColumnsOp& op);
  void mix_parts(const MixPartsOp& op);
  void match_rms(const MatchRmsOp& op);
  void keep_top(const KeepTopOp& op);
  void activation(const ActivationOp& op);
  void logits(const LogitsOp& op);
  void hidden(Id x);

  const KernelTable& table() const { return *table_; }
  int64_t max_tokens() const { return max_tokens_; }
  int64_t max_seqs() const { return max_seqs_; }
  const std::vector<Value>& values() const { return values_; }
  const std::vector<Matrix>& matrices() const { return matrices_; }
  const std::vector<Vector>& vectors() const { return vectors_; }
  const std::vector<CacheLayer>& kv_layers() const { return kv_layers_; }
  const std::vector<StateLayer>& states() const { return states_; }
  const std::vector<Op>& ops() const { return ops_; }

  int64_t embed_rows() const { return embed_rows_; }      // token ids must be below it
  int64_t vocab() const { return vocab_; }                // columns of the logits; 0 = no logits
  int64_t adapters() const { return adapters_; }          // of an adapter op; 0 = there is none
  int64_t hidden_width() const { return hidden_width_; }  // of a hidden op; 0 = there is none
  int64_t max_positions() const { return max_positions_; }
  int32_t cache_groups() const { return cache_groups_; }  // of KV layers; at least 1
  // Block tables of each sequence: one per group of KV layers, then one of states, if any.
  int32_t table_groups() const { return cache_groups_ + (states_.empty() ? 0 : 1); }
  int64_t state_bytes() const;  // of one slot
  int64_t weight_bytes() const;
  // Everything that determines the layout of packed matrices, for one level and number of ranks.
  std::vector<std::string> packed_layout() const;
  int64_t kv_block_bytes(KvType type) const;  // that a block of any group fits

 private:
  const Value& value(Id id) const;
  const Matrix& matrix(Id id) const;
  const Vector& vector(Id id) const;
  const CacheLayer& kv_layer(Id id) const;
  const Value& f32_value(Id id, const char* role) const;
  struct Experts {
    int32_t count, chosen;
  };
  Experts experts_of(Id routing, const char* role) const;
  const Value& routed_value(Id id, Id routing, const char* role) const;
  void check_tokens(const char* op, std::initializer_list<Id> ids) const;
  void set_grain(Id matrix, ActFormat out);
  void check_vector(Id id, int64_t count, const char* role) const;
  void check_columns(Id id, int64_t column, int64_t count, const char* role) const;
  void check_rope(const char* op, int32_t rotary, Id cos, Id sin);
  void check_multiplies(Id x, const Matrix& m) const;
  Id packed_bias(Id bias, const Matrix& m);
  Id pack_bias(Id bias, const Matrix& m);
  Id expert_biases(const std::vector<Id>& biases, const Matrix& m);

  const KernelTable* table_;
  int64_t max_tokens_, max_seqs_;
  std::vector<Value> values_;
  std::vector<Matrix> matrices_;
  std::vector<Vector> vectors_;
  std::vector<CacheLayer> kv_layers_;
  std::vector<StateLayer> states_;
  std::vector<Op> ops_;
  int64_t embed_rows_ = 0, vocab_ = 0, hidden_width_ = 0, adapters_ = 0;
  int32_t cache_groups_ = 1;
  int64_t max_positions_ = INT32_MAX;
};

}  // namespace cpuserve
