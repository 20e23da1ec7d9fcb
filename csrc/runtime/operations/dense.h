// The operations of dense layers: embeddings, linears, activations.
#pragma once
#include "base/span.h"
#include "kernels/table.h"
#include "runtime/choices.h"
#include "runtime/operations/operation.h"

namespace cpuserve {

// Looks up the row of each token id in the matrix and multiplies it by `scale`.
// A token id that is not less than the number of rows gets row 0.
struct EmbedOp {
  static constexpr const char* kName = "embed";
  Id out, matrix;
  float scale;
  MediaToken media = MediaToken::id;
  int32_t other = 0;
  CPUSERVE_FIELDS_WITH_DEFAULTS(2, out, matrix, scale, media, other)
};
void prepare(const EmbedOp& op, Declarations& p);
void run(const EmbedOp& op, Worker& w) noexcept;
inline Accesses accesses(const EmbedOp& op, const Declarations&) { return {{}, {own(op.out)}}; }

// Adds columns of rows of the media buffer, from `column` on, to x: each token with such a row
// (StepInput::media_rows) gets the columns of its row.
struct AddMediaOp {
  static constexpr const char* kName = "add_media";
  Id x;
  int64_t column;
  CPUSERVE_FIELDS(x, column)
};
void prepare(const AddMediaOp& op, Declarations& p);
void run(const AddMediaOp& op, Worker& w) noexcept;
inline Accesses accesses(const AddMediaOp& op, const Declarations&) { return changes({}, op.x); }

// The number of a row of a matrix, and the memory to read this row to, as floats.
struct MatrixRow {
  Id matrix;
  int64_t row;
  float* to;
};
// Reads up to kPanel rows of matrices of equal kind and width.
void read_matrix_rows(Span<const MatrixRow> reads, Worker& w) noexcept;

// Writes the patches of pictures (Executor::write_patches), one for each token. Byte b becomes
// the number b - 128, which every row format but those with scales has exactly.
struct PatchesOp {
  static constexpr const char* kName = "patches";
  Id out;
  CPUSERVE_FIELDS(out)
};
void prepare(const PatchesOp& op, Declarations& p);
void run(const PatchesOp& op, Worker& w) noexcept;
inline Accesses accesses(const PatchesOp& op, const Declarations&) { return {{}, {own(op.out)}}; }

// Joins the rows of `count` successive tokens to one row of out: side by side, or if `mean` is set
// to their mean. All folds of a program are alike.
struct FoldOp {
  static constexpr const char* kName = "fold";
  Id x, out;
  int32_t count;
  bool mean = false;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, out, count, mean)
};
void prepare(const FoldOp& op, Declarations& p);
void run(const FoldOp& op, Worker& w) noexcept;
inline Accesses accesses(const FoldOp& op, const Declarations&) {
  return {{any(op.x)}, {own(op.out)}};
}

// Adds a row of the table to each row of x: at the position plus `offset`, or, if
// `axis` is not -1, at its place on this axis (StepInput::angles), at most the last row.
struct PositionEmbedOp {
  static constexpr const char* kName = "position_embed";
  Id x, table;
  int64_t rows, offset;
  int64_t axis = -1;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, table, rows, offset, axis)
};
void prepare(const PositionEmbedOp& op, Declarations& p);
void run(const PositionEmbedOp& op, Worker& w) noexcept;
inline Accesses accesses(const PositionEmbedOp& op, const Declarations&) {
  return changes({}, op.x);
}

// Adds embeddings of places in a grid to x. The table has side x side places, and is stretched over
// the grid of a sequence: corner to corner if `corners` is true, else edge to edge, where the outer
// half of a place of the table has no neighbour. A place between four places of the table gets
// their weighted mean. A token's row and column in the grid are its places on axes 0 and 1
// (StepInput::angles); the last token is in the last row and column.
// If `smooth` is set, the table is stretched edge to edge, and where the grid has fewer places than
// the table, each gets the mean of all places that it covers, weighted by their distance.
// If `cubic` is set, the table is stretched edge to edge with cubic weights of 4 x 4 places (a is
// -0.75), where places beyond the table are those of its edge.
struct GridEmbedOp {
  static constexpr const char* kName = "grid_embed";
  Id x, table;
  int32_t side;
  bool corners = true, smooth = false, cubic = false;
  CPUSERVE_FIELDS_WITH_DEFAULTS(3, x, table, side, corners, smooth, cubic)
};
void prepare(const GridEmbedOp& op, Declarations& p);
void run(const GridEmbedOp& op, Worker& w) noexcept;
inline Accesses accesses(const GridEmbedOp& op, const Declarations&) { return changes({}, op.x); }

// Convolves each column over the grid of a sequence, with zeros around the grid:
//   out[r, c] = sum over i, j < size of weight[i * size + j] * x[r + i - size / 2, c + j - size /
//   2]
// The size is odd, and `weight` is a vector [size * size][columns]. The tokens of a sequence are
// the places of its grid in merge order: blocks of merge x merge places from left to right and from
// top to bottom, and so the places of a block. For the rows and columns see GridEmbedOp.
struct GridConvOp {
  static constexpr const char* kName = "grid_conv";
  Id x, weight, out;
  int32_t size, merge;
  CPUSERVE_FIELDS(x, weight, out, size, merge)
};
void prepare(const GridConvOp& op, Declarations& p);
void run(const GridConvOp& op, Worker& w) noexcept;
inline Accesses accesses(const GridConvOp& op, const Declarations&) {
  return {{any(op.x)}, {own(op.out)}};
}

// Converts x to the row format of out. If the vector `order` is set, column i of out
// is column order[i] of x. If `routing` is set, x has one row for each token and chosen expert;
// `order` then has one column order for each expert, and each row uses the order of its expert.
struct ConvertOp {
  static constexpr const char* kName = "convert";
  Id x, out;
  Id order = kNone, routing = kNone;
  CPUSERVE_FIELDS_WITH_DEFAULTS(2, x, out, order, routing)
};
void prepare(const ConvertOp& op, Declarations& p);
void run(const ConvertOp& op, Worker& w) noexcept;
Accesses accesses(const ConvertOp& op, const Declarations& p);

// Multiplies x by a matrix and writes the result to the columns of `out` from out_column on.
// Matrices of q, k and v with different weight kinds are separate matrices that write to one value.
struct LinearOp {
  static constexpr const char* kName = "linear";
  Id x, out, matrix, bias;
  Activation activation;
  bool glu, add;
  int64_t out_column;
  CPUSERVE_FIELDS(x, out, matrix, bias, activation, glu, add, out_column)
};
void prepare(LinearOp& op, Declarations& p);
void run(const LinearOp& op, Worker& w) noexcept;
inline Accesses accesses(const LinearOp& op, const Declarations&) {
  return claimed(with({any(op.x)}, op.add, any(op.out)), {any(op.out)});
}

struct ActivationOp {
  static constexpr const char* kName = "activation";
  Id x, out;
  Activation activation;
  bool glu;
  CPUSERVE_FIELDS(x, out, activation, glu)
};
void prepare(const ActivationOp& op, const Declarations& p);
void run(const ActivationOp& op, Worker& w) noexcept;
Accesses accesses(const ActivationOp& op, const Declarations& p);

using DenseOps = Family<EmbedOp, AddMediaOp, PatchesOp, FoldOp, PositionEmbedOp, GridEmbedOp,
                        GridConvOp, ConvertOp, LinearOp, ActivationOp>;

}  // namespace cpuserve
