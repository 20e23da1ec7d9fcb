// A small test framework: TEST(name) { EXPECT(...); }, and main() runs all tests.
#pragma once
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

namespace testing {

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
inline int& failures() {
  static int count = 0;
  return count;
}
struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline void expect(bool ok, const char* text, const char* file, int line) {
  if (ok) return;
  failures()++;
  std::printf("%s:%d: expected %s\n", file, line, text);
}

// Returns the message of the E that `f` throws, or "" if it throws nothing or something else.
template <class E, class F>
std::string message_of(const F& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  } catch (...) {
  }
  return "";
}

// Runs the tests whose names contain `filter`.
inline int run_all(const char* filter) {
  int failed = 0, ran = 0;
  for (const Test& t : tests()) {
    if (!std::strstr(t.name, filter)) continue;
    const int before = failures();
    try {
      t.run();
    } catch (const std::exception& e) {
      failures()++;
      std::printf("%s threw: %s\n", t.name, e.what());
    }
    ran++;
    failed += failures() != before;
    std::printf("%s %s\n", failures() == before ? "ok  " : "FAIL", t.name);
  }
  std::printf("%d passed, %d failed\n", ran - failed, failed);
  return failed || !ran ? 1 : 0;
}

}  // namespace testing

#define TEST(name)                                                     \
  static void name();                                                  \
  static const testing::Registration name##_registration(#name, name); \
  static void name()
#define EXPECT(condition) testing::expect((condition), #condition, __FILE__, __LINE__)
#define EXPECT_THROWS(Exception, part, ...)                                                 \
  testing::expect(                                                                          \
      testing::message_of<Exception>([&] { __VA_ARGS__; }).find(part) != std::string::npos, \
      #__VA_ARGS__ " to throw " #Exception " about " part, __FILE__, __LINE__)
