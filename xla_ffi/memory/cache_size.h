// The size of the CPU's caches as sysfs tells it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace jaxfabric {

// The bytes of the last-level cache divided by the cores that share it; `cpu_root` is
// /sys/devices/system/cpu or a stand-in. Empty where it cannot be read.
std::optional<size_t> LastLevelCacheShare(const std::string& cpu_root);

}  // namespace jaxfabric
