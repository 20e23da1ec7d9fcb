// AMX tiles in plain C++, after the operation descriptions of Intel's Software Developer's Manual,
// so that the kernels of level amx run on any CPU. For tests: no package is built with it.
//
// What the hardware would refuse (an unconfigured tile, shapes that do not fit, reserved bits) ends
// the process with a line.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

namespace CPUSERVE_NS {
namespace {  // no symbol may leave an ISA unit

namespace tile_model {

struct State {
  TileShapes shapes;
  uint8_t data[8][kTileRows16][kTileLineBytes];
};
static thread_local State current = {};
inline State& state() { return current; }

[[noreturn]] inline void refuse(const char* why) {
  fprintf(stderr, "AMX model: %s\n", why);
  abort();
}
inline int rows(int tile) { return state().shapes.rows[tile]; }
inline int bytes(int tile) { return state().shapes.row_bytes[tile]; }
inline void need(int tile) {
  if (state().shapes.palette != 1) refuse("a tile is used before tiles are configured");
  if (tile < 0 || tile > 7 || !rows(tile) || !bytes(tile)) refuse("a tile without rows is used");
}
inline void need_product(int c, int a, int b) {
  need(c);
  need(a);
  need(b);
  if (a == b || a == c || b == c) refuse("a product needs three different tiles");
  if (bytes(a) % 4 || bytes(b) % 4 || bytes(c) % 4) refuse("a row is not whole elements");
  if (bytes(a) / 4 != rows(b)) refuse("A and B differ in K");
  if (rows(a) != rows(c) || bytes(b) != bytes(c)) refuse("C does not fit A and B");
}

// AMX treats denormals as zero, and makes none.
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? 0.0f * x : x; }
inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float bf16_at(const uint8_t* p) {
  return flushed(from_bits(static_cast<uint32_t>(p[0] | p[1] << 8) << 16));
}

template <class Lines>
inline void dot_int8(int c, int a, int b) {
  need_product(c, a, b);
  State& s = state();
  // Whole tiles, and columns innermost, because the compiler makes vectors of that. What lies
  // beyond the rows and bytes of a tile is zero.
  for (int m = 0; m < rows(c); m++) {
    uint32_t sums[kTileLineBytes / 4];
    memcpy(sums, s.data[c][m], sizeof sums);
    for (int k = 0; k < rows(b); k++) {
      for (int j = 0; j < 4; j++) {
        const int x = static_cast<int8_t>(s.data[a][m][4 * k + j]);
        for (int n = 0; n < kTileLineBytes / 4; n++) {
          sums[n] += static_cast<uint32_t>(x * static_cast<Lines>(s.data[b][k][4 * n + j]));
        }
      }
    }
    memcpy(s.data[c][m], sums, sizeof sums);
  }
}

}  // namespace tile_model

inline void tile_configure(const TileShapes& shapes) {
  using tile_model::refuse;
  if (shapes.palette != 1 || shapes.start_row) refuse("an unknown configuration");
  for (uint8_t byte : shapes.reserved) {
    if (byte) refuse("a reserved byte is not zero");
  }
  for (int i = 0; i < 16; i++) {
    const int r = shapes.rows[i], b = shapes.row_bytes[i];
    if (i > 7 && (r || b)) refuse("there are eight tiles");
    if (r > kTileRows16 || b > kTileLineBytes) refuse("a tile is too large");
    if (!r != !b) refuse("a tile has rows without bytes, or bytes without rows");
  }
  tile_model::state() = {};
  tile_model::state().shapes = shapes;
}
inline void tile_release() {
  tile_model::state() = {};
  tile_model::state().shapes.palette = 0;
}
template <int T>
inline void tile_zero() {
  tile_model::need(T);
  memset(tile_model::state().data[T], 0, kTileBytes);
}
template <int T>
inline void tile_load(const void* from, size_t stride) {
  tile_model::need(T);
  auto& tile = tile_model::state().data[T];
  memset(tile, 0, kTileBytes);
  for (int r = 0; r < tile_model::rows(T); r++) {
    memcpy(tile[r], static_cast<const uint8_t*>(from) + static_cast<size_t>(r) * stride,
           static_cast<size_t>(tile_model::bytes(T)));
  }
}
template <int T>
inline void tile_load_passing(const void* from, size_t stride) {
  tile_load<T>(from, stride);
}
template <int T>
inline void tile_store(void* to, size_t stride) {
  tile_model::need(T);
  for (int r = 0; r < tile_model::rows(T); r++) {
    memcpy(static_cast<uint8_t*>(to) + static_cast<size_t>(r) * stride,
           tile_model::state().data[T][r], static_cast<size_t>(tile_model::bytes(T)));
  }
}
template <int C, int A, int B>
inline void tile_dot_bf16() {
  using namespace tile_model;
  need_product(C, A, B);
  State& s = state();
  constexpr int kColumns = kTileLineBytes / 4;
  for (int m = 0; m < rows(C); m++) {
    float even[kColumns] = {}, odd[kColumns] = {}, sums[kColumns];
    for (int k = 0; k < rows(B); k++) {
      const float x0 = bf16_at(&s.data[A][m][4 * k]), x1 = bf16_at(&s.data[A][m][4 * k + 2]);
      uint32_t pairs[kColumns];
      memcpy(pairs, s.data[B][k], sizeof pairs);
      for (int n = 0; n < kColumns; n++) {
        even[n] = flushed(fmaf(x0, flushed(from_bits(pairs[n] << 16)), even[n]));
        odd[n] = flushed(fmaf(x1, flushed(from_bits(pairs[n] & 0xffff0000u)), odd[n]));
      }
    }
    memcpy(sums, s.data[C][m], sizeof sums);
    for (int n = 0; n < bytes(C) / 4; n++) {
      sums[n] = flushed(flushed(sums[n]) + flushed(even[n] + odd[n]));
    }
    memcpy(s.data[C][m], sums, sizeof sums);
  }
}
template <int C, int A, int B>
inline void tile_dot_s8u8() {
  tile_model::dot_int8<uint8_t>(C, A, B);
}
template <int C, int A, int B>
inline void tile_dot_s8s8() {
  tile_model::dot_int8<int8_t>(C, A, B);
}

}  // namespace
}  // namespace CPUSERVE_NS
