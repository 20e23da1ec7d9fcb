#include "runtime/expert_pool.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "parallel/barrier.h"
#include "parallel/partition.h"
#include "parallel/thread_cpus.h"

namespace cpuserve {
namespace {

// Reads that bypass the page cache begin and end at multiples of this number, in file and memory.
constexpr size_t kSector = 4096;
constexpr int kChanged = -1;  // instead of an errno: the file has other bytes than at the start

size_t up(size_t bytes) { return (bytes + kSector - 1) / kSector * kSector; }

// The bytes of a slot for this part: reads begin and end at whole sectors.
size_t stride_of(const ExpertPart& part) {
  return part.bytes == 0 ? 0 : up(part.bytes + kSector) + kSector;
}

size_t region_of(const ExpertPart& part) {  // the bytes that are read for a part
  return part.bytes == 0 ? 0 : up(part.offset % kSector + part.bytes);
}

const char* reason(int error) {
  return error == kChanged ? "the file has changed while it was in use" : std::strerror(error);
}

int64_t read_file(int fd, void* to, size_t bytes, size_t offset) {
  return pread(fd, to, bytes, static_cast<off_t>(offset));
}

}  // namespace

// --- construction --------------------------------------------------------------------------------

ExpertPool::ExpertPool(std::vector<ExpertGroup> groups, int ranks, int fd, size_t budget, Read read)
    : ranks_(ranks), read_(read ? std::move(read) : Read(read_file)) {
  size_t units = 0, routes = 0, ids = 0, most = 0;
  for (ExpertGroup& g : groups) {
    routes = std::max(routes, g.route + 1);
    ids = std::max(ids, static_cast<size_t>(g.first) + 1);
    most = std::max(most, static_cast<size_t>(g.experts));
  }
  by_route_.resize(routes);
  group_of_.assign(ids, -1);
  for (ExpertGroup& g : groups) {
    group_of_[static_cast<size_t>(g.first)] = static_cast<int32_t>(groups_.size());
    by_route_[g.route].push_back(groups_.size());
    const auto experts = static_cast<size_t>(g.experts);
    groups_.push_back({std::move(g), units, std::vector<int32_t>(experts), 0, false, false});
    units += experts;
    group_of_unit_.resize(units, static_cast<int32_t>(groups_.size()) - 1);
  }
  last_.reserve(groups_.size());
  units_ = std::vector<Unit>(units);
  const size_t parts = units * static_cast<size_t>(ranks);
  digests_.resize(parts);
  tasks_ = std::make_unique<std::atomic<int64_t>[]>(parts);
  make_shelves(budget);
  for (Shelf& shelf : shelves_) shelf.pending.reserve(most);
  guesses_.units.reserve(4 * most);
  guesses_.begun.reserve(4 * most);
  open(fd);
  start_readers();
}

ExpertPool::~ExpertPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  jobs_ready_.notify_all();
  for (std::thread& reader : readers_) reader.join();
  if (fd_ >= 0) close(fd_);
}

size_t ExpertPool::least_bytes(const std::vector<ExpertGroup>& groups, int ranks) {
  std::vector<std::pair<int, size_t>> seen;
  size_t sum = 0;
  for (const ExpertGroup& g : groups) {
    size_t slot = 0;
    for (int r = 0; r < ranks; r++) slot += stride_of(g.parts[static_cast<size_t>(r)]);
    const std::pair<int, size_t> key{g.position, slot};
    if (std::find(seen.begin(), seen.end(), key) != seen.end()) continue;
    seen.push_back(key);
    sum += slot;
  }
  return sum;
}

// A shelf gets memory in proportion to the bytes of its units.
void ExpertPool::make_shelves(size_t budget) {
  std::vector<std::pair<int, size_t>> keys;
  const auto ranks = static_cast<size_t>(ranks_);
  for (Group& g : groups_) {
    std::vector<size_t> stride(ranks);
    for (size_t r = 0; r < ranks; r++) stride[r] = stride_of(g.of.parts[r]);
    size_t slot = 0;
    for (const size_t bytes : stride) slot += bytes;
    const std::pair<int, size_t> key{g.of.position, slot};
    const auto at = static_cast<size_t>(std::find(keys.begin(), keys.end(), key) - keys.begin());
    if (at == keys.size()) {
      keys.push_back(key);
      shelves_.emplace_back();
      shelves_[at].slot_bytes = slot;
      shelves_[at].stride = stride;
    }
    // The offsets of equal units differ in their sectors, but strides have room for each of them.
    for (int32_t e = 0; e < g.of.experts; e++) {
      Unit& unit = units_[g.first_unit + static_cast<size_t>(e)];
      unit.shelf = static_cast<int32_t>(at);
      unit.id = g.of.first + e;
    }
    shelves_[at].units += static_cast<size_t>(g.of.experts);
    shelves_[at].total += g.of.experts * static_cast<int64_t>(slot);
  }
  double all = 0;
  size_t least = 0, pieces = 0;
  for (const Shelf& s : shelves_) {
    all += static_cast<double>(s.total);
    least += s.slot_bytes;
  }
  check_argument(budget >= least, "a pool of experts needs ", least, " bytes, not ", budget);
  for (Shelf& s : shelves_) {  // one slot first, then a share of the rest
    const double share = static_cast<double>(budget - least) * static_cast<double>(s.total) / all;
    const auto more = static_cast<size_t>(share / static_cast<double>(s.slot_bytes));
    s.holders.assign(std::min(s.units, 1 + more), -1);
    for (const size_t stride : s.stride) {
      arenas_.emplace_back(stride * s.holders.size());
      pieces += s.holders.size() * (stride / kPiece + 1);
    }
  }
  wanted_.items.resize(pieces + 1);
  early_.items.resize(pieces + 1);
}

// Opens the file of `fd` again, because O_DIRECT would hold for all users of a duplicate.
void ExpertPool::open(int fd) {
#if defined(__linux__) && defined(O_DIRECT)
  const std::string again = "/proc/self/fd/" + std::to_string(fd);
  fd_ = ::open(again.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
#endif
  if (fd_ < 0) fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0) fail_system("the file of experts cannot be opened: ", std::strerror(errno));
#ifdef F_NOCACHE
  fcntl(fd_, F_NOCACHE, 1);
#endif
}

// The readers may run on any CPU: they only wait for the disk, and compute digests.
void ExpertPool::start_readers() {
  const BlockSignals block;
  const std::vector<int> cpus = allowed_cpus();
  try {
    for (int i = 0; i < kReaders; i++) {
      readers_.emplace_back([this, cpus] {
        const Bind bind(cpus);
        read_pieces();
      });
    }
  } catch (const std::system_error& error) {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    jobs_ready_.notify_all();
    for (std::thread& reader : readers_) reader.join();
    close(fd_);
    fail_system("a thread that reads experts cannot be started: ", error.what());
  }
}

// --- reading -------------------------------------------------------------------------------------

const ExpertPart& ExpertPool::part(size_t unit, int rank) const noexcept {
  const Group& g = groups_[static_cast<size_t>(group_of_unit_[unit])];
  return g.of
      .parts[(unit - g.first_unit) * static_cast<size_t>(ranks_) + static_cast<size_t>(rank)];
}

uint8_t* ExpertPool::place(const Unit& unit, int rank) const noexcept {
  const auto s = static_cast<size_t>(unit.shelf), r = static_cast<size_t>(rank);
  const size_t at = static_cast<size_t>(unit.slot) * shelves_[s].stride[r];
  return arenas_[s * static_cast<size_t>(ranks_) + r].data() + at;
}

// Reads [at, at + bytes) of the sectors that contain the part. Returns 0 or an errno.
int ExpertPool::read_bytes(uint8_t* to, const ExpertPart& part, size_t at,
                           size_t bytes) const noexcept {
  const size_t begin = part.offset / kSector * kSector;
  while (bytes > 0) {
    const int64_t got = read_(fd_, to + at, bytes, begin + at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    // The rest of a short read may not begin at a sector: its sector is read again.
    const size_t whole = std::min(bytes, static_cast<size_t>(got) / kSector * kSector);
    if (whole == 0) return EIO;  // the file is too short
    at += whole;
    bytes -= whole;
  }
  return 0;
}

uint64_t ExpertPool::digest_of(int32_t id, const ExpertPart& part,
                               const uint8_t* data) const noexcept {
  uint64_t sum = 0;
  for (size_t at = 0; at < part.bytes; at += part.panel_bytes) {
    const auto panel = static_cast<uint64_t>(part.first_panel) + at / part.panel_bytes;
    sum += digest(data + at, part.panel_bytes, (static_cast<uint64_t>(id) << 32) + panel);
  }
  return sum;
}

int ExpertPool::verify(int thread, int threads, std::atomic<uint64_t>& sum) {
  const Range mine = split(static_cast<int64_t>(units_.size()), thread, threads);
  size_t most = 0;
  for (const Shelf& s : shelves_) most = std::max(most, s.slot_bytes);
  const Buffer memory(most);
  for (auto unit = static_cast<size_t>(mine.begin); unit < static_cast<size_t>(mine.end); unit++) {
    for (int rank = 0; rank < ranks_; rank++) {
      const ExpertPart& p = part(unit, rank);
      const int error = read_bytes(memory.data(), p, 0, region_of(p));
      if (error != 0) return error;
      const uint64_t found = digest_of(units_[unit].id, p, memory.data() + p.offset % kSector);
      digests_[unit * static_cast<size_t>(ranks_) + static_cast<size_t>(rank)] = found;
      sum.fetch_add(found, std::memory_order_relaxed);
    }
  }
  return 0;
}

void ExpertPool::read_pieces() noexcept {
  std::unique_lock lock(mutex_);
  while (true) {
    jobs_ready_.wait(lock, [this] { return stop_ || has_work(); });
    if (stop_) return;
    const Piece piece = next_piece();
    if (piece.unit < 0) continue;
    lock.unlock();
    read(piece);
    lock.lock();
    guesses_.pieces -= piece.guess;
  }
}

void ExpertPool::read(const Piece& piece) noexcept {
  Unit& unit = units_[static_cast<size_t>(piece.unit)];
  const ExpertPart& p = part(static_cast<size_t>(piece.unit), piece.rank);
  const int error = read_bytes(place(unit, piece.rank), p, piece.at, piece.bytes);
  if (error != 0) unit.failed.store(error, std::memory_order_relaxed);
  // acq_rel: the last thread sees the bytes and the errors of all pieces
  if (unit.left.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(piece.unit);
}

// All pieces of a unit have been read, or have failed.
void ExpertPool::finish(int32_t number) noexcept {
  const auto at = static_cast<size_t>(number);
  Unit& unit = units_[at];
  int error = unit.failed.load(std::memory_order_relaxed);
  int64_t bytes = 0;
  for (int rank = 0; rank < ranks_; rank++) {
    const ExpertPart& p = part(at, rank);
    bytes += static_cast<int64_t>(region_of(p));
    if (error != 0 || !verified_) continue;
    const uint64_t found = digest_of(unit.id, p, place(unit, rank) + p.offset % kSector);
    if (found != digests_[at * static_cast<size_t>(ranks_) + static_cast<size_t>(rank)]) {
      error = kChanged;
    }
  }
  {
    const std::lock_guard lock(mutex_);
    Shelf& shelf = shelves_[static_cast<size_t>(unit.shelf)];
    counts_.bytes_read += bytes;
    if (error != 0) {
      counts_.errors++;
      last_error_ = error;
      unit.failed.store(error, std::memory_order_relaxed);
      shelf.holders[static_cast<size_t>(unit.slot)] = -1;
      unit.slot = -1;
      unit.pinned = false;
    }
    unit.state.store(error ? kFailed : kReady, std::memory_order_release);
    finished_.fetch_add(1, std::memory_order_relaxed);
    fill(shelf);
  }
  unit_ready_.notify_all();
}

// --- slots ---------------------------------------------------------------------------------------

// Heat is kept as log2(heat) + age, which stays the same while units are not used.
void ExpertPool::use(Unit& unit, double uses) noexcept {
  unit.level = age_ + std::log2(std::exp2(unit.level - age_) + uses);
  unit.kept = kept_age() + std::log2(std::exp2(unit.kept - kept_age()) + uses);
}

// Returns a free slot of the shelf, or the slot of the unit with the least heat that may leave,
// or -1 if all units are in use.
int32_t ExpertPool::coldest(const Shelf& shelf) const noexcept {
  int32_t best = -1;
  double level = 0;
  for (size_t slot = 0; slot < shelf.holders.size(); slot++) {
    const int32_t holder = shelf.holders[slot];
    if (holder < 0) return static_cast<int32_t>(slot);
    const Unit& unit = units_[static_cast<size_t>(holder)];
    if (unit.pinned || unit.held > 0 || unit.state.load(std::memory_order_relaxed) != kReady)
      continue;
    if (best >= 0 && unit.level >= level) continue;
    best = static_cast<int32_t>(slot);
    level = unit.level;
  }
  return best;
}

// Gives the unit a slot and puts its pieces into a queue. Returns false if no slot is free for it.
bool ExpertPool::begin_read(size_t number, Why why) noexcept {
  Unit& unit = units_[number];
  Shelf& shelf = shelves_[static_cast<size_t>(unit.shelf)];
  const int32_t slot = coldest(shelf);
  if (slot < 0) return false;
  int32_t& holder = shelf.holders[static_cast<size_t>(slot)];
  if (holder >= 0) {
    Unit& leaves = units_[static_cast<size_t>(holder)];
    // A guess is worth half a use: it displaces only units with less heat than that.
    if (why == Why::kGuessed && leaves.level >= std::max(unit.level, age_ - 1.0)) return false;
    leaves.state.store(kAbsent, std::memory_order_relaxed);
    leaves.slot = -1;
  }
  holder = static_cast<int32_t>(number);
  unit.slot = slot;
  unit.pinned = why == Why::kWanted;
  unit.failed.store(0, std::memory_order_relaxed);
  unit.state.store(kReading, std::memory_order_relaxed);
  int pieces = 0;
  for (int rank = 0; rank < ranks_; rank++) {
    pieces += static_cast<int>((region_of(part(number, rank)) + kPiece - 1) / kPiece);
  }
  unit.left.store(pieces, std::memory_order_relaxed);  // the mutex publishes it
  for (int rank = 0; rank < ranks_; rank++) {
    const size_t region = region_of(part(number, rank));
    for (size_t at = 0; at < region; at += kPiece) {
      (why == Why::kWanted ? wanted_ : early_)
          .push({static_cast<int32_t>(number), rank, at, std::min(kPiece, region - at), false});
    }
  }
  return true;
}

// Begins to read the units that wait for a slot of the shelf, in order.
void ExpertPool::fill(Shelf& shelf) noexcept {
  bool any = false;
  while (shelf.next < shelf.pending.size() &&
         begin_read(static_cast<size_t>(shelf.pending[shelf.next]), Why::kWanted)) {
    shelf.next++;
    any = true;
  }
  if (any) jobs_ready_.notify_all();
}

// --- steps ---------------------------------------------------------------------------------------

void ExpertPool::begin_step() noexcept {
  const std::lock_guard lock(mutex_);
  unpin();
  last_error_ = 0;
  age_ += 1 / kHalfLife;
  guesses_.units.clear();  // of a cancelled step; those that have begun are judged by want()
  guesses_.pause -= guesses_.pause > 0;
}

void ExpertPool::unpin() noexcept {
  for (const size_t g : last_) {
    for (int32_t i = 0; i < groups_[g].used; i++) {
      unit_of(groups_[g], groups_[g].order[static_cast<size_t>(i)]).pinned = false;
    }
    groups_[g].used = 0;
  }
  last_.clear();
  for (Shelf& shelf : shelves_) {
    shelf.pending.clear();
    shelf.next = 0;
  }
}

void ExpertPool::want(size_t route, const Routing& routing) noexcept {
  if (route >= by_route_.size()) return;
  const std::lock_guard lock(mutex_);
  unpin();
  for (const size_t number : by_route_[route]) {
    Group& g = groups_[number];
    last_.push_back(number);
    g.missing = g.waves = false;
    // Units with a slot come first, even those that are still being read: they keep their slots
    // until they are done, and in waves the units after them wait for these slots.
    for (const int first : {kReady, kReading, kAbsent}) {
      for (int32_t e = 0; e < g.of.experts; e++) {
        Unit& unit = unit_of(g, e);
        if (routing.rows(e) == 0 || unit.taken) continue;
        const int state = unit.state.load(std::memory_order_relaxed);
        if (first != kAbsent && state != first) continue;
        g.order[static_cast<size_t>(g.used++)] = e;
        unit.taken = true;
        take(g, e, state == kReady);
      }
    }
    for (int32_t i = 0; i < g.used; i++) {
      unit_of(g, g.order[static_cast<size_t>(i)]).taken = false;
    }
  }
  judge_guesses(route, routing);
  promote_guesses();
  for (const size_t number : by_route_[route]) {
    Group& g = groups_[number];
    if (g.used == 0) continue;
    Shelf& shelf = shelves_[static_cast<size_t>(unit_of(g, g.order[0]).shelf)];
    fill(shelf);
    g.waves = shelf.next < shelf.pending.size();
  }
  if (wanted_.count > 0) jobs_ready_.notify_all();
}

// Keeps a unit of this step in memory, or lets it wait for a slot.
void ExpertPool::take(Group& g, int32_t expert, bool ready) noexcept {
  const size_t number = g.first_unit + static_cast<size_t>(expert);
  Unit& unit = units_[number];
  int ranks = 0;
  for (int rank = 0; rank < ranks_; rank++) {
    tasks_[number * static_cast<size_t>(ranks_) + static_cast<size_t>(rank)].store(
        0, std::memory_order_relaxed);
    ranks += part(number, rank).bytes > 0;
  }
  unit.unfinished.store(ranks, std::memory_order_relaxed);
  use(unit, 1);
  if (!std::exchange(unit.counted, false)) (ready ? counts_.hits : counts_.misses)++;
  if (ready || unit.state.load(std::memory_order_relaxed) == kReading) {
    unit.pinned = true;
    g.missing = g.missing || !ready;
    return;
  }
  if (unit.held > 0 && unit.state.load(std::memory_order_relaxed) == kFailed) {
    last_error_ = unit.failed.load(std::memory_order_relaxed);  // as for those that wait for it
    return;
  }
  // A unit that failed before is read again. The threads that wait for it must not see the failure.
  unit.state.store(kAbsent, std::memory_order_relaxed);
  g.missing = true;
  shelves_[static_cast<size_t>(unit.shelf)].pending.push_back(static_cast<int32_t>(number));
}

bool ExpertPool::has_all() const noexcept {
  for (const Shelf& shelf : shelves_) {
    if (shelf.holders.size() < shelf.units) return false;
  }
  return true;
}

Span<const int32_t> ExpertPool::order(int32_t first) const noexcept {
  const Group& g = group(first);
  return {g.order.data(), g.used};
}

const uint8_t* ExpertPool::wait(int32_t first, int32_t expert, int rank,
                                const std::atomic<bool>& cancelled) noexcept {
  Group& g = group(first);
  const size_t number = g.first_unit + static_cast<size_t>(expert);
  Unit& unit = units_[number];
  int state = unit.state.load(std::memory_order_acquire);
  if (state != kReady && state != kFailed) {
    const int64_t begin = now_ns();
    std::unique_lock lock(mutex_);
    // The wait ends after 1 ms to read the flag, because whoever sets it notifies no one.
    while ((state = unit.state.load(std::memory_order_acquire)) != kReady && state != kFailed &&
           !cancelled.load(std::memory_order_relaxed)) {
      unit_ready_.wait_for(lock, std::chrono::milliseconds(1));
    }
    counts_.wait_ns += now_ns() - begin;
  }
  if (state != kReady) return nullptr;
  const ExpertPart& p = part(number, rank);
  const auto data = reinterpret_cast<uintptr_t>(place(unit, rank) + p.offset % kSector);
  return reinterpret_cast<const uint8_t*>(data -
                                          static_cast<uintptr_t>(p.first_panel) * p.panel_bytes);
}

void ExpertPool::done(int32_t first, int32_t expert, int rank, int64_t tasks,
                      int64_t all) noexcept {
  Group& g = group(first);
  if (!g.waves) return;
  const size_t number = g.first_unit + static_cast<size_t>(expert);
  std::atomic<int64_t>& count =
      tasks_[number * static_cast<size_t>(ranks_) + static_cast<size_t>(rank)];
  if (count.fetch_add(tasks, std::memory_order_acq_rel) + tasks < all) return;
  Unit& unit = units_[number];
  if (unit.unfinished.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const std::lock_guard lock(mutex_);
  unit.pinned = false;
  fill(shelves_[static_cast<size_t>(unit.shelf)]);
}

// --- facts ---------------------------------------------------------------------------------------

std::string ExpertPool::error() const {
  const std::lock_guard lock(mutex_);
  return last_error_ == 0 ? "" : reason(last_error_);
}

ExpertCounts ExpertPool::counts() const {
  const std::lock_guard lock(mutex_);
  ExpertCounts out = counts_;
  for (const Shelf& shelf : shelves_) out.held += static_cast<int64_t>(shelf.held);
  return out;
}

size_t ExpertPool::slots() const {
  size_t sum = 0;
  for (const Shelf& shelf : shelves_) sum += shelf.holders.size();
  return sum;
}

size_t ExpertPool::bytes() const {
  size_t sum = 0;
  for (const Shelf& shelf : shelves_) sum += shelf.holders.size() * shelf.slot_bytes;
  return sum;
}

}  // namespace cpuserve
