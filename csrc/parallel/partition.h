// How work is divided among threads.
// The division never changes a result, because a task computes the same bits on every thread.
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

// Divides [0, items) into `parts` contiguous ranges, and returns range number `part`.
// The sizes of the ranges differ by at most one, and larger and smaller ranges alternate evenly.
// If there are fewer items than threads, the items are therefore spread over all ranks
// and over all cores that share an L3.
inline Range split(int64_t items, int part, int parts) {
  return {items * part / parts, items * (part + 1) / parts};
}

// The relative speeds of the threads of a team, for CPUs with unequal cores (P and E cores,
// big and little cores). Only work that threads do not claim is divided by speed:
// threads that claim tasks simply claim more of them on a fast core.
class Speeds {
 public:
  Speeds() = default;  // all threads have the same speed
  // speeds: one number for each thread, in any unit. Empty: all threads have the same speed.
  explicit Speeds(const std::vector<int>& speeds) {
    int64_t sum = 0;
    for (int speed : speeds) ends_.push_back(sum += speed);
  }

  bool equal() const { return ends_.empty(); }
  // Returns the part of [0, items) for `thread`. `threads` is the number of threads that take part.
  // If `threads` differs from the number of speeds, all parts are equal.
  Range share(int64_t items, int thread, int threads) const {
    if (ends_.size() != static_cast<size_t>(threads)) return split(items, thread, threads);
    const auto end = [&](int t) {  // rounds to nearest: a fast thread gets a single item
      const int64_t before = t < 0 ? 0 : ends_[static_cast<size_t>(t)];
      return (2 * items * before + ends_.back()) / (2 * ends_.back());
    };
    return {end(thread - 1), end(thread)};
  }

 private:
  std::vector<int64_t> ends_;  // element t: the sum of the speeds of threads 0 to t
};

// Divides the threads of a team into ranks, which are contiguous groups.
// The threads of a rank share a NUMA node. Each rank owns a part of every matrix
// and of the KV heads, in proportion to its number of threads.
class Ranks {
 public:
  Ranks(int threads) : ends_{threads} {}  // NOLINT: an int converts to a single rank
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

  // Returns the part of [0, items) for a rank: the parts of all threads of the rank,
  // if the items are divided equally among all threads of the team.
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
  // Returns the rank that owns item `item` of `items`: the rank of the thread that computes
  // the middle of the item. It is meant for few items (KV heads): several threads may each compute
  // a part of an item, so that all threads get equal work.
  int owner_of_middle(int64_t item, int64_t items) const {
    int rank = 0;
    while ((2 * item + 1) * threads() >= 2 * items * ends_[static_cast<size_t>(rank)]) rank++;
    return rank;
  }

 private:
  std::vector<int> ends_;
};

// The threads that claim the same items: the threads of one rank that take part in a call
// of the team, or the threads of all ranks as if they were one rank.
// Their member numbers are `first` to first + size - 1.
struct RankThreads {
  int rank, first, size;
};

// A queue of tasks with work stealing. Items are split into one contiguous share for each thread.
// A thread first claims chunks of its own share, so that it reads one contiguous stream of memory,
// which it touched first. Then it claims chunks from the shares of the other threads of its rank.
// So no thread waits long for a thread with a core that is busy with another process: other threads
// of the rank compute its remaining items.
//
// A phase is the work between two barriers, and all threads number phases in the same way.
// Each thread has three cursors, which count the items claimed from its share.
// Claims in phase p use the cursors with index p % 3. At the start of phase p, each thread resets
// its cursor with index (p + 1) % 3: no thread uses it, as its last claims were in phase p - 2.
// The cursors of phase p - 1 keep their counts for claimed().
class WorkQueue {
 public:
  explicit WorkQueue(int threads)
      : capacity_(threads), cursors_(new Cursor[kSets * size(threads)]) {}

  // Resets all cursors. If the number of threads that claim work changes,
  // the caller resets the cursors between two calls of Team::run_on_all().
  void reset() noexcept {
    for (size_t i = 0; i < kSets * size(capacity_); i++) {
      cursors_[i].next.store(0, std::memory_order_relaxed);
    }
  }

  // Every thread calls this function once at the start of every phase,
  // even if no work is claimed in the phase.
  void enter(int thread, int64_t phase) noexcept {
    // relaxed: the barrier between the phases publishes this store
    cursor(phase + 1, thread).next.store(0, std::memory_order_relaxed);
  }

  // Claims chunks of at most `chunk` items of [0, items) and calls run(begin, end) on each chunk,
  // until the threads `peers` have claimed all items. `thread` is one of the peers.
  // Each rank has items of its own, which only its threads claim.
  template <class Run>
  void drain(int thread, RankThreads peers, int64_t phase, int64_t items, int64_t chunk,
             const Run& run) noexcept {
    drain_shares(
        thread, peers, phase, [&](int owner) { return split(items, owner, peers.size); }, chunk,
        run);
  }

  // Does the same as drain(), but for items of unequal cost.
  // share(i) returns the range of items in the share of peer i.
  template <class Share, class Run>
  void drain_shares(int thread, RankThreads peers, int64_t phase, const Share& share, int64_t chunk,
                    const Run& run) noexcept {
    const int me = thread - peers.first;
    for (int i = 0; i < peers.size; i++) {
      const int owner = me + i < peers.size ? me + i : me + i - peers.size;
      drain_share(cursor(phase, peers.first + owner), share(owner), chunk, run);
    }
  }

  // Returns the number of items claimed in this phase and the phase before it.
  // The number only shows whether work proceeds:
  // it grows within a phase and may fall between phases. Any thread may call this function.
  int64_t claimed() const noexcept {
    int64_t sum = 0;
    for (size_t i = 0; i < kSets * size(capacity_); i++) {
      sum += cursors_[i].next.load(std::memory_order_relaxed);
    }
    return sum;
  }

 private:
  struct alignas(64) Cursor {
    std::atomic<int64_t> next{0};  // number of items claimed from the share of this cursor
  };
  static constexpr int kSets = 3;
  static size_t size(int threads) { return static_cast<size_t>(threads); }

  Cursor& cursor(int64_t phase, int thread) noexcept {
    return cursors_[static_cast<size_t>(phase % kSets) * size(capacity_) + size(thread)];
  }

  template <class Run>
  static void drain_share(Cursor& cursor, Range share, int64_t chunk, const Run& run) noexcept {
    // relaxed: a claim only takes an index, and the next barrier publishes the results.
    // The load comes before fetch_add: without this load, every thread would write
    // to the cache line of a share that has no items left.
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
