#include <algorithm>
#include <cstdlib>

#include "cpu/caches.h"
#include "cpu/features.h"
#include "main.h"

using namespace cpuserve;

namespace {

CpuInfo cpu_with(std::vector<std::string> features) {
  CpuInfo cpu;
  cpu.features = std::move(features);
  return cpu;
}

bool contains(const std::vector<std::string>& list, const char* name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

// A Xeon with AMX: every register state is saved, and every bit that is read is set.
X86Source::Regs all_bits(uint32_t, uint32_t) { return {~0u, ~0u, ~0u, ~0u}; }
uint64_t all_saved() { return ~uint64_t{0}; }
uint64_t no_zmm_saved() { return 0x7; }
int permissions_asked = 0;
bool granted() { return ++permissions_asked; }
bool refused() { return ++permissions_asked == 0; }

bool lists(const std::vector<std::string>& features, const char* name) {
  return std::find(features.begin(), features.end(), name) != features.end();
}

}  // namespace

TEST(amx_is_listed_only_with_the_operating_systems_permission) {
  permissions_asked = 0;
  const auto with = x86_features({all_bits, all_saved, granted});
  EXPECT(permissions_asked == 1);
  for (const char* name : {"amx_tile", "amx_int8", "amx_bf16"}) EXPECT(lists(with, name));
  const auto without = x86_features({all_bits, all_saved, refused});
  for (const char* name : {"amx_tile", "amx_int8", "amx_bf16"}) EXPECT(!lists(without, name));
  EXPECT(lists(without, "avx512_bf16"));
  const X86Source forbidden{all_bits, all_saved, refused}, unsaved{all_bits, no_zmm_saved, granted};
  EXPECT(!lacks_permission_for_tiles({all_bits, all_saved, granted}, with));
  EXPECT(lacks_permission_for_tiles(forbidden, without));
  EXPECT(lacks_permission_for_tiles(unsaved, x86_features(unsaved)));
  permissions_asked = 0;  // not requested if tiles are not saved, or the CPU has none
  EXPECT(!lists(x86_features({all_bits, no_zmm_saved, granted}), "amx_tile"));
  const auto no_bits = [](uint32_t, uint32_t) { return X86Source::Regs{}; };
  EXPECT(x86_features({no_bits, all_saved, granted}).empty());
  EXPECT(!lacks_permission_for_tiles({no_bits, all_saved, granted}, {}));
  EXPECT(permissions_asked == 0);
}

TEST(what_the_operating_system_does_not_save_is_not_listed) {
  const auto features = x86_features({all_bits, no_zmm_saved, granted});
  EXPECT(lists(features, "avx2") && !lists(features, "avx512f") && !lists(features, "avx512_bf16"));
}

TEST(apple_silicon_from_m2_on_has_bf16) {
  const auto m1 = apple_features([](const char*) { return false; });
  const auto m2 = apple_features([](const char* key) {
    const std::string name = key;
    return name == "hw.optional.arm.FEAT_BF16" || name == "hw.optional.arm.FEAT_I8MM";
  });
  EXPECT(m1 == (std::vector<std::string>{"asimd", "asimddp"}));
  EXPECT(lists(m2, "bf16") && lists(m2, "i8mm") && lists(m2, "asimddp"));
#if defined(__aarch64__)
  EXPECT(supported_isa_levels(cpu_with(m1)).back() == "neon_dotprod");
  EXPECT(supported_isa_levels(cpu_with(m2)).back() == "neon_bf16");
#endif
}

#if defined(__aarch64__)
TEST(matrix_products_of_int8_and_of_bf16_are_detected_apart) {
  const auto highest = [](std::vector<std::string> more) {
    more.insert(more.end(), {"asimd", "asimddp"});
    return supported_isa_levels(cpu_with(more)).back();
  };
  EXPECT(highest({}) == "neon_dotprod");  // Graviton 2, Ampere Altra
  EXPECT(highest({"i8mm"}) == "neon_i8mm");
  EXPECT(highest({"i8mm", "bf16", "sve"}) == "neon_bf16");  // Graviton 3 and 4, Grace
  EXPECT(highest({"bf16"}) == "neon_dotprod");
}
#endif

TEST(scalar_runs_on_a_cpu_without_any_feature) {
  EXPECT(supported_isa_levels(cpu_with({})) == std::vector<std::string>{"scalar"});
}

// Levels are a tree: a CPU can have avx512_vnni without avx_vnni, but no level without its base.
TEST(supported_levels_are_in_the_known_order_and_stand_on_their_bases) {
  const std::vector<std::string> here = supported_isa_levels(cpu_info());
  EXPECT(!here.empty() && here.front() == "scalar");
  std::vector<std::string> in_order;
  for (const std::string& level : known_isa_levels()) {
    if (contains(here, level.c_str())) in_order.push_back(level);
  }
  EXPECT(here == in_order);
  for (const std::string& level : here) {
    const std::string base = isa_level_base(level);
    EXPECT(base.empty() || contains(here, base.c_str()));
  }
}

TEST(this_cpu_is_described) {
  const CpuInfo& cpu = cpu_info();
  EXPECT(cpu.arch == "x86_64" || cpu.arch == "aarch64");
  EXPECT(!cpu.features.empty());
  const CacheSizes caches = read_cache_sizes(0);
  EXPECT(caches.l1d == 0 || (caches.l1d >= 8 << 10 && caches.l1d <= 1 << 20));
  EXPECT(caches.l2 == 0 || caches.l2 >= caches.l1d);
}

#if defined(__x86_64__)
TEST(one_missing_feature_ends_the_ladder) {
  const std::vector<std::string> haswell{"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"};
  EXPECT(contains(supported_isa_levels(cpu_with(haswell)), "avx2"));
  for (size_t i = 0; i < haswell.size(); i++) {
    std::vector<std::string> without = haswell;
    without.erase(without.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT(!contains(supported_isa_levels(cpu_with(without)), "avx2"));
  }
}

TEST(a_level_above_a_missing_one_is_not_supported) {
  const auto levels = supported_isa_levels(
      cpu_with({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}));
  EXPECT(levels == std::vector<std::string>{"scalar"});
}
#endif
