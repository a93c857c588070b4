// Which launch, which of several equal calls: the parts of the matching key that a rank works out
// for itself, so that they agree on all ranks without a message. docs/matching.md tells why.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"

namespace jaxfabric {

// Turns run ids into launch numbers for the instances of one executable.
//
// A run id grows by one per launch of its executable, from a base that may differ between processes
// (an executable loaded from the compilation cache has another). The base is the smallest run id
// seen within kSettle of the first: several threads may enter out of launch order.
class LaunchClock {
 public:
  static constexpr Clock::duration kSettle = std::chrono::milliseconds(5);

  // The launch number of a run id, or nothing while the base is not settled (then ask again; the
  // first call for a run id has counted it). Negative for a launch that came after a later one had
  // settled the base.
  //
  // Every fabric counts from the start: after a failure ranks may have launched a program a
  // different number of times, and they begin anew together.
  std::optional<int32_t> Launch(int64_t run_id, uint64_t fabric_serial);

 private:
  // Executables compiled by several threads at once may share a clock; their run ids are far apart.
  struct Base {
    int32_t smallest;
    Clock::time_point settled_at;
    bool settled;
  };
  std::mutex mutex_;
  uint64_t fabric_serial_ = 0;
  std::vector<Base> bases_;
};

// Process-wide counts of call instances and the source lines of sites. Independent of any fabric:
// programs are compiled before one exists and outlive it.
class SiteRegistry {
 public:
  struct Instance {
    uint32_t duplicate;  // position among the instances with equal attributes
    std::shared_ptr<LaunchClock> clock;
  };

  static SiteRegistry& Get();

  // Numbers one more instance. Called in instantiation order, which is the same on every rank.
  Instance Add(uint64_t attributes_hash);
  // The instances added so far belong to executables that are complete: later ones get a new clock.
  void CloseExecutable();
  // The same, if `clock` is that of the executable being filled: one of its instances executes.
  void CloseExecutable(const LaunchClock* clock);

  void SetSource(uint64_t site, std::string source);
  // "train.py:42", or "unknown line" for a program that this process did not lower.
  std::string Source(uint64_t site);

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, uint32_t> counts_;
  std::unordered_map<uint64_t, std::string> sources_;
  std::shared_ptr<LaunchClock> open_;
};

}  // namespace jaxfabric
