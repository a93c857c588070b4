// A call instruction of a program for GPUs: what the FFI instantiate stage makes, and what launches
// its kernel.
//
// Calls of one communicator and slot meet in launch order, which a stream fixes and which is the
// same on all ranks of an SPMD program; the header that travels with the first signal says which
// call it is, so that a difference is an error on all of them. Threads: one per device.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/call.h"
#include "collective/gpu/compilation.h"
#include "collective/gpu/domain.h"
#include "collective/gpu/windows.h"

namespace jaxfabric {

class Fabric;

class GpuCall {
 public:
  // Calls that the main stream waits for, and started ones that run beside it.
  enum class Slot : uint32_t { kInOrder = 0, kStarted = 1 };

  GpuCall(CallSpec spec, Slot slot);

  // Sets the communicator up before the first launch of the GPU with this ordinal: may wait for the
  // other ranks. Only the sizes and the type of `buffers` are looked at. After it Launch() neither
  // allocates nor waits. Cheap once done.
  Status Prepare(int ordinal, const Buffers& buffers);

  // Launches the kernel on `stream`. Prepares first if that has not been done, which a stream that
  // is being captured does not allow.
  Status Launch(int ordinal, cuda::CUstream stream, const Buffers& buffers);

  // Prepares, and tells the next launches of a call with positions, in the order of `stream`, where
  // these arrays are in windows. Where they are in none, on whatever rank, all ranks' launches
  // copy.
  Status Attach(int ordinal, cuda::CUstream stream, const Buffers& buffers,
                const GpuWindows& windows);

  // The same beside `stream`: after what is queued on it, and GpuDomain::Finish() makes a stream
  // wait for the end.
  Status Start(int ordinal, cuda::CUstream stream, const Buffers& buffers);

  const CallSpec& spec() const { return spec_; }

 private:
  // Of a binding whose kernel looks for its arrays in windows.
  struct Windowed {
    Windowed(std::weak_ptr<Fabric> owner, int owner_local)
        : fabric(std::move(owner)), local(owner_local) {}
    ~Windowed();
    const std::weak_ptr<Fabric> fabric;  // has the table's memory, and may end first
    const int local;
    device::WindowTable* table = nullptr;  // in the GPU's memory
    cuda::CUfunction write = nullptr;
    std::vector<int> peers;  // the communicator's members as ranks of XLA's
    std::mutex mutex;        // guards what follows
    device::WindowTable written{};
    cuda::CUstream stream = nullptr;  // on which it was
    bool told = false;                // why there are no windows
  };

  // What a launch on one GPU needs beside the buffers.
  struct Binding {
    std::weak_ptr<Fabric> fabric;  // has the domain
    const Fabric* raw = nullptr;   // the same, to compare only
    // The same once a launch has been captured: a graph of the executable may be running while the
    // fabric ends, so what that uses stays as long as the call.
    std::atomic<bool> captured{false};
    std::shared_ptr<Fabric> kept;  // written by who sets `captured`
    GpuDomain* domain = nullptr;
    int local = -1;
    GpuCommunicator* communicator = nullptr;  // the domain's, as long as that is there
    cuda::CUfunction function = nullptr;
    uint32_t blocks = 1;
    uint64_t amount = 0;  // elements, bytes or rows, as the kernel counts
    uint32_t root = 0;
    int32_t target = -1, source = -1;
    std::unique_ptr<Windowed> windows;  // null: the kernel does not look for any
  };

  static Status KeepIfCaptured(Binding& binding, cuda::CUstream stream,
                               const std::shared_ptr<Fabric>& fabric);
  Status LaunchBound(const Binding& binding, cuda::CUstream stream, const Buffers& buffers);
  // Of the current fabric, which `fabric` keeps while the binding is used.
  Result<Binding*> BindingFor(int ordinal, const Buffers& buffers, std::shared_ptr<Fabric>& fabric);
  // An executable whose graph was captured with an earlier fabric would launch its kernel again, in
  // memory that nobody watches, and where other ranks may not be. XLA captures anew when arrays
  // move only, which they may do on some ranks.
  Status RefuseOldGraphs(const Fabric& current, int ordinal);
  Result<std::unique_ptr<Binding>> Bind(const std::shared_ptr<Fabric>& fabric, int local,
                                        const Buffers& buffers);
  // The group of this rank: its ranks, and the number of its first member among all groups'.
  struct Group {
    std::vector<int64_t> ranks;
    size_t first = 0;
  };
  Result<Group> GroupOf(int64_t rank) const;
  Status PlanLaunch(Binding& binding, const Group& group, const Buffers& buffers);
  Status BindWindows(Binding& binding, const Group& group) const;
  // With the lock of the binding's windows held.
  Status WriteTable(Binding& binding, cuda::CUstream stream,
                    const device::WindowTable& table) const;
  // The table of these arrays. The error says why they are in no windows.
  Result<device::WindowTable> FindWindows(const Binding& binding, const Buffers& buffers,
                                          const GpuWindows& windows) const;

  static constexpr size_t kMaxOrdinals = 64;
  const CallSpec spec_;
  const Slot slot_;
  const std::shared_ptr<const ExecutableDevices> devices_;
  const uint32_t header_;
  std::mutex mutex_;  // guards owned_ and the making of bindings
  std::vector<std::unique_ptr<Binding>> owned_;
  std::atomic<Binding*> bindings_[kMaxOrdinals] = {};  // by ordinal: read without the mutex
};

}  // namespace jaxfabric
