// Normalizes and rotates q and k of each token, writes q to the rows of queries, and stores k
// and v in a token slot of the KV cache. With MLA, one compressed row is stored as both k and v.
#pragma once
#include "kernels/generic/attention_kv.h"
#include "kernels/generic/hadamard.h"
#include "kernels/generic/kv8.h"
#include "kernels/generic/norm.h"

namespace CPUSERVE_NS {

// Rotates each pair of dims i and i + n (i < n) by the angle with cosine[i] and sine[i].
CPUSERVE_INLINE void rotate(float* x, const float* cosine, const float* sine, int n) {
  float* y = x + n;
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F a = load(x + i), b = load(y + i), c = load(cosine + i), s = load(sine + i);
    store(x + i, fnma(b, s, mul(a, c)));
    store(y + i, fma(a, s, mul(b, c)));
  }
  if (i < n) {
    const int m = n - i;
    const F a = load_n(x + i, m), b = load_n(y + i, m);
    const F c = load_n(cosine + i, m), s = load_n(sine + i, m);
    store_n(x + i, fnma(b, s, mul(a, c)), m);
    store_n(y + i, fma(a, s, mul(b, c)), m);
  }
}

// Normalizes (if `norm` is given) and rotates one head of q or k at x, in place.
static inline void turn_head(const RopeStoreArgs& a, float* x, const float* norm,
                             int32_t position) {
  const int hd = a.kv.head_dim, half = a.rotary / 2;
  if (norm) scale_columns(x, x, hd, 0.0f, rms_inverse(x, hd, a.eps), norm, nullptr);
  if (half > 0) {
    const int64_t row = static_cast<int64_t>(position) * half;
    rotate(x, a.cos + row, a.sin + row, half);
  }
}

// Returns values [i, i + kLanes) of a row of n values, and zeros after its end.
CPUSERVE_INLINE F load_padded(const float* x, int i, int n) {
  return i + kLanes <= n ? load(x + i) : i < n ? load_n(x + i, n - i) : zero();
}

static inline void write_query(const Rows& q, const KvLayer& kv, int64_t token, int head,
                               const float* x) {
  uint8_t* row = row_at(q, token);
  const int64_t column = static_cast<int64_t>(head) * kv.hd_pad;
  for (int i = 0; i < kv.hd_pad; i += kLanes) {
    const F v = load_padded(x, i, kv.head_dim);
    if (q.format == ActFormat::bf16) {
      store_bf16(reinterpret_cast<uint16_t*>(row) + column + i, v);
    } else {
      store(reinterpret_cast<float*>(row) + column + i, v);
    }
  }
}

CPUSERVE_INLINE void store_elements(KvBf16, uint16_t* p, F x) { store_bf16(p, x); }
CPUSERVE_INLINE void store_elements(KvF16, uint16_t* p, F x) { store_f16(p, x); }
CPUSERVE_INLINE void store_elements(KvF32, float* p, F x) { store(p, x); }

// Stores one key in token slot `at` of a KV block. The padding after head_dim is stored as zeros,
// because attention multiplies it by the zero padding of q, and 0 x NaN is NaN.
template <class Kv>
static inline void store_key(const KvLayer& kv, uint8_t* block, int at, const float* x) {
  constexpr int S = Kv::kStep;
  typename Kv::Elem v[kLanes];
  typename Kv::Elem* key = reinterpret_cast<typename Kv::Elem*>(block) + at * S;
  for (int i = 0; i < kv.hd_pad; i += kLanes) {
    store_elements(Kv{}, v, load_padded(x, i, kv.head_dim));
    for (int j = 0; j < kLanes; j += S) memcpy(key + (i + j) * kBlock, v + j, S * sizeof(v[0]));
  }
}

template <class Kv>
static inline void store_value(const KvLayer& kv, uint8_t* values, int at, const float* x) {
  constexpr int S = Kv::kStep;
  typename Kv::Elem v[kLanes];
  typename Kv::Elem* value =
      reinterpret_cast<typename Kv::Elem*>(values) + at / S * kv.hd_pad * S + at % S;
  for (int i = 0; i < kv.hd_pad; i += kLanes) {
    store_elements(Kv{}, v, load_padded(x, i, kv.head_dim));
    for (int j = 0; j < kLanes; j++) value[(i + j) * S] = v[j];
  }
}

// Stores the key k and the value v of KV head `head` and one token in KV slot `slot`.
// v is nullptr where the keys are also the values (MLA).
template <class Kv>
static inline void store_key_and_value(const KvLayer& kv, int32_t slot, int head, const float* k,
                                       const float* v) {
  uint8_t* keys = kv_block(kv, slot / kBlock, head);
  uint8_t* values = kv_values(kv, slot / kBlock, head);
  const int at = slot % kBlock;
  if constexpr (Kv::kScaled) {
    store_key_codes<Kv>(kv, keys, at, k);
    if (v) store_value_codes<Kv>(kv, values, at, v);
  } else {
    store_key<Kv>(kv, keys, at, k);
    if (v) store_value<Kv>(kv, values, at, v);
  }
}

template <class Kv>
static inline void rope_store_rows(const RopeStoreArgs& a) {
  const int hd = a.kv.head_dim;
  const bool mixed = kv_mixed(a.kv.type);
  for (int64_t t = a.m0; t < a.m1; t++) {
    float* q = f32_row(a.qkv, t);
    float* k = q + static_cast<int64_t>(a.q_heads) * hd;
    float* v = k + static_cast<int64_t>(a.kv.kv_heads) * hd;
    for (int h = 0; h < a.q_heads; h++, q += hd) {
      turn_head(a, q, a.q_norm, a.positions[t]);
      if (mixed) mix_query(q, hd);
      write_query(a.q, a.kv, t, h, q);
    }
    for (int h = 0; h < a.kv.kv_heads; h++, k += hd, v += hd) {
      turn_head(a, k, a.k_norm, a.positions[t]);
      if (mixed) mix_key(k, hd);
      store_key_and_value<Kv>(a.pieces ? a.pieces[h] : a.kv, a.slots[t], h, k, v);
    }
  }
}

// The kernel rope_store (see RopeStoreArgs in table/attention.h).
// It normalizes and rotates q and k in place, in a.qkv.
static inline void rope_store(const RopeStoreArgs& a) noexcept {
  with_kv(a.kv.type, [&](auto kv) { rope_store_rows<decltype(kv)>(a); });
}

// Rotates pairs of the a.rotary columns at x and writes the columns to `to`:
// the first columns of all pairs, then the second columns of all pairs.
static inline void turn_latent(const LatentStoreArgs& a, const float* x, float* to,
                               int32_t position) {
  const int half = a.rotary / 2;
  for (int i = 0; i < half; i++) {
    to[i] = a.interleaved ? x[2 * i] : x[i];
    to[half + i] = a.interleaved ? x[2 * i + 1] : x[half + i];
  }
  const int64_t row = static_cast<int64_t>(position) * half;
  rotate(to, a.cos + row, a.sin + row, half);
}

template <class Kv>
static inline void latent_store_rows(const LatentStoreArgs& a) {
  alignas(64) float x[kMaxHeadDim];
  const size_t latent = static_cast<size_t>(a.rank) * sizeof(float);
  for (int64_t t = a.m0; t < a.m1; t++) {
    const float* kv = f32_row(a.kv, t);
    scale_columns(x, kv, a.rank, 0.0f, rms_inverse(kv, a.rank, a.eps), a.norm, nullptr);
    turn_latent(a, kv + a.rank, x + a.rank, a.positions[t]);
    store_key_and_value<Kv>(a.layer, a.slots[t], 0, x, a.layer.value_offset ? x : nullptr);
    const float* q = f32_row(a.q, t) + a.nope;
    const float* absorbed = f32_row(a.latent, t);
    for (int h = 0; h < a.q_heads; h++, q += a.nope + a.rotary, absorbed += a.rank) {
      memcpy(x, absorbed, latent);
      turn_latent(a, q, x + a.rank, a.positions[t]);
      write_query(a.out, a.layer, t, h, x);
    }
  }
}

static inline void latent_store(const LatentStoreArgs& a) noexcept {
  with_kv(a.layer.type, [&](auto kv) { latent_store_rows<decltype(kv)>(a); });
}

}  // namespace CPUSERVE_NS
