// What a FakeDriver knows, for the sources that implement it. One mutex guards all of it; the
// thread that runs the grid holds it except while the grid runs.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "drivers/cuda/fake/allocation.h"
#include "drivers/cuda/fake/driver.h"

namespace jaxfabric::cuda {

namespace fake {

enum class Function {
#define JF_CUDA_FUNCTION(kind, name, symbol, parameters) name,
#include "drivers/cuda/functions.inc"
#undef JF_CUDA_FUNCTION
  kCount,
};

// What fills the table, function by function.
struct Calls {
#define JF_CUDA_FUNCTION(kind, name, symbol, parameters) static CUresult name parameters;
#include "drivers/cuda/functions.inc"
#undef JF_CUDA_FUNCTION
};

struct KernelEntry {
  emulation::Kernel kernel;
  size_t argument_bytes;
};

// One recording of an event.
struct Recorded {
  bool done = false;
  std::chrono::steady_clock::time_point at;
};

// Something for the grid: a kernel, or a copy or fill in the guise of one.
struct Work {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_KERNEL;
  CUfunction function = nullptr;  // of a kernel
  emulation::Kernel kernel = nullptr;
  emulation::Dim dim;
  std::vector<std::byte> arguments;
};

// The nodes of an instantiated graph, in an order in which each comes after those it waits for.
struct Program {
  std::vector<Work> nodes;
  std::vector<std::vector<size_t>> after;
};

struct Record {
  std::shared_ptr<Recorded> recorded;
};
struct Wait {
  std::shared_ptr<Recorded> recorded;
};
struct GraphRun {
  std::shared_ptr<const Program> program;
  std::shared_ptr<bool> busy;  // a graph does not overlap itself
};
using Op = std::variant<Work, Record, Wait, GraphRun>;

// A capture that is going on.
struct Capture {
  CUstream origin = nullptr;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  std::unique_ptr<CUgraph_st> graph;
  bool invalidated = false;
};

// Memory that has an address: mapped, allocated or pinned.
struct Region {
  enum class Kind { kMapped, kMulticast, kAllocated, kPinned, kRegistered } kind = Kind::kMapped;
  size_t bytes = 0;
  int device = 0;       // ordinal, or -1 for another process's and for the host's
  uint64_t access = 0;  // a bit for each device
  std::shared_ptr<Allocation> allocation;
};

}  // namespace fake

struct CUctx_st {
  int device = 0;
};
struct CUmod_st {
  int device = 0;
};
struct CUfunc_st {
  int device = 0;
  CUmodule loaded = nullptr;
  fake::KernelEntry entry;
};
struct CUevent_st {
  int device = 0;
  unsigned flags = 0;
  std::shared_ptr<fake::Recorded> recorded;
  // Of the last recording in a capture, while that is the last one.
  std::weak_ptr<fake::Capture> capture;
  bool captured = false;
  std::vector<size_t> nodes;
};
struct CUstream_st {
  int device = 0;
  std::deque<fake::Op> queue;
  bool busy = false;
  std::shared_ptr<fake::Capture> capture;
  std::vector<size_t> tail;  // the nodes that the next captured one comes after
};
struct CUgraphNode_st {
  fake::Work work;
  std::vector<size_t> after;
  void* parameter = nullptr;  // for cuGraphKernelNodeGetParams
  size_t index = 0;
};
struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<const fake::Program> program;
  std::shared_ptr<bool> busy = std::make_shared<bool>(false);
};

struct FakeDriver::State {
  struct Device {
    int gpu = 0;
    CUctx_st context;
    int retained = 0;
    CUresult failed = CUDA_SUCCESS;
    bool held = false;
    bool stopped = false;
    std::atomic<size_t> used_bytes = 0;  // relaxed: a sum
    CUstream_st legacy;
  };
  struct InFlight {
    uint64_t launch = 0;
    CUstream stream = nullptr;
    int device = 0;
    std::shared_ptr<struct GraphProgress> graph;
    size_t node = 0;
  };
  struct Failure {
    fake::Function function;
    int nth;
    CUresult code;
  };

  explicit State(FakeConfig wanted);
  ~State();

  // Null, an unknown stream, or one whose device has failed gives the error.
  CUresult FindStream(CUstream stream, CUstream* found);
  CUresult CurrentDevice(int* device) const;
  bool KnownDevice(CUdevice device) const {
    return device >= 0 && device < static_cast<CUdevice>(devices.size());
  }
  bool PeerAccess(int from_gpu, int to_gpu) const;
  // Whether `device` may use all of [address, address + bytes).
  bool Accessible(int device, CUdeviceptr address, size_t bytes) const;
  const fake::Region* RegionAt(CUdeviceptr address, CUdeviceptr* start) const;
  // A call that no capture may see; gives its error and invalidates the capture.
  CUresult ForbiddenInCapture();
  CUresult Submit(CUstream stream, fake::Op op);
  void Fail(int device, CUresult code);

  // The thread that runs the grid.
  void Main();
  bool StartAll();
  bool StartStream(CUstream stream);
  void Launch(CUstream stream, const fake::Work& work, std::shared_ptr<GraphProgress> graph,
              size_t node);
  void Reap();
  void Drop(int device);

  const FakeConfig config;
  const uint64_t id;  // no other fake of this process or its parents has it
  const int pid;
  mutable std::mutex mutex;
  std::condition_variable device_news;
  std::condition_variable host_news;
  bool news = false;
  bool stopping = false;

  std::deque<Device> devices;
  std::map<std::string, fake::KernelEntry> kernels;
  std::array<uint64_t, static_cast<size_t>(fake::Function::kCount)> calls{};
  std::vector<Failure> failures;

  uint64_t next_handle = 1;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<fake::Allocation>> handles;
  std::map<CUdeviceptr, size_t> reservations;
  std::map<CUdeviceptr, fake::Region> regions;
  std::map<CUmodule, std::unique_ptr<CUmod_st>> modules;
  std::map<CUfunction, std::unique_ptr<CUfunc_st>> functions;
  std::map<CUevent, std::unique_ptr<CUevent_st>> events;
  std::map<CUstream, std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUstream_st>> dying_streams;  // destroyed with work queued
  std::map<CUgraph, std::unique_ptr<CUgraph_st>> graphs;
  std::map<CUgraphExec, std::unique_ptr<CUgraphExec_st>> executables;
  std::vector<std::weak_ptr<fake::Capture>> captures;

  emulation::Grid grid;  // the thread's own
  std::map<uint64_t, InFlight> in_flight;
  uint64_t next_token = 1;
  std::vector<std::pair<uint64_t, bool>> ended;  // token, trapped; the thread's own
  uint64_t clock_advance = 0;
  std::string trap_reason;
  std::unique_ptr<std::thread> thread;
};

namespace fake {
// The fake of this process; null between two of them.
FakeDriver::State* Current();
}  // namespace fake

}  // namespace jaxfabric::cuda
