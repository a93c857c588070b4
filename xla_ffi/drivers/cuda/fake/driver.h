// A CUDA driver without a GPU: fills the same table of functions as the real one.
//
// Device memory is memfds, so that processes share it as GPUs do; kernels are host C++ that an
// emulated grid runs (grid.h), all streams and devices of the process on one thread of its own.
// While everything in flight waits, that thread yields its core, so that other processes go on.
//
// One fake per process at a time; a forked child makes its own, before it calls the driver. What
// the driver is strict about, the fake is strict about: sizes that are no multiple of the
// granularity, memory mapped without access (a fault), streams used with another device's context,
// and the rules of stream capture. Not modelled: the legacy stream's implicit order (it is a stream
// like others, one for each device), priorities, contexts other than primary ones, graphs captured
// into graphs.
//
// Threading: the table may be used by any thread, and so may the functions below.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "drivers/cuda/api.h"
#include "drivers/cuda/fake/grid.h"

namespace jaxfabric::cuda {

struct FakeConfig {
  // The machine's GPUs that this process sees, by a number that all its processes agree on. The
  // device ordinal is the index in here.
  std::vector<int> gpus = {0, 1};
  int multiprocessors = 4;
  int blocks_per_multiprocessor = 2;
  int compute_capability = 90;
  bool multicast = true;            // the devices can do it
  bool multicast_functions = true;  // the driver knows it
  bool fabric_handles = false;
  // Of one NVLink domain, which may be of several hosts: only there fabric handles are of use.
  int clique = 0;
  bool host_memory = true;  // cuMemCreate() can make memory of the host
  // Pairs of GPUs that cannot reach each other's memory.
  std::vector<std::pair<int, int>> no_peer_access;
  size_t granularity = size_t{64} * 1024;  // 2 MiB on real ones
  size_t memory_bytes = size_t{1} << 30;   // of one device
  uint64_t seed = 1;                       // of the grid's schedule
};

class FakeDriver {
 public:
  explicit FakeDriver(FakeConfig config = {});
  // Kernels in flight are dropped, and everything that is still allocated is freed.
  ~FakeDriver();
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  const Api& api() const { return api_; }

  // What cuModuleGetFunction() finds, in whatever module. The kernel's one parameter is a struct of
  // `argument_bytes`.
  void AddKernel(std::string name, emulation::Kernel kernel, size_t argument_bytes);

  // The n-th call of the function from now on, 1 being the next, fails with `code`. "": of any.
  void FailCall(std::string_view function, int nth, CUresult code);
  // How often a function has been called, or with "" all of them together.
  uint64_t Calls(std::string_view function) const;

  // While held a device begins nothing that is queued on its streams: a rank that does not come.
  void Hold(int ordinal, bool held);
  // The rank dies: what runs on the device never goes on and never ends.
  void Stop(int ordinal);
  // Moves the clock that kernels see forward.
  void AdvanceClock(uint64_t nanoseconds);
  // Why the last kernel that trapped did so.
  std::string TrapReason() const;

  // What has not been freed, one line each; empty if nothing is left.
  std::string Leaks() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
  Api api_;
};

}  // namespace jaxfabric::cuda
