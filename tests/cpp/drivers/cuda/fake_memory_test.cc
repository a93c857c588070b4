#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>

#include "device/layout.h"
#include "drivers/cuda/fake/multicast.h"
#include "drivers/cuda/fake_gpu.h"
#include "os/mapping.h"

namespace jaxfabric::cuda {
namespace {

constexpr size_t kGranularity = size_t{64} * 1024;
constexpr size_t kBytes = 4 * kGranularity;
constexpr unsigned kFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

bool FaultsInAChild(volatile std::byte* address) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(STDERR_FILENO);  // where a sanitizer would say so at length
    *address = std::byte{1};
    ::_exit(0);
  }
  int status = 0;
  return ::waitpid(child, &status, 0) == child && status != 0;
}

class FakeMemory : public FakeGpuTest {
 protected:
  using FakeGpuTest::FakeGpuTest;
  // `memory`, mapped for both devices.
  AddressRange Map(const PhysicalMemory& memory) {
    AddressRange range = Must(AddressRange::Reserve(api(), memory.bytes(), 0));
    EXPECT_TRUE(range.Map(0, memory).ok());
    EXPECT_TRUE(range.SetAccess(0, memory.bytes(), std::array{0, 1}).ok());
    return range;
  }
};

TEST_F(FakeMemory, IsZeroedAndSeenThroughEveryMapping) {
  const PhysicalMemory memory = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
  const AddressRange first = Map(memory), second = Map(memory);
  EXPECT_NE(first.address(), second.address());
  EXPECT_EQ(first.address() % kGranularity, 0u);
  EXPECT_EQ(Pointer(second.address()) [kBytes - 1], std::byte { 0 });
  Pointer(first.address())[kBytes - 1] = std::byte{42};
  EXPECT_EQ(Pointer(second.address()) [kBytes - 1], std::byte { 42 });
}

TEST_F(FakeMemory, StaysWhileItIsMapped) {
  AddressRange range;
  {
    const PhysicalMemory memory = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
    range = Map(memory);
  }
  Pointer(range.address())[0] = std::byte{1};
}

TEST_F(FakeMemory, AccessIsGivenNotTaken) {
  const PhysicalMemory memory = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
  AddressRange range = Must(AddressRange::Reserve(api(), kBytes, 0));
  ASSERT_TRUE(range.Map(0, memory).ok());
  EXPECT_TRUE(FaultsInAChild(Pointer(range.address())));
  EXPECT_EQ(api().cuMemsetD8(range.address(), 0, 1), CUDA_ERROR_INVALID_VALUE);
  ASSERT_TRUE(range.SetAccess(0, kBytes, std::array{1}).ok());
  EXPECT_EQ(api().cuMemsetD8(range.address(), 0, 1), CUDA_ERROR_INVALID_VALUE)
      << "the other device has it";
  ASSERT_TRUE(range.SetAccess(0, kBytes, std::array{0}).ok());
  EXPECT_EQ(api().cuMemsetD8(range.address(), 0, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(api().cuMemsetD8(range.address(), 0, kBytes + 1), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(FakeMemory, OneRangeHoldsSeveral) {
  const PhysicalMemory a = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
  const PhysicalMemory b = Must(PhysicalMemory::Create(api(), 1, kBytes, kFd));
  AddressRange range = Must(AddressRange::Reserve(api(), 2 * kBytes, 2 * kBytes));
  EXPECT_EQ(range.address() % (2 * kBytes), 0u);
  ASSERT_TRUE(range.Map(kBytes, b).ok());
  ASSERT_TRUE(range.Map(0, a).ok());
  EXPECT_FALSE(range.Map(0, b).ok()) << "there is something";
  ASSERT_TRUE(range.SetAccess(0, 2 * kBytes, std::array{0, 1}).ok());
  EXPECT_CUDA_OK(api().cuMemsetD8(range.address(), 9, 2 * kBytes));
  int ordinal = -1;
  ASSERT_CUDA_OK(api().cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                             range.address() + kBytes));
  EXPECT_EQ(ordinal, 1);
  EXPECT_EQ(api().cuMemAddressFree(range.address(), 2 * kBytes), CUDA_ERROR_INVALID_VALUE)
      << "still mapped";
}

TEST_F(FakeMemory, SizesAreMultiplesOfTheGranularity) {
  EXPECT_EQ(Must(PhysicalMemory::Granularity(api(), 0, kFd)), kGranularity);
  EXPECT_EQ(PhysicalMemory::Create(api(), 0, kBytes + 4096, kFd).status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(PhysicalMemory::Create(api(), 2, kBytes, kFd).status().code(), Code::kInvalidArgument);
  EXPECT_FALSE(AddressRange::Reserve(api(), kBytes + 1, 0).ok());
  EXPECT_EQ(PhysicalMemory::Create(api(), 0, size_t{1} << 31, kFd).status().code(),
            Code::kResourceExhausted);
}

TEST_F(FakeMemory, OnlyWhatWasAskedForIsExported) {
  const PhysicalMemory memory = Must(PhysicalMemory::Create(api(), 0, kBytes, 0));
  EXPECT_EQ(memory.ExportFd().status().code(), Code::kInvalidArgument);
  EXPECT_EQ(PhysicalMemory::Create(api(), 0, kBytes, CU_MEM_HANDLE_TYPE_FABRIC).status().code(),
            Code::kPermissionDenied);
  const UniqueFd alien(::dup(0));
  EXPECT_FALSE(PhysicalMemory::Import(api(), alien.get(), kBytes).ok());
}

TEST_F(FakeMemory, MulticastReachesAllMembers) {
  const PhysicalMemory a = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
  const PhysicalMemory b = Must(PhysicalMemory::Create(api(), 1, kBytes, kFd));
  const AddressRange at_a = Map(a), at_b = Map(b);
  Multicast object = Must(Multicast::Create(api(), 2, kBytes, kFd));
  ASSERT_TRUE(object.AddDevice(0).ok());
  EXPECT_FALSE(object.AddDevice(0).ok());
  ASSERT_TRUE(object.AddDevice(1).ok());
  AddressRange range = Must(AddressRange::Reserve(api(), kBytes, 0));
  ASSERT_TRUE(object.Bind(0, 0, a, 0, kBytes).ok());
  ASSERT_TRUE(range.Map(0, object.memory()).ok());
  ASSERT_TRUE(range.SetAccess(0, kBytes, std::array{0, 1}).ok());
  EXPECT_TRUE(emulation::MulticastMembers(Pointer(range.address())).empty()) << "one is missing";
  ASSERT_TRUE(object.Bind(1, 0, b, kGranularity, kBytes - kGranularity).ok());
  const auto members = emulation::MulticastMembers(Pointer(range.address() + 100));
  ASSERT_EQ(members.size(), 2u);
  EXPECT_EQ(members[0], Pointer(at_a.address() + 100)) << "where the process has mapped it";
  EXPECT_EQ(members[1], Pointer(at_b.address() + kGranularity + 100));
  EXPECT_TRUE(emulation::MulticastMembers(Pointer(range.address() + kBytes - 1)).empty());
  EXPECT_TRUE(emulation::MulticastMembers(Pointer(range.address() + kBytes)).empty());
  range.Reset();
  EXPECT_TRUE(emulation::MulticastMembers(Pointer(range.address() + 100)).empty());
}

TEST_F(FakeMemory, MulticastWithoutADriver) {
  std::array<std::byte, 64> a{}, b{}, address{};
  emulation::RegisterMulticast(address.data(), 64, {a.data(), b.data()});
  for (std::byte* member : emulation::MulticastMembers(address.data() + 8)) {
    *member = std::byte{3};
  }
  EXPECT_EQ(a[8], std::byte{3});
  EXPECT_EQ(b[8], std::byte{3});
  emulation::UnregisterMulticast(address.data());
  EXPECT_TRUE(emulation::MulticastMembers(address.data()).empty());
}

TEST_F(FakeMemory, MulticastOfTheLargestDomain) {
  std::array<std::byte, 8> address{};
  std::vector<std::byte> members(device::kMaxRanks);
  std::vector<std::byte*> places;
  for (std::byte& member : members) places.push_back(&member);
  emulation::RegisterMulticast(address.data(), 8, places);
  EXPECT_EQ(emulation::MulticastMembers(address.data()).size(), device::kMaxRanks);
  emulation::UnregisterMulticast(address.data());
}

FakeConfig Poor() {
  FakeConfig config;
  config.multicast_functions = false;
  config.no_peer_access = {{0, 1}};
  return config;
}

class FakePoorMachine : public FakeMemory {
 protected:
  FakePoorMachine() : FakeMemory(Poor()) {}
};

TEST_F(FakePoorMachine, SaysWhatItCannot) {
  EXPECT_EQ(api().cuMulticastCreate, nullptr);
  EXPECT_EQ(Multicast::Create(api(), 2, kBytes, kFd).status().code(), Code::kUnimplemented);
  EXPECT_EQ(Multicast::Granularity(api(), 2, kBytes, kFd).status().code(), Code::kUnimplemented);
  int value = 1;
  ASSERT_CUDA_OK(api().cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0));
  EXPECT_EQ(value, 0);
  ASSERT_CUDA_OK(api().cuDeviceCanAccessPeer(&value, 0, 1));
  EXPECT_EQ(value, 0);
  const PhysicalMemory memory = Must(PhysicalMemory::Create(api(), 0, kBytes, kFd));
  AddressRange range = Must(AddressRange::Reserve(api(), kBytes, 0));
  ASSERT_TRUE(range.Map(0, memory).ok());
  EXPECT_FALSE(range.SetAccess(0, kBytes, std::array{1}).ok());
}

TEST_F(FakePoorMachine, BothGpusReachMemoryOfTheHost) {
  const CUmemLocation host{CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
  EXPECT_EQ(Must(PhysicalMemory::Granularity(api(), host, kFd)), kGranularity);
  const PhysicalMemory memory = Must(PhysicalMemory::Create(api(), host, kBytes, kFd));
  const AddressRange range = Map(memory);
  EXPECT_CUDA_OK(api().cuMemsetD8(range.address(), 7, kBytes));
  unsigned type = 0;
  ASSERT_CUDA_OK(
      api().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, range.address()));
  EXPECT_EQ(type, CU_MEMORYTYPE_HOST);
  const CUmemLocation nowhere{CU_MEM_LOCATION_TYPE_HOST_NUMA, 3};
  EXPECT_FALSE(PhysicalMemory::Create(api(), nowhere, kBytes, kFd).ok());
}

TEST_F(FakePoorMachine, BothGpusReachRegisteredPages) {
  const UniqueFd memfd = Must(CreateSharedMemory("test", kBytes));
  const Mapping pages = Must(Mapping::MapShared(memfd.get(), kBytes));
  CUdeviceptr address = 0;
  {
    const RegisteredMemory registered = Must(RegisteredMemory::Register(api(), pages.bytes()));
    address = registered.device_address();
    EXPECT_FALSE(RegisteredMemory::Register(api(), pages.bytes().subspan(4096)).ok()) << "twice";
    EXPECT_NE(driver().Leaks().find("registered memory"), std::string::npos);
    for (int device = 0; device < 2; ++device) {
      const ScopedContext current(api(), context(device));
      EXPECT_CUDA_OK(api().cuMemsetD8(address, static_cast<unsigned char>(device), kBytes));
    }
    EXPECT_EQ(pages.bytes()[kBytes - 1], std::byte{1});
  }
  EXPECT_EQ(api().cuMemsetD8(address, 9, kBytes), CUDA_ERROR_INVALID_VALUE);
}

TEST(FakeDevice, DescribesItself) {
  FakeConfig config;
  config.gpus = {5};
  config.multiprocessors = 132;
  const FakeDriver driver(config);
  const Api& api = driver.api();
  int value = 0;
  ASSERT_CUDA_OK(api.cuDeviceGetCount(&value));
  EXPECT_EQ(value, 1);
  char text[32];
  ASSERT_CUDA_OK(api.cuDeviceGetPCIBusId(text, sizeof(text), 0));
  EXPECT_STREQ(text, "0000:05:00.0");
  ASSERT_CUDA_OK(api.cuDeviceGetName(text, sizeof(text), 0));
  EXPECT_STREQ(text, "Fake GPU 5");
  ASSERT_CUDA_OK(api.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
  EXPECT_EQ(value, 132);
  EXPECT_EQ(api.cuDeviceGetName(text, sizeof(text), 1), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(PrimaryContext::Retain(api, 1).status().code(), Code::kInvalidArgument);
}

TEST(FakeDevice, ContextsNest) {
  const FakeDriver driver;
  const Api& api = driver.api();
  CUcontext current = nullptr;
  {
    const PrimaryContext first = Must(PrimaryContext::Retain(api, 0));
    const PrimaryContext second = Must(PrimaryContext::Retain(api, 1));
    const ScopedContext outer(api, first.context());
    {
      const ScopedContext inner(api, second.context());
      ASSERT_CUDA_OK(api.cuCtxGetCurrent(&current));
      EXPECT_EQ(current, second.context());
    }
    ASSERT_CUDA_OK(api.cuCtxGetCurrent(&current));
    EXPECT_EQ(current, first.context());
    EXPECT_NE(driver.Leaks(), "");
  }
  ASSERT_CUDA_OK(api.cuCtxGetCurrent(&current));
  EXPECT_EQ(current, nullptr);
  EXPECT_EQ(driver.Leaks(), "");
  EXPECT_FALSE(ScopedContext(api, nullptr).status().ok());
}

}  // namespace
}  // namespace jaxfabric::cuda
