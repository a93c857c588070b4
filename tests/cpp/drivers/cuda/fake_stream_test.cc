#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "drivers/cuda/fake_gpu.h"

namespace jaxfabric::cuda {
namespace {

struct AddArguments {
  int* value;
  int factor;
  int term;
};

// value = value * factor + term: the order of two of them shows.
void Affine(const void* arguments) {
  const auto& args = *static_cast<const AddArguments*>(arguments);
  if (emulation::ThreadIndex() != 0 || emulation::BlockIndex() != 0) return;
  *args.value = *args.value * args.factor + args.term;
  emulation::MaybeSwitch();
}

struct GateArguments {
  std::atomic<int>* gate;
};

void WaitForGate(const void* arguments) {
  const auto& args = *static_cast<const GateArguments*>(arguments);
  while (args.gate->load(std::memory_order_acquire) == 0) emulation::Pause();
}

class FakeStream : public FakeGpuTest {
 protected:
  FakeStream()
      : affine_(Kernel("affine", &Affine, sizeof(AddArguments))),
        gate_(Kernel("gate", &WaitForGate, sizeof(GateArguments))) {
    EXPECT_CUDA_OK(api().cuMemAlloc(&value_, sizeof(int)));
    EXPECT_CUDA_OK(api().cuMemsetD8(value_, 0, sizeof(int)));
  }
  ~FakeStream() override {
    (void)api().cuMemFree(value_);  // an error after a fault
    Unload();
  }
  CUresult Apply(const Stream& stream, int factor, int term) {
    return Launch(affine_, stream.get(),
                  AddArguments{reinterpret_cast<int*>(Pointer(value_)), factor, term}, 2, 32);
  }
  int Value() {
    int value = -1;
    EXPECT_CUDA_OK(api().cuMemcpyDtoH(&value, value_, sizeof(value)));
    return value;
  }

  CUfunction affine_, gate_;
  CUdeviceptr value_ = 0;
};

TEST_F(FakeStream, WorkIsDoneInOrder) {
  const Stream stream = Must(Stream::Create(api()));
  int expected = 0;
  for (int i = 1; i <= 20; ++i) {
    ASSERT_CUDA_OK(Apply(stream, 3, i));
    expected = static_cast<int>(3u * static_cast<unsigned>(expected) + static_cast<unsigned>(i));
  }
  ASSERT_CUDA_OK(api().cuStreamSynchronize(stream.get()));
  EXPECT_EQ(api().cuStreamQuery(stream.get()), CUDA_SUCCESS);
  EXPECT_EQ(Value(), expected);
}

TEST_F(FakeStream, CopiesAndFillsTakeTheirTurn) {
  const Stream stream = Must(Stream::Create(api()));
  const Result<PinnedMemory> pinned = PinnedMemory::Allocate(api(), 4096);
  ASSERT_TRUE(pinned.ok());
  driver().Hold(0, true);
  int source = 5;
  ASSERT_CUDA_OK(api().cuMemcpyHtoDAsync(value_, &source, sizeof(int), stream.get()));
  source = 1000;  // pageable memory has been read
  ASSERT_CUDA_OK(Apply(stream, 2, 1));
  int copied = 0;
  ASSERT_CUDA_OK(api().cuMemcpyDtoHAsync(&copied, value_, sizeof(int), stream.get()));
  ASSERT_CUDA_OK(api().cuMemsetD8Async(value_, 1, sizeof(int), stream.get()));
  ASSERT_CUDA_OK(
      api().cuMemcpyDtoDAsync(pinned->device_address(), value_, sizeof(int), stream.get()));
  EXPECT_EQ(api().cuStreamQuery(stream.get()), CUDA_ERROR_NOT_READY);
  driver().Hold(0, false);
  ASSERT_CUDA_OK(api().cuStreamSynchronize(stream.get()));
  EXPECT_EQ(copied, 11);
  EXPECT_EQ(Value(), 0x01010101);
  EXPECT_EQ(std::memcmp(pinned->host().data(), "\1\1\1\1", 4), 0);
}

TEST_F(FakeStream, PinnedMemoryIsReadWhenTheCopyRuns) {
  const Stream stream = Must(Stream::Create(api()));
  const PinnedMemory pinned = Must(PinnedMemory::Allocate(api(), sizeof(int)));
  auto* source = reinterpret_cast<int*>(pinned.host().data());
  driver().Hold(0, true);
  *source = 1;
  ASSERT_CUDA_OK(api().cuMemcpyHtoDAsync(value_, source, sizeof(int), stream.get()));
  *source = 2;
  driver().Hold(0, false);
  ASSERT_CUDA_OK(api().cuStreamSynchronize(stream.get()));
  EXPECT_EQ(Value(), 2);
}

TEST_F(FakeStream, EventsOrderStreams) {
  const Stream first = Must(Stream::Create(api()));
  const Stream second = Must(Stream::Create(api(), Stream::Priority::kHighest));
  const Event event = Must(Event::Create(api()));
  EXPECT_CUDA_OK(api().cuEventQuery(event.get()));  // never recorded
  std::atomic<int> gate{0};
  ASSERT_CUDA_OK(Launch(gate_, first.get(), GateArguments{&gate}));
  ASSERT_CUDA_OK(Apply(first, 1, 7));
  ASSERT_CUDA_OK(api().cuEventRecord(event.get(), first.get()));
  ASSERT_CUDA_OK(api().cuStreamWaitEvent(second.get(), event.get(), 0));
  ASSERT_CUDA_OK(Apply(second, 10, 0));
  EXPECT_EQ(api().cuEventQuery(event.get()), CUDA_ERROR_NOT_READY);
  gate.store(1, std::memory_order_release);
  ASSERT_CUDA_OK(api().cuEventSynchronize(event.get()));
  ASSERT_CUDA_OK(api().cuStreamSynchronize(second.get()));
  EXPECT_EQ(Value(), 70);
}

TEST_F(FakeStream, StreamsOverlapAcrossDevices) {
  // The gate on one device is opened by a kernel of the other.
  const Stream here = Must(Stream::Create(api()));
  std::atomic<int> gate{0};
  ASSERT_CUDA_OK(Launch(gate_, here.get(), GateArguments{&gate}, 2, 32));
  {
    const ScopedContext other(api(), context(1));
    const Stream there = Must(Stream::Create(api()));
    const Module loaded = Must(Module::Load(api(), "image"));
    driver().AddKernel(
        "open",
        [](const void* arguments) {
          static_cast<const GateArguments*>(arguments)->gate->store(1, std::memory_order_release);
        },
        sizeof(GateArguments));
    const CUfunction open = Must(loaded.Function("open"));
    EXPECT_EQ(Launch(open, here.get(), GateArguments{&gate}), CUDA_ERROR_INVALID_HANDLE)
        << "another device's stream";
    ASSERT_CUDA_OK(Launch(open, there.get(), GateArguments{&gate}));
    ASSERT_CUDA_OK(api().cuStreamSynchronize(there.get()));
  }
  ASSERT_CUDA_OK(api().cuStreamSynchronize(here.get()));
}

TEST_F(FakeStream, ElapsedTime) {
  const Stream stream = Must(Stream::Create(api()));
  const Event begin = Must(Event::Create(api(), CU_EVENT_DEFAULT));
  const Event end = Must(Event::Create(api(), CU_EVENT_DEFAULT));
  const Event untimed = Must(Event::Create(api()));
  ASSERT_CUDA_OK(api().cuEventRecord(begin.get(), stream.get()));
  ASSERT_CUDA_OK(Apply(stream, 1, 1));
  ASSERT_CUDA_OK(api().cuEventRecord(end.get(), stream.get()));
  ASSERT_CUDA_OK(api().cuEventRecord(untimed.get(), stream.get()));
  ASSERT_CUDA_OK(api().cuStreamSynchronize(stream.get()));
  float milliseconds = -1;
  ASSERT_CUDA_OK(api().cuEventElapsedTime(&milliseconds, begin.get(), end.get()));
  EXPECT_GT(milliseconds, 0);
  EXPECT_EQ(api().cuEventElapsedTime(&milliseconds, begin.get(), untimed.get()),
            CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(FakeStream, WhatIsQueuedOnADestroyedStreamIsStillDone) {
  std::atomic<int> gate{0};
  const Event event = Must(Event::Create(api()));
  {
    const Stream stream = Must(Stream::Create(api()));
    ASSERT_CUDA_OK(Launch(gate_, stream.get(), GateArguments{&gate}));
    ASSERT_CUDA_OK(Apply(stream, 1, 3));
    ASSERT_CUDA_OK(api().cuEventRecord(event.get(), stream.get()));
  }
  gate.store(1, std::memory_order_release);
  ASSERT_CUDA_OK(api().cuEventSynchronize(event.get()));
  EXPECT_EQ(Value(), 3);
}

TEST_F(FakeStream, AFaultFailsTheDeviceFromThenOn) {
  const CUfunction fault =
      Kernel("fault", [](const void*) { emulation::Trap("deadline passed"); }, 0);
  const Stream stream = Must(Stream::Create(api()));
  const Stream other = Must(Stream::Create(api()));
  const Event event = Must(Event::Create(api()));
  std::atomic<int> gate{0};
  ASSERT_CUDA_OK(Launch(gate_, other.get(), GateArguments{&gate}));
  ASSERT_CUDA_OK(Launch(fault, stream.get(), 0));
  ASSERT_CUDA_OK(Apply(stream, 1, 1));
  EXPECT_EQ(api().cuStreamSynchronize(stream.get()), CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(api().cuStreamSynchronize(other.get()), CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(api().cuEventRecord(event.get(), stream.get()), CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(Apply(stream, 1, 1), CUDA_ERROR_LAUNCH_FAILED);
  CUdeviceptr memory = 0;
  EXPECT_EQ(api().cuMemAlloc(&memory, 4096), CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(driver().TrapReason(), "deadline passed");
  const ScopedContext healthy(api(), context(1));
  EXPECT_CUDA_OK(api().cuMemAlloc(&memory, 4096));
  EXPECT_CUDA_OK(api().cuMemFree(memory));
}

TEST_F(FakeStream, ADeviceThatStopsTakesNoOtherWithIt) {
  const Stream stream = Must(Stream::Create(api()));
  std::atomic<int> gate{0};
  ASSERT_CUDA_OK(Launch(gate_, stream.get(), GateArguments{&gate}));
  driver().Stop(0);
  gate = 1;
  const ScopedContext other(api(), context(1));
  const Stream alive = Must(Stream::Create(api()));
  const Module loaded = Must(Module::Load(api(), "image"));
  const CUfunction open_gate = Must(loaded.Function("gate"));
  ASSERT_CUDA_OK(Launch(open_gate, alive.get(), GateArguments{&gate}));
  ASSERT_CUDA_OK(api().cuStreamSynchronize(alive.get()));
  EXPECT_EQ(api().cuStreamQuery(stream.get()), CUDA_ERROR_NOT_READY);
}

TEST_F(FakeStream, WrongUseIsAnError) {
  const Stream stream = Must(Stream::Create(api()));
  void* none = nullptr;
  EXPECT_EQ(api().cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, stream.get(), &none, nullptr),
            CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(api().cuLaunchKernel(affine_, 0, 1, 1, 1, 1, 1, 0, stream.get(), &none, nullptr),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(api().cuLaunchKernel(affine_, 1, 1, 1, 1025, 1, 1, 0, stream.get(), &none, nullptr),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(api().cuStreamSynchronize(reinterpret_cast<CUstream>(&none)),
            CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(api().cuMemsetD8Async(reinterpret_cast<uintptr_t>(&none), 0, 8, stream.get()),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(loaded_[0].Function("no such kernel").status().code(), Code::kNotFound);
  std::thread([&] {
    CUevent event;
    EXPECT_EQ(api().cuEventCreate(&event, 0), CUDA_ERROR_INVALID_CONTEXT) << "a thread without one";
  }).join();
}

TEST_F(FakeStream, FailuresCanBePlanned) {
  driver().FailCall("cuLaunchKernel", 2, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  const Stream stream = Must(Stream::Create(api()));
  const uint64_t before = driver().Calls("cuLaunchKernel");
  EXPECT_CUDA_OK(Apply(stream, 1, 1));
  EXPECT_EQ(Apply(stream, 1, 1), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  EXPECT_CUDA_OK(Apply(stream, 1, 1));
  EXPECT_EQ(driver().Calls("cuLaunchKernel"), before + 3);
  ASSERT_CUDA_OK(api().cuStreamSynchronize(stream.get()));
  EXPECT_EQ(Value(), 2);
}

TEST_F(FakeStream, TheClockOfKernelsCanBeMoved) {
  const CUfunction sleep = Kernel(
      "sleep",
      [](const void*) {
        const uint64_t begin = emulation::NanoClock();
        while (emulation::NanoClock() - begin < 3'600'000'000'000) emulation::Pause();
      },
      0);
  const Stream stream = Must(Stream::Create(api()));
  ASSERT_CUDA_OK(Launch(sleep, stream.get(), 0, 1, 4));
  while (api().cuStreamQuery(stream.get()) == CUDA_ERROR_NOT_READY) {
    driver().AdvanceClock(600'000'000'000);
    std::this_thread::yield();
  }
  EXPECT_CUDA_OK(api().cuStreamSynchronize(stream.get()));
}

}  // namespace
}  // namespace jaxfabric::cuda
