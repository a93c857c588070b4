#include "collective/gpu/domain.h"

#include <algorithm>
#include <cstring>

#include "device/launch.h"

namespace jaxfabric {
namespace {

constexpr size_t kPinnedBytes = 256 << 10;
// The least that is worth to be an arena.
constexpr size_t kSmallestArena = 256 << 10;
constexpr size_t kRecordBytes = (sizeof(device::FaultRecord) + device::kLineBytes - 1) /
                                device::kLineBytes * device::kLineBytes;
constexpr size_t kControlBytes = (sizeof(device::HostControl) + device::kLineBytes - 1) /
                                 device::kLineBytes * device::kLineBytes;

}  // namespace

Status GpuCommunicator::Follow(const cuda::Api& api, cuda::CUstream stream) {
  // Relaxed: a rank's calls of one slot follow each other on the host.
  const cuda::CUstream last = last_stream_.load(std::memory_order_relaxed);
  if (last == stream) return OkStatus();
  cuda::CUstreamCaptureStatus capturing{};
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuStreamIsCapturing, stream, &capturing));
  if (capturing != cuda::CU_STREAM_CAPTURE_STATUS_NONE) return OkStatus();
  std::lock_guard lock(order_mutex_);
  if (last != nullptr) {
    JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuEventRecord, order_.get(), last));
    JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuStreamWaitEvent, stream, order_.get(), 0));
  }
  last_stream_.store(stream, std::memory_order_relaxed);
  return OkStatus();
}

Result<std::unique_ptr<GpuDomain>> GpuDomain::Open(int process, std::vector<LocalGpu> gpus,
                                                   const GpuOptions& options, Uplink uplink) {
  std::unique_ptr<GpuDomain> domain(new GpuDomain(process, options, std::move(uplink)));
  JF_RETURN_IF_ERROR(domain->OpenLocal(std::move(gpus)));
  return domain;
}

GpuDomain::~GpuDomain() {
  Stop();
  if (!abandoned_) return;
  // Kernels that nobody has waited for may still be queued: what they use stays to the end of the
  // process. Never destroyed.
  struct InUse {
    std::deque<Local> gpus;
    std::vector<MappedMemory> imported;
    std::unique_ptr<MulticastPools> multicast;
  };
  static std::mutex mutex;
  static auto* const kept = new std::deque<InUse>;
  std::lock_guard lock(mutex);
  kept->push_back({std::move(gpus_), std::move(imported_), std::move(multicast_)});
}

Status GpuDomain::OpenLocal(std::vector<LocalGpu> gpus) {
  api_ = options_.api;
  if (api_ == nullptr) {
    JF_ASSIGN_OR_RETURN(api_, cuda::LoadApi());
  }
  std::vector<int> ordinals;
  for (const LocalGpu& gpu : gpus) ordinals.push_back(gpu.ordinal);
  JF_ASSIGN_OR_RETURN(devices_, FindDevices(*api_, ordinals));
  for (const LocalGpu& wanted : gpus) {
    Local& local = gpus_.emplace_back();
    local.rank = wanted.rank;
    JF_ASSIGN_OR_RETURN(local.gpu, Gpu::Open(*api_, wanted.ordinal));
    const cuda::ScopedContext current(*api_, local.gpu->context());
    JF_RETURN_IF_ERROR(current.status());
    for (const void* image : options_.images) {
      auto module = cuda::Module::Load(*api_, image);
      if (!module.ok()) {
        return module.status().WithContext(
            StrCat("no kernel of this build runs on ", local.gpu->name()));
      }
      local.modules.push_back(*std::move(module));
    }
    JF_ASSIGN_OR_RETURN(local.pinned, cuda::PinnedMemory::Allocate(*api_, kPinnedBytes));
    std::memset(local.pinned.host().data(), 0, kPinnedBytes);
  }
  return OkStatus();
}

int GpuDomain::LocalIndex(int ordinal) const {
  for (size_t i = 0; i < gpus_.size(); ++i) {
    if (gpus_[i].gpu->ordinal() == ordinal) return static_cast<int>(i);
  }
  return -1;
}

Result<cuda::CUfunction> GpuDomain::Function(int local, const std::string& kernel) {
  std::lock_guard lock(mutex_);
  Local& owner = gpus_[static_cast<size_t>(local)];
  const auto found = owner.functions.find(kernel);
  if (found != owner.functions.end()) return found->second;
  const cuda::ScopedContext current(*api_, owner.gpu->context());
  JF_RETURN_IF_ERROR(current.status());
  std::string why;
  for (const cuda::Module& module : owner.modules) {
    auto function = module.Function(kernel.c_str());
    if (function.ok()) {
      owner.functions.emplace(kernel, *function);
      return *function;
    }
    why = StrCat(": ", function.status().message());
  }
  return Status(Code::kInternal, StrCat("this build has no kernel ", kernel, why));
}

void GpuDomain::Describe(uint32_t header, std::string call) {
  std::lock_guard lock(mutex_);
  calls_[header] = std::move(call);
}

Status GpuDomain::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

// Blocks that wait for each other must all be resident, those of several ranks on one GPU together.
// Half of the GPU stays free, so that other kernels, and calls of other slots, go on beside them.
uint32_t GpuDomain::LanesFor(const std::vector<int64_t>& ranks) const {
  uint32_t lanes = device::kMaxLanes;
  for (int64_t rank : ranks) {
    const Remote& gpu = known_.at(rank);
    const auto sharing = std::count_if(ranks.begin(), ranks.end(), [&](int64_t other) {
      return known_.at(other).uuid == gpu.uuid;
    });
    lanes = std::min(lanes, gpu.multiprocessors / 2 / static_cast<uint32_t>(sharing));
  }
  return std::max(lanes, 1u);
}

Result<GpuDomain::Arena> GpuDomain::TakeArena(Local& local, uint32_t ranks) {
  // What is left is shared out more sparingly than what there was: nobody takes all of it.
  size_t bytes = options_.arena_bytes;
  while (bytes > local.gpu->pool_free() / 3 && bytes > kSmallestArena) bytes /= 2;
  auto offset = local.gpu->Allocate(bytes);
  if (!offset.ok()) {
    const bool full = bytes > local.gpu->pool_free();
    return offset.status().WithContext(StrCat("no arena for one more communicator of ", ranks,
                                              " ranks",
                                              full ? "; raise JAXFABRIC_GPU_POOL_BYTES" : ""));
  }
  return Arena{*offset, bytes};
}

void GpuDomain::AnnounceArena(const GroupKey& key, int64_t rank, const Arena& arena) {
  const auto& [ranks, slot] = key;
  WireWriter message(MessageType::kGpuArena);
  message.Add(std::span<const int64_t>(ranks)).Add(slot).Add(rank);
  message.Add(uint64_t{arena.offset}).Add(uint64_t{arena.bytes});
  std::vector<int> told;
  for (int64_t member : ranks) {
    const int process = known_.at(member).process;
    if (process == process_ || std::find(told.begin(), told.end(), process) != told.end()) continue;
    uplink_.send(process, message);
    told.push_back(process);
  }
}

Result<std::shared_ptr<GpuCommunicator>> GpuDomain::CommunicatorFor(
    int local, const std::vector<int64_t>& ranks, uint32_t slot, const std::string& call) {
  Local& owner = gpus_[static_cast<size_t>(local)];
  const GroupKey key{ranks, slot};
  const auto begun = Clock::now();
  std::unique_lock lock(mutex_);
  const auto made = [&] {
    const auto found = communicators_.find({key, owner.rank});
    return found == communicators_.end() ? nullptr : found->second;
  };
  if (auto communicator = made()) return communicator;
  if (!failure_.ok()) return failure_;
  for (int64_t rank : ranks) {
    if (!known_.contains(rank)) {
      return Status(Code::kInvalidArgument,
                    StrCat(call, ": rank ", rank, " has no GPU in this job"));
    }
  }
  if (ranks.size() > device::kMaxRanks) {
    return Status(Code::kUnimplemented, StrCat(call, ": a communicator of GPUs has at most ",
                                               device::kMaxRanks, " ranks, not ", ranks.size()));
  }
  auto& arenas = arenas_[key];
  if (!arenas.contains(owner.rank)) {
    auto arena = TakeArena(owner, static_cast<uint32_t>(ranks.size()));
    if (!arena.ok()) return FailUnlocked(lock, arena.status().WithContext(call));
    arenas[owner.rank] = *arena;
    AnnounceArena(key, owner.rank, *arena);
    changed_.notify_all();
  }
  JF_RETURN_IF_ERROR(AwaitArenas(lock, key, owner.rank, call));
  // Another thread may have been here meanwhile.
  if (auto communicator = made()) return communicator;
  auto fresh = std::make_shared<GpuCommunicator>();
  fresh->local_ = local;
  fresh->ranks_ = ranks;
  fresh->slot_ = slot;
  if (const Status filled = FillView(*fresh, owner, key); !filled.ok()) {
    return FailUnlocked(lock, filled.WithContext(call));
  }
  communicators_[{key, owner.rank}] = fresh;
  longest_setup_ = std::max(longest_setup_, Clock::now() - begun);
  return fresh;
}

Status GpuDomain::AwaitArenas(std::unique_lock<std::mutex>& lock, const GroupKey& key, int64_t rank,
                              const std::string& call) {
  const Deadline deadline = Deadline::AfterSeconds(options_.deadline);
  const auto missing = [&] {
    std::vector<int64_t> late;
    for (int64_t member : key.first) {
      if (!arenas_[key].contains(member)) late.push_back(member);
    }
    return late;
  };
  while (true) {
    const std::vector<int64_t> late = missing();
    if (late.empty()) return OkStatus();
    if (!failure_.ok()) return failure_;
    const auto gone = std::find_if(late.begin(), late.end(),
                                   [&](int64_t member) { return known_.at(member).gone; });
    if (gone == late.end() && !deadline.expired()) {
      changed_.wait_until(lock, deadline.at());
      continue;
    }
    const int64_t culprit = gone == late.end() ? late[0] : *gone;
    lock.unlock();
    Status failed(
        gone == late.end() ? Code::kDeadlineExceeded : Code::kUnavailable,
        gone == late.end()
            ? StrCat(Name(rank), " waited ", options_.deadline, " s in ", call, " for ",
                     Name(culprit), ", which is in ", Ask(culprit, 0))
            : StrCat(Name(culprit), " has ended, and ", Name(rank), " waits for it in ", call));
    lock.lock();
    return FailUnlocked(lock, std::move(failed));
  }
}

Status GpuDomain::FillView(GpuCommunicator& communicator, Local& local, const GroupKey& key) {
  const auto& ranks = key.first;
  auto& arenas = arenas_[key];
  size_t bytes = arenas[ranks[0]].bytes;
  for (int64_t rank : ranks) bytes = std::min(bytes, arenas[rank].bytes);
  device::Communicator& view = communicator.view_;
  JF_ASSIGN_OR_RETURN(
      view.shape, device::ShapeArena(static_cast<uint32_t>(ranks.size()), LanesFor(ranks), bytes));
  view.rank =
      static_cast<uint32_t>(std::find(ranks.begin(), ranks.end(), local.rank) - ranks.begin());
  view.wait_milliseconds =
      static_cast<uint32_t>(std::clamp(options_.deadline * 1000, 1.0, 4294967295.0));
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Remote& remote = known_.at(ranks[i]);
    view.arena[i] = remote.pool + arenas[ranks[i]].offset;
  }
  view.multicast = MulticastFor(key, view.shape.Bytes());
  if (local.pinned_used + kRecordBytes + kControlBytes > kPinnedBytes) {
    return Status(Code::kResourceExhausted,
                  StrCat(local.gpu->name(), " has as many communicators as can be watched"));
  }
  const auto take = [&](size_t size) {
    return std::exchange(local.pinned_used, local.pinned_used + size);
  };
  const size_t fault = take(kRecordBytes), control = take(kControlBytes);
  std::byte* host = local.pinned.host().data();
  auto* device_base = reinterpret_cast<std::byte*>(local.pinned.device_address());
  communicator.fault_ = reinterpret_cast<device::FaultRecord*>(host + fault);
  communicator.control_ = reinterpret_cast<device::HostControl*>(host + control);
  view.fault = reinterpret_cast<device::FaultRecord*>(device_base + fault);
  view.control = reinterpret_cast<const device::HostControl*>(device_base + control);
  for (size_t i = 0; i < ranks.size(); ++i) {
    communicator.control_->gone[i] = known_.at(ranks[i]).gone ? 1 : 0;
  }
  const cuda::ScopedContext current(*api_, local.gpu->context());
  JF_RETURN_IF_ERROR(current.status());
  JF_ASSIGN_OR_RETURN(communicator.order_, cuda::Event::Create(*api_));
  return OkStatus();
}

std::map<std::string, uint64_t> GpuDomain::Counters() const {
  std::map<std::string, uint64_t> counters;
  std::lock_guard lock(mutex_);
  counters["gpu_communicators"] = communicators_.size();
  uint64_t& multicast = counters["gpu_multicast_communicators"];
  for (const auto& [key, communicator] : communicators_) {
    multicast += communicator->view_.multicast != nullptr;
  }
  uint64_t& largest = counters["gpu_communicator_bytes"];
  for (const auto& [key, arenas] : arenas_) {
    for (const auto& [rank, arena] : arenas) largest = std::max(largest, uint64_t{arena.bytes});
  }
  counters["gpu_setup_microseconds"] = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(longest_setup_).count());
  // Relaxed: figures only.
  counters["gpu_windows_found"] = windows_found_.load(std::memory_order_relaxed);
  counters["gpu_windows_missing"] = windows_missing_.load(std::memory_order_relaxed);
  for (const Local& local : gpus_) {
    counters["gpu_pool_bytes"] += local.gpu->pool().bytes();
    counters["gpu_pool_free_bytes"] += local.gpu->pool_free();
  }
  return counters;
}

}  // namespace jaxfabric
