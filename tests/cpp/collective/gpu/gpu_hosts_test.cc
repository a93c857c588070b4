// GPUs of several hosts, which share memory by fabric handles or are used by nobody: whatever one
// of the processes lacks, all say the same of it. Calls on them are in the other files here.
#include <gtest/gtest.h>

#include "collective/gpu/gpu_ranks.h"

namespace jaxfabric::testing {
namespace {

using cuda::FakeConfig;
using cuda::FakeDriver;

constexpr char kNotShared[] =
    "the job is on several hosts, and their GPUs do not share memory: process ";
constexpr char kWhatItTakes[] = "GPUs of one NVLink domain";

// The process, of several on two hosts, on which something is not as on the others.
class GpuHosts : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (Machine::OnHardware()) GTEST_SKIP() << "needs several hosts";
  }
  // Why the GPUs are used by nobody, as all processes say it.
  std::string Reason(const Peculiar& peculiar) {
    const std::string failed = OnGpus(
        shape_, [](GpuProcess&) { return "used"; }, Machine::Gpus::kOneEach, TestOptions(),
        peculiar);
    std::string reason;
    for (int process = 0; process < shape_.processes; ++process) {
      const std::string begin = StrCat("process ", process, ": ");
      // Lines are of processes, in order.
      const size_t at = failed.find(begin, reason.empty() ? 0 : failed.find('\n'));
      if (at == std::string::npos) return StrCat("nothing from process ", process, ": ", failed);
      const size_t from = at + begin.size();
      const std::string own = failed.substr(from, failed.find('\n', from) - from);
      if (reason.empty()) reason = own;
      if (own != reason) return StrCat("not the same: ", failed);
    }
    return reason;
  }
  std::string Odd() const { return StrCat("process ", GetParam(), ", pid "); }

  const Shape shape_{3, 1, 2};
};

TEST_P(GpuHosts, AGpuWithoutFabricHandlesEndsItForAll) {
  const auto without = [](int process, FakeConfig& config) {
    config.fabric_handles = process != GetParam();
  };
  EXPECT_EQ(Expect(Reason({.config = without}), {kNotShared + StrCat(GetParam(), ", pid "),
                                                 "Fake GPU", "no fabric handles", kWhatItTakes}),
            "");
}

// As where nvidia-imex does not run, or one host is not of its domain.
TEST_P(GpuHosts, ARefusalOfOneDriverEndsItForAll) {
  struct Refusal {
    const char* call;
    int nth;
  };
  for (const auto [call, nth] :
       {Refusal{"cuMemCreate", 1}, Refusal{"cuMemExportToShareableHandle", 1},
        Refusal{"cuMemImportFromShareableHandle", 1}, Refusal{"cuMemImportFromShareableHandle", 2},
        Refusal{"cuMemMap", 2}, Refusal{"cuMemSetAccess", 3}}) {
    const auto refuse = [&](int process, FakeDriver& driver) {
      if (process == GetParam()) driver.FailCall(call, nth, cuda::CUDA_ERROR_NOT_PERMITTED);
    };
    EXPECT_EQ(Expect(Reason({.driver = refuse}), {kNotShared + StrCat(GetParam(), ", pid "), call,
                                                  "CUDA_ERROR_NOT_PERMITTED", kWhatItTakes}),
              "")
        << call;
  }
}

TEST_P(GpuHosts, AnotherDomainEndsItForAll) {
  const auto elsewhere = [](int process, FakeConfig& config) {
    config.clique = process == GetParam() ? 1 : 0;
  };
  const std::string reason = Reason({.config = elsewhere});
  EXPECT_EQ(Expect(reason, {kNotShared, "'s GPU (process ", Odd(), "cuMemImportFromShareableHandle",
                            kWhatItTakes}),
            "");
}

// What GPUs of one host go through then: another host cannot reach it.
TEST_P(GpuHosts, MemoryOfAHostIsNotTried) {
  const auto unreachable = [](int process, FakeDriver& driver) {
    if (process == GetParam()) {
      driver.FailCall("cuMemSetAccess", 2, cuda::CUDA_ERROR_INVALID_DEVICE);
    }
  };
  EXPECT_EQ(Expect(Reason({.driver = unreachable}), {kNotShared + StrCat(GetParam(), ", pid "),
                                                     "cannot be reached", "cuMemSetAccess"}),
            "");
}

INSTANTIATE_TEST_SUITE_P(Odd, GpuHosts, ::testing::Values(0, 1, 2));

// A process that brings no GPU, with or without a driver, and those of another host that have some.
TEST(GpuHost, WithoutGpusLeavesAllWithout) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs several hosts";
  const Shape shape{4, 1, 2};
  for (const bool broken : {false, true}) {
    auto machine = std::make_shared<std::unique_ptr<Machine>>();
    const auto options = [&](int number) {
      *machine = std::make_unique<Machine>(shape, number);
      if (number != 1) return (*machine)->AddTo(TestOptions());
      if (!broken) return TestOptions();
      (*machine)->driver().FailCall("cuDevicePrimaryCtxRetain", 1, cuda::CUDA_ERROR_NO_DEVICE);
      return (*machine)->AddTo(TestOptions());
    };
    const auto body = [&](LocalRanks& ranks) {
      Fabric& fabric = ranks.fabric();
      if (fabric.gpus() != nullptr) return std::string("they are used");
      const std::string why = broken ? "CUDA_ERROR_NO_DEVICE" : "this process has none";
      const std::string whose = fabric.process() == 1 ? "" : "process 1, pid ";
      std::string failed = Expect(fabric.gpu_reason(), {whose, why});
      // Nothing is left of them, and the CPUs go on.
      failed += (*machine)->driver().Leaks();
      const size_t sum = ranks.Add(EveryKind(shape.size(), 100)[0]);
      return failed + Text(ranks.Run(sum, 0, 0));
    };
    EXPECT_EQ(InForkedProcesses(shape, options, body), "");
  }
}

}  // namespace
}  // namespace jaxfabric::testing
