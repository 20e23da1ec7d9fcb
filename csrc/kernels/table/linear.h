// The arguments of linears and of activations.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/rows.h"
#include "kernels/table/weights.h"
#include "kernels/table/work_sizes.h"

namespace cpuserve {

// clamped_swiglu has no form without glu, because it also changes the factor of the gate:
//   out = (1 + clamp(up, -7, 7)) * g * sigmoid(1.702 g), g = min(gate, 7)   (gpt-oss)
enum class Activation : int32_t { none = 0, relu, gelu, gelu_tanh, silu, clamped_swiglu };

// The epilogue of a finished tile, in this order: + bias, activation, (glu) times the other half,
// then store in out.format, or add to an f32 `out` in place.
struct Epilogue {
  const float* bias;  // [panels * 16] in packed column order, or nullptr
  Activation act;
  bool glu;  // panels alternate gate, up: out column 16 i + c = act(panel 2i) * panel 2i+1
  bool add;  // out += result; out.format must be f32
  Rows out;
};

struct LinearArgs {
  const PackedWeight* w;
  const void* x;    // rows in the kind's act format
  size_t x_stride;  // bytes
  int64_t m;        // rows
  // Panels to compute: whole pairs with glu (a gate and its up) and of a quantized output (32
  // results share a scale), whole strips if both.
  int64_t panel0, panel1;
  Epilogue ep;        // ep.out.data points at row 0; columns by absolute panel
  void* scratch;      // kLinearScratch bytes, 64-byte aligned, used by this thread only
  int32_t terms = 1;  // int8 rows per row of activations
  WorkSizes sizes = {};
};
constexpr size_t kLinearScratch = 640 << 10;

// Whether the activations of a step's rows stay in L2 while weights pass: up to four times the
// weights of a strip in a K block, which is half of an L2 of 2 MB.
constexpr bool rows_stay_in_l2(int64_t rows, size_t x_stride, const WorkSizes& sizes) {
  return static_cast<size_t>(rows) * x_stride <= 4 * static_cast<size_t>(sizes.strip_bytes);
}

struct LinearKernel {
  ActFormat act;
  // A level that packs weights as the level below does leaves panel_bytes, pack and row null.
  size_t (*panel_bytes)(int64_t k) noexcept;
  void (*pack)(const PackArgs&) noexcept;
  void (*product)(const LinearArgs&) noexcept;
  // out[0..k) = row n of W in fp32 (embedding lookup from a tied matrix).
  void (*row)(const PackedWeight&, int64_t n, float* out) noexcept;
  // Its geometry, which the division into tasks follows (runtime/linear_plan.h). The register tile
  // for many rows: int8 or float rows, and columns.
  int tile_rows = 1, tile_columns = kPanel;
  int tile_panels = 1;  // panels that are computed together, or that rows are prepared for
  int pass_rows = 1;    // up to so many int8 or float rows take one pass over the weights
  // Elements of K in a K block of many rows.
  int64_t (*block_k)(int64_t k, const WorkSizes&) noexcept = nullptr;
  int32_t column_bytes = 4;        // bytes of a column that are neighbours in a panel
  int span_panels = kStripPanels;  // of a task, at most, if its rows do not stay in L2
  bool sizes_cut_passes = false;   // WorkSizes::float_pass_rows may be less than pass_rows
  // Up to few_rows int8 rows take the product of the level below, which has the same bits: a level
  // with matrix tiles does not compile the loops for vectors a second time.
  int few_rows = 0;
  void (*few_product)(const LinearArgs&) noexcept = nullptr;

  void run(const LinearArgs& a) const noexcept {
    (few_product && a.m * a.terms <= few_rows ? few_product : product)(a);
  }
};

}  // namespace cpuserve
