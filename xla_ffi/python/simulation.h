// The cost model and the simulation of patterns, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxfabric {

void BindSimulation(nanobind::module_& module);

}  // namespace jaxfabric
