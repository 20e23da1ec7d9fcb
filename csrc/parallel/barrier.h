// How threads wait: a thread first spins with `pause`, may then yield,
// and finally sleeps in a futex. If threads share cores, spinning without a limit is very slow,
// because the spinning thread uses CPU time that the late thread needs. Sleeping immediately
// would cost tens of microseconds at each of the hundreds of barriers of a step.
#pragma once
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

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

// How long a thread spins and yields before it sleeps. `spin_ns` adapts between max_spin_ns / 4
// and max_spin_ns. If a wait outlasts spinning and yielding, the late thread probably does not run
// because its core is shared: spinning would only take CPU time from threads that could run there.
// spin_ns does not fall below max_spin_ns / 4. With a lower limit and no yields,
// spin_ns could not rise again, because even waits of some microseconds outlasted it,
// and steps took 1.25 times as long.
struct alignas(64) WaitState {
  int64_t max_spin_ns = 0;
  int64_t yield_ns = 0;
  int64_t spin_ns = 0;
  int64_t waited_ns = 0;  // total time of waits longer than a few pauses; includes asleep_ns
  int64_t asleep_ns = 0;

  void configure(int64_t max_spin, int64_t yield) noexcept {
    max_spin_ns = spin_ns = max_spin;
    yield_ns = yield;
  }
  void slept(int64_t ns) noexcept {
    spin_ns = std::max(spin_ns / 2, max_spin_ns / 4);
    asleep_ns += ns;
  }
  void caught_awake() noexcept {
    if (spin_ns < max_spin_ns) spin_ns += max_spin_ns / 64 + 1;
  }
};

// A counter that one thread advances while other threads wait for a change.
// The counter has 64 bits, so it never wraps around. Threads sleep (futex) on its lower 32 bits.
class Signal {
 public:
  uint64_t load() const noexcept { return value_.load(std::memory_order_acquire); }

  // This store and the increment of sleepers_ in sleep_until_not are sequentially consistent.
  // Therefore either this thread sees that a thread sleeps and wakes it,
  // or that thread (and the system, in FUTEX_WAIT) sees the new value and does not sleep.
  void advance() noexcept {
    value_.store(value_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all();
  }

  // Waits until the value differs from `old`.
  // After the return, all earlier writes of the advancing thread are visible.
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
  // Spins, then yields, for the times in `state`. Returns true if the value has changed.
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
static_assert(sizeof(std::atomic<uint64_t>) == 8,
              "the first four bytes of the value are the futex word");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the first four bytes must be the lower half");

// A barrier for threads in groups. The last thread of a group to arrive counts as its group,
// and the last group to arrive advances the phase that all threads wait for.
// Threads of a group should share an L3: the counter of the group stays in this L3 (20-40 ns
// for an arrival), and only one arrival per group crosses the interconnect (100 ns and more).
// With a single counter, the arrivals of 192 threads, one after another, would take 20 us.
class Barrier {
 public:
  // groups: the number of groups of threads. Groups are numbered from 0.
  explicit Barrier(int groups) : groups_(new Group[static_cast<size_t>(groups)]), count_(groups) {}

  // Sets the number of threads to wait for: arrivals[g] threads of group g.
  // May be called only while no thread waits.
  void expect(const std::vector<int>& arrivals) noexcept {
    int active = 0;
    for (int g = 0; g < count_; g++) {
      const int expected = arrivals[static_cast<size_t>(g)];
      groups_[static_cast<size_t>(g)].expected.store(expected, std::memory_order_relaxed);
      active += expected > 0;
    }
    active_.store(active, std::memory_order_relaxed);
  }

  // Waits until all threads have arrived. The last thread to arrive calls last() before the others
  // continue: last() sees the earlier writes of all threads, and all threads see its writes.
  template <class Last>
  void wait(int group, WaitState& state, const Last& last) noexcept {
    const uint64_t phase = phase_.load();
    if (!arrive(group, last)) phase_.wait_while(phase, state);
  }

  // Counts this thread as arrived and does not wait, for a thread that needs no results of others.
  // Returns true if this thread is the last to arrive. Arrivals use acq_rel:
  // an arrival publishes the writes of its thread, and the last thread sees the writes of all.
  bool arrive(int group) noexcept {
    return arrive(group, [] {});
  }

 private:
  template <class Last>
  bool arrive(int group, const Last& last) noexcept {
    Group& of = groups_[static_cast<size_t>(group)];
    // Reads `expected` and `active` before this thread arrives: expect() may change them later.
    const int expected = of.expected.load(std::memory_order_relaxed);
    const int active = active_.load(std::memory_order_relaxed);
    if (of.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < expected) return false;
    of.arrived.store(0, std::memory_order_relaxed);  // for the next phase; advance() publishes it
    if (active > 1) {
      if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < active) return false;
      arrived_.store(0, std::memory_order_relaxed);
    }
    last();
    phase_.advance();
    return true;
  }

  struct alignas(64) Group {
    std::atomic<int> arrived{0}, expected{0};
  };

  std::unique_ptr<Group[]> groups_;
  const int count_;
  std::atomic<int> active_{0};               // number of groups with threads
  alignas(64) std::atomic<int> arrived_{0};  // number of groups that have arrived
  Signal phase_;
};

}  // namespace cpuserve
