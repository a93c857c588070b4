// A call instruction of a compiled program: what the FFI instantiate stage makes, and what every
// execution goes through.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "collective/call.h"
#include "collective/launch.h"
#include "collective/participant.h"

namespace jaxfabric {

class Fabric;

// The fabric that executions use, or null. initialize() sets it, shutdown() clears it.
void SetCurrentFabric(std::shared_ptr<Fabric> fabric);
std::shared_ptr<Fabric> CurrentFabric();
// Without a lock.
bool IsCurrentFabric(const Fabric* fabric);

class CallSite {
 public:
  // Must be made in instantiation order: it takes the instance's number.
  explicit CallSite(CallSpec spec);
  ~CallSite();

  // Called on a completion thread with the result of an execution that did not finish at once.
  using Finished = std::function<void(const Status&)>;

  // Executes on rank `device`. Either the result is there on return, or `make_finished` was called
  // and what it returned will be called once.
  //
  // `partition` is the mesh position of this device, for specs by position.
  template <class MakeFinished>
  Status Execute(int64_t device, std::optional<uint32_t> partition, int64_t run_id,
                 const Buffers& buffers, MakeFinished make_finished) {
    Participant* participant = Bound(device);
    if (participant == nullptr) {
      Result<Participant*> bound = Bind(device, partition, run_id, buffers);
      if (!bound.ok()) return bound.status();
      participant = *bound;
    }
    Op* op = participant->Begin(buffers, run_id);
    if (!participant->WaitInline(*op)) {
      op->on_finished = make_finished();
      if (HandOff(op)) return OkStatus();
      // Shut down meanwhile: finish it here.
      const Finished finished = Cancel(op);
      const Status status = op->status();
      participant->End(op);
      finished(status);
      return OkStatus();
    }
    Status status = op->status();
    participant->End(op);
    return status;
  }

  // The same, but returns at once: `finished` is called, perhaps before it returns, unless the
  // result is an error.
  Status Start(int64_t device, std::optional<uint32_t> partition, int64_t run_id,
               const Buffers& buffers, Finished finished);

  const CallSpec& spec() const { return spec_; }

 private:
  Participant* Bound(int64_t device) const;
  Result<Participant*> Bind(int64_t device, std::optional<uint32_t> partition, int64_t run_id,
                            const Buffers& buffers);
  static bool HandOff(Op* op);
  static Finished Cancel(Op* op);

  // The participants of this process's devices on one fabric.
  struct Binding {
    std::shared_ptr<Fabric> fabric;
    std::vector<std::unique_ptr<Participant>> by_device;  // by Fabric::LocalIndex
    std::unique_ptr<std::atomic<Participant*>[]> ready;   // the same, readable without the mutex
  };

  const CallSpec spec_;
  const SiteRegistry::Instance instance_;
  std::mutex mutex_;  // guards bindings_ and the making of participants
  std::vector<std::unique_ptr<Binding>> bindings_;  // the last one is current
  std::atomic<Binding*> current_{nullptr};
};

}  // namespace jaxfabric
