#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "main.h"
#include "parallel/partition.h"
#include "parallel/team.h"

using namespace cpuserve;

namespace {

double process_cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Does what a library linked with -ffast-math does to the thread that loads it.
void flush_denormals(bool on) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(on ? 0x9fc0 : 0x1f80);
#elif defined(__aarch64__)
  const uint64_t mode = on ? uint64_t{1} << 24 : 0;
  asm volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

const int kTeamSizes[] = {1, 2, 3, 5};

}  // namespace

TEST(run_on_all_runs_every_thread_once) {
  for (int n : kTeamSizes) {
    Team team(n, {});
    team.run([&] {
      for (int round = 0; round < 50; round++) {
        std::vector<int> calls(static_cast<size_t>(n));  // plain: run_on_all() orders it
        team.run_on_all([&](int thread, int threads) noexcept {
          calls[static_cast<size_t>(thread)] += threads;
        });
        for (int c : calls) EXPECT(c == n);
      }
    });
  }
}

// Returns the error of `call` in a forked child, or "" if there is none. SIGALRM ends a child that
// hangs, which counts as "hangs".
template <class F>
std::string message_in_forked_child(const F& call) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const std::string said = testing::message_of<std::runtime_error>(call);
    const ssize_t written = write(ends[1], said.data(), said.size());
    _exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  close(ends[1]);
  int status = 0;
  waitpid(child, &status, 0);
  char text[256] = {};
  const ssize_t got = read(ends[0], text, sizeof text - 1);
  close(ends[0]);
  return WIFEXITED(status) && got >= 0 ? text : "hangs";
}

TEST(a_forked_child_is_refused_and_does_not_wait_for_threads_it_lacks) {
  Team team(2, {});
  const auto idle = [](int, int) noexcept {};
  team.run([&] {
    team.run_on_all(idle);
    const std::string said = message_in_forked_child([&] { team.run_on_all(idle); });
    EXPECT(said.find("forked") != std::string::npos);
    team.run_on_all(idle);  // the team of the parent still works
  });
}

#if !defined(CPUSERVE_TEAM_STD_THREAD)
TEST(a_forked_child_may_not_open_a_team_where_openmp_had_threads) {
  Team(2, {}).run([] {});
  const std::string said = message_in_forked_child([] { Team(2, {}).run([] {}); });
  EXPECT(said.find("forked") != std::string::npos);
}
#endif

TEST(writes_before_a_barrier_are_seen_behind_it) {
  for (int n : kTeamSizes) {
    Team team(n, {});
    std::atomic<int> wrong{0};
    team.run([&] {
      std::vector<int64_t> cells(static_cast<size_t>(n) * 8);
      team.run_on_all([&](int thread, int threads) noexcept {
        const size_t mine = static_cast<size_t>(thread) * 8;
        const size_t next = static_cast<size_t>((thread + 1) % threads) * 8;
        for (int64_t i = 1; i <= 400; i++) {
          cells[mine] = i;
          team.barrier(thread);
          if (cells[next] != i) wrong++;
          team.barrier(thread);
        }
      });
    });
    EXPECT(wrong == 0);
  }
}

TEST(writes_before_a_barrier_of_core_complexes_are_seen_behind_it) {
  for (const std::vector<int>& complexes :
       {std::vector<int>{7, 7, 7}, {0, 1, 2}, {4, 4, 9}, {5, 3, 5, 3, 3}, {1, 1, 1, 1, 8}}) {
    const int n = static_cast<int>(complexes.size());
    Team team(n, {}, false, {}, complexes);
    std::atomic<int> wrong{0};
    team.run([&] {
      std::vector<int64_t> cells(static_cast<size_t>(n) * 8);
      for (int job = 0; job < 3; job++) {
        team.run_on_all([&](int thread, int threads) noexcept {
          for (int64_t i = 1; i <= 100; i++) {
            cells[static_cast<size_t>(thread) * 8] = i;
            team.barrier(thread);
            for (int other = 0; other < threads; other++) {
              if (cells[static_cast<size_t>(other) * 8] != i) wrong++;
            }
            team.barrier(thread);
          }
        });
      }
    });
    EXPECT(wrong == 0);
  }
}

TEST(a_team_needs_a_core_complex_for_each_thread) {
  EXPECT_THROWS(std::invalid_argument, "one core complex for each", Team(2, {}, false, {}, {0}));
}

void wait_for_a_late_thread(bool passive_waits) {
  Team team(2, {}, passive_waits);
  team.run([&] {
    int value = 0;  // plain: the barrier orders it
    team.run_on_all([&](int thread, int) noexcept {
      if (thread == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than any thread spins
        value = 7;
      }
      team.barrier(thread);
      if (thread == 0) value++;
    });
    EXPECT(value == 8);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // workers sleep meanwhile
    team.run_on_all([&](int thread, int) noexcept {
      if (thread == 1) value++;
    });
    EXPECT(value == 9);
  });
}

TEST(a_late_thread_is_waited_for) { wait_for_a_late_thread(false); }

TEST(a_late_thread_is_waited_for_asleep) { wait_for_a_late_thread(true); }

TEST(threads_take_no_signals_but_their_own_faults) {
  Team team(3, {});
  std::atomic<int> deaf{0}, told{0};
  team.run([&] {
    team.run_on_all([&](int thread, int) noexcept {
      sigset_t blocked;
      pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
      deaf += thread > 0 && sigismember(&blocked, SIGINT) && sigismember(&blocked, SIGTERM);
      told += !sigismember(&blocked, SIGSEGV) && !sigismember(&blocked, SIGBUS);
    });
  });
  EXPECT(deaf == 2);
  EXPECT(told == 3);
}

TEST(jobs_keep_denormals_whatever_the_caller_does) {
  const volatile float least = 1e-39f;  // a denormal; volatile, so that it is computed at run time
  for (int n : kTeamSizes) {
    Team team(n, {});
    std::atomic<int> kept{0};
    team.run([&] {
      flush_denormals(true);
      EXPECT(least * 0.5f == 0.0f);
      team.run_on_all([&](int, int) noexcept { kept += least * 0.5f != 0.0f; });
      EXPECT(least * 0.5f == 0.0f);  // the mode of the caller is restored
      flush_denormals(false);
    });
    EXPECT(kept == n);
  }
}

TEST(an_exception_of_main_leaves_the_region) {
  for (int n : kTeamSizes) {
    Team team(n, {});
    EXPECT_THROWS(std::domain_error, "from main",
                  team.run([] { throw std::domain_error("from main"); }));
    int calls = 0;
    team.run([&] { calls++; });  // and the team can be used again
    EXPECT(calls == 1);
  }
}

TEST(a_team_of_one_works_outside_run) {
  Team team(1, {});
  int calls = 0;
  team.run_on_all([&](int thread, int threads) noexcept { calls += threads + thread; });
  team.barrier(0);
  EXPECT(calls == 1);
}

TEST(a_larger_team_refuses_calls_outside_run) {
  Team team(2, {});
  EXPECT_THROWS(std::runtime_error, "inside Team.run", team.run_on_all([](int, int) noexcept {}));
}

TEST(the_time_that_threads_wait_for_others_is_counted) {
  for (int n : {1, 3}) {
    Team team(n, {});
    EXPECT(team.waited_ns() == 0);
    const int64_t start = now_ns();
    team.run([&] {
      // A thread may lose its core before it waits, so a single round may have no wait.
      for (int round = 0; round < (n == 1 ? 10 : 1000) && team.waited_ns() == 0; round++) {
        team.run_on_all([&](int thread, int) noexcept {
          const timespec nap{0, 5'000'000};
          if (thread == 1) nanosleep(&nap, nullptr);
          team.barrier(thread);
        });
      }
    });
    const int64_t waited = team.waited_ns();
    EXPECT((waited > 0) == (n > 1));
    EXPECT(waited <= n * (now_ns() - start));
    team.run([&] { team.run_on_all([](int, int) noexcept {}); });
    EXPECT(team.waited_ns() >= waited);  // a counter
  }
}

TEST(a_call_from_another_thread_is_refused) {
  Team team(2, {});
  std::string message;
  team.run([&] {
    std::thread other([&] {
      message = testing::message_of<std::runtime_error>(
          [&] { team.run_on_all([](int, int) noexcept {}); });
    });
    other.join();
  });
  EXPECT(message.find("thread that called Team.run") != std::string::npos);
}

TEST(running_twice_is_refused) {
  Team team(2, {});
  team.run([&] { EXPECT_THROWS(std::runtime_error, "already running", team.run([] {})); });
}

TEST(wrong_sizes_and_cpus_are_refused) {
  EXPECT_THROWS(std::invalid_argument, "threads", Team(0, {}));
  EXPECT_THROWS(std::invalid_argument, "list of CPUs for each", Team(2, CpuSets{{0}}));
  EXPECT_THROWS(std::invalid_argument, "is empty", Team(1, CpuSets{{}}));
  EXPECT_THROWS(std::invalid_argument, "have 3", Team(4, {}, false, {1, 2}));
  EXPECT_THROWS(std::invalid_argument, "at least 1 thread", Team(2, {}, false, {2, 0}));
#if defined(__linux__)
  EXPECT_THROWS(std::invalid_argument, "CPU 1000", Team(1, CpuSets{{1000}}));
#endif
}

#if defined(__linux__)
TEST(threads_are_pinned_inside_run_and_freed_behind_it) {
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof before, &before);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &before)) cpu++;
  Team team(2, CpuSets{{cpu}, {cpu}});
  team.run([&] {
    team.run_on_all([](int, int) noexcept {});
    EXPECT((team.placement() == std::vector<int>{cpu, cpu}));
  });
  sched_getaffinity(0, sizeof after, &after);
  EXPECT(CPU_EQUAL(&before, &after));
}

TEST(threads_that_share_a_list_of_cpus_are_bound_to_all_of_them) {
  cpu_set_t before;
  sched_getaffinity(0, sizeof before, &before);
  std::vector<int> all;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (CPU_ISSET(cpu, &before)) all.push_back(cpu);
  }
  Team team(3, CpuSets{all, all, {all.front()}}, false, {2, 1});
  team.run([&] {
    std::vector<int> counts(3), first(3);
    team.run_on_all([&](int thread, int) noexcept {
      cpu_set_t mine;
      sched_getaffinity(0, sizeof mine, &mine);
      counts[static_cast<size_t>(thread)] = CPU_COUNT(&mine);
      first[static_cast<size_t>(thread)] = CPU_ISSET(all.front(), &mine);
    });
    const int size = static_cast<int>(all.size());
    EXPECT((counts == std::vector<int>{size, size, 1}));
    EXPECT((first == std::vector<int>{1, 1, 1}));
    const std::vector<int> nodes = team.nodes_of_ranks();
    EXPECT(nodes[1] >= 0);
    EXPECT(nodes[0] == nodes[1] || nodes[0] == -1);  // -1 where the machine has several nodes
  });
}

TEST(an_idle_team_uses_no_cpu) {
  Team team(3, {});
  team.run([&] {
    team.run_on_all([](int, int) noexcept {});
    const double before = process_cpu_seconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    // Bounded waiting costs at most 400 us a worker before it sleeps.
    EXPECT(process_cpu_seconds() - before < 0.03);
  });
}
#endif
