// Reading another process's memory without its help (process_vm_readv).
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace jaxfabric {

// Copies `bytes` bytes at `address` of process `pid` to `destination`. kUnavailable when the
// process is gone, kPermissionDenied where the kernel forbids it (seccomp, Yama, another user).
Status ReadProcessMemory(pid_t pid, uint64_t address, void* destination, size_t bytes);

}  // namespace jaxfabric
