// One rank's side of one call instance: its cell, its peers' cells, and its executions.
//
// An instance is a call instruction of a compiled program on one communicator. It is set up at its
// first execution: the rank takes a cell, tells the others, and is ready once it knows all of
// theirs. From then on an execution touches shared memory only.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/call.h"
#include "collective/communicator.h"
#include "collective/launch.h"
#include "collective/layout.h"
#include "collective/op.h"
#include "collective/pattern/messages.h"
#include "collective/plan.h"
#include "collective/staging.h"
#include "transport/message.h"

namespace jaxfabric {

class Fabric;

// A rank as its peers see it.
struct PeerView {
  int64_t rank = -1;
  int process = -1;
  pid_t pid = 0;
  bool remote = false;          // on another host
  std::byte* window = nullptr;  // or its mirror
  Cell* cell = nullptr;
  LastSeen* last_seen = nullptr;
};

// A process of another host that has members of the group.
struct RemotePeer {
  MessageChannel* channel = nullptr;
  uint32_t region = 0;         // the mirror of this process's window there
  uint32_t window_region = 0;  // its own window
  std::vector<int> positions;  // of those that read from this rank
};

class Participant {
 public:
  // `run_id`: of a launch that is about to enter.
  Participant(Fabric& fabric, const CallSpec& spec, SiteRegistry::Instance instance, int64_t rank,
              int group, int position, int64_t run_id, const Buffers& buffers);
  ~Participant();
  Participant(const Participant&) = delete;
  Participant& operator=(const Participant&) = delete;

  // Begins an execution. Executions of one launch on one rank follow each other.
  Op* Begin(const Buffers& buffers, int64_t run_id);
  // Drives `op` on the calling thread while its peers are near; true when it has finished.
  bool WaitInline(Op& op);
  // Returns a finished op for reuse.
  void End(Op* op);
  // No execution is under way.
  bool idle() const { return active_.load(std::memory_order_acquire) == 0; }

  const CallSpec& spec() const { return spec_; }
  const Plan& plan() const { return plan_; }
  int64_t rank() const { return rank_; }
  int position() const { return position_; }
  int group() const { return group_; }
  uint64_t key() const { return key_; }
  uint32_t cell_index() const { return cell_index_; }
  std::optional<uint32_t> first_run_id() const { return first_run_id_; }
  Fabric& fabric() { return fabric_; }
  // Ranks of the group.
  int size() const { return static_cast<int>(peer_done_.size()); }
  // Null until ready(), as plan() and peers() mean nothing until then.
  Communicator* communicator() { return ready() ? communicator_.get() : nullptr; }
  bool ready() const { return ready_.load(std::memory_order_acquire); }
  const std::vector<PeerView>& peers() const { return peers_; }
  // "rank 3 (process 1, pid 4242)" of a position, as far as it is known.
  std::string DescribePeer(int position) const;
  // Whether this rank has been in that execution, or is in it. Any thread.
  bool HasEntered(uint64_t tag) const;
  // "psum float32[4096] at train.py:42"
  std::string DescribeCall() const;
  // A failure, with what this rank was doing.
  Status WithCaller(const Status& cause) const;

 private:
  friend class Op;
  friend class Fabric;

  struct SlotState {
    uint64_t tag = 0;
    uint64_t looked_at = 0;  // claims_ when the readers' logs were last looked at
    bool in_use = false;
    // Written by the op's thread when it has finished, read under Enter().
    std::atomic<bool> complete{false};
    // By index in plan_.readers: that reader is done. Set under Enter(), read by the op's thread.
    std::vector<std::atomic<bool>> confirmed;
    size_t unconfirmed = 0;
    StagingPool::Block staging;  // kept between executions
    bool reserve = false;
  };

  // Mutual exclusion for the few lines that hand out slots and ops. Threads meet here only when
  // several launches of one executable overlap on one device.
  void Enter();
  bool TryEnter();
  void Leave();
  bool has_cell();

  // Setup for an op: true when the instance is ready and the op's launch number known.
  bool Prepare(Op& op);
  // True once all members have announced themselves and the launch base is known; `settled` is what
  // the launch clock says of `run_id`.
  bool ResolvePeers(int64_t run_id, std::optional<int32_t> settled);
  // False, and the fabric has failed, where a channel cannot be made.
  bool FindRemotes();
  // Positions of members that have not announced themselves.
  std::vector<int> NotAnnounced() const;
  int TryClaimSlot(uint64_t tag, uint64_t entry);
  // Positions that have not read all of the finished executions that no slot is free for.
  std::vector<int> ReadersOfFullSlots();
  // Whether the peer's last call is the one this rank did before `op`.
  bool InStep(const Op& op) const;
  // Whether that peer's thread last ran on the core of this one.
  bool OnThisCore(const Op& op) const;
  bool WaitsForRemote(const Op& op) const;
  // The reader (an index in plan_.readers) needs nothing of this execution any more.
  bool ReaderDone(size_t reader, int slot, uint64_t tag) const;
  void ConfirmReaders(SlotState& slot);
  bool SlotFree(SlotState& slot);
  bool StagingFor(SlotState& slot, uint64_t bytes);
  bool DoneLogHas(int peer, uint64_t tag) const;
  void LogDone(uint64_t tag);
  void RingPeers();
  uint64_t WindowOffset(const void* address) const;
  // What became of a post: of an ordered channel nothing may be missing. A lost channel says so
  // itself.
  void Posted(const Status& status);
  size_t RemoteOf(int position) const { return remote_of_[static_cast<size_t>(position)]; }
  const HostsLayout& LocalLayout(int position) const {
    return layouts_[static_cast<size_t>(position)];
  }
  // Gives the staging of idle slots back to the pool.
  void ReleaseIdleStaging();

  Fabric& fabric_;
  const CallSpec spec_;
  const SiteRegistry::Instance instance_;
  const int64_t rank_;
  const int group_;
  const int position_;
  uint64_t key_ = 0;
  uint64_t call_ = 0;  // the instance, whatever the group: see LastSeen
  LastSeen* last_seen_ = nullptr;
  std::optional<uint32_t> cell_;
  uint32_t cell_index_ = 0;
  Cell* mine_ = nullptr;
  std::shared_ptr<Communicator> communicator_;
  std::vector<PeerView> peers_;       // by position
  std::vector<WindowHeader*> bells_;  // one per process of the peers on this host
  std::vector<RemotePeer> remotes_;   // one per process of the peers on other hosts
  std::vector<size_t> remote_of_;     // by position: an index in remotes_
  bool local_readers_ = true;         // some reader is on this host
  HostRoles roles_;                   // Algorithm::kHosts, Algorithm::kRelay
  // Algorithm::kRelay: of this rank, and of those who relay to it, in the order of roles_.relays.
  RelayRings relay_rings_;
  struct RelaySource {
    RelayRings rings;
    std::vector<int> members;  // of its host
  };
  std::vector<RelaySource> relay_sources_;
  PatternMessages messages_;          // Algorithm::kPattern
  std::vector<HostsLayout> layouts_;  // of the members of this host, by position
  Plan plan_;

  std::atomic<bool> ready_{false};
  std::optional<uint32_t> first_run_id_;  // of the executable; set before the announcement
  uint64_t group_hash_ = 0;
  uint32_t launch_base_ = 0;  // run id of launch 0
  // In every tag of the instance, the same on all ranks: a mirror may still show, and even get,
  // what an earlier instance has left in the cell. Zero where all ranks are on one host, whose
  // cells are cleared before they are used again.
  uint64_t salt_ = 0;
  uint64_t own_salt_ = 0;  // this rank's share in it

  std::atomic<bool> entered_{false};
  std::atomic<int> active_{0};
  SlotState slots_[kSlots];
  int last_slot_ = 1;
  uint64_t entries_ =
      0;  // executions begun, and of them those that have a slot; guarded by Enter()
  uint64_t claims_ = 0;
  std::atomic<uint64_t> last_done_{0};
  std::atomic<uint32_t> done_count_{0};
  std::vector<std::atomic<uint64_t>> peer_done_;  // by position: last tag seen as done
  OccurrenceCounter occurrences_;                 // guarded by Enter()
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Op*> idle_ops_;
};

}  // namespace jaxfabric
