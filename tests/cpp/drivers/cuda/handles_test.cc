#include "drivers/cuda/handles.h"

#include <array>
#include <thread>
#include <utility>

#include "drivers/cuda/fake_gpu.h"

namespace jaxfabric::cuda {
namespace {

constexpr size_t kBytes = size_t{256} * 1024;
constexpr unsigned kFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// That everything is freed is what the fixture checks at the end of each.
class CudaHandles : public FakeGpuTest {};

TEST_F(CudaHandles, EmptyOnesFreeNothing) {
  const Event event;
  const Stream stream;
  const Module loaded;
  const PinnedMemory pinned;
  const PhysicalMemory memory;
  const AddressRange range;
  const Multicast multicast;
  const PrimaryContext context;
  EXPECT_EQ(event.get(), nullptr);
  EXPECT_FALSE(memory.valid());
  EXPECT_TRUE(pinned.host().empty());
}

TEST_F(CudaHandles, MoveWithWhatTheyOwn) {
  Event event = Must(Event::Create(api()));
  const CUevent raw = event.get();
  Event moved = std::move(event);
  EXPECT_EQ(event.get(), nullptr);  // NOLINT: what a moved-from handle is
  EXPECT_EQ(moved.get(), raw);
  Event other = Must(Event::Create(api()));
  const uint64_t before = driver().Calls("cuEventDestroy");
  other = std::move(moved);
  EXPECT_EQ(driver().Calls("cuEventDestroy"), before + 1);
  EXPECT_EQ(other.get(), raw);

  PhysicalMemory memory = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
  AddressRange range = Must(AddressRange::Reserve(api(), kBytes, 0));
  ASSERT_TRUE(range.Map(0, memory).ok());
  ASSERT_TRUE(range.SetAccess(0, kBytes, std::array{0}).ok());
  const CUdeviceptr address = range.address();
  AddressRange taken = std::move(range);
  EXPECT_EQ(range.address(), 0u);  // NOLINT
  EXPECT_EQ(taken.address(), address);
  *Pointer(address) = std::byte{1};
  taken = Must(AddressRange::Reserve(api(), kBytes, 0));

  PrimaryContext context = Must(PrimaryContext::Retain(api(), 1));
  PrimaryContext held = std::move(context);
  EXPECT_EQ(context.context(), nullptr);  // NOLINT
  EXPECT_EQ(held.device(), 1);
  held = PrimaryContext();
}

TEST_F(CudaHandles, AreFreedUnderTheirOwnContextFromAnyThread) {
  Event event = Must(Event::Create(api()));
  Stream stream = Must(Stream::Create(api()));
  PinnedMemory pinned = Must(PinnedMemory::Allocate(api(), 100));
  EXPECT_EQ(pinned.host().size(), 100u);
  const uint64_t pushed = driver().Calls("cuCtxPushCurrent");
  std::thread([&] {
    // Without a current context.
    event = Event();
    stream = Stream();
    pinned = PinnedMemory();
  }).join();
  EXPECT_EQ(driver().Calls("cuCtxPushCurrent"), pushed + 3);
  EXPECT_EQ(driver().Calls("cuCtxPopCurrent"), 3u);
}

TEST_F(CudaHandles, ErrorsNameTheCall) {
  driver().FailCall("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(PhysicalMemory::Create(api(), 0, kBytes, kFd).status().ToString(),
            "RESOURCE_EXHAUSTED: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  EXPECT_TRUE(PhysicalMemory::Create(api(), 0, kBytes, kFd).ok());
  const Module loaded = Must(Module::Load(api(), "image"));
  EXPECT_EQ(loaded.Function("missing").status().ToString(),
            "NOT_FOUND: kernel missing: cuModuleGetFunction: CUDA_ERROR_NOT_FOUND "
            "(named symbol not found)");
  const Result<PrimaryContext> none = PrimaryContext::Retain(api(), 7);
  EXPECT_EQ(none.status().ToString(),
            "INVALID_ARGUMENT: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (invalid device ordinal)");
}

TEST_F(CudaHandles, WhatFailsHalfWayIsUndone) {
  driver().FailCall("cuMemHostGetDevicePointer", 1, CUDA_ERROR_INVALID_VALUE);
  EXPECT_FALSE(PinnedMemory::Allocate(api(), 4096).ok());
  driver().FailCall("cuDevicePrimaryCtxRetain", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_FALSE(PrimaryContext::Retain(api(), 0).ok());
  driver().FailCall("cuMemAddressReserve", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_FALSE(AddressRange::Reserve(api(), kBytes, 0).ok());
  driver().FailCall("cuMemMap", 1, CUDA_ERROR_OUT_OF_MEMORY);
  const PhysicalMemory memory = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
  AddressRange range = Must(AddressRange::Reserve(api(), kBytes, 0));
  EXPECT_FALSE(range.Map(0, memory).ok());
}

TEST_F(CudaHandles, AMulticastObjectIsUnboundBeforeItsMemoryGoes) {
  const PhysicalMemory memory = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
  EXPECT_GT(Must(Multicast::Granularity(api(), 1, kBytes, kFd)), 0u);
  {
    Multicast object = Must(Multicast::Create(api(), 1, kBytes, kFd));
    ASSERT_TRUE(object.AddDevice(0).ok());
    ASSERT_TRUE(object.Bind(0, 0, memory, 0, kBytes).ok());
    Multicast moved = std::move(object);
    EXPECT_EQ(driver().Calls("cuMulticastUnbind"), 0u);
  }
  EXPECT_EQ(driver().Calls("cuMulticastUnbind"), 1u);
}

TEST_F(CudaHandles, ExportedMemoryIsTheSameMemory) {
  const PhysicalMemory memory = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
  const UniqueFd fd = Must(memory.ExportFd());
  const PhysicalMemory imported = Must(PhysicalMemory::Import(api(), fd.get(), kBytes));
  AddressRange first = Must(AddressRange::Reserve(api(), kBytes, 0));
  AddressRange second = Must(AddressRange::Reserve(api(), kBytes, 0));
  ASSERT_TRUE(first.Map(0, memory).ok());
  ASSERT_TRUE(second.Map(0, imported).ok());
  ASSERT_TRUE(first.SetAccess(0, kBytes, std::array{0}).ok());
  ASSERT_TRUE(second.SetAccess(0, kBytes, std::array{1}).ok());
  *Pointer(first.address()) = std::byte{17};
  EXPECT_EQ(*Pointer(second.address()), std::byte{17});
}

}  // namespace
}  // namespace jaxfabric::cuda
