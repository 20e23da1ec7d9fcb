// The tiles of matrix products with NEON and with SVE of one vector length, for a comparison of
// their inner loops (docs/design/modelled-speed.md). The program checks them against plain loops:
//
//   aarch64-linux-gnu-g++ -O3 -std=c++17 -static -march=armv8.2-a+sve+bf16+i8mm
//       -msve-vector-bits=256 benchmarks/sve_tile.cpp -o sve_tile
//   qemu-aarch64 -cpu max,sve256=on,sve512=off sve_tile
//
// With clang++ -S, the inner loops of tile_bf16 and tile_i8 can be given to llvm-mca. Without +sve
// and -msve-vector-bits, the tiles use NEON.
#include <arm_neon.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

constexpr int kRowPairs = 6,
              kRegisters = 4;  // a tile is 12 rows by `kRegisters` vectors of columns

#ifdef __ARM_FEATURE_SVE_BITS
#include <arm_sve.h>
constexpr int kPairs = __ARM_FEATURE_SVE_BITS / 128;  // column pairs of a vector
#define CPUSERVE_FIXED __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)))
typedef svfloat32_t Floats CPUSERVE_FIXED;
typedef svint32_t Ints CPUSERVE_FIXED;
typedef svbfloat16_t Halves CPUSERVE_FIXED;
typedef svint8_t Bytes CPUSERVE_FIXED;
static Halves weights(const bfloat16_t* p) { return svld1_bf16(svptrue_b16(), p); }
static Bytes weights(const int8_t* p) { return svld1_s8(svptrue_b8(), p); }
static Halves rows(const bfloat16_t* p) { return svld1rq_bf16(svptrue_b16(), p); }
static Bytes rows(const int8_t* p) { return svld1rq_s8(svptrue_b8(), p); }
static Floats product(Floats c, Halves x, Halves w) { return svbfmmla_f32(c, x, w); }
static Ints product(Ints c, Bytes x, Bytes w) { return svmmla_s32(c, x, w); }
static void save(float* p, Floats c) { svst1_f32(svptrue_b32(), p, c); }
static void save(int32_t* p, Ints c) { svst1_s32(svptrue_b32(), p, c); }
static Floats nothing(float) { return svdup_f32(0); }
static Ints nothing(int32_t) { return svdup_s32(0); }
#else
constexpr int kPairs = 1;
using Floats = float32x4_t;
using Ints = int32x4_t;
using Halves = bfloat16x8_t;
using Bytes = int8x16_t;
static Halves weights(const bfloat16_t* p) { return vld1q_bf16(p); }
static Bytes weights(const int8_t* p) { return vld1q_s8(p); }
static Halves rows(const bfloat16_t* p) { return vld1q_bf16(p); }
static Bytes rows(const int8_t* p) { return vld1q_s8(p); }
static Floats product(Floats c, Halves x, Halves w) { return vbfmmlaq_f32(c, x, w); }
static Ints product(Ints c, Bytes x, Bytes w) { return vmmlaq_s32(c, x, w); }
static void save(float* p, Floats c) { vst1q_f32(p, c); }
static void save(int32_t* p, Ints c) { vst1q_s32(p, c); }
static Floats nothing(float) { return vdupq_n_f32(0); }
static Ints nothing(int32_t) { return vdupq_n_s32(0); }
#endif

// Adds `steps` products of the rows at a and the columns at w, and writes the sums to out.
template <class Sums, class Sum, class Element>
static inline void tile(Sum* out, const Element* a, const Element* w, int64_t steps) {
  constexpr int kStep = 16 / sizeof(Element);  // elements of two rows or two columns
  Sums c[kRowPairs][kRegisters];
  for (auto& row : c) {
    for (auto& sum : row) sum = nothing(Sum{});
  }
  for (int64_t s = 0; s < steps; s++) {
    decltype(weights(w)) b[kRegisters];
    for (int j = 0; j < kRegisters; j++) b[j] = weights(w + kStep * kPairs * j);
    for (int i = 0; i < kRowPairs; i++) {
      const auto x = rows(a + kStep * i);
      for (int j = 0; j < kRegisters; j++) c[i][j] = product(c[i][j], x, b[j]);
    }
    a += kStep * kRowPairs;
    w += kStep * kPairs * kRegisters;
  }
  for (int i = 0; i < kRowPairs; i++) {
    for (int j = 0; j < kRegisters; j++) save(out + 4 * kPairs * (i * kRegisters + j), c[i][j]);
  }
}

extern "C" void tile_bf16(float* out, const bfloat16_t* a, const bfloat16_t* w, int64_t steps) {
  tile<Floats>(out, a, w, steps);
}
extern "C" void tile_i8(int32_t* out, const int8_t* a, const int8_t* w, int64_t steps) {
  tile<Ints>(out, a, w, steps);
}

static uint16_t half(int number) {  // bf16 of a small integer
  const float value = static_cast<float>(number);
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

int main() {
  constexpr int kSteps = 9, kColumns = kPairs * kRegisters, kSums = 4 * kRowPairs * kColumns;
  static int8_t a8[16 * kRowPairs * kSteps], w8[16 * kColumns * kSteps];
  static uint16_t a16[8 * kRowPairs * kSteps], w16[8 * kColumns * kSteps];
  uint32_t seed = 1;
  const auto next = [&] {
    return static_cast<int>((seed = seed * 1664525 + 1013904223) >> 28) - 8;
  };
  for (auto& x : a8) x = static_cast<int8_t>(next());
  for (auto& x : w8) x = static_cast<int8_t>(next());
  for (auto& x : a16) x = half(next());
  for (auto& x : w16) x = half(next());
  static int32_t ints[kSums];
  static float floats[kSums];
  tile_i8(ints, a8, w8, kSteps);
  tile_bf16(floats, reinterpret_cast<const bfloat16_t*>(a16),
            reinterpret_cast<const bfloat16_t*>(w16), kSteps);
  const auto number = [](uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return static_cast<int>(value);
  };
  int wrong = 0;
  for (int i = 0; i < kRowPairs; i++) {
    for (int j = 0; j < kColumns; j++) {
      for (int r = 0; r < 2; r++) {
        for (int c = 0; c < 2; c++) {
          int sum8 = 0, sum16 = 0;
          for (int s = 0; s < kSteps; s++) {
            for (int k = 0; k < 8; k++) {
              sum8 += a8[16 * (s * kRowPairs + i) + 8 * r + k] *
                      w8[16 * (s * kColumns + j) + 8 * c + k];
            }
            for (int k = 0; k < 4; k++) {
              sum16 += number(a16[8 * (s * kRowPairs + i) + 4 * r + k]) *
                       number(w16[8 * (s * kColumns + j) + 4 * c + k]);
            }
          }
          const int at = 4 * (i * kColumns + j) + 2 * r + c;
          wrong += ints[at] != sum8 || floats[at] != static_cast<float>(sum16);
        }
      }
    }
  }
  printf("vectors of %d bits: %d of %d sums are wrong\n", 128 * kPairs, wrong, kSums);
  return wrong != 0;
}
