// The GPUs of a fabric: their pools, the communicators over them, and what ends waits on them.
//
// Pools are made and mapped in steps that all processes take together, so that all have the same
// kind of memory: that of the GPUs, or of the host where GPUs of one host cannot reach each other;
// and multicast memory over the pools on all or on none. What travels is descriptors on one host,
// and fabric handles between hosts, where nothing else reaches.
//
// A call is set up before its first launch: the rank takes an arena in its pool for the
// communicator and slot, tells the processes of the group where it is, and waits until all have
// told. From then on a launch is one call of the driver, without a message, lock or allocation, and
// a captured one needs not even that.
//
// A kernel that gives up leaves a record in pinned memory; the watch thread turns it into the
// failure of the fabric. Threads: all functions from any, unless they say otherwise.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collective/gpu/options.h"
#include "control/wire.h"
#include "device/layout.h"
#include "drivers/cuda/api.h"
#include "drivers/nccl/api.h"
#include "os/unix_socket.h"
#include "transport/nvlink/gpu.h"
#include "transport/nvlink/multicast.h"

namespace jaxfabric {

// One rank's end of a communicator, in one slot. A slot's calls follow each other in the same order
// on all ranks; calls that may overlap have slots of their own.
class GpuCommunicator {
 public:
  // Constant once the communicator is set up.
  const device::Communicator& view() const { return view_; }
  int local() const { return local_; }

  // Makes `stream` wait for what was launched last, on whatever stream. Not needed, nor possible,
  // in a capture.
  Status Follow(const cuda::Api& api, cuda::CUstream stream);

 private:
  friend class GpuDomain;
  int local_ = -1;
  std::vector<int64_t> ranks_;
  uint32_t slot_ = 0;
  device::Communicator view_{};
  device::FaultRecord* fault_ = nullptr;  // as the host addresses them
  device::HostControl* control_ = nullptr;
  bool fault_seen_ = false;  // guarded by the domain's mutex
  std::atomic<cuda::CUstream> last_stream_{nullptr};
  std::mutex order_mutex_;
  cuda::Event order_;
};

class GpuDomain {
 public:
  struct Uplink {
    std::function<void(int process, const WireWriter&)> send;
    // Poisons the fabric and tells the peers.
    std::function<void(const Status&)> fail;
    // "process 1, pid 4242 on host"
    std::function<std::string(int process)> describe_process;
  };

  static Result<std::unique_ptr<GpuDomain>> Open(int process, std::vector<LocalGpu> gpus,
                                                 const GpuOptions& options, Uplink uplink);
  ~GpuDomain();

  // --- before Start
  // Sends to all other processes and receives from each, by process.
  using Exchange = std::function<Result<std::vector<SocketMessage>>(const WireWriter& message,
                                                                    std::span<const int> fds)>;
  // Makes the pools of this process and maps all others'. All processes, which are on one host or
  // not, call it at the same time; all get an empty string, or all get why the GPUs cannot be used.
  // An error: a process has gone.
  Result<std::string> Share(bool one_host, const Exchange& exchange);
  void Start();
  // Ends set-ups that wait and refuses further launches. Unless the fabric has failed it waits for
  // kernels in flight, for which their peers may wait as well: they end when the peers come, when
  // the fabric fails, or after a while. Then ends the thread.
  void Stop();

  // --- from the control plane
  void OnMessage(int process, WireReader& message);
  void OnGone(int process);
  // Ends all waits and every set-up: the fabric has failed.
  void Abort(const Status& cause);

  // --- for calls
  // Index among the GPUs of this process, or -1.
  int LocalIndex(int ordinal) const;
  int64_t rank(int local) const { return gpus_[static_cast<size_t>(local)].rank; }
  size_t local_count() const { return gpus_.size(); }
  const cuda::Api& api() const { return *api_; }
  unsigned block_threads() const { return options_.block_threads; }
  const Gpu& gpu(int local) const { return *gpus_[static_cast<size_t>(local)].gpu; }
  // Sets up what is not there yet, which waits for the other ranks. `call` is for messages.
  Result<std::shared_ptr<GpuCommunicator>> CommunicatorFor(int local,
                                                           const std::vector<int64_t>& ranks,
                                                           uint32_t slot, const std::string& call);
  Result<cuda::CUfunction> Function(int local, const std::string& kernel);
  // Calls `launch` with a stream of this GPU that goes on beside `stream`, from where that is now.
  Status StartBeside(int local, cuda::CUstream stream, uint64_t site,
                     const std::function<Status(cuda::CUstream)>& launch);
  // Makes `stream` wait for the call that was started so and has not been waited for yet.
  Status Finish(int ordinal, cuda::CUstream stream, uint64_t site);
  // Copies device memory on `stream`.
  Status Copy(int ordinal, cuda::CUstream stream, void* to, const void* from, size_t bytes);
  // Memory of a GPU for the table of a call's windows, zero when it is first taken.
  Result<device::WindowTable*> TakeWindowTable(int local);
  void GiveWindowTable(int local, device::WindowTable* table);
  // Whether the arrays of an execution are in windows.
  void CountWindows(bool found) {
    // Relaxed: figures only.
    (found ? windows_found_ : windows_missing_).fetch_add(1, std::memory_order_relaxed);
  }
  Result<const nccl::Api*> nccl() const;
  // How messages name the call with this header.
  void Describe(uint32_t header, std::string call);
  // If a call cannot go on here, ends it on all ranks: returns why, which may be an earlier
  // failure.
  Status FailUnlessOk(Status status);
  // OK while healthy.
  Status failure() const;
  // Pairs with Abort(), so failure() is set. Sequentially consistent: see Launching.
  bool failed() const { return failed_.load(std::memory_order_seq_cst); }
  // Around a launch. Whoever has not seen failed() in it has launched when Stop() looks for kernels
  // in flight: either that sees the count, or this sees the flag.
  class Launching {
   public:
    explicit Launching(GpuDomain& domain) : domain_(domain) {
      domain_.launching_.fetch_add(1, std::memory_order_seq_cst);
    }
    // Release: the launch comes before.
    ~Launching() { domain_.launching_.fetch_sub(1, std::memory_order_release); }

   private:
    GpuDomain& domain_;
  };
  void NoteLaunch(int local, uint32_t header) {
    // Relaxed: for messages only.
    gpus_[static_cast<size_t>(local)].last_header.store(header, std::memory_order_relaxed);
  }
  // The memory that communicators have, and why not better: "memory of the GPUs, with multicast".
  // Constant since Share().
  std::string Memory() const;
  // Bytes of memory that communicators take, how many these are, and how long the longest set-up
  // took, waiting for other ranks included.
  std::map<std::string, uint64_t> Counters() const;

 private:
  struct Local {
    int64_t rank = -1;
    std::unique_ptr<Gpu> gpu;
    std::vector<cuda::Module> modules;
    cuda::PinnedMemory pinned;  // fault records and controls
    size_t pinned_used = 0;
    std::map<std::string, cuda::CUfunction> functions;
    std::vector<device::WindowTable*> spare_tables;
    std::atomic<uint32_t> last_header{0};
    std::mutex started_mutex;  // guards what follows
    cuda::Stream side;
    cuda::Event fork;
    std::map<uint64_t, std::deque<cuda::Event>> started;  // by site: their ends, oldest first
    std::vector<cuda::Event> spare;
  };
  // A GPU of the job, as everybody knows it.
  struct Remote {
    int process = -1;
    std::byte* pool = nullptr;
    size_t pool_bytes = 0;
    Gpu::Uuid uuid{};
    uint32_t multiprocessors = 0;
    bool multicast = false;
    bool gone = false;
  };
  struct Arena {
    size_t offset;
    size_t bytes;
  };
  using GroupKey = std::pair<std::vector<int64_t>, uint32_t>;  // ranks, slot

  GpuDomain(int process, const GpuOptions& options, Uplink uplink)
      : process_(process), options_(options), uplink_(std::move(uplink)) {}
  Status OpenLocal(std::vector<LocalGpu> gpus);

  // Why a step failed; an empty text if it did not.
  struct Trouble {
    std::string text;
    bool unreachable = false;  // GPUs cannot reach each other, and nothing else is wrong
  };
  struct Answers {
    std::vector<SocketMessage> messages;  // by process
    Trouble worst;                        // of all processes, the same on all
  };
  enum class Step : uint32_t { kPools, kMapped, kMulticast, kAdded, kBound };
  static WireWriter Say(Step step, const Trouble& trouble);
  static WireReader Hear(const SocketMessage& message, Step step, Trouble* trouble);
  Result<Answers> Ask(const Exchange& exchange, Step step, const Trouble& own,
                      const WireWriter& message, std::span<const int> fds = {});
  Result<Trouble> SharePools(const Exchange& exchange, PoolPlace place);
  Trouble MakePools(PoolPlace place, std::vector<MemoryHandle>* handles);
  Trouble MapPools(PoolPlace place, Answers& answers);
  Status MapPool(int process, PoolPlace place, WireReader& reader, std::vector<UniqueFd>& fds);
  Status ShareMulticast(const Exchange& exchange);
  std::string NoMulticast() const;
  std::byte* MulticastFor(const GroupKey& key, uint64_t bytes);

  Result<Arena> TakeArena(Local& local, uint32_t ranks);
  void AnnounceArena(const GroupKey& key, int64_t rank, const Arena& arena);
  Status AwaitArenas(std::unique_lock<std::mutex>& lock, const GroupKey& key, int64_t rank,
                     const std::string& call);
  Status FillView(GpuCommunicator& communicator, Local& local, const GroupKey& key);
  uint32_t LanesFor(const std::vector<int64_t>& ranks) const;

  void Watch();
  void AbortKernels();  // with the lock held
  // Reports the faults that kernels have left since the last time; unlocks meanwhile.
  void ReportFaults(std::unique_lock<std::mutex>& lock);
  // FailUnlessOk() of a failure, for who holds the lock, which it gives up.
  Status FailUnlocked(std::unique_lock<std::mutex>& lock, Status status);
  void Report(const GpuCommunicator& communicator, const device::FaultRecord& fault);
  // What a rank is doing: the call with this header, or the last one it launched if that is 0.
  std::string Ask(int64_t rank, uint32_t header);
  std::string CallOf(int64_t rank, uint32_t header) const;
  // "rank 3 (a GPU of process 1, pid 4242 on host)". Ranks here are numbered apart from CPU
  // devices.
  std::string Name(int64_t rank) const;

  const int process_;
  const GpuOptions options_;
  const Uplink uplink_;
  const cuda::Api* api_ = nullptr;
  std::vector<cuda::CUdevice> devices_;
  std::deque<Local> gpus_;
  bool one_host_ = true;
  std::vector<MappedMemory> imported_;
  std::unique_ptr<MulticastPools> multicast_;  // null: see no_multicast_
  std::string no_multicast_;
  std::string unreachable_;  // why pools are not in the GPUs' memory

  mutable std::mutex
      mutex_;  // guards all below, and the Locals' pools, functions and pinned memory
  std::condition_variable changed_;
  std::map<int64_t, Remote> known_;                      // by rank
  std::map<GroupKey, std::map<int64_t, Arena>> arenas_;  // by rank
  std::map<std::pair<GroupKey, int64_t>, std::shared_ptr<GpuCommunicator>> communicators_;
  std::map<uint32_t, std::string> calls_;  // by header
  std::map<uint64_t, std::optional<std::string>> questions_;
  uint64_t next_question_ = 0;
  Status failure_;
  std::atomic<bool> failed_{false};
  std::atomic<int> launching_{0};
  std::atomic<uint64_t> windows_found_{0}, windows_missing_{0};
  int reporting_ = 0;  // threads in ReportFaults()
  Clock::time_point abort_at_ = Clock::time_point::max();
  bool stopping_ = false;
  bool abandoned_ = false;  // stopped without waiting for kernels
  Clock::duration longest_setup_{};
  std::thread watch_;
};

}  // namespace jaxfabric
