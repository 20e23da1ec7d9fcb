// The engine's threads: one parallel region for the engine's life, with waits of our own in it.
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "parallel/barrier.h"

namespace cpuserve {

class Team {
 public:
  // cpus: one CPU per thread in thread order; empty = not pinned. Throws std::invalid_argument for
  // a CPU this process may not use.
  Team(int threads, std::vector<int> cpus);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Opens the region. Thread 0, the caller, runs `main`; the others wait for dispatch() until it
  // returns or throws (which passes through). All threads are pinned meanwhile.
  void run(const std::function<void()>& main);

  // Runs f(thread, threads) on every thread, the caller included, and returns when all are done.
  // Only thread 0 inside run() may call it; a team of one thread works anywhere. f must not throw.
  template <class F>
  void dispatch(F&& f) {
    const auto call = [](void* context, int thread, int threads) noexcept {
      (*static_cast<std::remove_reference_t<F>*>(context))(thread, threads);
    };
    dispatch_job({call, const_cast<void*>(static_cast<const void*>(&f))});
  }

  // Inside a dispatched function: returns when every thread has come here.
  void barrier(int thread) noexcept {
    if (threads_ > 1) barrier_.wait(slots_[static_cast<size_t>(thread)].in_step);
  }

  int threads() const { return threads_; }

  // CPU on which each thread finished its last job, -1 before its first.
  std::vector<int> placement() const;

 private:
  struct Job {
    void (*call)(void* context, int thread, int threads) noexcept;
    void* context;
  };
  // One cache line or more per thread, so that nobody's waiting disturbs another.
  struct alignas(64) Slot {
    WaitState in_step, between_steps;
    std::atomic<int> cpu{-1};
  };

  void dispatch_job(Job job);
  void finish_job(int thread) noexcept;
  void lead(const std::function<void()>& main) noexcept;
  void work(int thread) noexcept;
  void member(int thread, const std::function<void()>& main) noexcept;
  int open_region(const std::function<void()>& main);
  void configure_waits();

  const int threads_;
  const std::vector<int> cpus_;
  std::unique_ptr<Slot[]> slots_;
  Barrier barrier_;
  Signal epoch_;              // advanced once per job and once to stop; publishes job_ and stop_
  uint32_t first_epoch_ = 0;  // epoch_ when run() began
  Job job_{};
  bool stop_ = false;
  std::atomic<bool> running_{false};
  std::thread::id leader_;
  std::exception_ptr error_;
};

}  // namespace cpuserve
