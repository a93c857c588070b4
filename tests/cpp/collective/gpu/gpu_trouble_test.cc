// Every call of the driver that a rank makes fails once: all ranks hear of it at once, or nothing
// has happened.
#include <gtest/gtest.h>

#include "collective/call_site.h"
#include "collective/gpu/gpu_ranks.h"

namespace jaxfabric::testing {
namespace {

// Nobody is to wait so long.
constexpr double kDeadline = 20;
constexpr char kAllWereMade[] = "there was no such call";

// A whole call and the halves of one, as the handlers make them.
Status MakeCalls(GpuProcess& process, GpuCall& whole, GpuCall& half, GpuRank& rank,
                 const Buffers& first, const Buffers& second) {
  JF_RETURN_IF_ERROR(whole.Prepare(rank.ordinal(), first));
  JF_RETURN_IF_ERROR(half.Prepare(rank.ordinal(), second));
  JF_RETURN_IF_ERROR(half.Start(rank.ordinal(), rank.stream(), second));
  JF_RETURN_IF_ERROR(whole.Launch(rank.ordinal(), rank.stream(), first));
  GpuDomain& domain = *process.fabric->gpus();
  JF_RETURN_IF_ERROR(domain.Finish(rank.ordinal(), rank.stream(), half.spec().site));
  // What the second half does where XLA has given the result another place.
  return domain.Copy(rank.ordinal(), rank.stream(), second.output, second.output,
                     second.output_bytes);
}

// The n-th call fails on one rank. "" if all went on, or all failed for that reason.
std::string FailNth(int nth) {
  const Shape shape{2, 1};
  Options options = TestOptions();
  options.deadline = kDeadline;
  const auto body = [&](GpuProcess& process) {
    const Problem sum{OpKind::kAllReduce, DType::kFloat32, 100, 2, ReduceOp::kSum, {}, 0};
    const CallPointer whole = MakeCall(sum, shape.Ids(), 7);
    const CallPointer half = MakeCall(sum, shape.Ids(), 8, GpuCall::Slot::kStarted);
    return process.OnEveryGpu([&](GpuRank& rank, int position) -> std::string {
      cuda::FakeDriver& driver = process.machine->driver();
      const auto first = rank.Make(sum, position, 0), second = rank.Make(sum, position, 1);
      const uint64_t before = driver.Calls("");
      if (position == 1) driver.FailCall("", nth, cuda::CUDA_ERROR_OUT_OF_MEMORY);
      Status made = MakeCalls(process, *whole, *half, rank, first.buffers, second.buffers);
      if (position == 1 && driver.Calls("") - before < static_cast<uint64_t>(nth)) {
        return kAllWereMade;
      }
      if (made.ok() && rank.Synchronize().empty()) {
        return rank.Check(first, sum, position, 0) + rank.Check(second, sum, position, 1);
      }
      const std::string failure = FailureOf(*process.fabric);
      // The half may still be using the arrays.
      const cuda::ScopedContext current(rank.api(), rank.context());
      (void)rank.api().cuCtxSynchronize();
      return Expect(failure, {"CUDA_ERROR_OUT_OF_MEMORY"});
    });
  };
  return OnGpus(shape, body, Machine::Gpus::kOneEach, options);
}

TEST(GpuDriver, WhatItRefusesOneRankIsToldToAll) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs a driver that fails";
  int nth = 1;
  for (std::string failed; failed.find(kAllWereMade) == std::string::npos; ++nth) {
    ASSERT_EQ(failed, "") << "call " << nth - 1;
    failed = FailNth(nth);
  }
  EXPECT_GT(nth, 30);
}

}  // namespace
}  // namespace jaxfabric::testing
