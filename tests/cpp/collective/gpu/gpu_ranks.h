// Ranks that are emulated GPUs, of one process or of forked ones, and calls on them without XLA.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/gpu/call.h"
#include "collective/world.h"
#include "device/emulated.h"
#include "drivers/cuda/fake/driver.h"

namespace jaxfabric::testing {

// A driver with the GPUs of one process and all kernels.
class Machine {
 public:
  // The GPUs of process `process`, all different, or all the same one.
  enum class Gpus { kOneEach, kOneForAll };
  Machine(Shape shape, int process, Gpus gpus = Gpus::kOneEach);
  cuda::FakeDriver& driver() { return *driver_; }
  const cuda::Api& api() const { return driver_->api(); }
  // For a fabric over them.
  Options AddTo(Options options) const;

 private:
  Shape shape_;
  int process_;
  std::unique_ptr<cuda::FakeDriver> driver_;
};

// A rank's GPU as a program uses it: a stream, and memory.
class GpuRank {
 public:
  GpuRank(const cuda::Api& api, int ordinal);
  ~GpuRank();

  const cuda::Api& api() const { return api_; }
  int ordinal() const { return ordinal_; }
  cuda::CUcontext context() const { return context_.context(); }
  cuda::CUstream stream() const { return stream_.get(); }

  // Memory for one execution of `problem`, filled with the inputs of `data`.
  struct Execution {
    cuda::CUdeviceptr input = 0, output = 0, slices = 0;
    Buffers buffers;
  };
  Execution Make(const Problem& problem, int position, int data);
  void Fill(const Execution& execution, const Problem& problem, int position, int data);
  // "" if the bytes are right. The stream is idle.
  std::string Check(const Execution& execution, const Problem& problem, int position, int data);
  void Free(const Execution& execution);
  // Waits for the stream; "" for success.
  std::string Synchronize();

 private:
  const cuda::Api& api_;
  const int ordinal_;
  cuda::PrimaryContext context_;
  cuda::Stream stream_;
};

// Launches `call` once on a rank and checks the result.
std::string RunOnGpu(GpuCall& call, GpuRank& rank, const Problem& problem, int position, int data);

// Problems of every op, small and large.
std::vector<Problem> GpuProblems(int ranks);

using CallPointer = std::unique_ptr<GpuCall>;
CallPointer MakeCall(const Problem& problem, const std::vector<int64_t>& ids, uint64_t site,
                     GpuCall::Slot slot = GpuCall::Slot::kInOrder);

// One process of a job.
struct GpuProcess {
  Shape shape;
  std::unique_ptr<Machine> machine;
  std::shared_ptr<Fabric> fabric;

  // Every local rank on a thread: body(rank, position) returns what went wrong.
  std::string OnEveryGpu(const std::function<std::string(GpuRank&, int)>& body);
};

// A job of forked processes with a fake driver each; returns what went wrong anywhere.
std::string OnGpus(Shape shape, const std::function<std::string(GpuProcess&)>& body,
                   Machine::Gpus gpus = Machine::Gpus::kOneEach, Options options = TestOptions());

}  // namespace jaxfabric::testing
