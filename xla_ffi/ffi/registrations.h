// The table of FFI targets, built explicitly: nothing registers itself.
#pragma once

#include <span>

#include "ffi/handler.h"

namespace jaxfabric {

struct Registration {
  const char* target;
  XLA_FFI_Handler* instantiate;  // null: the handler has no state
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* initialize = nullptr;  // null: the handler has no such stage
};

std::span<const Registration> Registrations();
// The same targets, for platform "CUDA".
std::span<const Registration> CudaRegistrations();

}  // namespace jaxfabric
