#include "os/cores.h"

#include <sched.h>

#include <fstream>

namespace jaxfabric {

std::vector<int64_t> UsableCores() {
  std::vector<int64_t> cores;
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
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
