// From the caches of a core to the work sizes of the kernels, and the files that list caches.
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "cpu/caches.h"
#include "main.h"
#include "runtime/work_sizes.h"

using namespace cpuserve;

namespace {

WorkSizes sizes_of(int64_t l1d, int64_t l2) { return work_sizes_for({l1d, l2, 0}, "another"); }
bool same(const WorkSizes& a, const WorkSizes& b) {
  for (const WorkSizeField& f : kWorkSizeFields) {
    if (a.*f.value != b.*f.value) return false;
  }
  return true;
}
bool refused(const WorkSizes& sizes) {
  try {
    check_work_sizes(sizes);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

// The files of /sys/devices/system/cpu for one CPU; removed at the end of the test.
class Folder {
 public:
  Folder() : root_(std::filesystem::temp_directory_path() / "cpuserve_test_work_sizes") {
    std::filesystem::remove_all(root_);
  }
  ~Folder() { std::filesystem::remove_all(root_); }
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = root_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  void cache(int cpu, int index, const char* level, const char* type, const char* size,
             const char* shared) const {
    const std::string at =
        "cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index) + "/";
    write(at + "level", level);
    write(at + "type", type);
    write(at + "size", size);
    write(at + "shared_cpu_list", shared);
  }
  std::string root() const { return root_.string(); }

 private:
  std::filesystem::path root_;
};

}  // namespace

TEST(unknown_caches_keep_the_defaults) {
  EXPECT(same(sizes_of(0, 0), WorkSizes{}));
  EXPECT(!refused(WorkSizes{}));
}

TEST(a_core_with_48_kb_and_1_mb_or_more_has_the_measured_sizes) {
  for (const int64_t l2 : {1 << 20, 1280 << 10, 2 << 20, 64 << 20}) {
    EXPECT(same(sizes_of(48 << 10, l2), WorkSizes{}));
  }
}

TEST(smaller_caches_get_smaller_parts_that_fit_them) {
  const WorkSizes zen = sizes_of(32 << 10, 512 << 10), client = sizes_of(32 << 10, 256 << 10);
  EXPECT(zen.strip_bytes == 128 << 10 && zen.rows == 256 && zen.attention_bytes == 128 << 10);
  EXPECT(zen.near_bytes == 16 << 10 && zen.ahead_bytes == 8 << 10);
  EXPECT(client.strip_bytes == 64 << 10 && client.rows == 128);
  for (int64_t l2 = 128 << 10; l2 <= 4 << 20; l2 += 96 << 10) {
    for (int64_t l1 = 16 << 10; l1 <= 128 << 10; l1 += 12 << 10) {
      const WorkSizes s = sizes_of(l1, l2);
      EXPECT(!refused(s));
      // A strip and the sums of its rows leave some of L2 to the rows that pass.
      EXPECT(l2 < 192 << 10 || s.strip_bytes + s.rows * 256 < l2 / 2 + (1 << 10));
      EXPECT(s.near_bytes <= l1 / 2 && s.ahead_bytes <= l1 / 4);
    }
  }
}

TEST(cores_of_intel_take_fewer_float_rows_in_one_pass) {
  const CacheSizes caches{48 << 10, 2 << 20, 0};
  WorkSizes intel = work_sizes_for(caches, "GenuineIntel");
  EXPECT(intel.float_pass_rows == 6 && WorkSizes{}.float_pass_rows == 16);
  intel.float_pass_rows = WorkSizes{}.float_pass_rows;
  EXPECT(same(intel, work_sizes_for(caches, "another")));
}

TEST(cores_of_amd_fetch_passes_and_keys_to_l2_and_keep_blocks_there) {
  for (const CacheSizes& caches : {CacheSizes{32 << 10, 1 << 20, 0}, CacheSizes{}}) {
    WorkSizes amd = work_sizes_for(caches, "AuthenticAMD");
    const WorkSizes other = work_sizes_for(caches, "another");
    EXPECT(!refused(amd));
    EXPECT(amd.float_pass_rows == 12 && amd.far_pass_rows == kMostPassRows);
    EXPECT(amd.near_blocks == 0 && amd.near_keys == 0);
    amd.float_pass_rows = other.float_pass_rows;
    amd.far_pass_rows = other.far_pass_rows;
    amd.near_blocks = other.near_blocks;
    amd.near_keys = other.near_keys;
    EXPECT(same(amd, other));
  }
}

TEST(sizes_that_a_kernel_cannot_work_with_are_refused) {
  for (const WorkSizeField& f : kWorkSizeFields) {
    for (const int32_t value : {-1, 1 << 30}) {
      WorkSizes sizes;
      sizes.*f.value = value;
      EXPECT(refused(sizes));
    }
  }
  WorkSizes odd;
  odd.rows = 33;
  EXPECT(refused(odd));
}

TEST(a_cache_that_cores_share_counts_in_equal_parts) {
  const Folder folder;
  // An E core of Alder Lake, one of four behind 2 MB, and a P core with two threads.
  folder.write("cpu16/topology/thread_siblings_list", "16");
  folder.cache(16, 0, "1", "Data", "32K", "16");
  folder.cache(16, 1, "1", "Instruction", "64K", "16");
  folder.cache(16, 2, "2", "Unified", "2048K", "16-19");
  folder.cache(16, 3, "3", "Unified", "30M", "0-23");
  folder.write("cpu2/topology/thread_siblings_list", "2-3");
  folder.cache(2, 0, "1", "Data", "48K", "2-3");
  folder.cache(2, 1, "2", "Unified", "1280K", "2-3");
  const CacheSizes slow = read_cache_sizes(16, folder.root());
  EXPECT(slow.l1d == 32 << 10 && slow.l2 == 512 << 10 && slow.l3 == 30 << 20);
  const CacheSizes fast = read_cache_sizes(2, folder.root());
  EXPECT(fast.l1d == 48 << 10 && fast.l2 == 1280 << 10 && fast.l3 == 0);
}

TEST(files_that_make_no_sense_give_unknown_caches_or_sane_ones) {
  const Folder folder;
  folder.cache(0, 0, "1", "Data", "-48K", "x");
  folder.cache(0, 1, "2", "Unified", "many", "9-");
  folder.cache(0, 2, "7", "Unified", "4M", "0");
  EXPECT(!refused(work_sizes_for(read_cache_sizes(0, folder.root()), "")));
  EXPECT(count_cpus("0-3,8") == 5 && count_cpus("7") == 1 && count_cpus("") == 0);
  EXPECT(count_cpus("x") == 0 && count_cpus("0-1,x") == 0);
}

TEST(this_machine_has_sizes_that_kernels_can_work_with) {
  EXPECT(!refused(work_sizes_for(read_cache_sizes(0), "")));
}
