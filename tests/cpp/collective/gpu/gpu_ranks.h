// Ranks that are GPUs, of one process or of forked ones, and calls on them without XLA.
//
// The GPUs are emulated, or those of this computer, with the kernels of this build: then ranks
// share a GPU where there are fewer of these. Everything of CUDA happens in forked children, since
// CUDA does not outlive a fork. Ranks of one process on one GPU share its context, in which
// allocating, freeing and loading code wait for the kernels that run, and these for other ranks. So
// a rank takes all memory when it is made, and gpu_main.cc has code loaded at once.
#pragma once

#include <barrier>
#include <memory>
#include <string>
#include <vector>

#include "collective/gpu/call.h"
#include "collective/world.h"
#include "device/emulated.h"
#include "drivers/cuda/fake/driver.h"

namespace jaxfabric::testing {

// What is not as usual about an emulated machine.
struct Peculiar {
  std::function<void(int process, cuda::FakeConfig&)> config{};
  std::function<void(int process, cuda::FakeDriver&)> driver{};
};

// A driver with the GPUs of one process and all kernels. One at a time in a process. Emulated GPUs
// of several hosts are of one NVLink domain.
class Machine {
 public:
  // The GPUs of process `process`, all different where there are so many, or all the same one.
  enum class Gpus { kOneEach, kOneForAll };
  Machine(Shape shape, int process, Gpus gpus = Gpus::kOneEach, const Peculiar& peculiar = {});
  // From here on, in this process and its children: this computer's GPUs.
  static void UseHardware();
  static bool OnHardware();
  cuda::FakeDriver& driver() { return *driver_; }  // not on hardware
  const cuda::Api& api() const { return *api_; }
  // For a fabric over them.
  Options AddTo(Options options) const;

 private:
  Shape shape_;
  int process_;
  std::unique_ptr<cuda::FakeDriver> driver_;
  const cuda::Api* api_ = nullptr;
};

// A rank's GPU as a program uses it: a stream, and memory.
class GpuRank {
 public:
  GpuRank(const cuda::Api& api, int ordinal, size_t bytes = size_t{64} << 20);
  ~GpuRank();

  const cuda::Api& api() const { return api_; }
  int ordinal() const { return ordinal_; }
  cuda::CUcontext context() const { return context_.context(); }
  cuda::CUstream stream() const { return stream_.get(); }

  // Memory for one execution of `problem`, filled with the inputs of `data`.
  struct Execution {
    cuda::CUdeviceptr input = 0, output = 0, slices = 0;
    cuda::CUdeviceptr residual = 0, weight = 0, new_residual = 0;
    Buffers buffers;
  };
  // `offset`: of input and output, from an address that is a multiple of 256. In place, which needs
  // equal sizes, the output is where the input is.
  Execution Make(const Problem& problem, int position, int data, size_t offset = 0,
                 bool in_place = false);
  // The same without contents.
  Execution Place(const Problem& problem, size_t offset = 0, bool in_place = false);
  void FillSlices(const Execution& execution, const Problem& problem, int position, int data);
  void Fill(const Execution& execution, const Problem& problem, int position, int data);
  // "" if the bytes are right. The stream is idle.
  std::string Check(const Execution& execution, const Problem& problem, int position, int data);
  // Memory is used again when every execution has been freed.
  void Free(const Execution& execution);
  // Waits for the stream; "" for success.
  std::string Synchronize();

 private:
  const cuda::Api& api_;
  const int ordinal_;
  cuda::PrimaryContext context_;
  cuda::Stream stream_;
  cuda::CUdeviceptr Take(size_t bytes);
  const size_t bytes_;
  cuda::CUdeviceptr memory_ = 0;
  size_t used_ = 0;
  int live_ = 0;
};

// Launches `call` once on a rank and checks the result.
std::string RunOnGpu(GpuCall& call, GpuRank& rank, const Problem& problem, int position, int data);

// Problems of all_reduce_rms_norm in all its types, for either kernel, and rows longer than an
// area.
std::vector<Problem> NormProblems(int ranks);
// Problems of every op, small and large.
std::vector<Problem> GpuProblems(int ranks);
// Large enough for the switch, in every op that it has.
std::vector<Problem> LargeGpuProblems(int ranks);

using CallPointer = std::unique_ptr<GpuCall>;
CallPointer MakeCall(const Problem& problem, const std::vector<int64_t>& ids, uint64_t site,
                     GpuCall::Slot slot = GpuCall::Slot::kInOrder);

// One process of a job.
struct GpuProcess {
  Shape shape;
  std::unique_ptr<Machine> machine;
  std::shared_ptr<Fabric> fabric;

  // Where the ranks of this process wait for each other: when they have made what the driver may
  // let wait for kernels.
  std::unique_ptr<std::barrier<>> together;
  // Every local rank on a thread: body(rank, position) returns what went wrong.
  std::string OnEveryGpu(const std::function<std::string(GpuRank&, int)>& body);
};

// A job of forked processes with a fake driver each; returns what went wrong anywhere.
std::string OnGpus(Shape shape, const std::function<std::string(GpuProcess&)>& body,
                   Machine::Gpus gpus = Machine::Gpus::kOneEach, Options options = TestOptions(),
                   const Peculiar& peculiar = {});

// One call of each on every GPU.
std::string RunAll(GpuProcess& process, const std::vector<Problem>& problems);

// "" if `text` has all of the parts.
std::string Expect(const std::string& text, const std::vector<std::string>& parts);

// Waits until the fabric has failed, and says how.
std::string FailureOf(Fabric& fabric);

// Tests of jobs of several shapes.
class GpuShapes : public ::testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    if (Machine::OnHardware() && GetParam().hosts > 1) GTEST_SKIP() << "needs several hosts";
  }
};

}  // namespace jaxfabric::testing
