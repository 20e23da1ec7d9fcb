// The parts of an operation of a program. Two files of its family have all of them:
//
//   struct GateOp                            its name, its fields, and fields() for the binding
//   void prepare(GateOp&, Program&)          checks the fields when the operation is added, and
//                                            sets those that follow; throws std::invalid_argument
//   Accesses accesses(const GateOp&, ...)    the values that it reads and writes
//   void run(const GateOp&, Worker&)         the share of one thread in a step
//
// Operations and fields are called as in the methods of _C.Program. A family ends with the list of
// its operations; operations.h joins the lists.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace cpuserve {

class Program;
struct Worker;

using Id = int32_t;
constexpr Id kNone = -1;

// A field that the caller of an operation passes. The caller may leave it out if the struct
// has a default for it.
template <class Op, class T, bool kDefault>
struct Field {
  using Type = T;
  static constexpr bool kHasDefault = kDefault;
  const char* name;
  T Op::*member;
};
template <class Op, class T>
constexpr Field<Op, T, false> field(const char* name, T Op::*member) {
  return {name, member};
}
template <class Op, class T>
constexpr Field<Op, T, true> optional(const char* name, T Op::*member) {
  return {name, member};
}

// Data that operations read and write like values, although the program has no value for it.
constexpr Id kRouting = -2;  // places of routed rows
constexpr Id kCache = -3;    // keys and values
constexpr Id kQueue = -4;    // of tasks: a phase of the queue serves one operation

// One that an operation touches. rows > 0: threads divide `rows` rows for each token, and a thread
// touches its own rows alone. 0: a thread may touch any row.
struct Access {
  Id id;
  int64_t rows;
};
using AccessList = std::vector<Access>;

// Executor::tap reports reads in the same order.
struct Accesses {
  AccessList reads, writes;  // a value changed in place is in both

  bool claim() const {  // whether threads claim tasks
    return std::any_of(writes.begin(), writes.end(),
                       [](const Access& a) { return a.id == kQueue; });
  }
};

constexpr Access own(Id id) { return {id, 1}; }  // a row for each token
constexpr Access any(Id id) { return {id, 0}; }

// An operation that changes own rows of `to`, and reads these and own rows of `from`.
inline Accesses changes(AccessList from, Id to) {
  from.push_back(own(to));
  return {std::move(from), {own(to)}};
}

// An operation that reads any rows of `from`, and that threads claim.
inline Accesses claimed(const AccessList& from, const AccessList& to) {
  Accesses out{from, to};
  out.writes.push_back(any(kQueue));
  return out;
}

inline AccessList with(AccessList list, bool more, Access one) {
  if (more) list.push_back(one);
  return list;
}

// Bytes of a thread's scratch that an operation needs, if it is more than others need; a family
// overloads it.
template <class Op>
size_t scratch_bytes(const Op&) {
  return 0;
}

// The operations of a family.
template <class... Op>
struct Family {};

}  // namespace cpuserve
