// Keeps the experts of a mixture that are used most in a limited memory, and reads the others from
// the file of packed weights when the router of a layer has chosen them.
//
// A unit is the packed matrix of an expert. Units of one operation and one size share a shelf,
// which has a fixed number of slots for them. Threads that do not compute read units into slots.
// A unit leaves its slot for another one if it has the least heat: its number of uses, where a use
// counts half after kHalfLife steps. So units that one prompt needs once do not displace units that
// most tokens need. A shelf with fewer slots than an operation needs units works in waves:
// the threads that compute release each unit, and the next unit takes its slot.
//
// Units that parked sequences wait for (parked_rows.h) are held: they keep their slots over steps.
// Their reads wait for the reads of the step that runs, except one of kShare.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/span.h"
#include "runtime/routing.h"

namespace cpuserve {

// The bytes of a unit for one rank: whole panels of a matrix at `offset` of the file.
// `first_panel` is the number of the first one in the whole matrix.
struct ExpertPart {
  size_t offset = 0, bytes = 0, panel_bytes = 0;
  int64_t first_panel = 0;
};

// The matrices of one ExpertLinearOp: `experts` matrices with consecutive ids from `first` on.
// parts: [expert][rank]. `route` is the number of the RouteOp that chooses among them.
struct ExpertGroup {
  int32_t first = 0, experts = 0;
  size_t route = 0;
  int position = 0;  // its number after the RouteOp, from 0 on
  std::vector<ExpertPart> parts;
};

// Sums since the pool was made; `wait_ns` is summed over the threads that compute.
struct ExpertCounts {
  int64_t hits = 0, misses = 0, bytes_read = 0, wait_ns = 0, errors = 0;
  // units that were read because of a guess, and guessed units that their operation used
  int64_t guessed = 0, guessed_right = 0;
  int64_t held = 0;  // units that are held now (no sum)
};

class ExpertPool {
 public:
  static constexpr int kReaders = 8;         // the depth at which disks reach their rate
  static constexpr size_t kPiece = 1 << 20;  // bytes of one read
  // In steps. Conversations change their topics, and the experts of a topic with them: of 128
  // experts, 20 % of them in memory, 21 to 23 % of uses are missed with 4 or 8 steps, and 37 % with
  // 64 (requests of 32 tokens on topics of their own; 17 and 18 % for one of 512 tokens, and 20 %
  // with 4 steps).
  static constexpr double kHalfLife = 8;
  static constexpr double kKeptHalfLife = 512;  // of the heat that the next start gets
  // A wrong guess takes the disk from the units of the next operation for at most kGuessPieces
  // reads, and a right one saves about the reading of a unit.
  static constexpr int kGuessPieces = 4;   // pieces of guesses that are read at a time
  static constexpr int kTrial = 64;        // guesses between two judgements
  static constexpr double kPays = 0.5;     // the least share of right ones
  static constexpr int64_t kPause = 1024;  // steps
  static constexpr int kShare = 4;         // reads for one read of a held unit

  // Reads bytes like pread. Tests replace the call with their own.
  using Read = std::function<int64_t(int fd, void* to, size_t bytes, size_t offset)>;

  // Makes slots with at most `budget` bytes, and at least one slot for each shelf.
  // The reads bypass the page cache if the system can do that.
  // Throws std::runtime_error if memory, a thread or the file is refused.
  ExpertPool(std::vector<ExpertGroup> groups, int ranks, int fd, size_t budget, Read read = {});
  ~ExpertPool();
  ExpertPool(const ExpertPool&) = delete;
  ExpertPool& operator=(const ExpertPool&) = delete;

  // Returns the bytes of the smallest pool for these groups.
  static size_t least_bytes(const std::vector<ExpertGroup>& groups, int ranks);

  // --- between steps ---------------------------------------------------------------------------
  // Computes the digest of every unit from the file, and stores it: a unit that has another digest
  // when it is read has changed. Thread `thread` of `threads` does its share. Returns 0 or an
  // errno, and adds the digests of the units to `sum`.
  int verify(int thread, int threads, std::atomic<uint64_t>& sum);
  // All units have their digests: reads compare them from now on.
  void compare() noexcept { verified_ = true; }
  // The heat of every unit for the next start (kKeptHalfLife), in the order of the groups and
  // experts. `warm` sets it, and begins to read the hottest units that fit.
  // Throws std::invalid_argument if the number of units differs.
  std::vector<float> heat() const;
  void warm(Span<const float> heat);
  // Forgets the units that a cancelled step wanted. Called before every step.
  void begin_step() noexcept;
  // The message of the first read of the last step that failed; "" if none did.
  std::string error() const;
  ExpertCounts counts() const;
  size_t units() const { return units_.size(); }
  size_t slots() const;
  size_t bytes() const;
  std::vector<Buffer>& arenas() { return arenas_; }  // [shelf][rank]
  const std::vector<Buffer>& arenas() const { return arenas_; }
  int64_t finished() const noexcept { return finished_.load(std::memory_order_relaxed); }

  // --- in a step -------------------------------------------------------------------------------
  // One thread calls `want` when the router of RouteOp `route` has chosen: the units of its experts
  // are kept until the next call, or are read. The step must not use units that are not wanted.
  void want(size_t route, const Routing& routing) noexcept;
  // Lets the readers read units of the experts that RouteOp `route` may choose, best guess first,
  // while no unit that the step needs waits for them, and as far as no hotter unit has to leave.
  // The next call of want() drops the guesses that no read has begun for.
  void guess(size_t route, Span<const int32_t> experts) noexcept;
  // Whether guesses may pay: not if all units fit, and for kPause steps after less than kPays of
  // the last guesses were right. Between steps. A pause ends the guesses of its step, too.
  bool guesses() const noexcept;
  bool has_all() const noexcept;  // whether there is a slot for every unit

  // --- parked sequences: between the parts of a step -------------------------------------------
  // Whether an expert that RouteOp `route` has chosen has to be read.
  bool misses(size_t route, const Routing& routing) const noexcept;
  // Whether the units of these experts are in memory, or could not be read.
  bool ready(size_t route, Span<const int32_t> experts) const noexcept;
  int missing(size_t route,
              Span<const int32_t> experts) const noexcept;  // units that are not ready
  // Keeps the units of these experts in their slots, or begins to read them, until release() is
  // called with the same experts. Returns false, and does nothing, if more than half of the slots
  // of a shelf would be held, or no slot is free. `first`: no other held unit is read before them.
  bool hold(size_t route, Span<const int32_t> experts, bool first = false) noexcept;
  void release(size_t route, Span<const int32_t> experts) noexcept;
  // Waits for the end of a read of a unit after the first `finished` ones, at most 1 ms.
  // The time counts as waiting of `threads` threads.
  void wait_read(int64_t finished, int threads) noexcept;

  // Whether the matrices of the operation with matrix `first` are units of this pool.
  bool holds(int32_t first) const noexcept {
    return static_cast<size_t>(first) < group_of_.size() &&
           group_of_[static_cast<size_t>(first)] >= 0;
  }
  // The experts that the operation with matrix `first` uses in this step: those in memory first.
  Span<const int32_t> order(int32_t first) const noexcept;
  // Whether threads should compute the experts in this order together, as they are being read.
  bool ordered(int32_t first) const noexcept { return group(first).missing; }
  // Waits until the unit is in memory, and returns its data for a rank as if it began with panel 0.
  // Returns nullptr if it could not be read, or if `cancelled` became true.
  const uint8_t* wait(int32_t first, int32_t expert, int rank,
                      const std::atomic<bool>& cancelled) noexcept;
  // A thread has done `tasks` of the `all` tasks that `rank` has for the unit.
  void done(int32_t first, int32_t expert, int rank, int64_t tasks, int64_t all) noexcept;

 private:
  enum State : int { kAbsent, kReading, kReady, kFailed };
  struct Unit {
    std::atomic<int> state{kAbsent};
    std::atomic<int> left{0};        // pieces that are still to be read
    std::atomic<int> unfinished{0};  // ranks that have not done all their tasks
    std::atomic<int> failed{0};      // an errno of a piece
    int32_t shelf = 0, slot = -1, id = 0;
    bool pinned = false;   // a step uses it, or will
    bool taken = false;    // want() has put it into the order of its group
    bool counted = false;  // its read for parked sequences was counted as a miss
    int32_t held = 0;      // number of parked sequences that wait for it
    double level = -1e30;  // log2 of the heat, plus the age of the pool in half-lives
    double kept = -1e30;   // the same of the heat for the next start
  };
  struct Shelf {
    size_t slot_bytes = 0;         // of all ranks
    std::vector<size_t> stride;    // by rank
    std::vector<int32_t> holders;  // by slot: its unit, or -1
    std::vector<int32_t> pending;  // units of the present operation without a slot, in order
    size_t next = 0;               // the first of them that still waits
    int64_t total = 0;             // bytes of all units
    size_t units = 0;
    size_t held = 0;  // number of units with Unit::held > 0
  };
  enum class Why { kWanted, kHeld, kGuessed };  // why a unit is read
  struct Group {
    ExpertGroup of;
    size_t first_unit = 0;
    std::vector<int32_t> order;
    int32_t used = 0;
    bool missing = false, waves = false;
  };
  struct Piece {
    int32_t unit, rank;
    size_t at, bytes;  // of the part
    bool guess;        // nothing needs it yet, and perhaps nothing will
  };

  void make_shelves(size_t budget);
  void open(int fd);
  void start_readers();
  void read_pieces() noexcept;
  void read(const Piece& piece) noexcept;
  void finish(int32_t unit) noexcept;
  void unpin() noexcept;
  void take(Group& g, int32_t expert, bool ready) noexcept;
  bool has_work() const noexcept;
  Piece next_piece() noexcept;
  bool begin_guess() noexcept;
  void judge_guesses(size_t route, const Routing& routing) noexcept;
  void promote_guesses() noexcept;
  Unit& unit_of(const Group& g, int32_t expert) noexcept {
    return units_[g.first_unit + static_cast<size_t>(expert)];
  }
  int read_bytes(uint8_t* to, const ExpertPart& part, size_t at, size_t bytes) const noexcept;
  uint64_t digest_of(int32_t id, const ExpertPart& part, const uint8_t* data) const noexcept;
  const ExpertPart& part(size_t unit, int rank) const noexcept;
  uint8_t* place(const Unit& unit, int rank) const noexcept;  // of its first byte
  void use(Unit& unit, double uses) noexcept;
  double kept_age() const noexcept { return age_ * kHalfLife / kKeptHalfLife; }
  int32_t coldest(const Shelf& shelf) const noexcept;
  bool begin_read(size_t unit, Why why) noexcept;
  bool hold_unit(size_t unit) noexcept;
  void release_unit(size_t unit) noexcept;
  template <class Visit>  // calls visit(unit) for each unit of the experts, until it returns false
  bool each_unit(size_t route, Span<const int32_t> experts, const Visit& visit) const noexcept {
    for (size_t g = 0; route < by_route_.size() && g < by_route_[route].size(); g++) {
      const size_t first = groups_[by_route_[route][g]].first_unit;
      for (const int32_t e : experts) {
        if (!visit(first + static_cast<size_t>(e))) return false;
      }
    }
    return true;
  }
  void fill(Shelf& shelf) noexcept;
  Group& group(int32_t first) noexcept {
    return groups_[static_cast<size_t>(group_of_[static_cast<size_t>(first)])];
  }
  const Group& group(int32_t first) const noexcept {
    return groups_[static_cast<size_t>(group_of_[static_cast<size_t>(first)])];
  }

  const int ranks_;
  int fd_ = -1;
  Read read_;
  std::vector<Group> groups_;
  std::vector<int32_t> group_of_;  // by id of the first matrix; -1: none
  std::vector<int32_t> group_of_unit_;
  std::vector<std::vector<size_t>> by_route_;  // by RouteOp: its groups
  std::vector<Shelf> shelves_;
  std::vector<Buffer> arenas_;
  std::vector<Unit> units_;
  std::vector<uint64_t> digests_;                  // [unit][rank]
  std::unique_ptr<std::atomic<int64_t>[]> tasks_;  // [unit][rank]: tasks done
  bool verified_ = false;

  mutable std::mutex mutex_;
  std::condition_variable jobs_ready_, unit_ready_;
  // Rings of pieces, of wanted units and of others: held and guessed ones, and a warm start's.
  // The capacity is enough for all units.
  struct Ring {
    std::vector<Piece> items;
    size_t first = 0, count = 0;
    void push(const Piece& piece) { items[(first + count++) % items.size()] = piece; }
    Piece& at(size_t i) { return items[(first + i) % items.size()]; }
    Piece pop() {
      const Piece piece = items[first];
      first = (first + 1) % items.size();
      count--;
      return piece;
    }
  } wanted_, early_;
  // The guesses for RouteOp `route`: `units`, best first, where `next` is the first that has not
  // been tried, and the units that are read because of them.
  struct Guesses {
    size_t route = 0, next = 0;
    std::vector<int32_t> units, begun;
    int pieces = 0;                // that are waiting or being read
    int64_t tried = 0, right = 0;  // since the last judgement
    int64_t pause = 0;             // steps until guesses are made again
    bool left() const { return next < units.size(); }
  } guesses_;
  int passed_ = 0;            // wanted pieces read since the last piece of a held unit
  std::vector<size_t> last_;  // groups of the last call of want
  double age_ = 0;            // in half-lives
  int last_error_ = 0;        // an errno, or -1 for bytes that have changed
  ExpertCounts counts_;
  std::atomic<int64_t> finished_{0};
  bool stop_ = false;
  std::vector<std::thread> readers_;
};

}  // namespace cpuserve
