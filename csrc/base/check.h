// The exceptions of this library; kernels and running steps throw none.
// std::invalid_argument (ValueError in Python) means a wrong argument, and std::runtime_error
// (RuntimeError) means that the operating system refuses a request.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace cpuserve {

template <class... Parts>
std::string sentence(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <class... Parts>
[[noreturn]] void fail_argument(const Parts&... parts) {
  throw std::invalid_argument(sentence(parts...));
}

template <class... Parts>
[[noreturn]] void fail_system(const Parts&... parts) {
  throw std::runtime_error(sentence(parts...));
}

// Throws std::invalid_argument unless `ok`.
// The message consists of `parts`, which are only formatted if the check fails.
template <class... Parts>
void check_argument(bool ok, const Parts&... parts) {
  if (!ok) fail_argument(parts...);
}

}  // namespace cpuserve
