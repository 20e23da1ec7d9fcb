// The arguments of linears and of activations.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/rows.h"
#include "kernels/table/weights.h"
#include "kernels/table/work_sizes.h"

namespace cpuserve {

// The activation functions of linears: X(name, up). generic/activation.h has the function `name`,
// which is applied to x or to the gate, and the function `up`, applied to the up projection.
// relu2 is the square of relu, and quick_gelu is x * sigmoid(1.702 x). clamped_swiglu (gpt-oss) is
// allowed only with Epilogue::glu:
//   out = (1 + clamp(up, -7, 7)) * g * sigmoid(1.702 g), g = min(gate, 7)
#define CPUSERVE_ACTIVATIONS(X) \
  X(none, none)                 \
  X(relu, none)                 \
  X(relu2, none)                \
  X(gelu, none)                 \
  X(gelu_tanh, none)            \
  X(silu, none)                 \
  X(clamped_swiglu, clamped_up) \
  X(quick_gelu, none) X(sigmoid, none) X(tanh, none)
enum class Activation : int32_t {
#define CPUSERVE_NAME(name, up) name,
  CPUSERVE_ACTIVATIONS(CPUSERVE_NAME)
#undef CPUSERVE_NAME
};

// What a linear does with finished sums, in this order: it adds the bias,
// applies the activation, multiplies the activated gate by the up projection (only with glu),
// and then stores the result in out.format, or adds it to `out` if that is f32.
struct Epilogue {
  const float* bias;  // bias [panels * 16] in packed column order, or nullptr
  Activation act;
  // If true, even panels are the gate and odd panels are the up projection:
  // output column 16 i + c is act(column c of panel 2 i) * column c of panel 2 i + 1.
  bool glu;
  bool add;  // out += result; out.format must be f32
  Rows out;
};

struct LinearArgs {
  const PackedWeight* w;
  const void* x;    // rows of activations, in LinearKernel::act format
  size_t x_stride;  // bytes from row to row
  int64_t m;        // number of rows
  // The kernel computes panels [panel0, panel1): whole pairs of panels with glu (gate and up) or
  // with quantized output (32 results share a scale), whole strips of 4 with glu and such output.
  int64_t panel0, panel1;
  Epilogue ep;        // ep.out.data is row 0; columns are counted from panel 0 of the matrix
  void* scratch;      // kLinearScratch bytes, 64-byte aligned, used by this thread only
  int32_t terms = 1;  // number of int8 rows (terms) that a row of x consists of: 1 or 2 (two_terms)
  WorkSizes sizes = {};
};
constexpr size_t kLinearScratch = 640 << 10;

// Returns whether `rows` rows of activations stay in L2 while weights are multiplied by them:
// whether the rows take at most 4 * strip_bytes (1 MB by default, half of an L2 of 2 MB).
constexpr bool rows_stay_in_l2(int64_t rows, size_t x_stride, const WorkSizes& sizes) {
  return static_cast<size_t>(rows) * x_stride <= 4 * static_cast<size_t>(sizes.strip_bytes);
}

struct LinearKernel {
  ActFormat act;
  // panel_bytes, pack and row are null in an ISA unit that uses the packed panels
  // of the level below.
  size_t (*panel_bytes)(int64_t k) noexcept;
  void (*pack)(const PackArgs&) noexcept;
  void (*product)(const LinearArgs&) noexcept;
  // Writes row n of W to out[0 .. k) as fp32 (to look up embeddings in a tied matrix).
  void (*row)(const PackedWeight&, int64_t n, float* out) noexcept;
  // The next fields determine how a linear is divided into tasks (runtime/linear_plan.h).
  // tile_rows and tile_columns are the size of the register tile for many rows.
  int tile_rows = 1, tile_columns = kPanel;
  int tile_panels = 1;  // panels of one tile; in linear/mmla.h: panels that a task needs at least
  int pass_rows = 1;    // one pass over the weights multiplies up to this many rows (int8 or float)
  // Returns the number of elements of K in one K block, for linears with many rows.
  int64_t (*block_k)(int64_t k, const WorkSizes&) noexcept = nullptr;
  int32_t column_bytes = 4;        // adjacent bytes of one column in a panel
  int span_panels = kStripPanels;  // panels of the widest task, if its rows do not stay in L2
  bool sizes_cut_passes = false;   // whether WorkSizes::float_pass_rows limits pass_rows
  // Linears with up to few_rows int8 rows use few_product, the function of the ISA level below,
  // which computes the same bits. A level with AMX tiles then needs no vector loops of its own.
  int few_rows = 0;
  void (*few_product)(const LinearArgs&) noexcept = nullptr;

  void run(const LinearArgs& a) const noexcept {
    (few_product && a.m * a.terms <= few_rows ? few_product : product)(a);
  }
};

}  // namespace cpuserve
