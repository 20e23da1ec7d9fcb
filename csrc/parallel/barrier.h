// Waiting, bounded: spin with `pause`, then yield, then sleep in a futex. An unbounded spin
// collapses when cores are shared (the spinner burns the time the late thread needs); a sleep alone
// costs tens of microseconds at each of a step's hundreds of barriers.
#pragma once
#include <sched.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace cpuserve {

inline void cpu_relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // `yield` is a no-op on most cores; isb waits some tens of cycles
#endif
}

inline int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// How long a thread waits awake. `spin_ns` adapts between 0 and `max_spin_ns`: a wait that outlasts
// spinning and yielding says that the late thread is not running (its core is shared), and then
// staying awake only takes time from whoever could run here.
struct alignas(64) WaitState {
  int64_t max_spin_ns = 0;
  int64_t yield_ns = 0;
  int64_t spin_ns = 0;
  int64_t waited_ns = 0;  // all told, asleep included; waits of some pauses are not counted
  int64_t asleep_ns = 0;

  void configure(int64_t max_spin, int64_t yield) noexcept {
    max_spin_ns = spin_ns = max_spin;
    yield_ns = yield;
  }
  void slept(int64_t ns) noexcept {
    spin_ns /= 2;
    asleep_ns += ns;
  }
  void caught_awake() noexcept {
    if (spin_ns < max_spin_ns) spin_ns += max_spin_ns / 64 + 1;
  }
};

// A counter that one thread advances and others wait for. 64 bits, so that it never wraps; waiters
// sleep on the lower half.
class Signal {
 public:
  uint64_t load() const noexcept { return value_.load(std::memory_order_acquire); }

  // seq_cst on the store here and on the sleepers' increment there: either the setter sees the
  // sleeper and wakes it, or the sleeper (and the kernel, in FUTEX_WAIT) sees the new value.
  void advance() noexcept {
    value_.store(value_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all();
  }

  // Returns once the value differs from `old`; what the setter wrote before is visible then.
  void wait_while(uint64_t old, WaitState& state) noexcept {
    for (int i = 0; i < 16; i++) {
      if (load() != old) return;
      cpu_relax();
    }
    const int64_t start = now_ns();
    if (stay_awake(old, start, state)) {
      state.caught_awake();
    } else {
      const int64_t tired = now_ns();
      sleep_until_not(old);
      state.slept(now_ns() - tired);
    }
    state.waited_ns += now_ns() - start;
  }

 private:
  // Spins, then yields, for as long as `state` says; true when the value has changed.
  bool stay_awake(uint64_t old, int64_t start, const WaitState& state) noexcept {
    const int64_t spin_until = start + state.spin_ns, yield_until = spin_until + state.yield_ns;
    for (int64_t now = start; now < spin_until; now = now_ns()) {
      for (int i = 0; i < 16; i++) {
        if (load() != old) return true;
        cpu_relax();
      }
    }
    while (load() == old) {
      if (now_ns() >= yield_until) return false;
      sched_yield();
    }
    return true;
  }

  void sleep_until_not(uint64_t old) noexcept {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == old) sleep_while(old);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

#if defined(__linux__)
  void sleep_while(uint64_t old) noexcept {
    syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, static_cast<uint32_t>(old), nullptr, nullptr,
            0);
  }
  void wake_all() noexcept {
    syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
#else
  void sleep_while(uint64_t) noexcept {
    const timespec nap{0, 50'000};
    nanosleep(&nap, nullptr);
  }
  void wake_all() noexcept {}
#endif

  alignas(64) std::atomic<uint64_t> value_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};
static_assert(sizeof(std::atomic<uint64_t>) == 8, "its first four bytes are the futex word");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "and hold the lower half");

// Sense-reversing: the last to arrive resets the count and advances the phase the others wait on.
class Barrier {
 public:
  explicit Barrier(int threads) : expected_(threads) {}

  // Between two uses only: how many arrivals make it open.
  void expect(int threads) noexcept { expected_.store(threads, std::memory_order_relaxed); }

  void wait(WaitState& state) noexcept {
    const uint64_t phase = phase_.load();
    if (!arrive()) phase_.wait_while(phase, state);
  }

  // For a thread that has nothing to learn from the others: counts it in and returns at once. True
  // for the last one. acq_rel: each arrival publishes its thread's writes, the last collects all.
  bool arrive() noexcept {
    const int expected = expected_.load(std::memory_order_relaxed);  // before it may change
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < expected) return false;
    arrived_.store(0, std::memory_order_relaxed);  // published by advance()
    phase_.advance();
    return true;
  }

 private:
  std::atomic<int> expected_;
  alignas(64) std::atomic<int> arrived_{0};
  Signal phase_;
};

}  // namespace cpuserve
