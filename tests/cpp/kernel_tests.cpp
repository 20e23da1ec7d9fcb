// Runs the kernel tests:
//   kernel_tests [--isa LEVEL] [--own] [--filter SUBSTRING] [--part I/N] [--few] [--threads N]
//                [--unsigned] [--list] [--levels]
//
// Without --isa, at every level this CPU can run, and with --own. Exit 0 when every case passed, 1
// when one failed or none ran, 2 for a level that is not in this build or that this CPU cannot run.
// --list prints the names of the cases, --levels those of the levels in this build. With --threads,
// each of N threads runs all cases, and begins at another one. --part runs every Nth case from the
// Ith on (I from 1), --few fewer combinations of shapes. With --own, a level leaves out the kernels
// that it takes from the level below: they are the same code, which is tested there.
#include <algorithm>
#include <string_view>
#include <thread>

#include "cpu/features.h"
#include "harness.h"
#include "kernels/resolve.h"

namespace {

using cpuserve::CpuInfo;

bool contains(const std::vector<std::string>& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

// Returns why `isa` cannot be tested on `cpu`, or an empty string if it can.
std::string refusal(std::string_view isa, const CpuInfo& cpu) {
  if (!cpuserve::find_kernels(isa)) return "no level '" + std::string(isa) + "' in this build";
  if (!contains(cpuserve::supported_isa_levels(cpu), isa)) {
    return "this CPU cannot run level '" + std::string(isa) + "'";
  }
  return "";
}

std::vector<const char*> levels_here() {
  std::vector<const char*> levels;
  for (const char* level : cpuserve::compiled_levels()) {
    if (refusal(level, cpuserve::cpu_info()).empty()) levels.push_back(level);
  }
  return levels;
}

// Returns the table that `isa` extends in this build; nullptr if it brings every kernel itself.
const cpuserve::KernelTable* extended(std::string_view isa) {
  std::string base = cpuserve::isa_level_base(isa);
  while (!base.empty() && base != "scalar") {
    if (const cpuserve::KernelTable* table = cpuserve::find_kernels(base)) return table;
    base = cpuserve::isa_level_base(base);
  }
  return nullptr;
}

struct Totals {
  int passed = 0, failed = 0;
};

void run_case(const harness::Case& c, const cpuserve::KernelTable& table, Totals& totals) {
  harness::progress() = {c.name, table.isa, 0};
  c.run(table);
  const int failures = harness::progress().failures;
  if (failures) std::printf("FAIL %s [%s]: %d checks\n", c.name, table.isa, failures);
  (failures ? totals.failed : totals.passed)++;
}

// Which cases run: of those whose names contain `filter`, every one whose number is `part` of
// `parts`.
struct Choice {
  std::string filter;
  size_t part = 0, parts = 1;

  bool takes(size_t number) const {
    const char* name = harness::cases()[number].name;
    return number % parts == part && std::strstr(name, filter.c_str());
  }
};

// Reads "I/N", counted from 1. Returns false if it is something else.
bool read_part(const char* text, Choice& choice) {
  char after = 0;
  if (std::sscanf(text, "%zu/%zu%c", &choice.part, &choice.parts, &after) != 2) return false;
  return choice.part-- >= 1 && choice.part < choice.parts;
}

// Runs the chosen cases, beginning with the one at `first`.
Totals run_cases(const cpuserve::KernelTable& table, const Choice& choice, size_t first) {
  Totals totals;
  const std::vector<harness::Case>& cases = harness::cases();
  for (size_t i = 0; i < cases.size(); i++) {
    const size_t number = (first + i) % cases.size();
    if (choice.takes(number)) run_case(cases[number], table, totals);
  }
  return totals;
}

Totals run_threads(const cpuserve::KernelTable& table, const Choice& choice, size_t threads) {
  std::vector<Totals> of_thread(threads);
  const auto run = [&](size_t thread) {
    of_thread[thread] = run_cases(table, choice, harness::cases().size() * thread / threads);
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < threads; t++) others.emplace_back(run, t);
  run(0);
  for (std::thread& other : others) other.join();
  Totals all;
  for (const Totals& each : of_thread) {
    all.passed += each.passed;
    all.failed += each.failed;
  }
  return all;
}

}  // namespace

KERNEL_TEST(forced_level_is_the_one_that_runs) {
  const char* isa = harness::progress().isa;
  CHECK(cpuserve::find_kernels(isa) == &k);
  CHECK(std::string_view(k.isa) == isa);
  bool own = false;
  for (const cpuserve::KernelEntry& e : cpuserve::kernel_entries(isa)) {
    CHECK(e.level != nullptr);
    own |= e.level && std::string_view(e.level) == isa;
  }
  CHECK(own);  // a level that brings nothing of its own would test the one below twice
}

KERNEL_TEST(every_entry_comes_from_this_level_or_one_below) {
  const std::vector<const char*> levels = cpuserve::compiled_levels();
  const auto place = [&](std::string_view name) {
    return std::find(levels.begin(), levels.end(), name) - levels.begin();
  };
  for (const cpuserve::KernelEntry& e : cpuserve::kernel_entries(k.isa)) {
    if (e.level) CHECK(place(e.level) <= place(k.isa));
  }
}

KERNEL_TEST(every_entry_of_another_level_is_that_of_the_level_below) {  // what --own relies on
  const cpuserve::KernelTable* base = extended(k.isa);
  const std::vector<cpuserve::KernelEntry> entries = cpuserve::kernel_entries(k.isa);
  const std::vector<cpuserve::KernelEntry> below =
      base ? cpuserve::kernel_entries(base->isa) : std::vector<cpuserve::KernelEntry>{};
  for (size_t i = 0; i < entries.size(); i++) {
    const char* level = entries[i].level;
    if (level == nullptr || std::string_view(level) == k.isa) continue;
    CHECK(i < below.size() && below[i].level && std::string_view(below[i].level) == level);
  }
}

KERNEL_TEST(unknown_level_is_refused) {
  CHECK(cpuserve::find_kernels("avx1024") == nullptr);
  CHECK(cpuserve::kernel_entries("").empty());
  CHECK(refusal("avx1024", cpuserve::cpu_info()).find("no level") == 0);
}

KERNEL_TEST(level_above_the_cpu_is_refused) {
  const CpuInfo plain;  // a CPU without any feature
  for (const char* level : cpuserve::compiled_levels()) {
    const bool scalar = std::string_view(level) == "scalar";
    CHECK(refusal(level, plain).empty() == scalar);
  }
}

int main(int argc, char** argv) {
  std::string isa;
  bool own = false;
  Choice choice;
  size_t threads = 1;
  for (int i = 1; i < argc; i++) {
    const std::string_view option = argv[i];
    if (option == "--list") {
      for (const harness::Case& c : harness::cases()) std::printf("%s\n", c.name);
      return 0;
    }
    if (option == "--levels") {
      for (const char* level : cpuserve::compiled_levels()) std::printf("%s\n", level);
      return 0;
    }
    if (option == "--unsigned") {
      harness::unsigned_bytes() = true;
    } else if (option == "--own") {
      own = true;
    } else if (option == "--few") {
      harness::few_shapes() = true;
    } else if (i + 1 < argc && option == "--isa") {
      isa = argv[++i];
    } else if (i + 1 < argc && option == "--filter") {
      choice.filter = argv[++i];
    } else if (i + 1 < argc && option == "--part" && read_part(argv[i + 1], choice)) {
      i++;
    } else if (i + 1 < argc && option == "--threads") {
      threads = std::max(1ul, std::strtoul(argv[++i], nullptr, 10));
    } else {
      std::fprintf(stderr,
                   "usage: kernel_tests [--isa LEVEL] [--own] [--filter SUBSTRING] [--part I/N] "
                   "[--few] [--threads N] [--unsigned] [--list] [--levels]\n");
      return 2;
    }
  }
  std::vector<const char*> levels = levels_here();
  if (!isa.empty()) {
    const std::string why = refusal(isa, cpuserve::cpu_info());
    if (!why.empty()) {
      std::fprintf(stderr, "kernel_tests: %s\n", why.c_str());
      return 2;
    }
    levels = {isa.c_str()};
  }
  Totals totals;
  for (const char* level : levels) {
    std::printf("level %s\n", level);
    if (own || isa.empty()) harness::below() = extended(level);
    const Totals here = run_threads(*cpuserve::find_kernels(level), choice, threads);
    totals.passed += here.passed;
    totals.failed += here.failed;
  }
  std::printf("%d passed, %d failed\n", totals.passed, totals.failed);
  return totals.failed || !totals.passed ? 1 : 0;
}
