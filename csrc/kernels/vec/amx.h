// AMX tiles: eight registers of up to 16 rows of 64 bytes, and products of whole tiles.
//
// A product adds A [rows][64 bytes] times B [16 lines][64 bytes] to C [rows][16 sums of 32 bits].
// Line i of B holds, for each of 16 columns, the 4 bytes (2 bf16 or 4 int8) that are multiplied
// by bytes 4 i to 4 i + 3 of a row of A.
// Packed panels of weights have this layout in memory (kernels/table/weights.h).
//
// The functions below use inline assembly, because the intrinsics of gcc 12 do not say
// that they read memory and the tile configuration, so gcc may move earlier stores after them.
// CPUSERVE_TILE_MODEL is a header with the same functions in plain C++, for CPUs without AMX.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

constexpr int kTileRows16 = 16;     // rows of a tile
constexpr int kTileLineBytes = 64;  // bytes of a row of A, and of a line of B
constexpr int kTileLines = 16;      // lines of a tile of B
constexpr int kTileBytes = kTileLines * kTileLineBytes;

// The operand of the instruction LDTILECFG: the number of rows and the bytes per row of each
// AMX tile. Code must not use an AMX tile with 0 rows.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64, "the instruction reads 64 bytes");

}  // namespace CPUSERVE_NS

#ifdef CPUSERVE_TILE_MODEL
#include CPUSERVE_TILE_MODEL
#else

namespace CPUSERVE_NS {

CPUSERVE_INLINE void tile_configure(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}
CPUSERVE_INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
CPUSERVE_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
CPUSERVE_INLINE void tile_load(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
// Does the same as tile_load, with the hint that the cache lines need not stay in L1.
template <int T>
CPUSERVE_INLINE void tile_load_passing(const void* from, size_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
CPUSERVE_INLINE void tile_store(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// C += A B in bf16. One chain of additions sums the products of the even elements of K,
// another chain sums the products of the odd elements, and both sums together are added to C.
template <int C, int A, int B>
CPUSERVE_INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// C += A B with int8 rows in A and uint8 or int8 lines in B. The int32 sums are exact.
template <int C, int A, int B>
CPUSERVE_INLINE void tile_dot_s8u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
CPUSERVE_INLINE void tile_dot_s8s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace CPUSERVE_NS

#endif
