// How work is divided among threads. The division never changes a result: a task computes the same
// bits on any thread.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace cpuserve {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Returns part `part` of [0, items) divided into `parts` contiguous ranges; their sizes differ by
// at most one. The larger ones are spread over all parts: any run of parts has its proportion of
// the items, so neither a rank nor the cores of one L3 get all of a few.
inline Range split(int64_t items, int part, int parts) {
  return {items * part / parts, items * (part + 1) / parts};
}

// The relative speeds of a team's threads, where cores are unequal (P and E cores, big and little
// ones). Only work that is not claimed is divided by them: threads that claim tasks take as many as
// they can compute.
class Speeds {
 public:
  Speeds() = default;  // all are equal
  // By thread, in any unit; empty: all are equal.
  explicit Speeds(const std::vector<int>& speeds) {
    int64_t sum = 0;
    for (int speed : speeds) ends_.push_back(sum += speed);
  }

  bool equal() const { return ends_.empty(); }
  // The part of [0, items) of `thread`. If fewer threads than all take part, all parts are equal.
  Range share(int64_t items, int thread, int threads) const {
    if (ends_.size() != static_cast<size_t>(threads)) return split(items, thread, threads);
    const auto end = [&](int t) {  // rounded, so that a fast thread gets a single item
      const int64_t before = t < 0 ? 0 : ends_[static_cast<size_t>(t)];
      return (2 * items * before + ends_.back()) / (2 * ends_.back());
    };
    return {end(thread - 1), end(thread)};
  }

 private:
  std::vector<int64_t> ends_;  // by thread: the sum of the speeds up to and including it
};

// The threads of a team in contiguous groups. The threads of a rank share a NUMA node and own the
// same part of every matrix and of the KV heads. The size of that part is proportional to their
// number.
class Ranks {
 public:
  Ranks(int threads) : ends_{threads} {}  // NOLINT: a team without ranks is one rank
  explicit Ranks(const std::vector<int>& sizes) {
    int end = 0;
    for (int size : sizes) ends_.push_back(end += size);
  }

  int count() const { return static_cast<int>(ends_.size()); }
  int threads() const { return ends_.back(); }
  Range threads_of(int rank) const {
    return {rank == 0 ? 0 : ends_[static_cast<size_t>(rank) - 1], ends_[static_cast<size_t>(rank)]};
  }
  int of_thread(int thread) const {
    int rank = 0;
    while (thread >= ends_[static_cast<size_t>(rank)]) rank++;
    return rank;
  }

  // Returns the items that the threads of a rank get when [0, items) is split over all threads.
  Range share(int64_t items, int rank) const {
    const Range t = threads_of(rank);
    return {split(items, static_cast<int>(t.begin), threads()).begin,
            split(items, static_cast<int>(t.end) - 1, threads()).end};
  }
  int owner_of_share(int64_t item, int64_t items) const {
    int rank = 0;
    while (item >= share(items, rank).end) rank++;
    return rank;
  }
  // Returns the rank that computes the middle of `item`, for cases where there are few items and
  // each is divided so that threads get equal work.
  int owner_of_middle(int64_t item, int64_t items) const {
    int rank = 0;
    while ((2 * item + 1) * threads() >= 2 * items * ends_[static_cast<size_t>(rank)]) rank++;
    return rank;
  }

 private:
  std::vector<int> ends_;
};

// The members of one rank that take part in a call, or all members as if they were one rank: member
// numbers [first, first + size). They are peers: they claim the same items.
struct RankThreads {
  int rank, first, size;
};

// Dynamic claims over a static contiguous split. A thread first works through its own share, so
// that each thread reads one stream of memory, which it touched first. Then it takes chunks from
// the shares of the other threads of its rank, so that they do not wait for a thread when its
// core is busy with another process.
//
// A phase is the work between two barriers, and all threads number phases alike. Three sets of
// cursors rotate: in phase p a thread claims from set p % 3 and resets its own cursor of set (p +
// 1) % 3, which was last used in phase p - 2, that is two barriers ago.
class WorkQueue {
 public:
  explicit WorkQueue(int threads)
      : capacity_(threads), cursors_(new Cursor[kSets * size(threads)]) {}

  // To be called between calls of a team when the number of threads that claim work changes.
  void reset() noexcept {
    for (size_t i = 0; i < kSets * size(capacity_); i++) {
      cursors_[i].next.store(0, std::memory_order_relaxed);
    }
  }

  // Every thread calls this once at the start of every phase, even of one without claims.
  void enter(int thread, int64_t phase) noexcept {
    // relaxed: the barrier between the phases publishes it
    cursor(phase + 1, thread).next.store(0, std::memory_order_relaxed);
  }

  // Calls run(begin, end) on chunks of at most `chunk` items until the peers have claimed all of
  // [0, items). `thread` is one of them. Ranks have separate items and never claim from each other.
  template <class Run>
  void drain(int thread, RankThreads peers, int64_t phase, int64_t items, int64_t chunk,
             const Run& run) noexcept {
    drain_shares(
        thread, peers, phase, [&](int owner) { return split(items, owner, peers.size); }, chunk,
        run);
  }

  // The same, but share(i) returns the items that peer i owns. For items of unequal
  // cost.
  template <class Share, class Run>
  void drain_shares(int thread, RankThreads peers, int64_t phase, const Share& share, int64_t chunk,
                    const Run& run) noexcept {
    const int me = thread - peers.first;
    for (int i = 0; i < peers.size; i++) {
      const int owner = me + i < peers.size ? me + i : me + i - peers.size;
      drain_share(cursor(phase, peers.first + owner), share(owner), chunk, run);
    }
  }

  // Returns the number of items claimed in this phase and the one before it. Any thread may call
  // it. It only shows whether work proceeds: it grows within a phase and falls between phases.
  int64_t claimed() const noexcept {
    int64_t sum = 0;
    for (size_t i = 0; i < kSets * size(capacity_); i++) {
      sum += cursors_[i].next.load(std::memory_order_relaxed);
    }
    return sum;
  }

 private:
  struct alignas(64) Cursor {
    std::atomic<int64_t> next{0};  // items of the owner's share claimed so far
  };
  static constexpr int kSets = 3;
  static size_t size(int threads) { return static_cast<size_t>(threads); }

  Cursor& cursor(int64_t phase, int thread) noexcept {
    return cursors_[static_cast<size_t>(phase % kSets) * size(capacity_) + size(thread)];
  }

  template <class Run>
  static void drain_share(Cursor& cursor, Range share, int64_t chunk, const Run& run) noexcept {
    // relaxed: only the index is claimed here, and the next barrier publishes the results. The load
    // comes first because otherwise every thread would write to the cache line of an exhausted
    // share.
    while (cursor.next.load(std::memory_order_relaxed) < share.size()) {
      const int64_t at = share.begin + cursor.next.fetch_add(chunk, std::memory_order_relaxed);
      if (at >= share.end) return;
      run(at, std::min(at + chunk, share.end));
    }
  }

  const int capacity_;
  std::unique_ptr<Cursor[]> cursors_;
};

}  // namespace cpuserve
