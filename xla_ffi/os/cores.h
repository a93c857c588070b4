// The CPU cores that this process may run on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace jaxfabric {

// Numbers of the cores in the calling thread's affinity mask, ascending; empty if unknown.
std::vector<int64_t> UsableCores();

// The core that the calling thread runs on just now; a few nanoseconds.
uint64_t CurrentCore();

// A moment of a loop that waits for another core: about 15 ns.
inline void CpuPause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Cores' worth of time that the control group grants, rounded up; `cgroup_root` is /sys/fs/cgroup
// or a stand-in. Empty where there is no limit or it cannot be read.
std::optional<int64_t> CoreQuota(const std::string& cgroup_root);

}  // namespace jaxfabric
