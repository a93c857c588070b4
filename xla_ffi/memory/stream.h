// Stores that bypass the cache.
#pragma once

#include <cstddef>

namespace jaxfabric {

// The line that a streaming store fills as a whole.
inline constexpr size_t kStreamLine = 64;

// memcpy with streaming stores for the whole lines of `destination`. Not ordered with other stores
// until StreamFence().
void StreamCopy(void* destination, const void* source, size_t bytes);
void StreamFence();

}  // namespace jaxfabric
