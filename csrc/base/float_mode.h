// The floating-point environment of kernels.
#pragma once
#include <cstdint>

namespace cpuserve {

// While an object of this class exists, its thread rounds to nearest and keeps denormals.
// A library that was linked with -ffast-math makes the thread that loads it flush denormals
// to zero: without this class, the bits of a row would depend on the thread that computes it.
class PlainFloats {
 public:
  PlainFloats() noexcept : before_(read()) {
    if ((before_ & kControl) != kPlain) write(kPlain);
  }
  ~PlainFloats() {
    if ((before_ & kControl) != kPlain) write(before_);
  }
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kPlain = 0x1f80, kControl = 0xffc0;  // MXCSR; bits 0 to 5 are flags
  static uint64_t read() noexcept { return __builtin_ia32_stmxcsr(); }
  static void write(uint64_t mode) noexcept { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kPlain = 0, kControl = ~uint64_t{0};
  static uint64_t read() noexcept {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(uint64_t mode) noexcept { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kPlain = 0, kControl = 0;
  static uint64_t read() noexcept { return 0; }
  static void write(uint64_t) noexcept {}
#endif
  const uint64_t before_;
};

}  // namespace cpuserve
