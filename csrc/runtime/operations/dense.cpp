// The operations of dense layers: embeddings, linears, activations.
#include "runtime/operations/dense.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "runtime/operations/checks.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

// Runs a ConvertOp that reorders columns (op.order is set).
void reorder(const ConvertOp& op, Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const bool routed = op.routing != kNone;
  const Range mine = w.share(routed ? w.routing().rows() : w.rows(op.x));
  Rows one = x;  // one row in scratch memory; its stride is 0, so every row index is this row
  one.data = w.scratch;
  one.stride = 0;
  float* to = reinterpret_cast<float*>(w.scratch);
  int64_t expert = 0;
  for (int64_t r = mine.begin; r < mine.end; r++) {
    while (routed && r >= w.routing().first_row(expert + 1)) expert++;
    const float* from = floats_of(x, r);
    const float* order = w.vector(op.order) + expert * x.width;
    for (int64_t i = 0; i < x.width; i++) to[i] = from[static_cast<int32_t>(order[i])];
    w.kernels().convert({one, w.value(op.out), r, r + 1});
  }
}

}  // namespace

void prepare(const EmbedOp& op, Declarations& p) {
  const Matrix& m = p.matrix(op.matrix);
  p.check_tokens("embed", {op.out});
  check_argument(!m.glu && p.f32_value(op.out, "embed out").width == m.k,
                 "embed: value and matrix differ in width");
  p.limits().embed_rows = std::max(p.limits().embed_rows, m.n);
  check_argument(op.other >= 0 && op.other < m.n, "embed: there is no row ", op.other);
  if (op.media == MediaToken::row) p.limits().media_width = std::max(p.limits().media_width, m.k);
}

void read_matrix_rows(Span<const MatrixRow> reads, Worker& w) noexcept {
  if (reads.empty()) return;
  const Matrix& m = w.matrix(reads[0].matrix);
  const LinearKernel& kernel = w.kernels().linear[static_cast<int>(m.kind)];
  if (!m.gathered) {
    for (const MatrixRow& r : reads) {
      kernel.row(w.weights().with_row(r.matrix, r.row), r.row, r.to);
    }
    return;
  }
  // Packs a row of a gathered table, and then reads it like a row of a packed matrix, so that
  // it has the same bits as without Matrix::gathered, for every weight kind and source type.
  const void* from[kPanel] = {};
  for (int64_t c = 0; c < reads.size(); c++) {
    const SourceTensor& table = w.weights().table(reads[c].matrix);
    // A table that was never loaded has rows of zeros, like a matrix that was never loaded.
    if (table.data) from[c] = table.data + static_cast<size_t>(reads[c].row) * table.row_bytes;
  }
  kernel.pack({from, w.weights().table(reads[0].matrix).type, m.k, w.scratch});
  const PackedWeight panel{w.scratch, m.panel_bytes, kPanel, m.k, m.kind};
  for (int64_t c = 0; c < reads.size(); c++) kernel.row(panel, c, reads[c].to);
}

// Replaces the row `to` of a token by the row `row` of the media buffer, if it has one.
void put_media(const EmbedOp& op, int32_t row, int64_t width, float* to, Worker& w) noexcept {
  if (row < 0 || op.media == MediaToken::id || op.media == MediaToken::other) return;
  if (op.media == MediaToken::row) {
    std::copy_n(w.media_row(row), width, to);
  } else {
    std::fill_n(to, width, 0.0f);
  }
}

void run(const EmbedOp& op, Worker& w) noexcept {
  const Rows& out = w.value(op.out);
  const int64_t num_rows = w.matrix(op.matrix).n;
  const Range rows = w.share(w.tokens());
  for (int64_t t = rows.begin; t < rows.end; t += kPanel) {
    const int64_t count = std::min<int64_t>(kPanel, rows.end - t);
    MatrixRow reads[kPanel];
    for (int64_t c = 0; c < count; c++) {
      const bool other = op.media == MediaToken::other && w.input().media_row(t + c) >= 0;
      const int32_t id = other ? op.other : w.input().token_ids[t + c];
      reads[c] = {op.matrix, id < num_rows ? id : 0, floats_of(out, t + c)};
    }
    read_matrix_rows({reads, count}, w);
    for (int64_t c = 0; c < count && op.scale != 1.0f; c++) {
      for (int64_t i = 0; i < out.width; i++) reads[c].to[i] *= op.scale;
    }
    for (int64_t c = 0; c < count && w.input().media_rows; c++) {
      put_media(op, w.input().media_row(t + c), out.width, reads[c].to, w);
    }
  }
}

void prepare(const AddMediaOp& op, Declarations& p) {
  p.check_tokens("add_media", {op.x});
  check_argument(op.column >= 0, "add_media: there is no column ", op.column);
  const int64_t end = op.column + p.f32_value(op.x, "add_media x").width;
  p.limits().media_width = std::max(p.limits().media_width, end);
}

void run(const AddMediaOp& op, Worker& w) noexcept {
  if (!w.input().media_rows) return;
  const Rows& x = w.value(op.x);
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const int32_t row = w.input().media_row(t);
    if (row < 0) continue;
    const float* from = w.media_row(row) + op.column;
    float* to = floats_of(x, t);
    for (int64_t i = 0; i < x.width; i++) to[i] += from[i];
  }
}

void prepare(const PatchesOp& op, Declarations& p) {
  p.check_tokens("patches", {op.out});
  check_argument(p.limits().patch_width == 0, "a program can have only one patches op");
  p.limits().patch_width = p.value(op.out).width;
  p.limits().embed_rows = std::max(p.limits().embed_rows, int64_t{1});  // all tokens have id 0
}

void run(const PatchesOp& op, Worker& w) noexcept {
  const Rows& out = w.value(op.out);
  const Range mine = w.share(w.tokens());
  auto* const to = reinterpret_cast<float*>(w.scratch);
  // The stride is 0, so that row r is the row in the scratch memory.
  const Rows one{w.scratch, 0, out.width, ActFormat::f32};
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const uint8_t* from = w.patch(t);
    for (int64_t i = 0; i < out.width; i++) to[i] = static_cast<float>(from[i]) - 128.0f;
    w.kernels().convert({one, out, t, t + 1});
  }
}

void prepare(const FoldOp& op, Declarations& p) {
  p.check_rows("fold", {op.x});
  const Value &x = p.f32_value(op.x, "fold x"), &out = p.value(op.out);
  check_argument(op.count >= 1 && x.fold == 1 && out.copies == 1 && out.fold == op.count &&
                     out.width == x.width * (op.mean ? 1 : op.count),
                 "fold: value ", out.name, " does not have the rows of ", op.count, " rows of ",
                 x.name);
  check_argument(p.fold() == 1 || p.fold() == op.count, "fold: ", op.count,
                 " rows, but an earlier fold joins ", p.fold());
  check_argument(p.max_tokens() % out.fold == 0, "fold: ", p.max_tokens(),
                 " tokens are no multiple of ", out.fold);
  p.limits().fold = out.fold;
}

void run(const FoldOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  const Range mine = w.share(w.rows(op.out));
  auto* const to = reinterpret_cast<float*>(w.scratch);
  const Rows one{w.scratch, 0, out.width, ActFormat::f32};
  const float share = 1.0f / static_cast<float>(op.count);
  for (int64_t r = mine.begin; r < mine.end; r++) {
    for (int64_t i = 0; i < op.count; i++) {
      const float* from = floats_of(x, r * op.count + i);
      if (!op.mean || i == 0) {
        std::copy_n(from, x.width, to + i * x.width);
      } else {
        for (int64_t c = 0; c < x.width; c++) to[c] += from[c];
      }
    }
    for (int64_t c = 0; op.mean && c < x.width; c++) to[c] *= share;
    w.kernels().convert({one, out, r, r + 1});
  }
}

void prepare(const PositionEmbedOp& op, Declarations& p) {
  p.check_rows("position_embed", {op.x});
  check_argument(op.table != kNone && op.rows > op.offset && op.offset >= 0,
                 "position_embed: a table of ", op.rows, " rows cannot have the offset ",
                 op.offset);
  p.check_vector(op.table, op.rows * p.f32_value(op.x, "position_embed x").width, "position table");
  check_argument(op.axis >= -1 && op.axis < kMostAxes, "position_embed: there is no axis ",
                 op.axis);
  if (op.axis >= 0) {
    p.limits().axes = std::max(p.limits().axes, op.axis + 1);
    p.limits().needs_angles = true;
    return;
  }
  const int64_t most = (op.rows - op.offset) * p.value(op.x).fold;
  p.limits().max_positions = std::min(p.limits().max_positions, most);
}

void run(const PositionEmbedOp& op, Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const int64_t fold = w.program().value(op.x).fold;
  const Range rows = w.share(w.rows(op.x));
  for (int64_t r = rows.begin; r < rows.end; r++) {
    float* to = reinterpret_cast<float*>(row_of(x, r));
    const int64_t t = r * fold;
    const int64_t place = op.axis < 0 ? w.input().positions[t] / fold : w.input().angle(op.axis, t);
    const int64_t row = std::min(place + op.offset, op.rows - 1);
    const float* from = w.vector(op.table) + row * x.width;
    for (int64_t i = 0; i < x.width; i++) to[i] += from[i];
  }
}

namespace {

// Lets every step have the row and the column of each token in the grid of its sequence.
void needs_grid(Declarations& p) {
  p.limits().axes = std::max<int64_t>(p.limits().axes, 2);
  p.limits().needs_angles = true;
}

}  // namespace

void prepare(const GridEmbedOp& op, Declarations& p) {
  p.check_tokens("grid_embed", {op.x});
  check_argument(op.table != kNone && op.side >= 1, "grid_embed: the table is missing");
  p.check_vector(op.table, int64_t{op.side} * op.side * p.f32_value(op.x, "grid_embed x").width,
                 "table of places");
  needs_grid(p);
}

namespace {

// A place of a grid between two places of a table: the first of them, and the weight of the second.
struct Between {
  int64_t at;
  float weight;
};

Between between(int32_t place, int32_t last, int32_t side, bool corners) noexcept {
  if (!corners) {
    const float scale = static_cast<float>(side) / static_cast<float>(last + 1);
    const float x = (static_cast<float>(place) + 0.5f) * scale - 0.5f;
    const float in = std::clamp(x, 0.0f, static_cast<float>(side - 1));
    const auto at = static_cast<int64_t>(in);
    return {at, in - static_cast<float>(at)};
  }
  if (place == 0 || last == 0) return {0, 0.0f};
  const float x =
      static_cast<float>(place) * (static_cast<float>(side - 1) / static_cast<float>(last));
  const int64_t at = std::clamp<int64_t>(static_cast<int64_t>(x), 0, side - 1);
  return {at, x - static_cast<float>(at)};
}

// The place `place` of a grid of `count` places, over a table of `side` places, edge to edge.
struct Cover {
  Cover(int32_t place, int32_t count, int32_t side) noexcept
      : scale(static_cast<float>(side) / static_cast<float>(count)),
        center((static_cast<float>(place) + 0.5f) * scale - 0.5f),
        reach(std::max(scale, 1.0f)),
        begin(std::max(0, static_cast<int32_t>(std::ceil(center - reach)))),
        end(std::min(side, static_cast<int32_t>(std::floor(center + reach)) + 1)) {
    for (int32_t at = begin; at < end; at++) sum += part(at);
  }
  // Returns the weight of a place of the table in [begin, end); the sum of all weights is 1.
  float weight(int32_t at) const noexcept { return part(at) / sum; }

  float scale, center, reach;
  int32_t begin, end;

 private:
  float part(int32_t at) const noexcept {
    return std::max(0.0f, 1.0f - std::fabs(static_cast<float>(at) - center) / reach);
  }
  float sum = 0.0f;
};

// Adds the embedding of one token to the row `to`, as GridEmbedOp::smooth says.
void add_covered(const Cover& rows, const Cover& columns, const float* table, int64_t side,
                 int64_t width, float* to) noexcept {
  for (int32_t y = rows.begin; y < rows.end; y++) {
    for (int32_t z = columns.begin; z < columns.end; z++) {
      const float weight = rows.weight(y) * columns.weight(z);
      const float* from = table + (y * side + z) * width;
      for (int64_t i = 0; i < width; i++) to[i] += weight * from[i];
    }
  }
}

// The four places of the table around a place of the grid, and their weights, as
// GridEmbedOp::cubic says.
struct Cubic {
  Cubic(int32_t place, int32_t count, int32_t side) noexcept {
    const float scale = static_cast<float>(side) / static_cast<float>(count);
    const float x = (static_cast<float>(place) + 0.5f) * scale - 0.5f;
    const float floor = std::floor(x), t = x - floor;
    for (int32_t tap = 0; tap < 4; tap++) {
      at[tap] = std::clamp(static_cast<int32_t>(floor) + tap - 1, 0, side - 1);
      weight[tap] = of(std::fabs(t + 1.0f - static_cast<float>(tap)));
    }
  }

  int32_t at[4];
  float weight[4];

 private:
  static float of(float apart) noexcept {
    constexpr float a = -0.75f;
    const float d = apart;
    return d <= 1.0f ? ((a + 2.0f) * d - (a + 3.0f)) * d * d + 1.0f
                     : ((a * d - 5.0f * a) * d + 8.0f * a) * d - 4.0f * a;
  }
};

void add_cubic(const Cubic& rows, const Cubic& columns, const float* table, int64_t side,
               int64_t width, float* to) noexcept {
  for (int32_t y = 0; y < 4; y++) {
    for (int32_t z = 0; z < 4; z++) {
      const float weight = rows.weight[y] * columns.weight[z];
      const float* from = table + (rows.at[y] * side + columns.at[z]) * width;
      for (int64_t i = 0; i < width; i++) to[i] += weight * from[i];
    }
  }
}

}  // namespace

void run(const GridEmbedOp& op, Worker& w) noexcept {
  const StepInput& in = w.input();
  const Rows& x = w.value(op.x);
  const float* table = w.vector(op.table);
  const Range mine = w.share(w.tokens());
  int64_t seq = 0;
  for (int64_t t = mine.begin; t < mine.end; t++) {
    while (in.query_start[seq + 1] <= t) seq++;
    const int64_t last = in.query_start[seq + 1] - 1;
    if (op.smooth) {
      add_covered({in.angle(0, t), in.angle(0, last) + 1, op.side},
                  {in.angle(1, t), in.angle(1, last) + 1, op.side}, table, op.side, x.width,
                  floats_of(x, t));
      continue;
    }
    if (op.cubic) {
      add_cubic({in.angle(0, t), in.angle(0, last) + 1, op.side},
                {in.angle(1, t), in.angle(1, last) + 1, op.side}, table, op.side, x.width,
                floats_of(x, t));
      continue;
    }
    const Between row = between(in.angle(0, t), in.angle(0, last), op.side, op.corners);
    const Between column = between(in.angle(1, t), in.angle(1, last), op.side, op.corners);
    const int64_t below = std::min<int64_t>(row.at + 1, op.side - 1);
    const int64_t right = std::min<int64_t>(column.at + 1, op.side - 1);
    const auto place = [&](int64_t y, int64_t z) { return table + (y * op.side + z) * x.width; };
    const float *a = place(row.at, column.at), *b = place(row.at, right);
    const float *c = place(below, column.at), *d = place(below, right);
    const float wa = (1.0f - row.weight) * (1.0f - column.weight);
    const float wb = (1.0f - row.weight) * column.weight;
    const float wc = row.weight * (1.0f - column.weight), wd = row.weight * column.weight;
    float* to = floats_of(x, t);
    for (int64_t i = 0; i < x.width; i++) {
      to[i] += a[i] * wa + b[i] * wb + c[i] * wc + d[i] * wd;
    }
  }
}

void prepare(const GridConvOp& op, Declarations& p) {
  p.check_tokens("grid_conv", {op.x, op.out});
  const int64_t width = p.f32_value(op.x, "grid_conv x").width;
  check_argument(op.x != op.out && p.f32_value(op.out, "grid_conv out").width == width,
                 "grid_conv: x and out must be two values of one width");
  check_argument(op.size >= 1 && op.size <= 15 && op.size % 2 == 1 && op.merge >= 1,
                 "grid_conv: a size of ", op.size, " places, in blocks of ", op.merge);
  check_argument(op.weight != kNone, "grid_conv: the weight is missing");
  p.check_vector(op.weight, int64_t{op.size} * op.size * width, "grid_conv weight");
  needs_grid(p);
}

void run(const GridConvOp& op, Worker& w) noexcept {
  const StepInput& in = w.input();
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  const int64_t size = op.size, merge = op.merge, half = size / 2;
  const Range mine = w.share(w.tokens());
  int64_t seq = 0;
  for (int64_t t = mine.begin; t < mine.end; t++) {
    while (in.query_start[seq + 1] <= t) seq++;
    const int64_t first = in.query_start[seq], end = in.query_start[seq + 1];
    const int64_t rows = in.angle(0, end - 1) + 1, columns = in.angle(1, end - 1) + 1;
    float* to = floats_of(out, t);
    std::fill_n(to, x.width, 0.0f);
    for (int64_t tap = 0; tap < size * size; tap++) {
      const int64_t y = in.angle(0, t) + tap / size - half, z = in.angle(1, t) + tap % size - half;
      if (y < 0 || y >= rows || z < 0 || z >= columns) continue;
      const int64_t block = y / merge * (columns / merge) + z / merge;
      const int64_t at = first + (block * merge + y % merge) * merge + z % merge;
      if (at >= end) continue;  // angles that are no grid in merge order
      const float *from = floats_of(x, at), *weight = w.vector(op.weight) + tap * x.width;
      for (int64_t i = 0; i < x.width; i++) to[i] += weight[i] * from[i];
    }
  }
}

void prepare(const ConvertOp& op, Declarations& p) {
  const int64_t width = p.f32_value(op.x, "convert x").width;
  check_argument(width == p.value(op.out).width, "convert: x and out differ in width");
  check_argument(p.value(op.x).rows(p.max_tokens()) == p.value(op.out).rows(p.max_tokens()),
                 "convert: x and out differ in rows");
  check_argument(op.routing == kNone || op.order != kNone, "convert: experts need an order");
  int64_t orders = 1;
  if (op.routing != kNone) {
    p.routed_value(op.x, op.routing, "convert x");
    orders = p.experts_of(op.routing, "convert").count;
  }
  p.check_vector(op.order, orders * width, "order of columns");
  if (op.order != kNone) p.set_columns(op.order, width);
}

Accesses accesses(const ConvertOp& op, const Declarations& p) {
  if (op.routing != kNone) return {{any(op.x), any(kRouting)}, {any(op.out)}};
  const int64_t copies = p.value(op.x).copies;
  return {{{op.x, copies}}, {{op.out, copies}}};
}

void run(const ConvertOp& op, Worker& w) noexcept {
  if (op.order != kNone) return reorder(op, w);
  const Range rows = w.share(w.rows(op.x));
  if (rows.size() > 0) w.kernels().convert({w.value(op.x), w.value(op.out), rows.begin, rows.end});
}

void prepare(LinearOp& op, Declarations& p) {
  const Matrix& m = p.matrix(op.matrix);
  check_argument(m.glu == op.glu, "linear: matrix ", m.name, op.glu ? " is not" : " is",
                 " packed as glu");
  p.check_multiplies(op.x, m);
  const Value& out = p.value(op.out);
  p.check_rows("linear", {op.x, op.out});
  check_argument(op.out != op.x, "linear: x and out are the same value");
  check_argument(op.out_column >= 0 && op.out_column + m.out_width() <= out.width,
                 "linear: ", m.out_width(), " columns from ", op.out_column,
                 " on do not fit value ", out.name, " of width ", out.width);
  // Only f32 values can take some columns from one matrix and other columns from another one:
  // other formats have padding and groups, so one matrix would overwrite columns of the other.
  const bool part = m.out_width() != out.width;
  check_argument(out.format == ActFormat::f32 || (!part && !op.add),
                 "linear: adding and writing some columns need an f32 value");
  check_argument(!whole_row(out.format), "linear: value ", out.name,
                 " has scales wider than a tile; only convert can write such rows");
  check_gated("linear", op.activation, op.glu);
  op.bias = p.packed_bias(op.bias, m);
  p.set_grain(op.matrix, out.format);
}

void run(const LinearOp& op, Worker& w) noexcept {
  const Matrix& m = w.matrix(op.matrix);
  Rows out = w.value(op.out);
  out.data = static_cast<uint8_t*>(out.data) + static_cast<size_t>(op.out_column) * sizeof(float);
  out.width = m.out_width();
  w.multiply(op.matrix, w.value(op.x), w.rows(op.x),
             {w.vector(op.bias), op.activation, m.glu, op.add, out});
}

void prepare(const ActivationOp& op, const Declarations& p) {
  const int64_t width = p.f32_value(op.x, "activation x").width;
  check_argument(width == p.value(op.out).width * (op.glu ? 2 : 1),
                 "activation: x and out differ in width");
  check_argument(p.value(op.x).rows(p.max_tokens()) == p.value(op.out).rows(p.max_tokens()),
                 "activation: x and out differ in rows");
  check_gated("activation", op.activation, op.glu);
}

Accesses accesses(const ActivationOp& op, const Declarations& p) {
  const int64_t copies = p.value(op.x).copies;
  return {{{op.x, copies}}, {{op.out, copies}}};
}

void run(const ActivationOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.rows(op.x));
  if (rows.size() == 0) return;
  w.kernels().activation({w.value(op.x), w.value(op.out), op.activation, op.glu, rows.begin,
                          rows.end, reinterpret_cast<float*>(w.scratch)});
}

}  // namespace cpuserve
