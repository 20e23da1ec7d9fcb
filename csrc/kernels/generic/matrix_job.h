// How linears and attention use the eight AMX tiles. A job multiplies up to two tiles of 16 rows
// by up to two tiles of 16 columns, so that two products use each AMX tile that is loaded.
#pragma once
#include "kernels/vec/amx.h"

namespace CPUSERVE_NS {
namespace {

constexpr int kJobRows = 2 * kTileRows16, kJobColumns = 2;

// Configures the AMX tiles for jobs of `rows` rows,
// with `lines` lines of 64 bytes in each AMX tile of columns.
CPUSERVE_INLINE void configure_job(int rows, int lines) {
  TileShapes shapes;
  const int first = rows < kTileRows16 ? rows : kTileRows16, second = rows - first;
  for (int column = 0; column < kJobColumns; column++) {
    shapes.set(column, first, kTileLineBytes);
    if (second) shapes.set(2 + column, second, kTileLineBytes);
    shapes.set(6 + column, lines, kTileLineBytes);
  }
  shapes.set(4, first, lines * 4);
  if (second) shapes.set(5, second, lines * 4);
  tile_configure(shapes);
}

// The AMX tiles of a job: tiles 0 and 1 hold the sums of the first 16 rows, tiles 2 and 3 the sums
// of the other rows. The operands are in tiles 4 and 5 (rows), and in tiles 6 and 7 (columns).
// RT is the number of AMX tiles of rows, and NP the number of AMX tiles of columns (panels).
template <int RT, int NP>
CPUSERVE_INLINE void load_sums(const float* c, size_t stride) {
  tile_load<0>(c, stride);
  if constexpr (NP == 2) tile_load<1>(c + kPanel, stride);
  if constexpr (RT == 2) {
    const float* low = c + kTileRows16 * (stride / sizeof(float));
    tile_load<2>(low, stride);
    if constexpr (NP == 2) tile_load<3>(low + kPanel, stride);
  }
}
template <int RT, int NP>
CPUSERVE_INLINE void zero_sums() {
  tile_zero<0>();
  if constexpr (NP == 2) tile_zero<1>();
  if constexpr (RT == 2) tile_zero<2>();
  if constexpr (RT == 2 && NP == 2) tile_zero<3>();
}
template <int RT, int NP>
CPUSERVE_INLINE void store_sums(float* c, size_t stride) {
  tile_store<0>(c, stride);
  if constexpr (NP == 2) tile_store<1>(c + kPanel, stride);
  if constexpr (RT == 2) {
    float* low = c + kTileRows16 * (stride / sizeof(float));
    tile_store<2>(low, stride);
    if constexpr (NP == 2) tile_store<3>(low + kPanel, stride);
  }
}

// Loads the operands of one step along K: RT AMX tiles of rows at x, and AMX tiles of columns
// at w0 and (if NP is 2) w1. kPassing is for rows that are not used again soon:
// they are loaded with a hint, so that they do not evict the columns from L1.
template <int RT, int NP, bool kPassing>
CPUSERVE_INLINE void load_operands(const uint8_t* x, size_t x_stride, const uint8_t* w0,
                                   const uint8_t* w1, size_t w_stride) {
  kPassing ? tile_load_passing<4>(x, x_stride) : tile_load<4>(x, x_stride);
  tile_load<6>(w0, w_stride);
  if constexpr (NP == 2) tile_load<7>(w1, w_stride);
  if constexpr (RT == 2) {
    const uint8_t* low = x + kTileRows16 * x_stride;
    kPassing ? tile_load_passing<5>(low, x_stride) : tile_load<5>(low, x_stride);
  }
}
// Adds the products of the operands that load_operands has loaded to the sums.
template <class Product, int RT, int NP>
CPUSERVE_INLINE void multiply_operands() {
  Product::template dot<0, 4, 6>();
  if constexpr (NP == 2) Product::template dot<1, 4, 7>();
  if constexpr (RT == 2) {
    Product::template dot<2, 5, 6>();
    if constexpr (NP == 2) Product::template dot<3, 5, 7>();
  }
}
// Loads the operands of one step along K (load_operands) and adds their products to the sums.
template <class Product, int RT, int NP, bool kPassing = false>
CPUSERVE_INLINE void tile_products(const uint8_t* x, size_t x_stride, const uint8_t* w0,
                                   const uint8_t* w1, size_t w_stride) {
  load_operands<RT, NP, kPassing>(x, x_stride, w0, w1, w_stride);
  multiply_operands<Product, RT, NP>();
}

struct Bf16Product {
  template <int C, int A, int B>
  static __attribute__((always_inline)) inline void dot() {
    tile_dot_bf16<C, A, B>();
  }
};
struct S8U8Product {
  template <int C, int A, int B>
  static __attribute__((always_inline)) inline void dot() {
    tile_dot_s8u8<C, A, B>();
  }
};
struct S8S8Product {
  template <int C, int A, int B>
  static __attribute__((always_inline)) inline void dot() {
    tile_dot_s8s8<C, A, B>();
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
