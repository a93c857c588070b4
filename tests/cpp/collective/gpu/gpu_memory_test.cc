// The memory that the GPUs of several processes share: multicast, and memory of the host where GPUs
// cannot reach each other; and what becomes of it when a step fails on one process.
#include <gtest/gtest.h>

#include "collective/gpu/gpu_ranks.h"
#include "device/launch.h"

namespace jaxfabric::testing {
namespace {

using cuda::FakeConfig;
using cuda::FakeDriver;

void Forbidden(const void*) { emulation::Trap("not the kernel that was to be run"); }

// Kernels that large calls use when there is no multicast memory, or when there is, are not there.
void Forbid(FakeDriver& driver, bool with_multicast) {
  const std::vector<std::string> kernels =
      with_multicast ? std::vector<std::string>{"all_reduce_multicast_sum_float32",
                                                "all_reduce_multicast_max_int32",
                                                "reduce_scatter_multicast_sum_bfloat16",
                                                "reduce_scatter_multicast_sum_uint32"}
                     : std::vector<std::string>{
                           "all_reduce_two_shot_sum_float32", "all_reduce_two_shot_max_int32",
                           "reduce_scatter_pull_sum_bfloat16", "reduce_scatter_pull_sum_uint32"};
  for (const std::string& kernel : kernels) {
    driver.AddKernel("jaxfabric_" + kernel, Forbidden, sizeof(device::ReduceArguments));
  }
  driver.AddKernel(StrCat("jaxfabric_all_gather_", with_multicast ? "multicast" : "push"),
                   Forbidden, sizeof(device::MoveArguments));
}

class GpuMulticast : public GpuShapes {};

TEST_P(GpuMulticast, DoesLargeCallsOfAllGpus) {
  const Shape shape = GetParam();
  const auto body = [&](GpuProcess& process) {
    std::vector<Problem> problems = LargeGpuProblems(shape.size());
    // And all other calls as before.
    for (const Problem& small : EveryKind(shape.size(), 7)) problems.push_back(small);
    if (Machine::OnHardware()) {
      // The switch adds floats in an order of its own.
      std::erase_if(problems, [](const Problem& problem) {
        return problem.dtype != DType::kInt32 && problem.kind != OpKind::kAllGather;
      });
      return RunAll(process, problems);
    }
    std::string failed = Expect(process.fabric->gpus()->Memory(),
                                {shape.hosts == 1 ? "memory of the GPUs, with multicast"
                                                  : "memory of the GPUs, between hosts by fabric "
                                                    "handles, with multicast"});
    failed += RunAll(process, problems);
    auto counters = process.fabric->Counters();
    if (counters["gpu_multicast_communicators"] != static_cast<uint64_t>(shape.ranks_each)) {
      failed += "not used ";
    }
    return failed;
  };
  EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneEach, TestOptions(),
                   {.driver = [](int, FakeDriver& driver) { Forbid(driver, false); }}),
            "");
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuMulticast,
                         ::testing::Values(Shape{1, 3}, Shape{2, 2}, Shape{3, 1}, Shape{2, 2, 2},
                                           Shape{4, 1, 2}),
                         ShapeName);

TEST(GpuMulticast, GroupsOfSomeGpusHaveNone) {
  const Shape shape{2, 2};
  const auto body = [&](GpuProcess& process) {
    return process.OnEveryGpu([&](GpuRank& rank, int position) -> std::string {
      if (position == 3) return "";
      const auto some = process.fabric->gpus()->CommunicatorFor(rank.ordinal(), {0, 1, 2048}, 0,
                                                                "the call of three");
      if (!some.ok()) return some.status().ToString();
      return (*some)->view().multicast == nullptr ? "" : "it reaches GPUs that are not in it";
    });
  };
  EXPECT_EQ(OnGpus(shape, body), "");
}

// A rank that has another communicator first has its arena elsewhere.
TEST(GpuMulticast, ArenasAtDifferentPlacesHaveNone) {
  const Shape shape{3, 1};
  const auto body = [&](GpuProcess& process) {
    return process.OnEveryGpu([&](GpuRank& rank, int position) -> std::string {
      GpuDomain& domain = *process.fabric->gpus();
      if (position == 1 && !domain.CommunicatorFor(rank.ordinal(), {2048}, 0, "alone").ok()) {
        return "alone";
      }
      const auto all = domain.CommunicatorFor(rank.ordinal(), shape.Ids(), 0, "all");
      if (!all.ok()) return all.status().ToString();
      return (*all)->view().multicast == nullptr ? "" : "it stands for different places";
    });
  };
  EXPECT_EQ(OnGpus(shape, body), "");
}

// The step of the set-up that fails, and where.
struct Failing {
  const char* call;
  int nth;
  int process;
  int hosts = 1;
};

class GpuMulticastFails : public ::testing::TestWithParam<Failing> {};

TEST_P(GpuMulticastFails, OnOneProcessAndNobodyHasIt) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs a driver that fails";
  const Failing failing = GetParam();
  const Shape shape{3, 1, failing.hosts};
  const auto body = [&](GpuProcess& process) {
    std::string failed =
        Expect(process.fabric->gpus()->Memory(),
               {StrCat("without multicast: process ", failing.process, ", pid "), failing.call});
    // Nothing of it is left: the pools of the others are mapped, and the own one.
    if (process.machine->driver().Leaks().find("multicast") != std::string::npos) {
      failed += "a half of it is left ";
    }
    return failed + RunAll(process, {LargeGpuProblems(3)[0]});
  };
  const auto fail = [&](int process, FakeDriver& driver) {
    Forbid(driver, true);
    if (process == failing.process) {
      driver.FailCall(failing.call, failing.nth, cuda::CUDA_ERROR_OUT_OF_MEMORY);
    }
  };
  EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneEach, TestOptions(), {.driver = fail}), "");
}

// A process makes one pool and imports two before it comes to multicast.
INSTANTIATE_TEST_SUITE_P(
    Steps, GpuMulticastFails,
    ::testing::Values(Failing{"cuMulticastGetGranularity", 1, 0},
                      Failing{"cuMulticastCreate", 1, 0},
                      Failing{"cuMemExportToShareableHandle", 2, 0},
                      Failing{"cuMemImportFromShareableHandle", 3, 1},
                      Failing{"cuMulticastGetGranularity", 1, 2},
                      Failing{"cuMulticastAddDevice", 1, 0}, Failing{"cuMulticastAddDevice", 1, 2},
                      Failing{"cuMulticastBindMem", 1, 0}, Failing{"cuMulticastBindMem", 1, 2},
                      Failing{"cuMemAddressReserve", 4, 1}, Failing{"cuMemMap", 4, 1},
                      Failing{"cuMemSetAccess", 4, 2}, Failing{"cuMulticastCreate", 1, 0, 2},
                      Failing{"cuMemImportFromShareableHandle", 3, 1, 2},
                      Failing{"cuMulticastAddDevice", 1, 2, 2},
                      Failing{"cuMulticastBindMem", 1, 1, 2}, Failing{"cuMemMap", 4, 1, 2}),
    [](const ::testing::TestParamInfo<Failing>& step) {
      return StrCat(step.param.call, "In", step.param.process,
                    step.param.hosts == 1 ? "" : "OfSeveralHosts");
    });

TEST(GpuMulticast, IsNotTriedWhereItCannotBe) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs other GPUs";
  const auto expect = [](const std::string& reason) {
    return [reason](GpuProcess& process) {
      const uint64_t made = process.machine->driver().Calls("cuMulticastCreate");
      return Expect(process.fabric->gpus()->Memory(), {"without multicast: " + reason}) +
             (made == 0 ? "" : "tried ") + RunAll(process, EveryKind(process.shape.size(), 7));
    };
  };
  const auto without = [](int process, FakeConfig& config) { config.multicast = process != 1; };
  EXPECT_EQ(OnGpus({3, 1}, expect("the GPU of rank 2048 has none"), Machine::Gpus::kOneEach,
                   TestOptions(), {.config = without}),
            "");
  const auto old = [](int process, FakeConfig& config) {
    config.multicast_functions = process < 2;
  };
  EXPECT_EQ(OnGpus({3, 1}, expect("the GPU of rank 4096 has none"), Machine::Gpus::kOneEach,
                   TestOptions(), {.config = old}),
            "");
  Options off = TestOptions();
  off.gpu.multicast = false;
  EXPECT_EQ(OnGpus({1, 3}, expect("the GPU of rank 0 has none, or it is switched off"),
                   Machine::Gpus::kOneEach, off),
            "");
  EXPECT_EQ(OnGpus({3, 1}, expect("ranks 0 and 2048 share a GPU"), Machine::Gpus::kOneForAll), "");
  EXPECT_EQ(OnGpus({2, 1}, expect("2 GPUs gain nothing")), "");
}

TEST(GpuHandles, AreChosenByWhereTheProcessesAre) {
  constexpr unsigned kFd = cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  EXPECT_EQ(*HandleTypes(/*one_host=*/true, /*fabric_offered=*/false), kFd);
  EXPECT_EQ(*HandleTypes(true, true), kFd);
  EXPECT_EQ(*HandleTypes(false, true), unsigned{cuda::CU_MEM_HANDLE_TYPE_FABRIC});
  EXPECT_EQ(HandleTypes(false, false).status().code(), Code::kUnimplemented);
}

TEST(GpuHandles, AreProbed) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs GPUs with and without";
  const Shape two_hosts{2, 2, 2};
  const std::vector<int> ordinals = {0, 1};
  {
    Machine machine(two_hosts, 0);
    EXPECT_EQ(Text(ProbeFabric(machine.api(), ordinals)), "");
    EXPECT_EQ(machine.driver().Leaks(), "");
    // As without the device of nvidia-imex.
    machine.driver().FailCall("cuMemCreate", 2, cuda::CUDA_ERROR_NOT_PERMITTED);
    EXPECT_EQ(Expect(Text(ProbeFabric(machine.api(), ordinals)),
                     {"Fake GPU 1 (GPU 1)", "cuMemCreate", "CUDA_ERROR_NOT_PERMITTED"}),
              "");
  }
  Machine without({1, 2}, 0);
  EXPECT_EQ(Expect(Text(ProbeFabric(without.api(), ordinals)),
                   {"Fake GPU 0 (GPU 0)", "offers no fabric handles"}),
            "");
}

TEST(GpuHandles, TravelAsBytesOrAsDescriptor) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs fabric handles";
  Machine machine({1, 1}, 0, Machine::Gpus::kOneEach,
                  {.config = [](int, FakeConfig& config) { config.fabric_handles = true; }});
  const auto gpu = Gpu::Open(machine.api(), 0);
  ASSERT_TRUE(gpu.ok());
  for (const bool one_host : {true, false}) {
    ASSERT_TRUE((*gpu)->MakePool(PoolPlace::kDevice, 1 << 20, one_host).ok());
    const auto handle = (*gpu)->pool().Export((*gpu)->handle_types());
    ASSERT_TRUE(handle.ok());
    EXPECT_EQ(handle->fd.valid(), one_host);
    EXPECT_EQ(handle->Bytes().size(), one_host ? 0u : 64u);
    const auto received = MemoryHandle::FromBytes(handle->Bytes());
    ASSERT_TRUE(received.ok());
    EXPECT_EQ(received->Import(machine.api(), 1 << 20).ok(), !one_host);
  }
  EXPECT_EQ(MemoryHandle::FromBytes(std::string(63, 'x')).status().code(), Code::kInvalidArgument);
}

std::string Unexpected(GpuProcess&) { return "used"; }

// GPUs without a way to each other's memory.
class GpuStaging : public ::testing::TestWithParam<Shape> {};

std::string ExpectStaged(GpuProcess& process) {
  const std::string failed = Expect(process.fabric->gpus()->Memory(),
                                    {"GPUs cannot reach each other: staged in pinned host memory"});
  return failed + RunAll(process, GpuProblems(process.shape.size()));
}

TEST_P(GpuStaging, GoesThroughTheHost) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs other GPUs";
  const Shape shape = GetParam();
  const auto body = [&](GpuProcess& process) {
    std::string failed = ExpectStaged(process);
    // The pools that could not be reached are no more.
    const std::string leaks = process.machine->driver().Leaks();
    int mapped = 0;
    for (size_t at = 0; (at = leaks.find("mapped memory", at)) != std::string::npos; ++at) ++mapped;
    return failed + (mapped == shape.size() ? "" : leaks);
  };
  // One pair of all is enough.
  const auto apart = [&](int, FakeConfig& config) {
    config.no_peer_access = {{0, shape.size() - 1}};
  };
  EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneEach, TestOptions(), {.config = apart}), "");
}

TEST_P(GpuStaging, WithoutHostMemoryOfTheDriver) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs other GPUs";
  const Shape shape = GetParam();
  const auto body = [&](GpuProcess& process) {
    const auto registered = process.machine->driver().Calls("cuMemHostRegister");
    return ExpectStaged(process) +
           (registered == static_cast<uint64_t>(shape.size()) ? "" : StrCat(registered, " pools"));
  };
  const auto apart = [&](int process, FakeConfig& config) {
    config.no_peer_access = {{0, shape.size() - 1}};
    config.host_memory = process != shape.processes - 1;
  };
  EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneEach, TestOptions(), {.config = apart}), "");
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuStaging,
                         ::testing::Values(Shape{1, 2}, Shape{2, 1}, Shape{2, 2}, Shape{3, 1}),
                         ShapeName);

TEST(GpuStagingFails, WhereItIsRefusedTooGpusAreNotUsed) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs other GPUs";
  const auto apart = [](int, FakeConfig& config) {
    config.no_peer_access = {{0, 1}};
    config.host_memory = false;
  };
  const auto fail = [](int process, FakeDriver& driver) {
    // Its own pool, and then that of the other.
    if (process == 1) driver.FailCall("cuMemHostRegister", 2, cuda::CUDA_ERROR_OUT_OF_MEMORY);
  };
  const std::string failed = OnGpus({2, 1}, Unexpected, Machine::Gpus::kOneEach, TestOptions(),
                                    {.config = apart, .driver = fail});
  EXPECT_EQ(Expect(failed, {"process 0: ", "cannot be reached", "nor the same memory of the host",
                            "cuMemHostRegister", "process 1: "}),
            "");
  EXPECT_EQ(failed.find("used"), std::string::npos);
}

// An error that is none of reach is not hidden by staging.
TEST(GpuStagingFails, OtherErrorsAreErrors) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs a driver that fails";
  const auto fail = [](int process, FakeDriver& driver) {
    if (process == 0) driver.FailCall("cuMemSetAccess", 2, cuda::CUDA_ERROR_OUT_OF_MEMORY);
  };
  const std::string failed =
      OnGpus({2, 1}, Unexpected, Machine::Gpus::kOneEach, TestOptions(), {.driver = fail});
  EXPECT_EQ(Expect(failed, {"process 0: ", "process 1: process 0, pid ", "cuMemSetAccess"}), "");
  EXPECT_EQ(failed.find("used"), std::string::npos);
}

TEST(GpuMemory, ACommunicatorsShareAndTimeAreCounted) {
  constexpr size_t kMost = size_t{64} << 20;
  EXPECT_LT(GpuOptions().pool_bytes, kMost);
  const auto body = [](GpuProcess& process) {
    const std::string failed = RunAll(process, EveryKind(2, 7));
    auto counters = process.fabric->Counters();
    const uint64_t taken = counters["gpu_pool_bytes"] - counters["gpu_pool_free_bytes"];
    return failed + (counters["gpu_communicators"] == 1 ? "" : "communicators ") +
           (counters["gpu_communicator_bytes"] == taken ? "" : "bytes ") +
           (counters["gpu_setup_microseconds"] > 0 ? "" : "no time ");
  };
  EXPECT_EQ(OnGpus({2, 1}, body), "");
}

}  // namespace
}  // namespace jaxfabric::testing
