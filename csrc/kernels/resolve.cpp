#include "kernels/resolve.h"

#include <string>
#include <utility>

#include "cpu/features.h"

#define CPUSERVE_ISA_UNIT(level, symbol) extern "C" const cpuserve::KernelTable* symbol();
#include "kernels/isa_units.inc"
#undef CPUSERVE_ISA_UNIT

namespace cpuserve {
namespace {

struct Unit {
  const char* level;
  const KernelTable* own;
};

const std::vector<Unit>& units() {
  static const std::vector<Unit> all = {
#define CPUSERVE_ISA_UNIT(level, symbol) {#level, symbol()},
#include "kernels/isa_units.inc"
#undef CPUSERVE_ISA_UNIT
  };
  return all;
}

constexpr const char* kLinearNames[] = {
#define NAME(name, ...) "linear." #name,
    CPUSERVE_WEIGHT_KINDS(NAME, NAME)
#undef NAME
};
constexpr int kLinearKinds = static_cast<int>(WeightKind::count);

constexpr const char* kAttentionNames[] = {"attention.bf16", "attention.f16",  "attention.f32",
                                           "attention.int8", "attention.e4m3", "attention.int8_v4"};
constexpr int kKvTypes = static_cast<int>(KvType::count);
static_assert(sizeof kAttentionNames / sizeof *kAttentionNames == kKvTypes, "one name per type");

constexpr const char* kDotNames[] = {"probe_dot.f32", "probe_dot.bf16", "probe_dot.int8",
                                     "probe_dot.int4"};
constexpr int kDotKinds = static_cast<int>(DotKind::count);
static_assert(sizeof kDotNames / sizeof *kDotNames == kDotKinds, "one name per kind");

// Calls visit(name, entry of `to`, entry of `from`, present) for every entry of the two tables.
// `present` is true if the entry of `from` is not null.
template <class Visit>
void for_each_entry(KernelTable& to, const KernelTable& from, Visit visit) {
  for (int i = 0; i < kLinearKinds; i++) {
    visit(kLinearNames[i], to.linear[i], from.linear[i], from.linear[i].product != nullptr);
  }
  for (int i = 0; i < kKvTypes; i++) {
    visit(kAttentionNames[i], to.attention[i], from.attention[i],
          from.attention[i].attend != nullptr);
  }
#define ENTRY(name, ...) visit(#name, to.name, from.name, from.name != nullptr);
  ENTRY(attention_merge)
  CPUSERVE_KERNELS(ENTRY)
  ENTRY(probe_read)
#undef ENTRY
  for (int i = 0; i < kDotKinds; i++) {
    visit(kDotNames[i], to.probe_dot[i], from.probe_dot[i], from.probe_dot[i] != nullptr);
  }
}

struct Level {
  const char* name;
  KernelTable table{};
  std::vector<KernelEntry> entries;
};

template <class Function>
void replace(Function*& to, Function* from) {
  to = from;
}
// Replaces a linear kernel by the kernel of a higher ISA level. For up to few_rows rows,
// the new kernel uses the function `product` of the lower level. If `pack` of the new kernel
// is null, the new kernel reads the same packed panels, and keeps `pack` of the lower level.
void replace(LinearKernel& to, const LinearKernel& from) {
  const LinearKernel below = to;
  to = from;
  if (from.few_rows > 0) to.few_product = below.product;
  if (from.pack) return;
  to.panel_bytes = below.panel_bytes;
  to.pack = below.pack;
  to.row = below.row;
}
// Replaces an attention kernel by the kernel of a higher ISA level.
// Heads wider than widest_head keep the kernel of the lower level.
void replace(AttentionKernel& to, const AttentionKernel& from) {
  const auto below = to.attend;
  to = from;
  to.attend_wider = below;
}

// Replaces the entries of the kernel table of `level` that an ISA unit defines,
// and records the level of this unit as the provider of these entries.
void lay_over(Level& level, const Unit& unit) {
  size_t next = 0;
  const bool empty = level.entries.empty();
  for_each_entry(level.table, *unit.own,
                 [&](const char* name, auto& to, const auto& from, bool present) {
                   if (empty) level.entries.push_back({name, nullptr});
                   if (present) {
                     replace(to, from);
                     level.entries[next].level = unit.level;
                   }
                   next++;
                 });
  level.name = level.table.isa = unit.level;
}

// Returns the level that `name` extends. If this build does not have that level,
// returns the next lower level in `levels`. Returns nullptr for levels that extend "scalar":
// they define every kernel themselves, so that no kernel runs without vectors.
const Level* base_of(std::string_view name, const std::vector<Level>& levels) {
  for (std::string base = isa_level_base(name); !base.empty(); base = isa_level_base(base)) {
    if (base == "scalar") break;
    for (const Level& level : levels) {
      if (base == level.name) return &level;
    }
  }
  return nullptr;
}

std::vector<Level> merge_levels() {
  std::vector<Level> levels;
  for (const Unit& unit : units()) {
    const Level* base = base_of(unit.level, levels);
    Level level = base ? *base : Level{};
    lay_over(level, unit);
    levels.push_back(std::move(level));
  }
  return levels;
}

const std::vector<Level>& all_levels() {
  static const std::vector<Level> levels = merge_levels();
  return levels;
}

const Level* find_level(std::string_view name) {
  for (const Level& level : all_levels()) {
    if (name == level.name) return &level;
  }
  return nullptr;
}

}  // namespace

std::vector<const char*> compiled_levels() {
  std::vector<const char*> names;
  for (const Level& level : all_levels()) names.push_back(level.name);
  return names;
}

const KernelTable* find_kernels(std::string_view level) {
  const Level* found = find_level(level);
  return found ? &found->table : nullptr;
}

std::vector<KernelEntry> kernel_entries(std::string_view level) {
  const Level* found = find_level(level);
  return found ? found->entries : std::vector<KernelEntry>{};
}

}  // namespace cpuserve
