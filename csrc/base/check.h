// Errors outside the hot path: std::invalid_argument (ValueError in Python) for a wrong argument,
// std::runtime_error (RuntimeError) when the operating system refuses a request.
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

// The message is formatted only when the check fails.
template <class... Parts>
void check_argument(bool ok, const Parts&... parts) {
  if (!ok) fail_argument(parts...);
}

}  // namespace cpuserve
