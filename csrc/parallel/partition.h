// Who computes what. Never part of the result: a task gives the same bits whoever runs it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace cpuserve {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Part `part` of [0, items) cut into `parts` contiguous pieces whose sizes differ by at most one.
inline Range split(int64_t items, int part, int parts) {
  const int64_t each = items / parts, extra = items % parts;
  const int64_t begin = each * part + std::min<int64_t>(part, extra);
  return {begin, begin + each + (part < extra ? 1 : 0)};
}

// A team's threads in contiguous groups: a rank's threads share a NUMA node and own the same part
// of every matrix and of the KV heads, in proportion to their number.
class Ranks {
 public:
  Ranks(int threads) : ends_{threads} {}  // NOLINT: a team without ranks is one
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

  // The items that the threads of a rank get of [0, items) split over all threads.
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
  // The rank that does the middle of `item`, where few items are cut finer to be shared out evenly.
  int owner_of_middle(int64_t item, int64_t items) const {
    int rank = 0;
    while ((2 * item + 1) * threads() >= 2 * items * ends_[static_cast<size_t>(rank)]) rank++;
    return rank;
  }

 private:
  std::vector<int> ends_;
};

// The members of one rank that take part in a job: numbers [first, first + size).
struct Crew {
  int rank, first, size;
};

// Dynamic claims over a static contiguous split: a thread drains its own share (memory it touched
// first, one stream per thread), then takes chunks from the shares of its crew, so that nobody
// waits for a thread whose core is busy with something else.
//
// Phases lie between barriers and are numbered alike by all threads. Three sets of cursors rotate:
// in phase p a thread claims from set p % 3 and resets its own cursor of set (p + 1) % 3, which was
// last used in phase p - 2, that is two barriers ago.
class WorkQueue {
 public:
  explicit WorkQueue(int threads)
      : capacity_(threads), cursors_(new Cursor[kSets * size(threads)]) {}

  // Between dispatches, when another number of threads is going to claim.
  void reset() noexcept {
    for (size_t i = 0; i < kSets * size(capacity_); i++) {
      cursors_[i].next.store(0, std::memory_order_relaxed);
    }
  }

  // Every thread calls this once at the start of every phase, also of phases without claims.
  void enter(int thread, int64_t phase) noexcept {
    // relaxed: the barrier between the phases publishes it
    cursor(phase + 1, thread).next.store(0, std::memory_order_relaxed);
  }

  // Calls run(begin, end) on chunks of at most `chunk` items until all of [0, items) is claimed by
  // the crew, whose member `thread` is. Crews share nothing: each has items of its own.
  template <class Run>
  void drain(int thread, Crew crew, int64_t phase, int64_t items, int64_t chunk,
             const Run& run) noexcept {
    const int me = thread - crew.first;
    for (int i = 0; i < crew.size; i++) {
      const int owner = me + i < crew.size ? me + i : me + i - crew.size;
      drain_share(cursor(phase, crew.first + owner), split(items, owner, crew.size), chunk, run);
    }
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
    // relaxed: only the index is claimed here; results are published by the barrier after.
    // The load first: an exhausted share must not bounce its cache line among all threads.
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
