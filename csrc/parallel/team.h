// The engine's threads: one parallel region for the engine's life, with waits of our own in it.
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "parallel/attendance.h"
#include "parallel/barrier.h"
#include "parallel/partition.h"

namespace cpuserve {

class Team {
 public:
  // cpus: one CPU per thread in thread order; empty = not pinned. passive_waits: sleep instead of
  // waiting awake for long, for a process whose CPU time is counted (a CFS quota). ranks: threads
  // of each rank, which add up to `threads`; empty = one rank. Throws std::invalid_argument for a
  // CPU this process may not use.
  Team(int threads, std::vector<int> cpus, bool passive_waits = false,
       const std::vector<int>& ranks = {});
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Opens the region. Thread 0, the caller, runs `main`; the others wait for dispatch() until it
  // returns or throws (which passes through). All threads are pinned meanwhile.
  void run(const std::function<void()>& main);

  // Runs f(thread, threads) on every member, the caller included, and returns when all are done;
  // members are numbered 0 .. threads - 1. Only thread 0 inside run() may call it; a team of one
  // thread works anywhere. f must not throw.
  template <class F>
  void dispatch(F&& f) {
    const auto call = [](void* context, int thread, int threads) noexcept {
      (*static_cast<std::remove_reference_t<F>*>(context))(thread, threads);
    };
    dispatch_job({call, const_cast<void*>(static_cast<const void*>(&f))});
  }

  // Inside a dispatched function: returns when every member has come here.
  void barrier(int member) noexcept {
    if (attendance_.members().size() > 1) barrier_.wait(slot_of(member).in_step);
  }

  // Between two dispatches: lets threads that keep losing their core to others sit out the next
  // ones (attendance.h), judging by the last dispatch. call_all() brings everyone back.
  void adapt() noexcept;
  void call_all() noexcept;

  // Threads that take part in the next dispatch.
  int members() const { return static_cast<int>(attendance_.members().size()); }
  int threads() const { return threads_; }
  const Ranks& ranks() const { return ranks_; }
  // Inside a dispatched function: the members of `member`'s rank, never none.
  Crew crew(int member) const noexcept { return crews_[static_cast<size_t>(member)]; }
  // Inside a dispatched function: which of [0, items) `member` has when the ranks split them, and
  // the members of a rank its part.
  Range share(int64_t items, int member) const noexcept {
    const Crew c = crew(member);
    const Range rank = ranks_.share(items, c.rank);
    const Range mine = split(rank.size(), member - c.first, c.size);
    return {rank.begin + mine.begin, rank.begin + mine.end};
  }
  // The NUMA node on which all threads of a rank are pinned, by rank; -1 where there is none such.
  // As dispatch: thread 0 inside run().
  std::vector<int> nodes_of_ranks();

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
    int member = 0;  // this thread's number in the jobs it takes part in; published by epoch_
    // The first epoch this thread takes part in, kNever for one that sits out. Read after the epoch
    // (acquire), written before it is advanced: a thread late by some epochs is never misled.
    std::atomic<uint64_t> joins{0};
    std::atomic<int64_t> lost_ns{0};  // of the last job: wanted to run, and did not
    std::atomic<int> cpu{-1};
  };
  static constexpr uint64_t kNever = ~uint64_t{0};

  void dispatch_job(Job job);
  void run_job(Slot& slot, int threads) noexcept;
  void change_members() noexcept;
  void form_crews() noexcept;
  void lead(const std::function<void()>& main) noexcept;
  void work(int thread) noexcept;
  void member(int thread, const std::function<void()>& main) noexcept;
  int open_region(const std::function<void()>& main);
  void configure_waits();
  Slot& slot_of(int member) noexcept {
    return slots_[static_cast<size_t>(attendance_.members()[static_cast<size_t>(member)])];
  }

  const int threads_;
  const Ranks ranks_;
  const std::vector<int> cpus_;
  const bool passive_waits_;
  std::unique_ptr<Slot[]> slots_;
  Barrier barrier_;
  Signal epoch_;              // advanced once per job and once to stop; publishes job_ and members
  Signal recall_;             // what threads that sit out wait on; advanced when one is called back
  uint64_t first_epoch_ = 0;  // epoch_ when run() began
  Job job_{};
  int job_threads_ = 1;
  std::atomic<bool> stop_{false};
  Attendance attendance_;
  std::vector<Crew> crews_;  // by member; published by epoch_
  std::vector<int64_t> lost_;
  int64_t job_wall_ns_ = 0, job_waited_ns_ = 0;
  std::atomic<bool> running_{false};
  std::thread::id leader_;
  std::exception_ptr error_;
};

}  // namespace cpuserve
