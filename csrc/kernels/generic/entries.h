// Computes the entries of pools of tokens, and gathers entries for attention (table/entries.h).
#pragma once
#include "kernels/generic/index_keys.h"
#include "kernels/table/entries.h"

namespace CPUSERVE_NS {

// Rotates columns 2 i and 2 i + 1 of x (i < n) by the angle with cosine[i] and sine[i].
static inline void rotate_neighbours(float* x, const float* cosine, const float* sine, int n) {
  for (int i = 0; i < n; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cosine[i] - b * sine[i];
    x[2 * i + 1] = b * cosine[i] + a * sine[i];
  }
}

// Reads the row of a token at `position` of a sequence to x, as fp32.
template <class Kv>
static inline void read_row(const KvLayer& kv, const int32_t* table, int64_t position, float* x) {
  const uint8_t* block = kv_block(kv, table[position / kBlock], 0);
  read_key<Kv>(kv, block, static_cast<int>(position % kBlock), x);
}

// Calls use(series, position, ape) for each token of a pool, after the pool before it.
template <class Use>
static inline void each_of_pool(const PoolEntriesArgs& a, int64_t entry, const Use& use) {
  const int columns = a.overlap ? 2 * a.width : a.width;
  for (int s = a.overlap && entry > 0 ? 0 : 1; s < 2; s++) {
    const float* ape = a.ape + (a.overlap ? s * a.width : 0);
    for (int p = 0; p < a.pool; p++, ape += columns) use(s, (entry - 1 + s) * a.pool + p, ape);
  }
}

// Writes to x the weighted mean of the keys of a pool. The scratch after x has rows of a.width.
template <class Kv>
static inline void mean_of_entry(const PoolEntriesArgs& a, int64_t entry, float* x) {
  float *top = x + a.width, *weights = top + a.width, *key = weights + a.width;
  float* gate = key + a.width;
  for (int i = 0; i < a.width; i += kLanes) {
    store(x + i, zero());
    store(weights + i, zero());
    store(top + i, set1(-INFINITY));
  }
  each_of_pool(a, entry, [&](int s, int64_t position, const float* ape) {
    read_row<Kv>(a.gates[s], a.block_table, position, gate);
    for (int i = 0; i < a.width; i += kLanes) {
      store(top + i, max(load(top + i), add(load(gate + i), load(ape + i))));
    }
  });
  each_of_pool(a, entry, [&](int s, int64_t position, const float* ape) {
    read_row<Kv>(a.gates[s], a.block_table, position, gate);
    read_row<Kv>(a.keys[s], a.block_table, position, key);
    for (int i = 0; i < a.width; i += kLanes) {
      const F z = sub(add(load(gate + i), load(ape + i)), load(top + i));
      const F weight = exp2(mul(z, set1(kLog2E)));
      store(weights + i, add(load(weights + i), weight));
      store(x + i, fma(weight, load(key + i), load(x + i)));
    }
  });
  for (int i = 0; i < a.width; i += kLanes) store(x + i, div(load(x + i), load(weights + i)));
}

static inline void pool_entries(const PoolEntriesArgs& a) noexcept {
  float* x = static_cast<float*>(a.scratch);
  const int parts = entry_parts(a.pool), half = a.rotary / 2;
  with_kv(a.to.type, [&](auto kv) {
    using Kv = decltype(kv);
    for (int64_t i = a.first; i < a.last; i++) {
      mean_of_entry<Kv>(a, i, x);
      scale_columns(x, x, a.width, 0.0f, rms_inverse(x, a.width, a.eps), a.norm, nullptr);
      const int64_t row = i * a.pool * half, stored = (i + 1) * a.pool - parts;
      if (half > 0) rotate_neighbours(x + a.width - a.rotary, a.cos + row, a.sin + row, half);
      const auto slot =
          static_cast<int32_t>(a.to_table[stored / kBlock] * kBlock + stored % kBlock);
      for (int p = 0; p < parts; p++) {
        store_key_and_value<Kv>(a.to, slot + p, 0, x + p * a.to.head_dim, nullptr);
      }
    }
  });
}

static inline void gather_entries(const GatherEntriesArgs& a) noexcept {
  alignas(64) float row[kMaxHeadDim], part[kMaxHeadDim];
  const int parts = entry_parts(a.pool), width = a.from.head_dim;
  with_kv(a.from.type, [&](auto kv) {
    using Kv = decltype(kv);
    for (int64_t i = 0; i < a.n; i++) {
      const int64_t entry =
          a.chosen ? static_cast<int64_t>(a.chosen[i * a.pool]) / a.pool : a.first + i;
      const int64_t stored = (entry + 1) * a.pool - parts, to = a.at + i;
      for (int p = 0; p < parts; p++) {
        read_row<Kv>(a.from, a.block_table, stored + p, part);
        memcpy(row + p * width, part, static_cast<size_t>(width) * sizeof(float));
      }
      store_key_and_value<Kv>(a.to, static_cast<int32_t>(to), 0, row, nullptr);
    }
  });
}

}  // namespace CPUSERVE_NS
