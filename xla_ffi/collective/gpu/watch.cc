// Failure on GPUs: records that kernels leave, processes that end, and what the ranks are told.
#include <pthread.h>

#include <algorithm>

#include "base/log.h"
#include "collective/gpu/domain.h"

namespace jaxfabric {
namespace {

// How often records are looked at: a fault is reported about so much later.
constexpr auto kInterval = std::chrono::milliseconds(5);
// How long another process has for an answer: it may be the one that hangs.
constexpr auto kPatience = std::chrono::milliseconds(500);
// How long Stop() waits for the peers of kernels in flight.
constexpr auto kStopPatience = std::chrono::seconds(30);

// Words that kernels read and write while the host does.
uint32_t LoadShared(const uint32_t& word) {
  // Acquire: what the kernel wrote before it is there.
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
void StoreShared(uint32_t& word, uint32_t value) {
  // Relaxed: nothing else is passed on by it.
  __atomic_store_n(&word, value, __ATOMIC_RELAXED);
}

}  // namespace

void GpuDomain::Start() {
  watch_ = std::thread([this] { Watch(); });
  ::pthread_setname_np(watch_.native_handle(), "jf-gpu-watch");
}

void GpuDomain::Stop() {
  if (!watch_.joinable()) return;
  bool healthy = false;
  {
    std::lock_guard lock(mutex_);
    healthy = failure_.ok();
    if (healthy) failure_ = Status(Code::kCancelled, "jaxfabric was shut down");
    abandoned_ = !healthy;
    // Sequentially consistent with Launching.
    failed_.store(true, std::memory_order_seq_cst);
    abort_at_ = Clock::now() + kStopPatience;
  }
  changed_.notify_all();  // who waits in a set-up
  while (healthy && launching_.load(std::memory_order_seq_cst) > 0) std::this_thread::yield();
  for (const Local& local : gpus_) {
    // After a failure our kernels have been ended, and others may wait for a process that died.
    if (!healthy) break;
    const cuda::ScopedContext current(*api_, local.gpu->context());
    if (current.status().ok()) (void)api_->cuCtxSynchronize();
  }
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  watch_.join();
}

void GpuDomain::Watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, kInterval);
    // Also when stopping: the last record may be the reason.
    ReportFaults(lock);
    if (Clock::now() >= abort_at_) AbortKernels();
  }
}

void GpuDomain::ReportFaults(std::unique_lock<std::mutex>& lock) {
  std::vector<std::pair<std::shared_ptr<GpuCommunicator>, device::FaultRecord>> faults;
  for (auto& [key, communicator] : communicators_) {
    if (communicator->fault_seen_ || LoadShared(communicator->fault_->kind) == 0) continue;
    communicator->fault_seen_ = true;
    faults.emplace_back(communicator, *communicator->fault_);
  }
  if (faults.empty()) return;
  ++reporting_;
  lock.unlock();
  for (const auto& [communicator, fault] : faults) Report(*communicator, fault);
  lock.lock();
  --reporting_;
  changed_.notify_all();
}

Status GpuDomain::FailUnlessOk(Status status) {
  if (status.ok()) return status;
  std::unique_lock lock(mutex_);
  return FailUnlocked(lock, std::move(status));
}

Status GpuDomain::FailUnlocked(std::unique_lock<std::mutex>& lock, Status status) {
  // After a kernel has failed the driver refuses everything: what the kernel says is the reason.
  ReportFaults(lock);
  changed_.wait(lock, [this] { return reporting_ == 0; });
  if (!failure_.ok()) return failure_;
  lock.unlock();
  uplink_.fail(status);
  return status;
}

void GpuDomain::Report(const GpuCommunicator& communicator, const device::FaultRecord& fault) {
  const int64_t rank = communicator.ranks_[fault.rank];
  const int64_t peer = communicator.ranks_[fault.peer];
  const std::string call = CallOf(rank, fault.header);
  const std::string self = Name(rank), other = Name(peer);
  switch (static_cast<device::FaultKind>(fault.kind)) {
    case device::FaultKind::kNone:
    case device::FaultKind::kAborted:
      return;  // its cause is known
    case device::FaultKind::kGone:
      uplink_.fail(Status(Code::kUnavailable,
                          StrCat(other, " has ended, and ", self, " waits for it in ", call)));
      return;
    case device::FaultKind::kDeadline:
      uplink_.fail(Status(Code::kDeadlineExceeded,
                          StrCat(self, " waited ", options_.deadline, " s in ", call, " for ",
                                 other, ", whose last call is ", Ask(peer, 0))));
      return;
    case device::FaultKind::kMismatch:
      uplink_.fail(
          Status(Code::kFailedPrecondition, StrCat("ranks disagree: ", call, " on ", self, ", ",
                                                   Ask(peer, fault.peer_header), " on ", other)));
      return;
    case device::FaultKind::kRagged:
      uplink_.fail(Status(Code::kInvalidArgument, StrCat(call, ": the sizes and offsets of ", self,
                                                         " and of ", other, " do not fit")));
      return;
    case device::FaultKind::kProtocol:
      uplink_.fail(Status(Code::kInternal,
                          StrCat(self, " is at step ", fault.step, " of lane ", fault.lane, " in ",
                                 call, ", and sees ", other, " at step ", fault.peer_step)));
      return;
  }
}

std::string GpuDomain::CallOf(int64_t rank, uint32_t header) const {
  std::lock_guard lock(mutex_);
  if (header == 0) {
    for (const Local& local : gpus_) {
      // Relaxed: for messages only.
      if (local.rank == rank) header = local.last_header.load(std::memory_order_relaxed);
    }
    if (header == 0) return "no call yet";
  }
  const auto found = calls_.find(header);
  return found == calls_.end() ? "a call that is not known there" : found->second;
}

std::string GpuDomain::Name(int64_t rank) const {
  // Complete since Start(), but for `gone`.
  return StrCat("rank ", rank, " (a GPU of ", uplink_.describe_process(known_.at(rank).process),
                ")");
}

std::string GpuDomain::Ask(int64_t rank, uint32_t header) {
  const int process = known_.at(rank).process;
  if (process == process_) return CallOf(rank, header);
  std::unique_lock lock(mutex_);
  const uint64_t number = ++next_question_;
  questions_[number] = std::nullopt;
  lock.unlock();
  WireWriter question(MessageType::kGpuAsk);
  uplink_.send(process, question.Add(number).Add(rank).Add(header));
  lock.lock();
  changed_.wait_until(lock, Clock::now() + kPatience,
                      [&] { return questions_[number].has_value() || stopping_; });
  const auto answer = questions_[number];
  questions_.erase(number);
  return answer.value_or("not known: its process does not answer");
}

void GpuDomain::OnMessage(int process, WireReader& message) {
  if (message.type() == MessageType::kGpuAsk) {
    const auto number = message.Get<uint64_t>();
    const auto rank = message.Get<int64_t>();
    const auto header = message.Get<uint32_t>();
    if (!message.ok()) return;
    WireWriter answer(MessageType::kGpuTell);
    uplink_.send(process, answer.Add(number).Add(std::string_view(CallOf(rank, header))));
    return;
  }
  std::lock_guard lock(mutex_);
  if (message.type() == MessageType::kGpuTell) {
    const auto number = message.Get<uint64_t>();
    const std::string text = message.GetString();
    const auto question = questions_.find(number);
    if (message.ok() && question != questions_.end()) question->second = text;
  } else if (message.type() == MessageType::kGpuArena) {
    const std::vector<int64_t> ranks = message.GetInts();
    const auto slot = message.Get<uint32_t>();
    const auto rank = message.Get<int64_t>();
    const auto offset = message.Get<uint64_t>();
    const auto bytes = message.Get<uint64_t>();
    const auto sender = known_.find(rank);
    // What does not fit is not ours to use.
    if (!message.ok() || sender == known_.end() || sender->second.process != process ||
        bytes > sender->second.pool_bytes || offset > sender->second.pool_bytes - bytes ||
        offset % device::kLineBytes != 0) {
      return;
    }
    // The first counts: kernels may use it already.
    arenas_[{ranks, slot}].try_emplace(rank, Arena{offset, bytes});
  }
  changed_.notify_all();
}

void GpuDomain::OnGone(int process) {
  std::lock_guard lock(mutex_);
  for (auto& [rank, gpu] : known_) gpu.gone |= gpu.process == process;
  for (auto& [key, communicator] : communicators_) {
    for (size_t i = 0; i < communicator->ranks_.size(); ++i) {
      if (known_.at(communicator->ranks_[i]).gone) StoreShared(communicator->control_->gone[i], 1);
    }
  }
  changed_.notify_all();
}

void GpuDomain::AbortKernels() {
  for (auto& [key, communicator] : communicators_) {
    StoreShared(communicator->control_->abort, 1);
  }
}

void GpuDomain::Abort(const Status& cause) {
  std::lock_guard lock(mutex_);
  if (failure_.ok()) failure_ = cause;
  // Release: who sees it finds failure_ set.
  failed_.store(true, std::memory_order_release);
  AbortKernels();
  changed_.notify_all();
}

}  // namespace jaxfabric
