// The operations of recurrent layers.
#pragma once
#include "kernels/table.h"
#include "runtime/operations/operation.h"

namespace cpuserve {

// The state of a sequence in one recurrent layer: for each of its independent units, the
// floats of the closed state and of the open rows.
struct StateLayer {
  int32_t units;
  int64_t closed, open;
};

// conv: [key_heads][taps][channels of a key head: q, k, v]. rates: by value head, -exp(A_log).
// tiled: one value head of every key head, then the next of each; else a key head's together.
struct GatedDeltaOp {
  static constexpr const char* kName = "gated_delta";
  Id x, gates, out;
  int32_t key_heads, value_heads, key_width, value_width, taps;
  Id conv, rates, dt_bias, norm;
  float eps;
  bool tiled;
  Id state = kNone;

  static constexpr auto fields() {
    return std::make_tuple(
        field("x", &GatedDeltaOp::x), field("gates", &GatedDeltaOp::gates),
        field("out", &GatedDeltaOp::out), field("key_heads", &GatedDeltaOp::key_heads),
        field("value_heads", &GatedDeltaOp::value_heads),
        field("key_width", &GatedDeltaOp::key_width),
        field("value_width", &GatedDeltaOp::value_width), field("taps", &GatedDeltaOp::taps),
        field("conv", &GatedDeltaOp::conv), field("rates", &GatedDeltaOp::rates),
        field("dt_bias", &GatedDeltaOp::dt_bias), field("norm", &GatedDeltaOp::norm),
        field("eps", &GatedDeltaOp::eps), field("tiled", &GatedDeltaOp::tiled));
  }

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
void prepare(GatedDeltaOp& op, Program& p);
void run(const GatedDeltaOp& op, Worker& w) noexcept;
inline Accesses accesses(const GatedDeltaOp& op, const Program&) {
  return claimed({any(op.x), any(op.gates)}, {any(op.out)});
}

// weight: [taps][channels of out]. A unit is an equal part of the channels.
struct ShortConvOp {
  static constexpr const char* kName = "short_conv";
  Id x, out;
  int64_t column;
  int32_t units, taps;
  Id weight, bias;
  bool silu;
  Id state = kNone;
  int64_t channels = 0;  // of a unit

  static constexpr auto fields() {
    return std::make_tuple(field("x", &ShortConvOp::x), field("out", &ShortConvOp::out),
                           field("column", &ShortConvOp::column),
                           field("units", &ShortConvOp::units), field("taps", &ShortConvOp::taps),
                           field("weight", &ShortConvOp::weight), field("bias", &ShortConvOp::bias),
                           field("silu", &ShortConvOp::silu));
  }

  StateLayer layer() const { return {units, (taps - 1) * channels, kStateChunk * channels}; }
};
void prepare(ShortConvOp& op, Program& p);
void run(const ShortConvOp& op, Worker& w) noexcept;
inline Accesses accesses(const ShortConvOp& op, const Program&) {
  return claimed({any(op.x)}, {any(op.out)});
}

// rates: by head, -exp(A_log). A unit is `together` heads of one group.
struct Mamba2Op {
  static constexpr const char* kName = "mamba2";
  Id x, steps, out;
  int32_t heads, groups, key_width, value_width, together;
  int64_t column;  // of steps
  Id rates, dt_bias, d;
  float low, high;  // limits of a step
  Id state = kNone;

  static constexpr auto fields() {
    return std::make_tuple(
        field("x", &Mamba2Op::x), field("steps", &Mamba2Op::steps), field("out", &Mamba2Op::out),
        field("heads", &Mamba2Op::heads), field("groups", &Mamba2Op::groups),
        field("key_width", &Mamba2Op::key_width), field("value_width", &Mamba2Op::value_width),
        field("together", &Mamba2Op::together), field("column", &Mamba2Op::column),
        field("rates", &Mamba2Op::rates), field("dt_bias", &Mamba2Op::dt_bias),
        field("d", &Mamba2Op::d), field("low", &Mamba2Op::low), field("high", &Mamba2Op::high));
  }

  RecurrentShape shape() const { return {key_width, value_width, together, false}; }
  int32_t unit_count() const { return heads / together; }
  int64_t values() const { return int64_t{heads} * value_width; }
  StateLayer layer() const {
    return {unit_count(), int64_t{together} * key_width * value_width,
            recurrent_open_floats(shape())};
  }
};
void prepare(Mamba2Op& op, Program& p);
void run(const Mamba2Op& op, Worker& w) noexcept;
inline Accesses accesses(const Mamba2Op& op, const Program&) {
  return claimed({any(op.x), any(op.steps)}, {any(op.out)});
}

size_t scratch_bytes(const GatedDeltaOp& op);
size_t scratch_bytes(const ShortConvOp& op);
size_t scratch_bytes(const Mamba2Op& op);

using RecurrentOps = Family<GatedDeltaOp, ShortConvOp, Mamba2Op>;

}  // namespace cpuserve
