// A lowered program: its declarations, and its operations as plain data.
#pragma once
#include <utility>
#include <vector>

#include "runtime/declarations.h"
#include "runtime/operations/operations.h"

namespace cpuserve {

class Program : public Declarations {
 public:
  using Declarations::Declarations;

  // Checks an operation and appends it.
  // Throws std::invalid_argument with the name of a wrong field.
  template <class Operation>
  void add(Operation op) {
    prepare(op, *this);
    ops_.emplace_back(std::move(op));
    num_ops_++;
  }

  const std::vector<Op>& ops() const { return ops_; }

 private:
  std::vector<Op> ops_;
};

}  // namespace cpuserve
