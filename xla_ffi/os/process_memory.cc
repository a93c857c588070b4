#include "os/process_memory.h"

#include <sys/uio.h>

#include <cerrno>

namespace jaxfabric {

Status ReadProcessMemory(pid_t pid, uint64_t address, void* destination, size_t bytes) {
  auto* to = static_cast<std::byte*>(destination);
  // One call moves at most 2 GiB less a page, and may stop early.
  while (bytes > 0) {
    const iovec local{to, bytes};
    const iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t moved = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) {
      const int error = errno;
      const std::string what = StrCat("reading ", bytes, " bytes of process ", pid);
      // ENOSYS is what some seccomp profiles answer instead of EPERM.
      if (error == ENOSYS) return Status(Code::kPermissionDenied, StrCat(what, ": not permitted"));
      if (error == EFAULT) {
        return Status(Code::kOutOfRange, StrCat(what, ": the memory is not mapped"));
      }
      return ErrnoStatus(what, error);
    }
    if (moved == 0) {
      return Status(Code::kUnavailable, StrCat("process ", pid, " gave no bytes of its memory"));
    }
    to += moved;
    address += static_cast<uint64_t>(moved);
    bytes -= static_cast<size_t>(moved);
  }
  return OkStatus();
}

}  // namespace jaxfabric
