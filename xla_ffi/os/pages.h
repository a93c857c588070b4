// How the pages come into being that results are written to: XLA allocates each anew.
#pragma once

#include <cstddef>
#include <span>

namespace jaxfabric {

// From this size on a huge page is worth a system call.
inline constexpr size_t kHugeArrayBytes = 4 * 1024 * 1024;

// Asks for huge pages where `memory` has not been touched yet: a small one costs as much as copying
// it several times. What the system does not grant costs time only.
void TryPreferHugePages(std::span<std::byte> memory);

// Has malloc keep freed blocks of up to 32 MiB for the next results instead of giving their pages
// back each time. It comes to this by itself once a program frees a block of that size; what the
// user has set for it (MALLOC_TRIM_THRESHOLD_ and others) stays.
void KeepFreedMemory();

}  // namespace jaxfabric
