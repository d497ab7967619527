// The parts of the Python module `_C`: each file binds what belongs to one subject.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <string>

#include "families.h"
#include "kernels.h"

using KernelsClass = pybind11::class_<Kernels, std::shared_ptr<Kernels>>;

// `Kernels.plan`, and the class `Plan` with its `run`.
void bind_plans(pybind11::module_& module, KernelsClass& kernels);

// `Kernels.block_score_plan`, `pooled_tail_plan` and `block_lists`, and the classes of the two plans.
void bind_block_selection(pybind11::module_& module, KernelsClass& kernels);

// Throws std::invalid_argument where this module has no such family.
const Family& family_of(const std::string& name);

// Sets the Python error for an exception of this module.
void translate(std::exception_ptr exception);
