// Turns the sums of a tile into output rows. If a row of activations has two terms (int8 values
// and their int8 rounding errors, table/rows.h), adds the sums of both, then runs the epilogue.
#pragma once
#include "kernels/generic/epilogue.h"
#include "kernels/linear/linear_tile.h"

namespace CPUSERVE_NS {
namespace {

// Returns whether the epilogue has f32 output and neither activation nor glu, as in most linears.
CPUSERVE_INLINE bool plain_f32(const Epilogue& ep) {
  return ep.out.format == ActFormat::f32 && ep.act == Activation::none && !ep.glu;
}

// Does the same as store_tile, but is not inlined, so that all weight kinds share one copy of it.
static __attribute__((noinline)) void finish_tile(const Epilogue& ep, int64_t row0, int rows,
                                                  int64_t panel0, int panels, const float* c,
                                                  size_t stride) {
  store_tile(ep, row0, rows, panel0, panels, c, stride);
}

// Runs an epilogue that is plain_f32, for one row of `panels` panels with its sums at `c`.
CPUSERVE_INLINE void finish_plain(const Epilogue& ep, int64_t row, int64_t panel0, int panels,
                                  const float* c) {
  const int64_t column0 = panel0 * kPanel;
  float* out = f32_row(ep.out, row) + column0;
  for (int i = 0; i < panels * kPanel; i += kLanes) {
    F v = load(c + i);
    if (ep.bias) v = add(v, load(ep.bias + column0 + i));
    store(out + i, ep.add ? add(load(out + i), v) : v);
  }
}

// Runs the epilogue for `panels` panels of rows [row0, row0 + rows).
// The finished sums are at `c`, with `stride` floats from row to row.
CPUSERVE_INLINE void finish(const Epilogue& ep, bool plain, int64_t row0, int rows, int64_t panel0,
                            int panels, const float* c, size_t stride) {
  if (!plain || (panel0 + panels) * kPanel > ep.out.width) {
    return finish_tile(ep, row0, rows, panel0, panels, c, stride);
  }
  for (int r = 0; r < rows; r++) {
    finish_plain(ep, row0 + r, panel0, panels, c + static_cast<size_t>(r) * stride);
  }
}

// Adds the sums of the second term of a row of activations,
// which are `stride` floats after `c`, to the sums of its first term at `c`.
CPUSERVE_INLINE void join_terms(float* c, int stride, int panels) {
  for (int i = 0; i < panels * kPanel; i += kLanes) {
    store(c + i, add(load(c + i), load(c + stride + i)));
  }
}

// Runs the epilogue for `rows` rows of sums. If a row of activations has two terms
// (LinearArgs::terms), two rows of sums belong to it, and the function adds them first.
static __attribute__((noinline)) void finish_terms(const LinearArgs& a, bool plain, int64_t row0,
                                                   int rows, int64_t panel0, int panels, float* c,
                                                   int stride) {
  if (a.terms == 2) {
    for (int r = 0; r < rows; r += 2) join_terms(c + r * stride, stride, panels);
  }
  finish(a.ep, plain, row0, rows / a.terms, panel0, panels, c,
         static_cast<size_t>(stride * a.terms));
}

// Prefetches the cache lines of the output that a tile will write or add to.
// The lines arrive while the tile computes. They were last used a layer ago,
// and waiting for them would take up to a fifth of the time of the tile.
static __attribute__((noinline)) void fetch_output(const Epilogue& ep, int64_t row0, int64_t rows,
                                                   int64_t panel0, int panels) {
  const int halves = ep.glu ? 2 : 1;
  const int64_t column0 = panel0 * kPanel / halves, n = panels * kPanel / halves;
  const int64_t padded = round_up(ep.out.width, 32);
  for (int64_t r = row0; r < row0 + rows; r++) {
    uint8_t* out = row_at(ep.out, r);
    switch (ep.out.format) {
      case ActFormat::f32:
        for (int64_t i = 0; i < n; i += 16) prefetch(out + (column0 + i) * 4);
        break;
      case ActFormat::bf16:
        for (int64_t i = 0; i < n; i += 32) prefetch(out + (column0 + i) * 2);
        break;
      case ActFormat::q8g32x2:
      case ActFormat::q8g32: {
        const QuantGroup group = group_of(out, padded, 32, column0 / 32, nullptr);
        const size_t half = ep.out.format == ActFormat::q8g32 ? 0 : ep.out.stride / 2;
        for (size_t at = 0; at <= half; at += half + !half) {
          prefetch(reinterpret_cast<uint8_t*>(group.q) + at);
          prefetch(reinterpret_cast<uint8_t*>(group.scale) + at);
          prefetch(reinterpret_cast<uint8_t*>(group.sum) + at);
        }
        break;
      }
      case ActFormat::q8g128:
      case ActFormat::q8row:
      case ActFormat::q8g256:
      case ActFormat::q8g256x2:
        break;  // the epilogue of a tile cannot write these formats
    }
  }
}

}  // namespace
}  // namespace CPUSERVE_NS
