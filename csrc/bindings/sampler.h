// Declares the bindings of the sampler, which are a part of the class Executor.
#pragma once
#include "bindings/module.h"
#include "runtime/executor.h"

namespace cpuserve {

// Defines the methods of Executor that admit and release requests.
void define_sampler(py::class_<Executor>& executor);

}  // namespace cpuserve
