// Who computes what. Never part of the result: a task gives the same bits whoever runs it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

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

// Dynamic claims over a static contiguous split: a thread drains its own share (memory it touched
// first, one stream per thread), then takes chunks from the others' shares, so that nobody waits
// for a thread whose core is busy with something else.
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
  // the `threads` that take part.
  template <class Run>
  void drain(int thread, int threads, int64_t phase, int64_t items, int64_t chunk,
             const Run& run) noexcept {
    for (int i = 0; i < threads; i++) {
      const int owner = thread + i < threads ? thread + i : thread + i - threads;
      drain_share(cursor(phase, owner), split(items, owner, threads), chunk, run);
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
