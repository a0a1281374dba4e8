#pragma once

#include <nanobind/nanobind.h>

namespace jaxmagi {

// Adds the planner's functions to a module. They release the GIL while they compute.
void bind_planning(nanobind::module_& m);

}  // namespace jaxmagi
