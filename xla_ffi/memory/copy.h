// Copies between buffers of one process (or memory it has mapped).
#pragma once

#include <cstddef>

#include "memory/reduce.h"

namespace jaxfabric {

// memcpy; with kNonTemporal the stores bypass the cache and a fence follows.
void Copy(void* destination, const void* source, size_t bytes, Store store = Store::kCached);

// Bytes from which non-temporal stores win: the last-level cache share of one core, read once from
// sysfs (8 MiB where it cannot be read).
size_t NonTemporalThreshold();

}  // namespace jaxfabric
