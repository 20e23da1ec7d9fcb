#include "kernels/resolve.h"

#include <utility>

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
    "linear.dense_bf16", "linear.dense_f16",  "linear.dense_f32",
    "linear.w8_g32",     "linear.w4_g32",     "linear.w4m_g32",
    "linear.w4m_g128",   "linear.w8_channel", "linear.w8_channel_g128"};
constexpr int kLinearKinds = static_cast<int>(WeightKind::count);
static_assert(sizeof kLinearNames / sizeof *kLinearNames == kLinearKinds, "one name per kind");

// Calls visit(name, pointer to the entry in `to`, pointer to it in `from`, present) for every
// entry.
template <class Visit>
void for_each_entry(KernelTable& to, const KernelTable& from, Visit visit) {
  for (int i = 0; i < kLinearKinds; i++) {
    visit(kLinearNames[i], to.linear[i], from.linear[i], from.linear[i].run != nullptr);
  }
#define ENTRY(name) visit(#name, to.name, from.name, from.name != nullptr)
  ENTRY(rms_norm);
  ENTRY(layer_norm);
  ENTRY(convert);
  ENTRY(add);
  ENTRY(activation);
  ENTRY(rope_store);
  ENTRY(attention);
  ENTRY(attention_merge);
  ENTRY(sample);
  ENTRY(probe_read);
  ENTRY(probe_dot);
#undef ENTRY
}

struct Level {
  const char* name;
  KernelTable table{};
  std::vector<KernelEntry> entries;
};

// Overrides `level`'s entries with those a unit brings.
void lay_over(Level& level, const Unit& unit) {
  size_t next = 0;
  const bool empty = level.entries.empty();
  for_each_entry(level.table, *unit.own,
                 [&](const char* name, auto& to, const auto& from, bool present) {
                   if (empty) level.entries.push_back({name, nullptr});
                   if (present) {
                     to = from;
                     level.entries[next].level = unit.level;
                   }
                   next++;
                 });
  level.name = level.table.isa = unit.level;
}

std::vector<Level> merge_levels() {
  std::vector<Level> levels;
  for (const Unit& unit : units()) {
    const bool stands_alone = levels.empty() || std::string_view(levels.back().name) == "scalar";
    Level level = stands_alone ? Level{} : levels.back();
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
