#include "os/cores.h"

#include <sched.h>

#include <fstream>

namespace jaxfabric {

std::vector<int64_t> UsableCores() {
  std::vector<int64_t> cores;
  // The kernel refuses a mask that is smaller than its own, which has more than cpu_set_t's 1024
  // bits on the largest machines.
  constexpr size_t kMostCores = size_t{1} << 16;
  for (size_t count = CPU_SETSIZE; count <= kMostCores; count *= 4) {
    std::vector<cpu_set_t> sets(count / CPU_SETSIZE);
    const size_t bytes = sets.size() * sizeof(cpu_set_t);
    if (::sched_getaffinity(0, bytes, sets.data()) != 0) continue;
    for (size_t core = 0; core < count; ++core) {
      if (CPU_ISSET_S(core, bytes, sets.data())) cores.push_back(static_cast<int64_t>(core));
    }
    break;
  }
  return cores;
}

uint64_t CurrentCore() { return static_cast<uint64_t>(::sched_getcpu()); }

std::optional<int64_t> CoreQuota(const std::string& cgroup_root) {
  // "max 100000" or "200000 100000": microseconds granted in each period (cgroup v2).
  std::ifstream file(cgroup_root + "/cpu.max");
  int64_t granted = 0;
  int64_t period = 0;
  if (!(file >> granted >> period) || granted <= 0 || period <= 0) return std::nullopt;
  return (granted + period - 1) / period;
}

}  // namespace jaxfabric
