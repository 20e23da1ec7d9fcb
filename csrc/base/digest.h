// A digest of bytes that detects damage,
// such as disk errors and truncated files, but not manipulation.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cpuserve {

// Each 64-bit word changes the state of one of four lanes by a bijection,
// so a change of a single word always changes the digest. There are four lanes
// because a core can begin four multiplications in the time that one of them takes.
inline uint64_t digest(const uint8_t* bytes, size_t count, uint64_t seed) noexcept {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;  // 2^64 / the golden ratio
  const auto step = [](uint64_t state, uint64_t word) {
    state = (state ^ word) * kOdd;
    return state ^ (state >> 32);
  };
  uint64_t lanes[4] = {seed, ~seed, seed + kOdd, count};
  uint64_t words[4];
  size_t at = 0;
  for (; at + sizeof(words) <= count; at += sizeof(words)) {
    std::memcpy(words, bytes + at, sizeof(words));
    for (int i = 0; i < 4; i++) lanes[i] = step(lanes[i], words[i]);
  }
  if (at < count) {
    std::memset(words, 0, sizeof(words));
    std::memcpy(words, bytes + at, count - at);
    for (int i = 0; i < 4; i++) lanes[i] = step(lanes[i], words[i]);
  }
  uint64_t sum = seed;
  for (const uint64_t lane : lanes) sum = step(sum, lane);
  return sum;
}

}  // namespace cpuserve
