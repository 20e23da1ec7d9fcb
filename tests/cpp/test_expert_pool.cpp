// Tests the pool of experts on a file of its own, with the threads of a step as plain threads.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "main.h"
#include "runtime/expert_pool.h"

using namespace cpuserve;

namespace {

constexpr int32_t kExperts = 6;
constexpr size_t kPanelBytes = 640, kPanels = 3, kUnit = kPanelBytes * kPanels;

// A file with two operations of one layer: the matrices of expert e begin at (e and 6 + e) * kUnit.
struct File {
  std::FILE* stream = std::tmpfile();
  std::vector<uint8_t> bytes = std::vector<uint8_t>(64 << 10);
  File() {
    for (size_t i = 0; i < bytes.size(); i++)
      bytes[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
    write();
  }
  ~File() { std::fclose(stream); }
  void write() {
    std::rewind(stream);
    std::fwrite(bytes.data(), 1, bytes.size(), stream);
    std::fflush(stream);
  }
  int fd() const { return fileno(stream); }
  const uint8_t* unit(int32_t id) const { return bytes.data() + static_cast<size_t>(id) * kUnit; }
};

std::vector<ExpertGroup> groups() {
  std::vector<ExpertGroup> out{{0, kExperts, 0, 0, {}}, {kExperts, kExperts, 0, 1, {}}};
  for (ExpertGroup& g : out) {
    for (int32_t e = 0; e < kExperts; e++) {
      g.parts.push_back({static_cast<size_t>(g.first + e) * kUnit, kUnit, kPanelBytes, 0});
    }
  }
  return out;
}

// The routing of tokens that use one expert each.
Routing routing_of(const std::vector<int32_t>& experts) {
  std::vector<float> ids(experts.begin(), experts.end());
  Routing routing(static_cast<int64_t>(ids.size()), kExperts);
  routing.build(kExperts, 1, {reinterpret_cast<uint8_t*>(ids.data()), 4, 1, ActFormat::f32},
                static_cast<int64_t>(ids.size()));
  return routing;
}

const std::atomic<bool> kGoesOn{false};

// Does a step of `threads` threads, and returns the number of units with the bytes of the file.
// Each unit has one task for each thread.
int step(ExpertPool& pool, const File& file, const std::vector<int32_t>& experts, int threads) {
  pool.begin_step();
  pool.want(0, routing_of(experts));
  std::atomic<int> right{0};
  for (const int32_t first : {0, kExperts}) {
    std::vector<std::thread> team;
    for (int t = 0; t < threads; t++) {
      team.emplace_back([&, t] {
        for (const int32_t e : pool.order(first)) {
          const uint8_t* data = pool.wait(first, e, 0, kGoesOn);
          if (t == 0 && data && std::equal(data, data + kUnit, file.unit(first + e))) right++;
          pool.done(first, e, 0, 1, threads);
        }
      });
    }
    for (std::thread& thread : team) thread.join();
  }
  return right;
}

}  // namespace

TEST(units_have_the_bytes_of_the_file_in_pools_of_all_sizes) {
  const File file;
  const size_t least = ExpertPool::least_bytes(groups(), 1);
  for (size_t slots = 1; slots <= kExperts; slots++) {
    ExpertPool pool(groups(), 1, file.fd(), least * slots);
    EXPECT(pool.slots() == 2 * slots && pool.bytes() <= least * slots);
    for (const int threads : {1, 3}) {
      EXPECT(step(pool, file, {0, 1, 2, 3, 4, 5}, threads) == 2 * kExperts);
      EXPECT(step(pool, file, {5, 2}, threads) == 4);
      EXPECT(step(pool, file, {2}, threads) == 2);
    }
    if (slots == kExperts) EXPECT(pool.counts().misses == 2 * kExperts);
  }
}

TEST(a_pool_below_one_slot_for_each_operation_is_refused) {
  const File file;
  EXPECT_THROWS(std::invalid_argument, "a pool of experts needs",
                ExpertPool(groups(), 1, file.fd(), 100));
}

TEST(the_units_used_most_stay) {
  const File file;
  ExpertPool pool(groups(), 1, file.fd(), 2 * ExpertPool::least_bytes(groups(), 1));
  for (int i = 0; i < 5; i++) step(pool, file, {3}, 1);
  for (const int32_t once : {0, 1, 2, 4, 5}) step(pool, file, {once}, 1);
  const int64_t before = pool.counts().misses;
  EXPECT(step(pool, file, {3}, 2) == 2);
  EXPECT(pool.counts().misses == before);
  ExpertPool warm(groups(), 1, file.fd(), 2 * ExpertPool::least_bytes(groups(), 1));
  warm.warm(pool.heat());
  while (warm.finished() < 4) std::this_thread::yield();
  EXPECT(step(warm, file, {3}, 1) == 2 && warm.counts().misses == 0);
}

TEST(units_of_an_earlier_topic_leave_and_the_next_start_knows_them) {
  const File file;
  ExpertPool pool(groups(), 1, file.fd(), 2 * ExpertPool::least_bytes(groups(), 1));
  for (int i = 0; i < 30; i++) step(pool, file, {3}, 1);
  for (int i = 0; i < 32; i++) step(pool, file, {i % 2}, 1);
  const int64_t before = pool.counts().misses;
  for (const int32_t used : {0, 1}) EXPECT(step(pool, file, {used}, 1) == 2);
  EXPECT(pool.counts().misses == before);
  const std::vector<float> heat = pool.heat();
  EXPECT(heat[3] > heat[0] && heat[3] > heat[1]);
}

TEST(a_read_that_fails_is_tried_again_in_the_next_step) {
  const File file;
  std::atomic<int> fails{1};
  const auto read = [&](int fd, void* to, size_t bytes, size_t offset) -> int64_t {
    if (fails.fetch_sub(1) == 1) {
      errno = EIO;
      return -1;
    }
    return pread(fd, to, bytes, static_cast<off_t>(offset));
  };
  ExpertPool pool(groups(), 1, file.fd(), ExpertPool::least_bytes(groups(), 1), read);
  EXPECT(step(pool, file, {0, 1, 2}, 2) == 5);
  EXPECT(!pool.error().empty() && pool.counts().errors == 1);
  EXPECT(step(pool, file, {0, 1, 2}, 2) == 6);
  EXPECT(pool.error().empty());
}

// Units of three pieces, of which a read can fail in the middle.
struct LargeFile {
  static constexpr size_t kBytes = 5 * ExpertPool::kPiece / 2;
  std::FILE* stream = std::tmpfile();
  std::vector<uint8_t> bytes = std::vector<uint8_t>(2 * kBytes);
  LargeFile() {
    for (size_t i = 0; i < bytes.size(); i++)
      bytes[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
    std::fwrite(bytes.data(), 1, bytes.size(), stream);
    std::fflush(stream);
  }
  ~LargeFile() { std::fclose(stream); }
  static std::vector<ExpertGroup> groups() {
    ExpertGroup g{0, 2, 0, 0, {}};
    for (size_t e = 0; e < 2; e++) g.parts.push_back({e * kBytes, kBytes, kBytes / 4, 0});
    return {g};
  }
};

// Does a step that uses this expert, and returns whether its bytes are those of the file.
bool reads_whole(ExpertPool& pool, const LargeFile& file, int32_t expert) {
  pool.begin_step();
  pool.want(0, routing_of({expert}));
  const uint8_t* data = pool.wait(0, expert, 0, kGoesOn);
  const uint8_t* expected = file.bytes.data() + static_cast<size_t>(expert) * LargeFile::kBytes;
  const bool right = data && std::equal(data, data + LargeFile::kBytes, expected);
  pool.done(0, expert, 0, 1, 1);
  return right;
}

TEST(a_unit_with_an_error_in_its_middle_is_read_again_whole) {
  const LargeFile file;
  for (const int error : {ENOMEM, EAGAIN, EIO, 0}) {  // 0: the file ends there
    std::atomic<bool> fails{true};
    const auto read = [&](int fd, void* to, size_t bytes, size_t offset) -> int64_t {
      // The piece in the middle gives some sectors, and then no more.
      if (fails && offset == ExpertPool::kPiece) bytes = 12288;
      if (!fails || offset != ExpertPool::kPiece + 12288)
        return pread(fd, to, bytes, static_cast<off_t>(offset));
      errno = error;
      return error == 0 ? 0 : -1;
    };
    ExpertPool pool(LargeFile::groups(), 1, fileno(file.stream), 3 << 20, read);
    EXPECT(pool.slots() == 1);
    for (int i = 0; i < 3; i++) {
      EXPECT(!reads_whole(pool, file, 0) && !pool.error().empty());
      EXPECT(reads_whole(pool, file, 1) && pool.error().empty());  // in the same slot
    }
    fails = false;
    EXPECT(reads_whole(pool, file, 0));
    EXPECT(pool.counts().errors == 3);
  }
}

TEST(interrupted_and_short_reads_of_a_unit_go_on_where_they_ended) {
  const LargeFile file;
  std::atomic<int> calls{0};
  const auto read = [&](int fd, void* to, size_t bytes, size_t offset) -> int64_t {
    if (calls++ % 3 == 1) {
      errno = EINTR;
      return -1;
    }
    // The rest of a sector that was read in part is read again.
    return pread(fd, to, std::min<size_t>(bytes, 8192), static_cast<off_t>(offset)) -
           (bytes > 8192 ? 100 : 0);
  };
  ExpertPool pool(LargeFile::groups(), 1, fileno(file.stream), 3 << 20, read);
  EXPECT(reads_whole(pool, file, 0) && reads_whole(pool, file, 1));
  EXPECT(pool.error().empty() && pool.counts().errors == 0);
  EXPECT(calls > static_cast<int>(2 * LargeFile::kBytes / 8192));
}

// Ends a pool while its readers read, and returns how many reads it had begun by its end.
int reads_until_the_end(const File& file) {
  std::atomic<int> begun{0};
  std::atomic<bool> ends{false};
  const auto read = [&](int fd, void* to, size_t bytes, size_t offset) -> int64_t {
    begun++;
    while (!ends) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the pool ends meanwhile
    return pread(fd, to, bytes, static_cast<off_t>(offset));
  };
  {
    ExpertPool pool(groups(), 1, file.fd(), 6 * ExpertPool::least_bytes(groups(), 1), read);
    pool.begin_step();
    pool.want(0, routing_of({0, 1, 2, 3, 4, 5}));  // 12 units
    while (begun < ExpertPool::kReaders) std::this_thread::yield();
    ends = true;
  }
  return begun;
}

TEST(a_pool_ends_after_the_reads_in_progress_and_begins_no_more) {
  const File file;
  int begun = 0;  // more if this thread got no CPU for half a second before the end
  for (int tries = 0; tries < 5 && begun != ExpertPool::kReaders; tries++) {
    begun = reads_until_the_end(file);
  }
  EXPECT(begun == ExpertPool::kReaders);
}

TEST(a_file_that_changes_is_found_out) {
  File file;
  ExpertPool pool(groups(), 1, file.fd(), ExpertPool::least_bytes(groups(), 1));
  std::atomic<uint64_t> sum{0};
  EXPECT(pool.verify(0, 1, sum) == 0 && sum != 0);
  pool.compare();
  EXPECT(step(pool, file, {0, 4}, 1) == 4);
  EXPECT(step(pool, file, {0}, 1) == 2);  // unit 4 leaves its slot
  file.bytes[4 * kUnit + 100] ^= 1;
  file.write();
  EXPECT(step(pool, file, {1, 4}, 1) == 3);
  EXPECT(pool.error().find("changed") != std::string::npos);
}

TEST(a_cancelled_wait_ends_and_guesses_are_read_once) {
  const File file;
  std::atomic<bool> slow{true};
  const auto read = [&](int fd, void* to, size_t bytes, size_t offset) -> int64_t {
    while (slow) std::this_thread::yield();
    return pread(fd, to, bytes, static_cast<off_t>(offset));
  };
  ExpertPool pool(groups(), 1, file.fd(), 4 * ExpertPool::least_bytes(groups(), 1), read);
  pool.begin_step();
  pool.want(0, routing_of({1}));
  const std::atomic<bool> cancelled{true};
  EXPECT(pool.wait(0, 1, 0, cancelled) == nullptr);
  const std::vector<int32_t> guessed{1, 5};
  pool.guess(0, guessed);
  while (pool.counts().guessed < 2) std::this_thread::yield();
  slow = false;
  EXPECT(step(pool, file, {1, 5, 2}, 2) == 6);
  EXPECT(pool.counts().guessed == 2 && pool.counts().bytes_read > 0);
}

TEST(a_unit_that_is_being_read_comes_before_those_that_need_its_slot) {
  const File file;
  std::atomic<bool> slow{true};
  const auto read = [&](int fd, void* to, size_t bytes, size_t offset) -> int64_t {
    while (slow) std::this_thread::yield();
    return pread(fd, to, bytes, static_cast<off_t>(offset));
  };
  ExpertPool pool(groups(), 1, file.fd(), ExpertPool::least_bytes(groups(), 1), read);
  pool.begin_step();
  const std::vector<int32_t> guessed{4};
  pool.guess(0, guessed);  // its units take the only slots
  while (pool.counts().guessed < 2) std::this_thread::yield();
  pool.want(0, routing_of({1, 4}));
  slow = false;
  int right = 0;
  for (const int32_t first : {0, kExperts}) {
    const std::vector<int32_t> order(pool.order(first).begin(), pool.order(first).end());
    EXPECT((order == std::vector<int32_t>{4, 1}));
    if (order.front() != 4) return;  // expert 1 would wait for ever
    for (const int32_t e : order) {
      const uint8_t* data = pool.wait(first, e, 0, kGoesOn);
      if (data && std::equal(data, data + kUnit, file.unit(first + e))) right++;
      pool.done(first, e, 0, 1, 1);
    }
  }
  EXPECT(right == 4);
}

// Makes a guess for the next step, waits until its units are read, and does the step.
int guessed_step(ExpertPool& pool, const File& file, int32_t guess, int32_t used) {
  const std::vector<int32_t> guessed{guess};
  const int64_t before = pool.counts().guessed, read = pool.finished();
  // The units in memory are not used any more: a guess displaces them.
  for (double steps = 0; steps < 3 * ExpertPool::kHalfLife; steps++) pool.begin_step();
  pool.guess(0, guessed);
  while (pool.counts().guessed < before + 2) std::this_thread::yield();
  while (pool.finished() < read + 2) std::this_thread::yield();
  pool.want(0, routing_of({used}));
  int right = 0;
  for (const int32_t first : {0, kExperts}) {
    const uint8_t* data = pool.wait(first, used, 0, kGoesOn);
    if (data && std::equal(data, data + kUnit, file.unit(first + used))) right++;
    pool.done(first, used, 0, 1, 1);
  }
  return right;
}

TEST(right_guesses_are_hits_and_wrong_ones_stop_for_a_while) {
  const File file;
  ExpertPool pool(groups(), 1, file.fd(), 2 * ExpertPool::least_bytes(groups(), 1));
  for (int i = 0; i < ExpertPool::kTrial / 2; i++) {
    EXPECT(pool.guesses());
    EXPECT(guessed_step(pool, file, i % kExperts, i % kExperts) == 2);
  }
  EXPECT(pool.guesses() && pool.counts().guessed == pool.counts().guessed_right);
  EXPECT(pool.counts().misses == 0);  // each unit was read before the router chose it
  for (int i = 0; i < ExpertPool::kTrial / 2; i++) {
    EXPECT(pool.guesses());
    EXPECT(guessed_step(pool, file, (2 * i + 2) % kExperts, (2 * i + 3) % kExperts) == 2);
  }
  EXPECT(!pool.guesses());
  for (int64_t i = 1; i < ExpertPool::kPause; i++) pool.begin_step();
  EXPECT(!pool.guesses());
  pool.begin_step();
  EXPECT(pool.guesses());
}

TEST(wrong_guesses_of_every_step_cost_few_reads) {
  constexpr int kCold = static_cast<int>(3 * ExpertPool::kHalfLife);  // units are not used any more
  const File file;
  ExpertPool pool(groups(), 1, file.fd(), 2 * ExpertPool::least_bytes(groups(), 1));
  int64_t steps = 0;
  const auto guess_wrongly = [&] {  // three times, as in a step of four layers
    for (int i = 0; i < kCold; i++, steps++) pool.begin_step();
    for (int layer = 0; layer < 3; layer++) {
      const std::vector<int32_t> guessed{(static_cast<int32_t>(steps) + layer) % 5};
      const int64_t before = pool.counts().guessed;
      const bool pauses = !pool.guesses();
      pool.guess(0, guessed);  // a step that has begun with guesses goes on with them
      // A reader begins them, unless they are in memory or displace a unit that was used more.
      for (int n = pauses ? 20 : 200; n > 0 && pool.counts().guessed < before + 2; n--) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      pool.want(0, routing_of({5}));
      for (const int32_t first : {0, kExperts}) pool.wait(first, 5, 0, kGoesOn);
    }
  };
  while (pool.guesses()) guess_wrongly();
  const int64_t trial = pool.counts().guessed;
  EXPECT(trial >= ExpertPool::kTrial && trial <= ExpertPool::kTrial + 4);
  const int64_t begun = steps;
  while (steps < begun + ExpertPool::kPause - kCold) guess_wrongly();
  EXPECT(pool.counts().guessed == trial && pool.counts().guessed_right == 0);
}

TEST(a_guess_of_a_cancelled_step_is_judged_and_one_of_a_parked_sequence_is_right) {
  const File file;
  ExpertPool pool(groups(), 1, file.fd(), 4 * ExpertPool::least_bytes(groups(), 1));
  const std::vector<int32_t> guessed{1, 2};
  pool.begin_step();
  pool.guess(0, guessed);
  while (pool.counts().guessed < 4) std::this_thread::yield();
  EXPECT(pool.hold(0, {guessed.data(), 1}));  // by a sequence that is parked
  EXPECT(step(pool, file, {3}, 1) == 2);
  EXPECT(pool.counts().guessed_right == 2);
  pool.release(0, {guessed.data(), 1});
}

TEST(wanted_units_are_read_before_guessed_ones) {
  const File file;
  std::mutex mutex;
  std::vector<size_t> order;
  std::atomic<int> open{0};
  const auto read = [&](int fd, void* to, size_t bytes, size_t offset) -> int64_t {
    while (open == 0) std::this_thread::yield();
    {
      const std::lock_guard lock(mutex);
      order.push_back(offset);
    }
    return pread(fd, to, bytes, static_cast<off_t>(offset));
  };
  ExpertPool pool(groups(), 1, file.fd(), 6 * ExpertPool::least_bytes(groups(), 1) - 1, read);
  pool.begin_step();
  pool.want(0, routing_of({0, 1, 2, 3}));  // as many units as readers
  const std::vector<int32_t> guessed{4};
  pool.guess(0, guessed);
  EXPECT(pool.counts().guessed == 0);  // every reader has a wanted unit
  open = 1;
  while (pool.counts().guessed < 2) std::this_thread::yield();
  while (pool.finished() < 10) std::this_thread::yield();
  const std::lock_guard lock(mutex);  // `finished` is a number only: it orders no other memory
  EXPECT(order.size() == 10);
}

TEST(units_that_wait_for_a_parked_sequence_stay_while_threads_use_the_others) {
  const File file;
  ExpertPool pool(groups(), 1, file.fd(), 3 * ExpertPool::least_bytes(groups(), 1));
  const std::vector<int32_t> parked{5}, more{0, 1};
  for (int i = 0; i < 20; i++) {
    pool.begin_step();
    EXPECT(pool.hold(0, {parked.data(), 1}, i % 2 == 0));
    EXPECT(!pool.hold(0, {more.data(), 2}));  // more than half of the slots
    EXPECT(pool.counts().held == 2);
    EXPECT(step(pool, file, {0, 1, 2, 3}, 3) == 8);
    while (!pool.ready(0, {parked.data(), 1})) pool.wait_read(pool.finished(), 1);
    const int64_t before = pool.counts().misses;
    EXPECT(step(pool, file, {5}, 2) == 2 && pool.counts().misses == before);
    pool.release(0, {parked.data(), 1});
    EXPECT(pool.counts().held == 0);
    EXPECT(step(pool, file, {4, 3, 2, 1, 0}, 3) == 10);
  }
}
