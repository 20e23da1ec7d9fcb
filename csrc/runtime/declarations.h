// What the operations of a program refer to by id: values, weights, caches and states.
// Each item is checked when it is added, so that a step needs no checks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "kernels/table.h"
#include "parallel/partition.h"

namespace cpuserve {

using Id = int32_t;
constexpr Id kNone = -1;

// A matrix of activations, [max_tokens * copies, width].
// In a step, a value has `copies` rows for each token, or one row for every `fold` tokens.
struct Value {
  std::string name;
  int64_t width;
  ActFormat format;
  int32_t copies = 1;
  int32_t fold = 1;

  int64_t rows(int64_t tokens) const { return tokens * copies / fold; }
};

// A packed weight matrix [n, k] of one or more parts (tensors of the checkpoint). Without glu,
// the rows of the parts follow one another. With glu, there are two parts (gate and up projection)
// with equal numbers of rows, each padded to whole panels of 16 rows, and their panels alternate.
// Threads and ranks never separate the panels of a grain (`grain` consecutive panels): a panel
// of the gate and its panel of up, or panels with results that share a quantization scale.
struct Matrix {
  std::string name;
  WeightKind kind;
  int64_t n, k;
  std::vector<int64_t> parts;  // number of rows of each part
  bool glu;
  size_t panel_bytes;
  int64_t grain;
  // If true, the matrix stays in the mapped file of its checkpoint, for EmbedOp.
  // Such a matrix has no packed panels: a row is packed when a token looks it up.
  bool gathered = false;

  int64_t panels() const;
  int64_t units() const { return (panels() + grain - 1) / grain; }
  Range panels_of(Range units) const {
    return {std::min(units.begin * grain, panels()), std::min(units.end * grain, panels())};
  }
  size_t bytes() const { return static_cast<size_t>(panels()) * panel_bytes; }
  int64_t out_width() const { return glu ? n / 2 : n; }
};

// An fp32 vector [count]. If `packed_from` is kNone, Weights::load_vector sets its elements.
// Otherwise it is a bias of a glu matrix: a copy of the vector `packed_from`, reordered to match
// the columns of the packed matrix (16 of the gate, 16 of up, and so on) and padded with zeros.
struct Vector {
  std::string name;
  int64_t count;
  Id packed_from = kNone;
  int64_t columns = 0;  // if not 0, each element is the index of a column, less than `columns`
};

// The KV cache of one attention layer. The layers of one cache group, such as all layers
// with the same sliding window, have common block tables.
struct CacheLayer {
  int32_t kv_heads, head_dim, hd_pad;  // hd_pad: head_dim rounded up to 16
  int32_t group = 0;
  bool latent = false;  // keys are also the values (MLA), stored once
  // Returns the bytes of the keys and values of one head in one block, in a cache of type `cache`.
  size_t head_bytes(KvType cache) const {
    const KvType type = kv_layer_type(cache, latent);
    return kv_key_bytes(type, hd_pad) + (latent ? 0 : kv_value_bytes(type, hd_pad));
  }
};

// The size of the state of one sequence in one recurrent layer. The state has `units` independent
// state units: heads, or groups of heads or channels. Each unit has `closed` floats for its state
// after a multiple of 16 tokens, and `open` floats for later tokens (table/recurrent.h).
struct StateLayer {
  int32_t units;
  int64_t closed, open;
};

// A rope with frequencies on several axes of places (RopeStoreOp::axes). A step with angles
// has tables of its own for it, with a row of cos and sin for each token (StepContext::turn).
struct AxialRope {
  Id cos, sin;
  std::vector<int32_t> axes;  // the axis of each frequency
};

// The number of experts (or adapters) of a routing, and the number that each token uses.
struct Experts {
  int32_t count = 0, chosen = 0;
};

// The limits for the steps of a program, which follow from its operations.
struct ProgramLimits {
  int64_t embed_rows = 0;  // token ids must be below this number
  int64_t max_positions = INT32_MAX;
  int64_t vocab = 0;          // columns of the logits; 0 = the program has no logits
  int64_t hidden_width = 0;   // width of the rows that HiddenOp returns; 0 = it has no HiddenOp
  int64_t adapters = 0;       // number of adapters of AdapterOp; 0 = it has no AdapterOp
  int64_t media_width = 0;    // columns that operations read of a row of the media buffer
  int64_t patch_width = 0;    // bytes of a patch of a picture; 0 = it has no PatchesOp
  int64_t fold = 1;           // tokens of a row after the last FoldOp
  int64_t axes = 0;           // number of axes of StepInput::angles that operations read
  Experts experts;            // the most experts of a routing, and of a token
  bool needs_angles = false;  // each step must have angles
};

// The matrices of an ExpertLinearOp: `experts` of them, from matrix `first` on.
struct ExpertMatrices {
  size_t op;     // the number of the operation
  size_t route;  // that of the last RouteOp before it; 0: there is none
  int position;  // 0 for the first ExpertLinearOp after this RouteOp; -1: an AdapterOp chooses
  Id first;
  int32_t experts;
};

class Declarations {
 public:
  // `table` must outlive this object. All add_* functions throw std::invalid_argument;
  // the message has the name of the wrong argument.
  Declarations(const KernelTable& table, int64_t max_tokens, int64_t max_seqs);

  Id add_value(std::string name, int64_t width, ActFormat format, int32_t copies = 1,
               int32_t fold = 1);
  Id add_matrix(std::string name, WeightKind kind, int64_t n, int64_t k, std::vector<int64_t> parts,
                bool glu);
  // Adds a table of rows that EmbedOp looks up by id; no linear can use it.
  Id add_table(std::string name, WeightKind kind, int64_t n, int64_t k);
  size_t packed_bytes(WeightKind kind, int64_t n,
                      int64_t k) const;  // returns the bytes of a packed matrix [n, k]
  Id add_vector(std::string name, int64_t count);
  Id add_kv_layer(int32_t kv_heads, int32_t head_dim, int32_t group = 0, bool latent = false);

  const KernelTable& table() const { return *table_; }
  int64_t max_tokens() const { return max_tokens_; }
  int64_t max_seqs() const { return max_seqs_; }
  const std::vector<Value>& values() const { return values_; }
  const std::vector<Matrix>& matrices() const { return matrices_; }
  const std::vector<Vector>& vectors() const { return vectors_; }
  const std::vector<CacheLayer>& kv_layers() const { return kv_layers_; }
  const std::vector<StateLayer>& states() const { return states_; }
  const std::vector<AxialRope>& axial_ropes() const { return axial_ropes_; }
  const std::vector<ExpertMatrices>& expert_matrices() const { return expert_matrices_; }
  size_t num_ops() const { return num_ops_; }  // the operations of the program so far

  int64_t embed_rows() const { return limits_.embed_rows; }
  int64_t vocab() const { return limits_.vocab; }
  int64_t adapters() const { return limits_.adapters; }
  int64_t hidden_width() const { return limits_.hidden_width; }
  int64_t media_width() const { return limits_.media_width; }
  int64_t patch_width() const { return limits_.patch_width; }
  int64_t fold() const { return limits_.fold; }
  int64_t axes() const { return limits_.axes; }
  bool needs_angles() const { return limits_.needs_angles; }
  Experts most_experts() const { return limits_.experts; }
  int64_t max_positions() const { return limits_.max_positions; }
  int32_t cache_groups() const { return cache_groups_; }  // groups of KV layers; at least 1
  // The number of block tables of each sequence:
  // one for each group of KV layers, and one more for recurrent states if the program has any.
  int32_t table_groups() const { return cache_groups_ + (states_.empty() ? 0 : 1); }
  int64_t state_bytes() const;  // bytes of one slot: the recurrent states of all layers
  int64_t weight_bytes() const;
  // Returns the facts that determine the layout of packed matrices, as strings,
  // except the ISA level and the number of ranks.
  std::vector<std::string> packed_layout() const;
  int64_t kv_block_bytes(KvType type) const;  // bytes of a KV block of any group

  // Operations call the following functions,
  // which throw std::invalid_argument if an id does not exist.
  const Value& value(Id id) const;
  const Matrix& matrix(Id id) const;
  const Vector& vector(Id id) const;
  const CacheLayer& kv_layer(Id id) const;
  const Value& f32_value(Id id, const char* role) const;
  // The checks throw std::invalid_argument if a field of an operation is wrong.
  // check_tokens checks that each of the values `ids` has exactly one row for each token.
  void check_tokens(const char* op, std::initializer_list<Id> ids) const;
  // Checks that the values have equally many rows, and none has several rows for each token.
  void check_rows(const char* op, std::initializer_list<Id> ids) const;
  void check_vector(Id id, int64_t count, const char* role) const;
  void check_columns(Id id, int64_t column, int64_t count, const char* role) const;
  void check_multiplies(Id x, const Matrix& m) const;
  // Returns the experts of the value `routing`, which must be the output of the last RouteOp
  // or AdapterOp, because operations use the last routing.
  Experts experts_of(Id routing, const char* role) const;
  // Returns a value, which must have one row for each token and chosen expert of the routing.
  const Value& routed_value(Id id, Id routing, const char* role) const;
  // Operations that change the program when they are added call the following functions.
  ProgramLimits& limits() { return limits_; }
  Id add_state(const StateLayer& layer);
  // Sets the routing of the following operations: the output of a RouteOp (routes) or an AdapterOp.
  void set_routing(Id out, Experts experts, bool routes);
  void add_experts(Id first, int32_t experts);  // the matrices of an ExpertLinearOp
  // Returns the index of a rope in axial_ropes(); equal ropes have the same index.
  int32_t axial_rope(const AxialRope& rope);
  void set_grain(Id matrix, ActFormat out);
  void set_columns(Id vector, int64_t columns);
  Id packed_bias(Id bias, const Matrix& m);
  Id pack_bias(Id bias, const Matrix& m);

 protected:
  size_t num_ops_ = 0;

 private:
  const KernelTable* table_;
  int64_t max_tokens_, max_seqs_;
  std::vector<Value> values_;
  std::vector<Matrix> matrices_;
  std::vector<Vector> vectors_;
  std::vector<CacheLayer> kv_layers_;
  std::vector<StateLayer> states_;
  std::vector<AxialRope> axial_ropes_;
  std::vector<ExpertMatrices> expert_matrices_;
  ProgramLimits limits_;
  int32_t cache_groups_ = 1;
  // The last routing: its value and experts, its RouteOp, and the next ExpertMatrices::position.
  Id routing_ = kNone;
  Experts experts_;
  size_t route_ = 0;
  int position_ = -1;
};

}  // namespace cpuserve
