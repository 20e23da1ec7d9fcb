#include <algorithm>
#include <cstdlib>

#include "cpu/features.h"
#include "main.h"

using namespace cpuserve;

namespace {

CpuInfo cpu_with(std::vector<std::string> features) {
  CpuInfo cpu;
  cpu.features = std::move(features);
  return cpu;
}

[[maybe_unused]] bool contains(const std::vector<std::string>& list, const char* name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

}  // namespace

TEST(scalar_runs_on_a_cpu_without_any_feature) {
  EXPECT(supported_isa_levels(cpu_with({})) == std::vector<std::string>{"scalar"});
}

TEST(supported_levels_are_the_beginning_of_the_known_ones) {
  const std::vector<std::string> known = known_isa_levels();
  const std::vector<std::string> here = supported_isa_levels(cpu_info());
  EXPECT(!here.empty() && here.size() <= known.size());
  EXPECT(std::equal(here.begin(), here.end(), known.begin()));
}

TEST(this_cpu_is_described) {
  const CpuInfo& cpu = cpu_info();
  EXPECT(cpu.arch == "x86_64" || cpu.arch == "aarch64");
  EXPECT(!cpu.features.empty());
  EXPECT(cpu.l1d_bytes == 0 || (cpu.l1d_bytes >= 8 << 10 && cpu.l1d_bytes <= 1 << 20));
  EXPECT(cpu.l2_bytes == 0 || cpu.l2_bytes >= cpu.l1d_bytes);
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
