// Which launch, which of several equal calls: the parts of the matching key that a rank works out
// for itself, so that they agree on all ranks without a message. docs/matching.md tells why.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"

namespace jaxfabric {

// Turns run ids into launch numbers for the instances of one executable.
//
// A run id grows by one per launch of its executable, from a base that may differ between processes
// (an executable loaded from the compilation cache has another). Where all ranks of a group know
// their bases and these are equal, the base counts. Otherwise it is the smallest run id with which
// the group was seen within kSettle of the first: several threads may enter out of launch order.
// It is the group's own, because only its members enter the same launches: others may have been in
// a branch without a collective.
class LaunchClock {
 public:
  static constexpr Clock::duration kSettle = std::chrono::milliseconds(5);

  LaunchClock();

  // The executable's first run id, where the registry knows it. Only for the first fabric of a
  // process: after a failure ranks may have launched a program a different number of times, and
  // they begin anew together.
  static std::optional<uint32_t> FirstRunId(int64_t run_id, uint64_t fabric_serial);

  // The launch number of a run id in a group, or nothing while the base is not settled (then ask
  // again; the first call for a run id has counted it). Negative for a launch that came after a
  // later one had settled the base. Every fabric counts from the start.
  std::optional<int32_t> Launch(int64_t run_id, uint64_t group, uint64_t fabric_serial);

  // Before anything else is asked about it: a call of this executable has entered with this run id.
  void Enter(int64_t run_id, uint64_t fabric_serial);
  // The run id as it would be if no equal executable counted with this one; nothing while that
  // cannot be told (ask again).
  std::optional<int64_t> OwnRunId(int64_t run_id) const;

 private:
  friend class SiteRegistry;

  // Executables compiled by several threads at once may share a clock; their run ids are far apart.
  struct Base {
    uint64_t group;
    int32_t smallest;
    Clock::time_point settled_at;
    bool settled;
  };
  std::mutex mutex_;
  uint64_t fabric_serial_ = 0;
  std::vector<Base> bases_;
  const uint64_t executable_;  // no other has this number
  // The newest run id that has entered, with kEntered set; 0 before the first.
  static constexpr uint64_t kEntered = uint64_t{1} << 32;
  std::atomic<uint64_t> newest_{0};
};

// The run ids of equal executables, which XLA draws from one counter: whose is which.
//
// A run id is an executable's once one of its calls has entered with it. An executable's number of
// launches before a run id is known once all smaller ones are somebody's. A launch that enters no
// call of this process (a branch without a collective) leaves a hole that nobody fills; those that
// failures leave are closed when another fabric begins.
class SharedRunIds {
 public:
  // `base`: the first one. Those below `next` are all the executable `only`'s.
  SharedRunIds(uint32_t base, uint32_t next, uint64_t only);
  void Claim(uint32_t run_id, uint64_t executable, uint64_t fabric_serial);
  // The base plus the number of the executable's launches before this one.
  std::optional<uint32_t> Own(uint32_t run_id) const;

 private:
  void CountNext();

  // What late calls of a launch may still ask for.
  static constexpr size_t kRemembered = 4096;
  const uint32_t base_;
  const uint32_t first_;  // index of the first that was shared
  uint64_t fabric_serial_ = 0;
  uint32_t next_;                                  // smallest index that is nobody's yet
  std::unordered_map<uint64_t, uint32_t> counts_;  // launches below next_, by executable
  std::map<uint32_t, uint64_t> ahead_;             // executables of those above it, by index
  std::map<uint32_t, uint32_t> own_;               // below next_, by index
};

// Counts the executions of one instance on one device within each launch: loop iterations.
//
// Nothing says when a launch has ended, so a few are remembered; more, once launches have been seen
// to overlap.
class OccurrenceCounter {
 public:
  // The count for this run id, from 0; nothing where it has been forgotten, or may have been.
  std::optional<uint32_t> Count(int64_t run_id);

 private:
  static constexpr size_t kInTurn = 64;
  static constexpr size_t kOverlapping = 4096;
  struct Launch {
    int64_t run_id = 0;
    uint32_t count = 0;  // 0: empty
  };
  std::vector<Launch> launches_ = std::vector<Launch>(kInTurn);  // a ring, last_ is the newest
  size_t last_ = 0;
  int64_t newest_ = 0;  // the largest run id so far
  std::optional<int64_t> newest_forgotten_;
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

  // Tell what the run ids of first launches derive from: fingerprints of executables, and the lists
  // of devices, of several processes, that they may run on. Several threads may launch an
  // executable at once the first time; then the smallest run id that has entered need not be the
  // first one.
  //
  // An executable equal to one that lives is told again, before its first launch: XLA counts the
  // launches of both together.
  void AddFingerprint(std::string_view fingerprint);
  void AddDeviceList(std::span<const int64_t> devices);
  // The first run id of the executable that has launched `run_id` lately, where it is known.
  std::optional<int32_t> FirstRunId(int64_t run_id);
  // A hash of the devices that it runs on: 0 if they are all of this process.
  std::optional<uint32_t> DevicesOf(int64_t run_id) const;
  // Call instances, for each rank, whose base had to be settled by time.
  void CountUnknownBase() { unknown_bases_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t unknown_bases() const { return unknown_bases_.load(std::memory_order_relaxed); }

  // Whether run ids may be shared at all. Sequentially consistent: see LaunchClock::Enter.
  bool shares() const { return shares_.load(std::memory_order_seq_cst); }
  void Claim(int64_t run_id, uint64_t executable, uint64_t fabric_serial);
  std::optional<int64_t> OwnRunId(int64_t run_id) const;

  void SetSource(uint64_t site, std::string source);
  // "train.py:42", or "unknown line" for a program that this process did not lower.
  std::string Source(uint64_t site);

 private:
  void AddFirstRunId(uint32_t fingerprint, uint32_t devices);
  // The nearest first run id below, round the 32 bits.
  std::optional<uint32_t> BaseOf(uint32_t run_id) const;

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, uint32_t> counts_;
  std::unordered_map<uint64_t, std::string> sources_;
  std::shared_ptr<LaunchClock> open_;
  std::set<uint32_t> executables_;   // hashes of fingerprints
  std::set<uint32_t> device_lists_;  // hashes
  // An executable's alone, and plus each list's: to the list's hash, or 0.
  std::map<uint32_t, uint32_t> first_run_ids_;
  std::vector<std::weak_ptr<LaunchClock>> clocks_;
  std::atomic<bool> shares_{false};
  std::set<uint32_t> shared_executables_;              // hashes of fingerprints
  std::unordered_map<uint32_t, SharedRunIds> shared_;  // by first run id
  std::atomic<uint64_t> unknown_bases_{0};
};

}  // namespace jaxfabric
