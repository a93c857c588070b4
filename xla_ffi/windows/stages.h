// The stages of a call whose arrays may be in windows that the core cannot have: they ask XLA for
// windows, by an extension of its FFI that only new headers describe. The other stages are the
// core's, as for calls without windows.
//
// Prepare asks, on every rank for the same: ranks make windows together. Initialize looks up what
// XLA has made for this execution and tells the core. Where XLA has no such extension, or another
// version of it, both do what they can without: the call copies.
#pragma once

#include <cstdint>

#include "collective/gpu/windows.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfabric {

// Attributes beside those of the core: `positions`, the members of `group_sizes` groups as
// positions in the list of the executable's devices, and `windows`, which arrays are to be in
// windows.
inline constexpr int64_t kWindowOfOperand = 1;
inline constexpr int64_t kWindowOfResult = 2;

// XLA's communicators are told apart by this number; its own have small ones.
inline constexpr int64_t kCommunicationId = 0x6a66;

// Names the core that runs the calls: before the first of them. The error says that it is of
// another build.
Status ConnectCore(const WindowCore* core);

// Of the extension that is compiled in; 129 is its type.
struct ExtensionVersion {
  int32_t major, minor;
};
ExtensionVersion CompiledExtension();

extern "C" XLA_FFI_Error* WindowsPrepare(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* WindowsInitialize(XLA_FFI_CallFrame*);

}  // namespace jaxfabric
