#include <atomic>
#include <thread>
#include <vector>

#include "drivers/cuda/fake_gpu.h"

namespace jaxfabric::cuda {
namespace {

struct StampArguments {
  std::atomic<int>* clock;
  int* stamp;
  int times;
};

// When it ran, on a clock that all of them move.
void Stamp(const void* arguments) {
  const auto& args = *static_cast<const StampArguments*>(arguments);
  *args.stamp = args.clock->fetch_add(args.times) + 1;
  emulation::MaybeSwitch();
}

class FakeCapture : public FakeGpuTest {
 protected:
  FakeCapture() : stamp_(Kernel("stamp", &Stamp, sizeof(StampArguments))) {
    EXPECT_CUDA_OK(api().cuEventQuery(fork_.get()));
  }
  CUresult Begin(CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) {
    return api().cuStreamBeginCapture(main_.get(), mode);
  }
  CUresult Run(const Stream& stream, int index) {
    return Launch(stamp_, stream.get(),
                  StampArguments{&clock_, &stamps_[static_cast<size_t>(index)], 1});
  }
  CUresult End() { return api().cuStreamEndCapture(main_.get(), &graph_); }
  CUresult Record(const Event& event, const Stream& stream) {
    return api().cuEventRecord(event.get(), stream.get());
  }
  CUresult Wait(const Stream& stream, const Event& event) {
    return api().cuStreamWaitEvent(stream.get(), event.get(), 0);
  }
  CUstreamCaptureStatus StatusOf(const Stream& stream) {
    CUstreamCaptureStatus status;
    EXPECT_CUDA_OK(api().cuStreamIsCapturing(stream.get(), &status));
    return status;
  }

  CUfunction stamp_;
  Stream main_ = Must(Stream::Create(api()));
  Stream side_ = Must(Stream::Create(api()));
  Stream other_ = Must(Stream::Create(api()));
  Event fork_ = Must(Event::Create(api()));
  Event join_ = Must(Event::Create(api()));
  std::atomic<int> clock_{0};
  std::vector<int> stamps_ = std::vector<int>(8);
  CUgraph graph_ = nullptr;
};

TEST_F(FakeCapture, ReplaysWhatWasCaptured) {
  ASSERT_CUDA_OK(Begin());
  EXPECT_EQ(StatusOf(main_), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  ASSERT_CUDA_OK(Run(main_, 0));
  ASSERT_CUDA_OK(Record(fork_, main_));
  EXPECT_EQ(StatusOf(side_), CU_STREAM_CAPTURE_STATUS_NONE);
  ASSERT_CUDA_OK(Wait(side_, fork_));
  EXPECT_EQ(StatusOf(side_), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  ASSERT_CUDA_OK(Run(side_, 1));
  ASSERT_CUDA_OK(Run(main_, 2));
  ASSERT_CUDA_OK(Record(join_, side_));
  ASSERT_CUDA_OK(Wait(main_, join_));
  ASSERT_CUDA_OK(Run(main_, 3));
  ASSERT_CUDA_OK(End());
  EXPECT_EQ(StatusOf(main_), CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT_EQ(StatusOf(side_), CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT_EQ(clock_, 0) << "captured, not run";

  CUgraphExec executable = nullptr;
  ASSERT_CUDA_OK(api().cuGraphInstantiate(&executable, graph_, 0));
  ASSERT_CUDA_OK(api().cuGraphDestroy(graph_));
  bool side_first = false, main_first = false;
  for (int replay = 0; replay < 40; ++replay) {
    // On two streams: a graph does not overlap itself.
    ASSERT_CUDA_OK(api().cuGraphLaunch(executable, main_.get()));
    ASSERT_CUDA_OK(api().cuGraphLaunch(executable, other_.get()));
    ASSERT_CUDA_OK(api().cuStreamSynchronize(main_.get()));
    ASSERT_CUDA_OK(api().cuStreamSynchronize(other_.get()));
    EXPECT_EQ(clock_, 8 * (replay + 1));
    const int begin = 8 * replay + 4;
    EXPECT_EQ(stamps_[0], begin + 1);
    EXPECT_EQ(stamps_[3], begin + 4);
    side_first |= stamps_[1] < stamps_[2];
    main_first |= stamps_[2] < stamps_[1];
  }
  EXPECT_TRUE(side_first && main_first) << "branches run in any order";
  ASSERT_CUDA_OK(api().cuGraphExecDestroy(executable));
}

TEST_F(FakeCapture, CopiesAndFillsAreNodes) {
  const PinnedMemory pinned = Must(PinnedMemory::Allocate(api(), 8192));
  const CUdeviceptr begin = pinned.device_address();
  ASSERT_CUDA_OK(Begin());
  ASSERT_CUDA_OK(api().cuMemsetD8Async(begin, 7, 4096, main_.get()));
  ASSERT_CUDA_OK(api().cuMemcpyDtoDAsync(begin + 4096, begin, 4096, main_.get()));
  ASSERT_CUDA_OK(End());
  size_t count = 0;
  ASSERT_CUDA_OK(api().cuGraphGetNodes(graph_, nullptr, &count));
  ASSERT_EQ(count, 2u);
  CUgraphNode nodes[2];
  ASSERT_CUDA_OK(api().cuGraphGetNodes(graph_, nodes, &count));
  CUgraphNodeType type;
  ASSERT_CUDA_OK(api().cuGraphNodeGetType(nodes[1], &type));
  EXPECT_EQ(type, CU_GRAPH_NODE_TYPE_MEMCPY);
  CUgraphExec executable = nullptr;
  ASSERT_CUDA_OK(api().cuGraphInstantiate(&executable, graph_, 0));
  ASSERT_CUDA_OK(api().cuGraphLaunch(executable, main_.get()));
  ASSERT_CUDA_OK(api().cuStreamSynchronize(main_.get()));
  EXPECT_EQ(pinned.host()[8191], std::byte{7});
  ASSERT_CUDA_OK(api().cuGraphExecDestroy(executable));
  ASSERT_CUDA_OK(api().cuGraphDestroy(graph_));
}

TEST_F(FakeCapture, ArgumentsOfAKernelCanBeChanged) {
  ASSERT_CUDA_OK(Begin());
  ASSERT_CUDA_OK(Run(main_, 0));
  ASSERT_CUDA_OK(End());
  size_t count = 1;
  CUgraphNode node;
  ASSERT_CUDA_OK(api().cuGraphGetNodes(graph_, &node, &count));
  CUDA_KERNEL_NODE_PARAMS parameters;
  ASSERT_CUDA_OK(api().cuGraphKernelNodeGetParams(node, &parameters));
  EXPECT_EQ(parameters.func, stamp_);
  EXPECT_EQ(static_cast<StampArguments*>(parameters.kernelParams[0])->stamp, &stamps_[0]);
  CUgraphExec executable = nullptr;
  ASSERT_CUDA_OK(api().cuGraphInstantiate(&executable, graph_, 0));
  driver().Hold(0, true);
  ASSERT_CUDA_OK(api().cuGraphLaunch(executable, main_.get()));
  StampArguments changed{&clock_, &stamps_[5], 10};
  void* pointer = &changed;
  parameters.kernelParams = &pointer;
  ASSERT_CUDA_OK(api().cuGraphExecKernelNodeSetParams(executable, node, &parameters));
  ASSERT_CUDA_OK(api().cuGraphLaunch(executable, main_.get()));
  driver().Hold(0, false);
  ASSERT_CUDA_OK(api().cuStreamSynchronize(main_.get()));
  EXPECT_EQ(stamps_[0], 1) << "the launch before the change keeps its arguments";
  EXPECT_EQ(stamps_[5], 2);
  EXPECT_EQ(clock_, 11);
  ASSERT_CUDA_OK(api().cuGraphExecDestroy(executable));
  ASSERT_CUDA_OK(api().cuGraphDestroy(graph_));
}

TEST_F(FakeCapture, UnjoinedWorkIsAnError) {
  ASSERT_CUDA_OK(Begin());
  ASSERT_CUDA_OK(Record(fork_, main_));
  ASSERT_CUDA_OK(Wait(side_, fork_));
  ASSERT_CUDA_OK(Run(side_, 0));
  EXPECT_EQ(End(), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  EXPECT_EQ(graph_, nullptr);
  EXPECT_EQ(StatusOf(side_), CU_STREAM_CAPTURE_STATUS_NONE);
}

TEST_F(FakeCapture, OnlyItsOwnStreamAndThreadEndIt) {
  EXPECT_EQ(End(), CUDA_ERROR_ILLEGAL_STATE);
  ASSERT_CUDA_OK(Begin());
  EXPECT_EQ(Begin(), CUDA_ERROR_ILLEGAL_STATE);
  std::thread([&] {
    CUgraph graph;
    EXPECT_EQ(api().cuStreamEndCapture(main_.get(), &graph),
              CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  }).join();
  ASSERT_CUDA_OK(Record(fork_, main_));
  ASSERT_CUDA_OK(Wait(side_, fork_));
  CUgraph graph;
  EXPECT_EQ(api().cuStreamEndCapture(side_.get(), &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  EXPECT_EQ(End(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(api().cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_RELAXED),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

TEST_F(FakeCapture, WhatMustNotHappenInvalidatesIt) {
  const std::vector<std::pair<const char*, std::function<CUresult()>>> violations = {
      {"synchronise", [&] { return api().cuStreamSynchronize(main_.get()); }},
      {"query", [&] { return api().cuStreamQuery(main_.get()); }},
      {"allocate",
       [&] {
         CUdeviceptr memory;
         return api().cuMemAlloc(&memory, 4096);
       }},
      {"pin",
       [&] {
         void* memory;
         return api().cuMemHostAlloc(&memory, 4096, 0);
       }},
      {"create memory",
       [&] {
         return PhysicalMemory::Create(api(), 0, 65536, 0).ok()
                    ? CUDA_SUCCESS
                    : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
       }},
      {"load a module",
       [&] {
         CUmodule loaded;
         return api().cuModuleLoadData(&loaded, "image");
       }},
      {"query an event", [&] { return api().cuEventQuery(join_.get()); }},
  };
  for (const auto& [what, violation] : violations) {
    SCOPED_TRACE(what);
    ASSERT_CUDA_OK(Begin());
    EXPECT_EQ(violation(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT_EQ(StatusOf(main_), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    EXPECT_EQ(Run(main_, 0), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_EQ(End(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_EQ(graph_, nullptr);
  }
}

TEST_F(FakeCapture, TheModeSaysWhoseCallsCount) {
  const auto allocate_elsewhere = [&] {
    CUresult result = CUDA_SUCCESS;
    std::thread([&] {
      const ScopedContext current(api(), context(0));
      CUdeviceptr memory;
      result = api().cuMemAlloc(&memory, 4096);
      if (result == CUDA_SUCCESS) (void)api().cuMemFree(memory);
    }).join();
    return result;
  };
  ASSERT_CUDA_OK(Begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  EXPECT_CUDA_OK(allocate_elsewhere());
  ASSERT_CUDA_OK(End());
  ASSERT_CUDA_OK(api().cuGraphDestroy(graph_));
  ASSERT_CUDA_OK(Begin(CU_STREAM_CAPTURE_MODE_GLOBAL));
  EXPECT_EQ(allocate_elsewhere(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(End(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  ASSERT_CUDA_OK(Begin(CU_STREAM_CAPTURE_MODE_RELAXED));
  CUdeviceptr memory = 0;
  EXPECT_CUDA_OK(api().cuMemAlloc(&memory, 4096));
  ASSERT_CUDA_OK(api().cuMemFree(memory));
  ASSERT_CUDA_OK(End());
  ASSERT_CUDA_OK(api().cuGraphDestroy(graph_));
}

TEST_F(FakeCapture, DependenciesDoNotCrossItsBorder) {
  ASSERT_CUDA_OK(Record(fork_, side_));
  ASSERT_CUDA_OK(Begin());
  EXPECT_EQ(Wait(main_, fork_), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  EXPECT_EQ(End(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

  ASSERT_CUDA_OK(Begin(CU_STREAM_CAPTURE_MODE_RELAXED));
  ASSERT_CUDA_OK(Record(fork_, main_));
  EXPECT_EQ(api().cuEventQuery(fork_.get()), CUDA_ERROR_CAPTURED_EVENT);
  ASSERT_CUDA_OK(api().cuStreamBeginCapture(side_.get(), CU_STREAM_CAPTURE_MODE_RELAXED));
  EXPECT_EQ(Wait(side_, fork_), CUDA_ERROR_STREAM_CAPTURE_MERGE);
  EXPECT_EQ(End(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(api().cuStreamEndCapture(side_.get(), &graph_), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(Wait(side_, fork_), CUDA_ERROR_CAPTURED_EVENT) << "of a capture that has ended";
}

}  // namespace
}  // namespace jaxfabric::cuda
