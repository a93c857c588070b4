#include "os/pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

namespace jaxfabric {

void TryPreferHugePages(std::span<std::byte> memory) {
  constexpr uintptr_t kPage = 64 * 1024;  // of any system a multiple
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const uintptr_t end = (address + memory.size()) / kPage * kPage;
  if (begin < end) (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

void KeepFreedMemory() {
  // glibc's largest block that can raise its thresholds is 32 MiB with what it adds to a block.
  constexpr size_t kBlock = 32 * 1024 * 1024 - 64 * 1024;
  void* volatile block = std::malloc(kBlock);  // volatile: compilers leave out what is not used
  std::free(block);
}

}  // namespace jaxfabric
