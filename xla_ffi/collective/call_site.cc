#include "collective/call_site.h"

#include <thread>

#include "collective/fabric.h"
#include "collective/started_call.h"

namespace jaxfabric {
namespace {

// The one pointer that FFI handlers, which are plain C functions, find their process's fabric by.
struct Current {
  std::mutex mutex;
  std::shared_ptr<Fabric> fabric;
  // For the fast path's comparison only; never dereferenced through here.
  std::atomic<Fabric*> raw{nullptr};
};

Current& TheCurrent() {
  static Current current;
  return current;
}

}  // namespace

void SetCurrentFabric(std::shared_ptr<Fabric> fabric) {
  Current& current = TheCurrent();
  std::lock_guard lock(current.mutex);
  // Release: who compares equal to it may use the fabric it holds itself.
  current.raw.store(fabric.get(), std::memory_order_release);
  current.fabric = std::move(fabric);
  // Their programs have failed, or will.
  StartedCalls::Get().Clear();
}

std::shared_ptr<Fabric> CurrentFabric() {
  Current& current = TheCurrent();
  std::lock_guard lock(current.mutex);
  return current.fabric;
}

bool IsCurrentFabric(const Fabric* fabric) {
  // Acquire: pairs with the release in SetCurrentFabric.
  return fabric == TheCurrent().raw.load(std::memory_order_acquire);
}

CallSite::CallSite(CallSpec spec)
    : spec_(std::move(spec)), instance_(SiteRegistry::Get().Add(spec_.Hash())) {}

CallSite::~CallSite() {
  // XLA destroys an executable after its executions; the last one may still be on its way out.
  for (const auto& binding : bindings_) {
    for (const auto& participant : binding->by_device) {
      while (participant && !participant->idle()) std::this_thread::yield();
    }
  }
}

Participant* CallSite::Bound(int64_t device) const {
  // Acquire, twice: pairs with the release in Bind().
  Binding* binding = current_.load(std::memory_order_acquire);
  if (binding == nullptr || !IsCurrentFabric(binding->fabric.get())) {
    return nullptr;
  }
  const int index = binding->fabric->LocalIndex(device);
  if (index < 0) return nullptr;
  return binding->ready[static_cast<size_t>(index)].load(std::memory_order_acquire);
}

Result<Participant*> CallSite::Bind(int64_t device, std::optional<uint32_t> partition,
                                    int64_t run_id, const Buffers& buffers) {
  std::shared_ptr<Fabric> fabric = CurrentFabric();
  if (!fabric) {
    return Status(Code::kFailedPrecondition,
                  StrCat(spec_.label,
                         ": jaxfabric is not initialized in this process; call "
                         "jaxfabric.initialize() first"));
  }
  const int index = fabric->LocalIndex(device);
  if (index < 0) {
    return Status(Code::kInternal,
                  StrCat(spec_.label, ": device ", device, " is not one of this process"));
  }
  const int64_t id = spec_.by_position ? int64_t{partition.value_or(0)} : device;
  int group = -1;
  int position = -1;
  for (size_t g = 0; g < spec_.groups.size(); ++g) {
    for (size_t p = 0; p < spec_.groups[g].size(); ++p) {
      if (spec_.groups[g][p] != id) continue;
      group = static_cast<int>(g);
      position = static_cast<int>(p);
    }
  }
  if (group < 0) {
    return Status(Code::kInvalidArgument,
                  StrCat(spec_.label, ": device ", device, " is in none of the call's groups"));
  }
  JF_RETURN_IF_ERROR(CheckSizes(
      spec_, static_cast<int>(spec_.groups[static_cast<size_t>(group)].size()), buffers));

  SiteRegistry::Get().CloseExecutable(instance_.clock.get());
  std::lock_guard lock(mutex_);
  Binding* binding = current_.load(std::memory_order_acquire);
  if (binding == nullptr || binding->fabric != fabric) {
    const size_t devices = fabric->local_ranks().size();
    bindings_.push_back(std::make_unique<Binding>());
    binding = bindings_.back().get();
    binding->fabric = std::move(fabric);
    binding->by_device.resize(devices);
    binding->ready = std::make_unique<std::atomic<Participant*>[]>(devices);
    // Release: the binding is complete.
    current_.store(binding, std::memory_order_release);
  }
  auto& participant = binding->by_device[static_cast<size_t>(index)];
  if (!participant) {
    participant = std::make_unique<Participant>(*binding->fabric, spec_, instance_, device, group,
                                                position, run_id, buffers);
    binding->ready[static_cast<size_t>(index)].store(participant.get(), std::memory_order_release);
  }
  return participant.get();
}

Status CallSite::Start(int64_t device, std::optional<uint32_t> partition, int64_t run_id,
                       const Buffers& buffers, Finished finished) {
  Participant* participant = Bound(device);
  if (participant == nullptr) {
    Result<Participant*> bound = Bind(device, partition, run_id, buffers);
    if (!bound.ok()) return bound.status();
    participant = *bound;
  }
  Op* op = participant->Begin(buffers, run_id);
  // The peers get the first bytes at once.
  op->Advance();
  if (!op->finished()) {
    op->on_finished = std::move(finished);
    if (HandOff(op)) return OkStatus();
    finished = Cancel(op);
  }
  const Status status = op->status();
  participant->End(op);
  finished(status);
  return OkStatus();
}

bool CallSite::HandOff(Op* op) { return op->participant().fabric().TryHandOff(op); }

CallSite::Finished CallSite::Cancel(Op* op) {
  op->Fail(op->participant().WithCaller(Status(Code::kCancelled, "jaxfabric was shut down")));
  while (!op->finished()) {
    op->Advance();
    std::this_thread::yield();
  }
  return std::move(op->on_finished);
}

}  // namespace jaxfabric
