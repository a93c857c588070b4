// Everything one process shares with its peers: windows, control plane, directory, and the threads
// that take over executions whose peers are late.
//
// One fabric lives from initialize() to shutdown(). Threads: the callers' (XLA's), one progress
// thread, the control plane's, and completion threads.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collective/blocks.h"
#include "collective/communicator.h"
#include "collective/completion.h"
#include "collective/directory.h"
#include "collective/gpu/domain.h"
#include "collective/layout.h"
#include "collective/op.h"
#include "collective/options.h"
#include "collective/participant.h"
#include "collective/plan.h"
#include "collective/staging.h"
#include "collective/trace.h"
#include "control/mesh.h"
#include "os/futex.h"
#include "os/mapping.h"
#include "transport/message.h"
#include "transport/transport.h"

namespace jaxfabric {

class Fabric {
 public:
  // How long the caller's thread waits before the progress thread takes over.
  struct Waiting {
    bool shared_cores;  // ranks outnumber the cores: a wait has to let others run
    // For a peer that did the same call as this rank before: it is on its way.
    Clock::duration in_step;
    // For any other: it may be waiting for this rank in another call that comes next here.
    Clock::duration out_of_step;
  };

  static Result<std::unique_ptr<Fabric>> Create(int process, int process_count,
                                                std::vector<int64_t> local_ranks, Options options);
  ~Fabric();

  // What every process must give to every other's Connect.
  std::string Address() const;
  // `job` is needed where processes are on several hosts.
  Status Connect(const std::vector<std::string>& addresses, const Mesh::Job& job = {});
  // Fails what is under way with kCancelled, leaves, frees everything. Idempotent.
  void Shutdown();

  // The failure that poisoned the communicators; OK while healthy.
  Status failure() const;
  // Why processes of this host do not read each other's memory; empty if they do, or it has one.
  const std::string& no_process_reads() const { return no_process_reads_; }
  // Processes that said goodbye: they leave, or start anew, of their own accord.
  std::vector<int> Left() const;
  std::map<std::string, uint64_t> Counters() const;
  // Records the entry of the next executions, in a ring of so many. Once per fabric.
  void EnableTrace(size_t capacity);
  std::vector<TraceRing::Entry> Trace() const;

  // --- for call sites
  // -----------------------------------------------------------------------------
  int process() const { return process_; }
  // Sequentially consistent: see Participant::Begin.
  bool shut_down() const { return shut_down_.load(std::memory_order_seq_cst); }
  // Grows with every fabric of this process.
  uint64_t serial() const { return serial_; }
  const std::vector<int64_t>& local_ranks() const { return local_ranks_; }
  // Index in local_ranks() or -1.
  int LocalIndex(int64_t rank) const;
  // Gives an unfinished execution to the progress thread; `on_finished` of the op is called on a
  // completion thread. False once the fabric is shut down.
  bool TryHandOff(Op* op);

  // Null where there are none, or where some process cannot use its own: then the reason.
  GpuDomain* gpus() const { return gpus_.get(); }
  const std::string& gpu_reason() const { return gpu_reason_; }

  // --- for participants and ops
  // -------------------------------------------------------------------
  const Waiting& waiting() const { return waiting_; }
  // Null unless enabled. Acquire: pairs with EnableTrace().
  TraceRing* trace() const { return trace_.load(std::memory_order_acquire); }
  std::byte* window() const { return window_.data(); }
  Topology TopologyOf(const std::vector<PeerView>& peers, bool one_process) const;
  const Directory& directory() const { return directory_; }
  // "rank 2049 (process 1)"
  std::string NameRank(int64_t rank) const;
  // "rank 2049 (process 1, pid 4242 on host)"
  std::string DescribeRank(int64_t rank) const;
  // "process 1, pid 4242 on host"
  std::string DescribeProcess(int process) const;
  Status HeaderMismatch(const Participant& participant, int peer) const;
  // An execution has failed for a reason of its own: its peers cannot finish theirs.
  void ReportFailure(const Status& status) { Poison(status); }

  // One more call instance of a rank is run so: an algorithm, or a pattern.
  void CountRunBy(std::string_view name);
  void Register(Participant& participant);
  void Unregister(Participant& participant);
  void Announce(const Participant& participant);
  PeerView View(const Directory::Member& member) const;
  WindowHeader* Bell(int process) const { return peers_[static_cast<size_t>(process)].header; }
  std::shared_ptr<Communicator> CommunicatorFor(const std::vector<int64_t>& ranks,
                                                bool one_process);
  std::optional<uint32_t> TryAllocateCell() { return cells_->TryAllocate(); }
  Cell* OwnCell(uint32_t index) const;
  // The way to a process of another host: to the mirror there of this process's window, and to its
  // own window. Made when it is first asked for.
  struct Link {
    MessageChannel* channel;
    uint32_t mirror_region;
    uint32_t window_region;
  };
  Result<Link> LinkTo(int process);
  // Null where all processes are on this host.
  MessageEndpoint* messages() const { return messages_.get(); }
  std::optional<StagingPool::Block> TryAllocateStaging(uint64_t bytes, Participant& user);
  // No other process, and no other call of this one, gets the same.
  uint64_t NewSalt();
  void FreeStaging(StagingPool::Block block) { staging_->Free(block); }
  BlockPool& blocks() { return blocks_; }
  const PatternChoice& patterns() const { return patterns_; }

  // Sleeps until somebody rings this process, unless `done()` says there is no need to.
  template <class Done>
  void SleepUnless(Done done, Deadline deadline);
  static void RingIfSleeping(WindowHeader* header) {
    // Relaxed: ordered by the fence in Participant::RingPeers.
    if (header->sleepers.load(std::memory_order_relaxed) != 0) Ring(header);
  }
  static void Ring(WindowHeader* header);

 private:
  struct Peer {
    pid_t pid = 0;
    std::string host;
    std::string host_id;
    std::vector<int64_t> ranks;
    bool remote = false;               // on another host
    std::unique_ptr<Channel> channel;  // keeps the window mapped
    std::span<std::byte> window;       // of a remote process: its mirror
    WindowHeader* header = nullptr;
    // Of a remote process: see network.cc.
    Mapping mirror;
    uint32_t mirror_region = 0;  // of it, for the remote process
    uint64_t window_bytes = 0;
    EndpointAddress address;
    uint32_t region = 0;                   // the mirror of this process's window there
    uint32_t window_region = 0;            // its window
    int host_number = 0;                   // the same for the processes of one host
    std::unique_ptr<MessageChannel> link;  // guarded by links_mutex_; stays once it is there
    // Written by the control thread, read by all: no other data depends on them (relaxed).
    std::atomic<bool> gone{false};
    std::atomic<bool> left{false};  // said goodbye first
    // One that is gone without a goodbye has not left: why it is gone is about to be told.
    bool has_left() const {
      return gone.load(std::memory_order_relaxed) && left.load(std::memory_order_relaxed);
    }
  };
  // A report that a rank waits for a rank of ours, or for a mesh position (late_rank is -1 then).
  struct Stuck {
    uint64_t key = 0;
    uint64_t tag = 0;
    uint64_t place = 0;
    uint64_t site = 0;
    Clock::time_point received{};
    int64_t waiting_rank = -1;
    int64_t late_rank = -1;
    // A wait for the reporting rank that it disagrees with: it has not been there. Zero: none.
    uint64_t other_key = 0;
    uint64_t other_tag = 0;
    std::string call;
  };

  Fabric(int process, int process_count, std::vector<int64_t> local_ranks, Options options);
  Status Bind();
  Status BindControl();
  // Whether a process is on this host, as far as memory, sockets and process numbers go.
  bool SharesMemory(int process) const {
    return peers_[static_cast<size_t>(process)].host_id == host_id_;
  }
  Status Greet(int process, const Mesh::Greeting& greeting, std::vector<UniqueFd> fds);
  Status AgreeOnMachine(size_t ranks, Deadline deadline);
  // calibrate.cc
  Status AgreeOnCosts(Deadline deadline);
  std::optional<PathCost> MeasurePath(int partner);
  void AnswerPath(int measuring);
  bool AwaitWord(int process, uint64_t value, Deadline deadline);
  std::span<std::byte> StagingOf(int process) const;
  // network.cc
  Status ChooseNetwork();
  Status BindMessages(const Mesh::Job& job);
  Status MirrorRemotes();
  void AbortLinks();
  void FlushLinks();
  void OnLost(int process, const Status& status);
  void CheckLost(Clock::time_point now);

  void OpenGpus();
  // This process's GPUs cannot be used: nobody's are.
  void GiveUpGpus(std::string reason);

  void ProgressLoop();
  bool AdvanceAll();
  void CheckWaits();
  void CheckWait(Op& op, Clock::time_point now);
  // Fails `op` if it waits for somebody who has left; true if it did, or the op has finished.
  bool FailIfLeft(Op& op);
  // The rank at a position of the op's group; empty where only its announcement can tell.
  std::optional<int64_t> RankAt(const Participant& participant, int position) const;
  bool HasLeft(int64_t rank) const;
  void ReportStuck(const Op& op, std::optional<int64_t> late_rank,
                   const std::optional<Stuck>& other);
  // Whether there still is a rank that may be one of those that have not announced themselves.
  bool MayCome(const Participant& participant) const;
  // The peers that hold `op` up: of those it needs, who does not wait in the same execution itself.
  std::vector<int> Late(const Op& op) const;
  // Whether what is missing is a cell of this process, not a peer.
  static bool NeedsCell(const Op& op);
  // " for rank 3 (process 1, pid 4242 on host), last seen in ...".
  std::string DescribeLate(Op& op) const;
  Status DeadlineError(Op& op, double seconds);
  std::string LastSeenAt(int64_t rank) const;
  std::string StuckReport(int64_t waiting, const Op& op) const;
  std::string Elsewhere(const Participant& participant) const;

  void OnMessage(int process, WireReader& message);
  void OnGone(int process, LinkEnd how);
  void OnStuck(WireReader& message);
  void AddToDirectory(const Directory::Announcement& announcement);
  void FreeRetiredCells(uint64_t key);
  // The first failure poisons every communicator, and all peers are told of it.
  void Poison(const Status& status);
  std::optional<Stuck> Disagreement(const Participant& participant, int64_t late) const;
  Status MismatchError(const Participant& participant, const Stuck& other) const;
  // Whether the rank of ours that is waited for has been there. Then what it gave is on its way,
  // which between hosts may take long, or the report is older. With mutex_ held.
  bool HasBeenThere(const Stuck& stuck) const;
  // Seconds after which waiting ranks tell each other; in any case well before the deadline.
  double compare_after() const { return std::min(options_.mismatch_after, options_.deadline / 2); }
  Clock::duration ReportInterval() const {
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(compare_after() / 2 + 0.01));
  }

  const uint64_t serial_;
  const int process_;
  const std::vector<int64_t> local_ranks_;
  const Options options_;
  Waiting waiting_{};
  std::string host_;
  std::string host_id_;  // boot and namespaces: processes with equal ids share memory and sockets

  Transport* transport_ = nullptr;
  std::unique_ptr<Endpoint> endpoint_;
  std::unique_ptr<Mesh> mesh_;
  std::optional<Mesh::Network> network_;  // how other hosts reach this process
  std::string network_reason_;            // why so, or why not at all
  UniqueFd data_port_;                    // of a range: kept until messages_ takes it
  std::span<std::byte> window_;
  std::vector<Peer> peers_;            // by process; the own entry describes this process
  std::map<int64_t, int> process_of_;  // by rank
  std::unique_ptr<CellAllocator> cells_;
  std::unique_ptr<StagingPool> staging_;
  uint32_t cell_count_ = 0;
  bool process_reads_ = false;
  std::string no_process_reads_;  // why not; empty where there is nobody to read
  Directory directory_;
  PatternChoice patterns_;  // not changed after Connect()
  BlockPool blocks_;
  std::unique_ptr<MessageEndpoint> messages_;  // where processes are on several hosts
  uint32_t window_region_ = 0;
  uint64_t nonce_ = 0;  // random where there are other hosts
  std::mutex links_mutex_;

  mutable std::mutex mutex_;  // communicators, participants and counts, failure, stuck reports
  std::map<std::vector<int64_t>, std::shared_ptr<Communicator>> communicators_;
  std::set<Participant*> participants_;
  std::map<std::string_view, uint64_t> run_by_;
  struct RetiredCell {  // waiting for the peers to retire the instance too
    uint32_t cell;
    std::vector<StagingPool::Block> staging;
  };
  std::multimap<uint64_t, RetiredCell> retired_cells_;  // by instance key
  Status failure_;
  std::vector<Stuck> stuck_;
  struct Lost {  // a process that no data can be sent to any more
    int process;
    Status reason;
    Clock::time_point since;
  };
  std::vector<Lost> lost_;

  std::mutex queue_mutex_;
  std::condition_variable queue_filled_;  // or stopping_ is set
  std::vector<Op*> queue_;                // handed off, not yet seen by the progress thread
  std::vector<Op*> pending_;              // the progress thread's
  bool progress_ended_ = false;           // guarded by queue_mutex_
  std::atomic<bool> stopping_{false};
  std::atomic<bool> shut_down_{false};
  std::thread progress_;
  std::unique_ptr<CompletionThreads> completions_;

  std::unique_ptr<GpuDomain> gpus_;  // as gpu_reason_: not changed after Connect()
  std::string gpu_reason_ = "this process has none";

  std::unique_ptr<TraceRing> trace_ring_;  // guarded by mutex_
  std::atomic<TraceRing*> trace_{nullptr};
  std::atomic<uint64_t> handed_off_{0};
  std::atomic<uint64_t> sleeps_{0};
  std::atomic<uint64_t> staging_allocations_{0};
};

template <class Done>
void Fabric::SleepUnless(Done done, Deadline deadline) {
  WindowHeader* header = peers_[static_cast<size_t>(process_)].header;
  const uint32_t bell = header->bell.load(std::memory_order_acquire);
  header->sleepers.fetch_add(1, std::memory_order_relaxed);
  // Pairs with the fence in Participant::RingPeers.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!done()) {
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    FutexWait(&header->bell, bell, deadline);
  }
  header->sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace jaxfabric
