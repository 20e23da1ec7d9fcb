// A small test framework for kernels without dependencies, so that tests also run in an emulator:
//
//   KERNEL_TEST_OF(rms_norm_of_zeros_is_zero, rms_norm) { k.rms_norm(...); CHECK(y == 0); }
//   KERNEL_TEST(every_linear_is_tested) { ... }
//
// `k` is the KernelTable of the level under test; every case runs at every level that the CPU
// supports. With --own, those of kernels that the level takes from the one below are left out.
//   CHECK(condition)            CHECK_NEAR(value, expected, tolerance)
//   Rng rng(seed)               rng.uniform() in [-1, 1)  rng.below(n)  rng.bits()
//   Buffer<T> b(count)          64-byte aligned, zeroed, guarded: a write before or beyond it fails
//                               the case
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/table.h"

namespace harness {

using cpuserve::KernelTable;

struct Case {
  const char* name;
  void (*run)(const KernelTable& k);
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
struct Registration {
  Registration(const char* name, void (*run)(const KernelTable&)) {
    cases().push_back({name, run});
  }
};

// The running case of this thread. A failed check is printed and counted, and the case continues.
struct Progress {
  const char* name = "";
  const char* isa = "";
  int failures = 0;
};
inline Progress& progress() {
  static thread_local Progress now;
  return now;
}

// Set by --unsigned: bytes that meet in int8 products are not negative. For an emulator that takes
// all of them for unsigned (Bochs 3.0, AMX).
inline bool& unsigned_bytes() {
  static bool on = false;
  return on;
}

// Set by --few, for emulators, which take a hundred times as long: the tests then use fewer
// combinations of shapes, and smaller ones that take the same paths. Without it they use all.
inline bool& few_shapes() {
  static bool on = false;
  return on;
}
inline int64_t fewer(int64_t all, int64_t few) { return few_shapes() ? few : all; }

// Set by --own: the level that the one under test extends, and that is tested for itself; else
// nullptr. A kernel taken from it is the same machine code, so its cases would only be repeated.
inline const KernelTable*& below() {
  static const KernelTable* table = nullptr;
  return table;
}
// Whether what `get` returns of a table is taken from the level below.
template <class Get>
bool from_below(const KernelTable& k, Get get) {
  return below() && get(k) == get(*below());
}
inline bool from_below(const KernelTable& k, cpuserve::WeightKind kind) {
  return from_below(k,
                    [&](const KernelTable& t) { return t.linear[static_cast<int>(kind)].product; });
}
// Calls body(kind) for the weight kinds that have kernels to be tested at this level.
template <class Kinds, class Body>
void for_each_kind(const KernelTable& k, const Kinds& kinds, Body body) {
  for (cpuserve::WeightKind kind : kinds) {
    if (!from_below(k, kind)) body(kind);
  }
}

inline void fail(const char* file, int line, const std::string& what) {
  constexpr int kShown = 10;  // a wrong kernel can fail millions of checks
  if (++progress().failures > kShown) return;
  const char* base = std::strrchr(file, '/');
  std::printf("%s:%d: %s [%s]: %s\n", base ? base + 1 : file, line, progress().name, progress().isa,
              what.c_str());
}
inline void check(bool ok, const char* text, const char* file, int line) {
  if (!ok) fail(file, line, text);
}
inline void check_near(double value, double expected, double tolerance, const char* text,
                       const char* file, int line) {
  const bool both_nan = std::isnan(value) && std::isnan(expected);
  if (both_nan || value == expected || std::fabs(value - expected) <= tolerance) return;
  char numbers[160];
  std::snprintf(numbers, sizeof numbers, " = %.9g, expected %.9g within %.3g", value, expected,
                tolerance);
  fail(file, line, text + std::string(numbers));
}

class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  float uniform() {
    return static_cast<float>(static_cast<int64_t>(bits() >> 40) - (1 << 23)) / (1 << 23);
  }

 private:
  uint64_t state_;
};

template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : count_(count), file_(file), line_(line) {
    const size_t bytes = kGuard + (count * sizeof(T) + 63) / 64 * 64 + kGuard;
    memory_ = static_cast<uint8_t*>(std::aligned_alloc(64, bytes));
    if (!memory_) std::abort();
    std::memset(memory_, kMark, bytes);
    std::memset(memory_ + kGuard, 0, count * sizeof(T));
  }
  ~Buffer() {
    const uint8_t* end = memory_ + kGuard + count_ * sizeof(T);
    bool intact = true;
    for (size_t i = 0; i < kGuard; i++) intact &= memory_[i] == kMark && end[i] == kMark;
    if (!intact) fail(file_, line_, "a kernel wrote outside this buffer");
    std::free(memory_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return reinterpret_cast<T*>(memory_ + kGuard); }
  const T* data() const { return reinterpret_cast<const T*>(memory_ + kGuard); }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr uint8_t kMark = 0xa5;
  size_t count_;
  const char* file_;
  int line_;
  uint8_t* memory_;
};

// Simple conversions to compare with those of the kernels.
inline float from_bf16(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint16_t to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if (f != f) return static_cast<uint16_t>((u >> 16) | 0x40);
  const uint32_t below = u & 0xffff, half = 0x8000;
  u >>= 16;
  if (below > half || (below == half && (u & 1))) u++;
  return static_cast<uint16_t>(u);
}
inline float from_f16(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  double v = 0;
  if (e == 31) {
    v = m ? NAN : INFINITY;
  } else {
    v = e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  }
  return static_cast<float>(h >> 15 ? -v : v);
}
inline uint16_t to_f16(float f) {  // the nearest of all halves; ties to the even one
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  if (f != f) return static_cast<uint16_t>(sign | 0x7e00);
  const double a = std::fabs(static_cast<double>(f));
  if (a == 0) return sign;
  if (a >= 65520) return static_cast<uint16_t>(sign | 0x7c00);
  int e = 0;
  std::frexp(a, &e);
  const int shift = e - 11 < -24 ? -24 : e - 11;  // weight of the last bit
  const double units = std::nearbyint(std::ldexp(a, -shift));
  const int biased = shift + 24;  // 0: subnormal or the smallest normals
  const int n = static_cast<int>(units);
  return static_cast<uint16_t>(sign | (biased * 1024 + n));
}

}  // namespace harness

#define KERNEL_TEST(name)                                              \
  static void name(const cpuserve::KernelTable& k);                    \
  static const harness::Registration name##_registration(#name, name); \
  static void name([[maybe_unused]] const cpuserve::KernelTable& k)
// A case of one entry of the table.
#define KERNEL_TEST_OF(name, entry)                                          \
  static void name##_of(const cpuserve::KernelTable& k);                     \
  KERNEL_TEST(name) {                                                        \
    const auto get = [](const cpuserve::KernelTable& t) { return t.entry; }; \
    if (!harness::from_below(k, get)) name##_of(k);                          \
  }                                                                          \
  static void name##_of(const cpuserve::KernelTable& k)
#define CHECK(...) harness::check((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
#define CHECK_NEAR(value, expected, tolerance) \
  harness::check_near((value), (expected), (tolerance), #value, __FILE__, __LINE__)
