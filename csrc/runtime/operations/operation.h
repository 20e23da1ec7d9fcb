// An operation of a program has four parts,
// which are in the header and the source file of its family:
//
//   struct GateOp                            its name, its fields, and which of them Python sets
//   void prepare(GateOp&, Declarations&)     checks the fields when the operation is added;
//                                            throws std::invalid_argument for a wrong field;
//                                            computes fields that follow from other fields
//   Accesses accesses(const GateOp&, ...)    the values that it reads and writes
//   void run(const GateOp&, Worker&)         the share of one thread in a step
//
// An operation has the name of its method of _C.Program, and a field has the name of its argument.
// The header of a family ends with a list of the operations; operations.h joins these lists.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "runtime/declarations.h"

namespace cpuserve {

struct Worker;

// Ids of data that are not values of the program, but that operations read and write like values.
constexpr Id kRouting = -2;  // the order of the routed rows (Routing)
constexpr Id kCache = -3;    // keys and values
constexpr Id kQueue = -4;    // the queue of tasks, which serves one operation between two barriers
constexpr Id kIndexCache = -5;  // index keys

// A value (or other data) that an operation reads or writes. If a thread touches only the rows
// of its own tokens, `rows` is the number of rows of the value for each token.
// If `rows` is 0, a thread may touch any row.
struct Access {
  Id id;
  int64_t rows;
};
using AccessList = std::vector<Access>;

// The values that an operation reads and writes.
// Executor::tap returns the inputs in the order of `reads`.
struct Accesses {
  AccessList reads, writes;  // a value that is changed in place is in both lists

  bool claim() const {  // returns whether threads claim tasks of the operation
    return std::any_of(writes.begin(), writes.end(),
                       [](const Access& a) { return a.id == kQueue; });
  }
};

constexpr Access own(Id id) { return {id, 1}; }  // a thread touches only its own rows
constexpr Access any(Id id) { return {id, 0}; }  // a thread may touch any row

// Returns the accesses of an operation that reads `from` and changes `to` in place;
// each thread changes only the rows of its own tokens.
inline Accesses changes(AccessList from, Id to) {
  from.push_back(own(to));
  return {std::move(from), {own(to)}};
}

// Returns the accesses of an operation of tasks that threads claim, which read `from`, write `to`.
inline Accesses claimed(const AccessList& from, const AccessList& to) {
  Accesses out{from, to};
  out.writes.push_back(any(kQueue));
  return out;
}

inline AccessList with(AccessList list, bool more, Access one) {
  if (more) list.push_back(one);
  return list;
}

// Returns the bytes of scratch that an operation needs on each thread.
// A family overloads this function for operations that need more than the common minimum
// (most_scratch_bytes in executor.cpp).
template <class Op>
size_t scratch_bytes(const Op&) {
  return 0;
}

// The types of the operations of a family, as a list.
template <class... Op>
struct Family {};

}  // namespace cpuserve
