#include "parallel/team.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/float_mode.h"

#if !defined(CPUSERVE_TEAM_STD_THREAD)
#include <omp.h>
#endif

namespace cpuserve {
namespace {

// Inside a step the next barrier is microseconds away, and a wake-up from the futex costs
// from 5 to more than 50 us. So threads spin first, and sleep after 100 us.
// Threads do not yield in a step: a background thread that gets the core by a yield keeps it until
// the next timer tick of the kernel (up to 4 ms), while all threads of the team wait.
// A thread that wakes up takes its core back immediately. While grammars compiled
// at the lowest priority, the times between tokens of 4 streams of SmolLM2 were 1.35 times as long
// as normal with 50 us of yields, and 1.2 times without (2 cores, Linux 6.18).
// Between steps the engine thread needs 100-300 us for Python. Measured: when a step starts,
// a thread that is awake begins within 3 us, a sleeping thread after 50 us or more. So threads
// stay awake between steps, but mostly yield, so that the front end can use their cores.
constexpr int64_t kSpinInStepNs = 100'000;
// Under a CFS quota of CPU time threads spin for a shorter time: while the quota has stopped
// the thread that they wait for, spinning would only use up more of the quota.
constexpr int64_t kSpinPassiveNs = 50'000;
constexpr int64_t kSpinBetweenNs = 50'000, kYieldBetweenNs = 350'000;
// If there are more threads than cores, threads yield instead of spinning,
// because the thread that they wait for may need their core.
constexpr int64_t kYieldOversubscribedNs = 20'000;

int checked_threads(int threads) {
  check_argument(threads >= 1 && threads <= 4096, "a team needs 1 to 4096 threads, not ", threads);
  return threads;
}

Ranks checked_ranks(int threads, const std::vector<int>& sizes) {
  if (sizes.empty()) return Ranks(threads);
  int64_t sum = 0;
  for (int size : sizes) {
    check_argument(size >= 1, "a rank needs at least 1 thread, not ", size);
    sum += size;
  }
  check_argument(sum == threads, "the ranks have ", sum, " threads in total, but the team has ",
                 threads);
  return Ranks(sizes);
}

Speeds checked_speeds(int threads, const std::vector<int>& speeds) {
  constexpr int kMostSpeed = 1 << 20;  // speed * (number of items) must fit an int64
  check_argument(speeds.empty() || speeds.size() == static_cast<size_t>(threads), "a team of ",
                 threads, " threads needs one speed for each thread, but got ", speeds.size());
  for (int speed : speeds) {
    check_argument(speed >= 1 && speed <= kMostSpeed, "the speed of a thread must be from 1 to ",
                   kMostSpeed, ", not ", speed);
  }
  return Speeds(speeds);
}

// Returns the core complex of each thread, numbered from 0 in order of first occurrence.
std::vector<int> numbered_complexes(int threads, const std::vector<int>& complexes) {
  if (complexes.empty()) return std::vector<int>(static_cast<size_t>(threads));
  check_argument(complexes.size() == static_cast<size_t>(threads), "a team of ", threads,
                 " threads needs one core complex for each thread, but got ", complexes.size());
  std::vector<int> seen, out;
  for (int complex : complexes) {
    auto at = std::find(seen.begin(), seen.end(), complex);
    if (at == seen.end()) at = seen.insert(at, complex);
    out.push_back(static_cast<int>(at - seen.begin()));
  }
  return out;
}

const char* const kForked =
    "this process was forked from one that runs compute threads, which a fork does not copy; start "
    "processes with the 'spawn' method instead";

#if defined(CPUSERVE_TEAM_STD_THREAD)
void check_not_forked() {}
#else
// Throws in a process that was forked after a team had run. OpenMP keeps its threads for the next
// parallel region: a forked child has no such threads, but OpenMP would wait for them.
void check_not_forked() {
  static std::atomic<int> first_process{0};
  int before = 0;
  if (!first_process.compare_exchange_strong(before, getpid()) && before != getpid()) {
    fail_system(kForked);
  }
}
#endif

}  // namespace

Team::Team(int threads, CpuSets cpus, bool passive_waits, const std::vector<int>& ranks,
           const std::vector<int>& complexes, const std::vector<int>& speeds)
    : threads_(checked_threads(threads)),
      ranks_(checked_ranks(threads, ranks)),
      speeds_(checked_speeds(threads, speeds)),
      cpus_(std::move(cpus)),
      complexes_(numbered_complexes(threads, complexes)),
      passive_waits_(passive_waits),
      slots_(new Slot[static_cast<size_t>(threads_)]),
      barrier_(1 + *std::max_element(complexes_.begin(), complexes_.end())),
      roster_(ranks_),
      rank_threads_(static_cast<size_t>(threads_)),
      lost_(static_cast<size_t>(threads_)),
      arrivals_(1 + static_cast<size_t>(*std::max_element(complexes_.begin(), complexes_.end()))) {
  find_rank_threads();
  for (int t = 0; t < threads_; t++) {
    slots_[static_cast<size_t>(t)].complex = complexes_[static_cast<size_t>(t)];
  }
  check_argument(cpus_.empty() || cpus_.size() == static_cast<size_t>(threads_), "a team of ",
                 threads_, " threads needs a list of CPUs for each thread, but got ", cpus_.size(),
                 " lists");
  const std::vector<int> allowed = allowed_cpus();
  for (const std::vector<int>& mine : cpus_) {
    check_argument(!mine.empty(), "the list of CPUs of a thread is empty");
    for (int cpu : mine) {
      check_argument(std::binary_search(allowed.begin(), allowed.end(), cpu),
                     "this process may not use CPU ", cpu,
                     "; choose CPUs from its CPU mask (taskset -p)");
    }
  }
}

void Team::configure_waits() {
  roster_.call_all();
  find_rank_threads();
  expect_members();
  const bool shared =
      cpus_.empty() ? static_cast<size_t>(threads_) > allowed_cpus().size() : share_cpus(cpus_);
  for (int t = 0; t < threads_; t++) {
    Slot& slot = slots_[static_cast<size_t>(t)];
    slot.member = t;
    slot.joins.store(0, std::memory_order_relaxed);
    if (shared) {
      slot.in_step.configure(0, kYieldOversubscribedNs);
      slot.between_steps.configure(0, kYieldOversubscribedNs);
    } else if (passive_waits_) {
      // If a wait outlasts spinning, the quota has probably stopped the awaited thread.
      // Between steps threads sleep without spinning: a wake-up takes little time compared
      // with a step, but hundreds of microseconds awake between all steps would use up the quota.
      slot.in_step.configure(kSpinPassiveNs, 0);
      slot.between_steps.configure(0, 0);
    } else {
      slot.in_step.configure(kSpinInStepNs, 0);
      slot.between_steps.configure(kSpinBetweenNs, kYieldBetweenNs);
    }
  }
}

void Team::run(const std::function<void()>& main) {
  if (threads_ > 1) check_not_forked();
  if (running_.exchange(true)) fail_system("this team is already running");
  process_ = getpid();
  configure_waits();
  stop_.store(false, std::memory_order_relaxed);
  first_epoch_ = epoch_.load();
  leader_ = std::this_thread::get_id();
  const int got = open_region(main);
  running_.store(false);
  if (got != threads_) {
    fail_system("requested ", threads_, " OpenMP threads and got ", got,
                "; unset OMP_THREAD_LIMIT, and do not run a team inside another parallel region");
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

#if defined(CPUSERVE_TEAM_STD_THREAD)
// Runs the team on std::thread, for systems without OpenMP, and for the thread sanitizer,
// which does not understand the synchronization of OpenMP.
int Team::open_region(const std::function<void()>& main) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads_; t++) others.emplace_back([&, t] { member(t, main); });
  member(0, main);
  for (std::thread& other : others) other.join();
  return threads_;
}
#else
int Team::open_region(const std::function<void()>& main) {
  if (threads_ == 1) {
    member(0, main);
    return 1;
  }
  int got = 0;
  omp_set_dynamic(0);
#pragma omp parallel num_threads(threads_) default(none) shared(main, got)
  {
    const int thread = omp_get_thread_num(), all = omp_get_num_threads();
    if (thread == 0) got = all;
    if (all == threads_) member(thread, main);
  }
  return got;
}
#endif

void Team::member(int thread, const std::function<void()>& main) noexcept {
  const Bind bind(cpus_.empty() ? std::vector<int>{} : cpus_[static_cast<size_t>(thread)]);
  if (thread == 0) {
    lead(main);
  } else {
    const BlockSignals quiet;
    work(thread);
  }
}

// Runs `main` on thread 0. An exception must not leave a parallel region,
// so it is stored here and thrown again after the region.
void Team::lead(const std::function<void()>& main) noexcept {
  try {
    main();
  } catch (...) {
    error_ = std::current_exception();
  }
  stop_.store(true, std::memory_order_relaxed);  // the next two lines publish this store
  epoch_.advance();
  recall_.advance();
}

void Team::work(int thread) noexcept {
  Slot& slot = slots_[static_cast<size_t>(thread)];
  // Not epoch_.load(), because the first call may already have begun when this thread gets here.
  uint64_t seen = first_epoch_;
  while (true) {
    const uint64_t call = recall_.load();
    // If `call` is the last value of recall_, no later advance ends the wait below.
    // But lead() stored stop_ before it advanced recall_ for the last time: this load sees stop_.
    if (stop_.load(std::memory_order_relaxed)) return;
    if (slot.joins.load(std::memory_order_acquire) == kNever) {
      recall_.wait_while(call, slot.between_steps);
    } else {
      epoch_.wait_while(seen, slot.between_steps);
    }
    seen = epoch_.load();
    if (stop_.load(std::memory_order_relaxed)) return;
    // If this thread joins only at a later call of run_on_all (epoch), it does not run call `seen`.
    if (seen < slot.joins.load(std::memory_order_acquire)) continue;
    run_call(slot, call_threads_);
    barrier_.arrive(slot.complex);
  }
}

void Team::run_call(Slot& slot, int threads) noexcept {
  const int64_t wall = now_ns(), cpu = thread_cpu_ns(), asleep = slot.in_step.asleep_ns;
  const PlainFloats plain;
  call_.function(call_.context, slot.member, threads);
  const int64_t idle = (now_ns() - wall) - (thread_cpu_ns() - cpu);
  slot.lost_ns.store(idle - (slot.in_step.asleep_ns - asleep), std::memory_order_relaxed);
  slot.cpu.store(current_cpu(), std::memory_order_relaxed);
  slot.waited_ns.store(slot.in_step.waited_ns, std::memory_order_relaxed);
}

void Team::make_call(Call call) {
  if (threads_ > 1) {
    if (!running_.load(std::memory_order_relaxed)) {
      fail_system("a team of ", threads_, " threads works only inside Team.run");
    }
    if (process_ != getpid()) fail_system(kForked);  // leader_ does not differ in a forked child
    if (leader_ != std::this_thread::get_id()) {
      fail_system("only the thread that called Team.run may use the team");
    }
  }
  Slot& slot = slots_[0];
  const int64_t start = now_ns(), waited = slot.in_step.waited_ns;
  call_ = call;
  call_threads_ = members();
  if (call_threads_ > 1) epoch_.advance();
  run_call(slot, call_threads_);
  if (call_threads_ > 1) barrier_.wait(slot.complex, slot.in_step, [] {});
  slot.waited_ns.store(slot.in_step.waited_ns, std::memory_order_relaxed);
  call_wall_ns_ = now_ns() - start;
  call_waited_ns_ = slot.in_step.waited_ns - waited;
}

void Team::adapt() noexcept {
  for (int t : roster_.members()) {
    const auto i = static_cast<size_t>(t);
    lost_[i] = slots_[i].lost_ns.load(std::memory_order_relaxed);
  }
  if (roster_.update(now_ns(), call_wall_ns_, call_waited_ns_, lost_)) change_members();
}

void Team::call_all() noexcept {
  if (roster_.call_all()) change_members();
}

void Team::change_members() noexcept {
  const uint64_t next = epoch_.load() + 1;
  const std::vector<int>& members = roster_.members();
  size_t at = 0;
  for (int t = 0; t < threads_; t++) {
    Slot& slot = slots_[static_cast<size_t>(t)];
    if (at == members.size() || members[at] != t) {
      slot.joins.store(kNever, std::memory_order_release);
      continue;
    }
    slot.member = static_cast<int>(at++);
    if (slot.joins.load(std::memory_order_relaxed) == kNever) {
      slot.joins.store(next, std::memory_order_release);
    }
  }
  find_rank_threads();
  expect_members();
  recall_.advance();
}

void Team::expect_members() noexcept {
  std::fill(arrivals_.begin(), arrivals_.end(), 0);
  for (int t : roster_.members()) {
    arrivals_[static_cast<size_t>(complexes_[static_cast<size_t>(t)])]++;
  }
  barrier_.expect(arrivals_);
}

void Team::find_rank_threads() noexcept {
  const std::vector<int>& members = roster_.members();
  const int count = static_cast<int>(members.size());
  for (int first = 0, end = 0; first < count; first = end) {
    const int rank = ranks_.of_thread(members[static_cast<size_t>(first)]);
    const int64_t last = ranks_.threads_of(rank).end;
    while (end < count && members[static_cast<size_t>(end)] < last) end++;
    for (int m = first; m < end; m++) {
      rank_threads_[static_cast<size_t>(m)] = {rank, first, end - first};
    }
  }
}

std::vector<int> Team::nodes_of_ranks() {
  std::vector<int> out(static_cast<size_t>(ranks_.count()), -1);
  if (cpus_.empty()) return out;
  call_all();
  std::vector<int> nodes(static_cast<size_t>(threads_));
  run_on_all([&](int thread, int) noexcept {
    nodes[static_cast<size_t>(thread)] = node_of(cpus_[static_cast<size_t>(thread)]);
  });
  for (int rank = 0; rank < ranks_.count(); rank++) {
    const Range t = ranks_.threads_of(rank);
    const auto first = nodes.begin() + t.begin, last = nodes.begin() + t.end;
    if (std::count(first, last, *first) == t.size()) out[static_cast<size_t>(rank)] = *first;
  }
  return out;
}

std::vector<int> Team::placement() const {
  std::vector<int> out;
  for (int t = 0; t < threads_; t++) {
    out.push_back(slots_[static_cast<size_t>(t)].cpu.load(std::memory_order_relaxed));
  }
  return out;
}

int64_t Team::waited_ns() const noexcept {
  int64_t sum = 0;
  for (int t = 0; t < threads_; t++) {
    sum += slots_[static_cast<size_t>(t)].waited_ns.load(std::memory_order_relaxed);
  }
  return sum;
}

}  // namespace cpuserve
