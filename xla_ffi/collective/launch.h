// Which launch, which of several equal calls: the parts of the matching key that a rank works out
// for itself, so that they agree on all ranks without a message. docs/matching.md tells why.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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

  // The first run id of the executable that has launched `run_id`, where it is known: see
  // SiteRegistry::EndCompilation. Only for the first fabric of a process: after a failure ranks may
  // have launched a program a different number of times, and they begin anew together.
  std::optional<uint32_t> FirstRunId(int64_t run_id, uint64_t fabric_serial) const;
  // A hash of the devices that it runs on, where they are known: 0 if they are all of this process.
  std::optional<uint32_t> DevicesOf(int64_t run_id) const;

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
  struct Executable {
    uint32_t hash;     // the run id of the very first launch of it or of an equal one
    uint32_t before;   // launches of equal ones before it was made, as far as they had entered
    uint32_t devices;  // a hash of them, or 0
    uint64_t number;   // no other has it
    // The registry's, of all equal ones, those that are gone included: the newest run id that has
    // entered, with kEntered set; 0 before the first.
    std::atomic<uint64_t>* newest;
    const Executable* next = nullptr;  // of the same clock
  };
  static constexpr uint64_t kEntered = uint64_t{1} << 32;
  // One thread at a time.
  void AddExecutable(const Executable& executable);
  bool HasExecutable(uint32_t hash) const;
  const Executable* ExecutableOf(int64_t run_id) const;

  struct Base {
    uint64_t group;
    int32_t smallest;
    Clock::time_point settled_at;
    bool settled;
  };
  std::mutex mutex_;
  uint64_t fabric_serial_ = 0;
  std::vector<Base> bases_;
  const uint64_t number_;  // no other clock or executable has it
  std::vector<std::unique_ptr<Executable>> executables_;
  std::atomic<const Executable*> first_{nullptr};  // of those: read without a lock
};

// The run ids of equal executables, which XLA draws from one counter: whose is which.
//
// A run id is an executable's once one of its calls has entered with it. An executable's number of
// launches before a run id is known once all smaller ones are somebody's. A launch that enters no
// call of this process (a branch without a collective) leaves a hole that nobody fills; those that
// failures leave are closed when another fabric begins.
class SharedRunIds {
 public:
  // `base`: the first one. `second`: the executable that is not the only one any more.
  SharedRunIds(uint32_t base, uint32_t next, uint64_t second);
  // `before`: what the executable's launches are counted from.
  void Claim(uint32_t run_id, uint64_t executable, uint32_t before, uint64_t fabric_serial);
  // The base plus the number of the executable's launch.
  std::optional<uint32_t> Own(uint32_t run_id) const;

 private:
  struct Launch {
    uint64_t executable;
    uint32_t before;
  };
  void CountNext();

  // What late calls of a launch may still ask for.
  static constexpr size_t kRemembered = 4096;
  const uint32_t base_;
  const uint32_t first_;  // index of the first that may be another's than the only one's
  const uint64_t second_;
  uint64_t fabric_serial_ = 0;
  uint32_t next_;                                  // smallest index that is nobody's yet
  std::unordered_map<uint64_t, uint32_t> counts_;  // of the next launch, by executable
  std::map<uint32_t, Launch> ahead_;               // those above it, by index
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
// programs are compiled before one exists and outlive it. Its lock is never taken inside a clock's.
class SiteRegistry {
 public:
  struct Instance {
    uint32_t duplicate;  // position among the instances with equal attributes
    std::shared_ptr<LaunchClock> clock;
  };

  static SiteRegistry& Get();

  // Numbers one more instance. Called in instantiation order, which is the same on every rank.
  Instance Add(uint64_t attributes_hash);
  // An executable is made, or loaded from the compilation cache: its instances are added between
  // these two. Several threads may do so at once.
  //
  // Its first run id derives from its fingerprint, and from its devices in order if some are of
  // other processes (none are passed otherwise). So it is known before the first launch, which
  // several threads may do at once: then the smallest run id that has entered need not be the
  // first one. No fingerprint: there is no executable, or it has none.
  //
  // XLA counts the launches of equal executables together, those that are gone included: so the
  // first run id of one is after all that have entered. Ranks on which fewer had entered so far
  // know another, and settle it by time. One that is equal to one whose clock lives makes them
  // share run ids from here on: ranks need not agree about who lives.
  uint64_t BeginCompilation();
  void EndCompilation(uint64_t begun, std::optional<std::string_view> fingerprint,
                      std::span<const int64_t> devices);
  // Where nobody told of the compilation: `clock` is complete, for one of its instances executes.
  void CloseExecutable(const LaunchClock* clock);

  // Call instances, for each rank, whose base had to be settled by time.
  void CountUnknownBase() { unknown_bases_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t unknown_bases() const { return unknown_bases_.load(std::memory_order_relaxed); }

  // Whether run ids may be shared at all. Sequentially consistent: see LaunchClock::Enter.
  bool shares() const { return shares_.load(std::memory_order_seq_cst); }
  void Claim(const LaunchClock::Executable& executable, int64_t run_id, uint64_t fabric_serial);
  std::optional<int64_t> OwnRunId(uint32_t hash, int64_t run_id) const;

  void SetSource(uint64_t site, std::string source);
  // "train.py:42", or "unknown line" for a program that this process did not lower.
  std::string Source(uint64_t site);

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, uint32_t> counts_;
  std::unordered_map<uint64_t, std::string> sources_;
  std::shared_ptr<LaunchClock> open_;  // of the instances that are added now
  int compilations_ = 0;               // under way
  std::vector<std::weak_ptr<LaunchClock>> clocks_;
  std::atomic<bool> shares_{false};
  std::unordered_map<uint32_t, SharedRunIds> shared_;           // by hash
  std::unordered_map<uint32_t, std::atomic<uint64_t>> newest_;  // by hash, for good
  std::atomic<uint64_t> unknown_bases_{0};
};

}  // namespace jaxfabric
