// What happens on GPUs when ranks disagree, do not come, or end: an error that names them, on all.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "collective/call_site.h"
#include "collective/gpu/gpu_ranks.h"

namespace jaxfabric::testing {
namespace {

constexpr Shape kTwo{2, 1};
constexpr Shape kTwoHosts{2, 1, 2};

const Problem kSum{OpKind::kAllReduce, DType::kFloat32, 100, 2, ReduceOp::kSum, {}, 0};

// Launches, waits for the stream, and expects that it failed.
std::string LaunchInVain(GpuCall& call, GpuRank& rank, const Problem& problem, int position) {
  const auto execution = rank.Make(problem, position, 0);
  const Status launched = call.Launch(rank.ordinal(), rank.stream(), execution.buffers);
  // Another thread's kernel may have failed first.
  if (launched.ok() && rank.Synchronize().empty()) return "the stream has no error";
  return "";
}

TEST(GpuFailure, ADifferenceNamesBothCalls) {
  EXPECT_EQ(
      OnGpus(kTwo,
             [&](GpuProcess& process) {
               return process.OnEveryGpu([&](GpuRank& rank, int position) {
                 Problem problem = kSum;
                 if (position == 1) problem.count = 50;
                 CallSpec spec = problem.Spec(kTwo.Ids(), 70 + position);
                 spec.label = position == 0 ? "psum float32[100]" : "psum float32[50]";
                 SiteRegistry::Get().SetSource(spec.site, "train.py:42");
                 GpuCall call(spec, GpuCall::Slot::kInOrder);
                 const auto next = rank.Make(problem, position, 0);
                 std::string failed = LaunchInVain(call, rank, problem, position);
                 failed += Expect(FailureOf(*process.fabric),
                                  {"ranks disagree", "psum float32[100] at train.py:42",
                                   "psum float32[50] at train.py:42", "rank 0 ", "rank 2048"});
                 // And so does what comes next.
                 return failed +
                        Expect(call.Launch(rank.ordinal(), rank.stream(), next.buffers).ToString(),
                               {"ranks disagree"});
               });
             }),
      "");
}

class GpuLate : public GpuShapes {};

TEST_P(GpuLate, ARankThatDoesNotComeIsNamed) {
  const Shape shape = GetParam();
  Options options = TestOptions();
  options.deadline = 0.5;
  const std::string late =
      StrCat("for rank ", shape.Ids()[1], " (a GPU of process ", shape.processes - 1);
  EXPECT_EQ(OnGpus(
                shape,
                [&](GpuProcess& process) {
                  const CallPointer call = MakeCall(kSum, shape.Ids(), 7);
                  return process.OnEveryGpu([&](GpuRank& rank, int position) {
                    std::string failed = RunOnGpu(*call, rank, kSum, position, 0);
                    if (position == 0) {
                      failed += LaunchInVain(*call, rank, kSum, position);
                    }
                    return failed + Expect(FailureOf(*process.fabric),
                                           {"rank 0 (a GPU of process 0", "waited 0.5 s", late,
                                            "whose last call is all_reduce"});
                  });
                },
                Machine::Gpus::kOneEach, options),
            "");
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuLate, ::testing::Values(kTwo, Shape{1, 2}, kTwoHosts),
                         ShapeName);

TEST(GpuFailure, ARankThatNeverSetsUpIsNamed) {
  Options options = TestOptions();
  options.deadline = 0.3;
  EXPECT_EQ(OnGpus(
                kTwo,
                [&](GpuProcess& process) {
                  return process.OnEveryGpu([&](GpuRank& rank, int position) {
                    if (position == 1) return Expect(FailureOf(*process.fabric), {"rank 2048"});
                    const CallPointer call = MakeCall(kSum, kTwo.Ids(), 7);
                    const auto execution = rank.Make(kSum, position, 0);
                    return Expect(call->Prepare(rank.ordinal(), execution.buffers).ToString(),
                                  {"DEADLINE_EXCEEDED", "waited 0.3 s in all_reduce", "rank 2048",
                                   "which is in no call yet"});
                  });
                },
                Machine::Gpus::kOneEach, options),
            "");
}

class GpuDeath : public GpuShapes {};

// Its control connections close, and the wait ends long before the deadline.
TEST_P(GpuDeath, EndsTheWaitsOfAll) {
  const Shape shape = GetParam();
  const int last = shape.processes - 1;
  const std::string dead = StrCat("process ", last);
  Problem sum = kSum;
  sum.size = shape.size();
  const std::string failed = OnGpus(shape, [&](GpuProcess& process) {
    const CallPointer call = MakeCall(sum, shape.Ids(), 7);
    return process.OnEveryGpu([&](GpuRank& rank, int position) {
      std::string wrong = RunOnGpu(*call, rank, sum, position, 0);
      if (process.fabric->process() == last) {
        process.together->arrive_and_wait();
        ::kill(::getpid(), SIGKILL);
      }
      wrong += LaunchInVain(*call, rank, sum, position);
      return wrong + Expect(FailureOf(*process.fabric), {dead, "died"});
    });
  });
  EXPECT_EQ(failed, StrCat(dead, ": \n", dead, " ended with status 9\n"));
}

TEST_P(GpuDeath, OfAProcessOfGpusOnlyIsNamed) {
  const Shape shape = GetParam();
  const Shape no_cpu_devices{shape.processes, 0, shape.hosts};
  auto machine = std::make_shared<std::unique_ptr<Machine>>();
  const std::string failed = InForkedProcesses(
      no_cpu_devices,
      [&](int number) {
        *machine = std::make_unique<Machine>(shape, number);
        return (*machine)->AddTo(TestOptions());
      },
      [&](LocalRanks& ranks) {
        if (ranks.fabric().gpus() == nullptr) return ranks.fabric().gpu_reason();
        if (ranks.fabric().process() == 1) ::kill(::getpid(), SIGKILL);
        return Expect(FailureOf(ranks.fabric()), {"UNAVAILABLE: process 1, pid ", " died"});
      });
  EXPECT_EQ(failed.find("process 0:"), std::string::npos) << failed;
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuDeath,
                         ::testing::Values(kTwo, kTwoHosts, Shape{2, 2, 2}, Shape{4, 1, 2}),
                         ShapeName);

TEST(GpuFailure, GpusThatOneProcessCannotUseAreNobodys) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs a driver that fails";
  // Before the processes meet, and when they share their pools.
  for (const char* call : {"cuDeviceGetUuid", "cuMemCreate"}) {
    auto machine = std::make_shared<std::unique_ptr<Machine>>();
    EXPECT_EQ(InForkedProcesses(
                  kTwo,
                  [&](int number) {
                    *machine = std::make_unique<Machine>(kTwo, number);
                    if (number == 1) {
                      (*machine)->driver().FailCall(call, 1, cuda::CUDA_ERROR_OUT_OF_MEMORY);
                    }
                    return (*machine)->AddTo(TestOptions());
                  },
                  [&](LocalRanks& ranks) {
                    Fabric& fabric = ranks.fabric();
                    if (fabric.gpus() != nullptr) return std::string("they are used");
                    return Expect(fabric.gpu_reason(), {call, "CUDA_ERROR_OUT_OF_MEMORY"}) +
                           (fabric.process() == 0
                                ? Expect(fabric.gpu_reason(), {"process 1, pid ", ": "})
                                : std::string());
                  }),
              "");
  }
}

// What fails on one rank alone, before its kernel runs, is not waited for by the others.
class GpuTrouble : public GpuShapes {};

TEST_P(GpuTrouble, OfOneRankIsToldToAll) {
  const Shape shape = GetParam();
  // Of the set-up: the arena, and what follows once all have announced theirs; then the launch.
  for (const char* call : {"cuMemsetD8", "cuEventCreate", "cuLaunchKernel"}) {
    Options options = TestOptions();
    options.deadline = 5;
    const auto body = [&](GpuProcess& process) {
      const CallPointer sum = MakeCall(kSum, shape.Ids(), 7);
      return process.OnEveryGpu([&](GpuRank& rank, int position) {
        if (position == 1) {
          process.machine->driver().FailCall(call, 1, cuda::CUDA_ERROR_OUT_OF_MEMORY);
        }
        const auto execution = rank.Make(kSum, position, 0);
        const Status launched = sum->Launch(rank.ordinal(), rank.stream(), execution.buffers);
        return Expect(FailureOf(*process.fabric), {call, "CUDA_ERROR_OUT_OF_MEMORY"}) +
               (position == 1 ? Expect(launched.ToString(), {call}) : std::string());
      });
    };
    EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneEach, options), "") << call;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuTrouble, ::testing::Values(kTwo, kTwoHosts), ShapeName);

// Only a pool that is full is helped by a larger one.
TEST(GpuFailure, AnArenaThatCannotBeClearedSaysWhy) {
  const Shape shape{1, 1};
  const auto body = [&](GpuProcess& process) -> std::string {
    process.machine->driver().FailCall("cuMemsetD8", 1, cuda::CUDA_ERROR_LAUNCH_FAILED);
    const std::string text =
        process.fabric->gpus()->CommunicatorFor(0, shape.Ids(), 7, "psum").status().ToString();
    return Expect(text, {"psum", "cuMemsetD8", "CUDA_ERROR_LAUNCH_FAILED"}) +
           (text.find("raise") == std::string::npos ? "" : text);
  };
  EXPECT_EQ(OnGpus(shape, body), "");
}

TEST(GpuShutdown, SetUpsThatWaitEnd) {
  const Shape shape{1, 2};
  Options options = TestOptions();
  options.deadline = 5;
  const auto body = [&](GpuProcess& process) {
    const CallPointer call = MakeCall(kSum, shape.Ids(), 7);
    return process.OnEveryGpu([&](GpuRank& rank, int position) -> std::string {
      if (position == 0) {
        const auto execution = rank.Make(kSum, position, 0);
        const Status prepared = call->Prepare(rank.ordinal(), execution.buffers);
        return Expect(prepared.ToString(), {"CANCELLED", "jaxfabric was shut down"});
      }
      const auto free_bytes = [&] { return process.fabric->Counters()["gpu_pool_free_bytes"]; };
      const uint64_t all = process.fabric->Counters()["gpu_pool_bytes"];
      while (free_bytes() == all) std::this_thread::yield();
      process.fabric->Shutdown();
      return "";
    });
  };
  EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneEach, options), "");
}

// A program ends while its last kernels are in flight, for which other ranks wait.
TEST(GpuShutdown, KernelsInFlightAreWaitedFor) {
  const auto body = [&](GpuProcess& process) {
    const CallPointer call = MakeCall(kSum, kTwo.Ids(), 7);
    return process.OnEveryGpu([&](GpuRank& rank, int position) {
      auto execution = rank.Make(kSum, position, 0);
      std::string failed = Text(call->Prepare(rank.ordinal(), execution.buffers));
      if (position == 0) {
        failed += Text(call->Launch(rank.ordinal(), rank.stream(), execution.buffers));
        process.fabric->Shutdown();
        if (rank.api().cuStreamQuery(rank.stream()) != cuda::CUDA_SUCCESS) failed += "not waited ";
        // What comes now has nobody to wait for it.
        failed += Expect(call->Launch(rank.ordinal(), rank.stream(), execution.buffers).ToString(),
                         {"jaxfabric was shut down"});
      } else {
        for (int more = 0; more < 20; ++more) {
          rank.Free(execution);
          execution = rank.Make(kSum, position, 0);
        }
        failed += Text(call->Launch(rank.ordinal(), rank.stream(), execution.buffers));
      }
      failed += rank.Synchronize();
      failed += rank.Check(execution, kSum, position, 0);
      rank.Free(execution);
      return failed;
    });
  };
  EXPECT_EQ(OnGpus(kTwo, body), "");
}

// Two GPUs of one rank would be told apart by nobody.
TEST(GpuFailure, ARankIsOneGpu) {
  auto machine = std::make_shared<std::unique_ptr<Machine>>();
  EXPECT_EQ(InForkedProcesses(
                kTwo,
                [&](int number) {
                  *machine = std::make_unique<Machine>(kTwo, number);
                  Options options = (*machine)->AddTo(TestOptions());
                  options.gpus[0].rank = 5;
                  return options;
                },
                [&](LocalRanks& ranks) {
                  return Expect(ranks.fabric().gpu_reason(), {"rank 5 is a GPU of process"}) +
                         (*machine)->driver().Leaks();
                }),
            "");
}

TEST(GpuFailure, ArenasThatCannotBeAreNotUsed) {
  const Shape shape{1, 2};
  Options options = TestOptions();
  options.deadline = 0.1;
  const auto body = [&](GpuProcess& process) -> std::string {
    GpuDomain& domain = *process.fabric->gpus();
    const std::vector<int64_t> ids = shape.Ids();
    const uint32_t slot = 7;
    const auto announce = [&](int64_t rank, uint64_t offset, uint64_t bytes) {
      WireWriter message(MessageType::kGpuArena);
      message.Add(std::span<const int64_t>(ids)).Add(slot).Add(rank).Add(offset).Add(bytes);
      WireReader reader(message.bytes());
      domain.OnMessage(0, reader);
    };
    const uint64_t bytes = 256 << 10;
    announce(1, 8, bytes);              // not aligned
    announce(1, 16 << 20, bytes);       // outside of the pool
    announce(1, 0, uint64_t{1} << 60);  // larger than it
    announce(9, 0, bytes);              // no such rank
    return Expect(domain.CommunicatorFor(0, ids, slot, "psum").status().ToString(),
                  {"waited 0.1 s in psum for rank 1 "});
  };
  EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneEach, options), "");
}

TEST(GpuShutdown, AfterAFailureNothingIsWaitedFor) {
  const Shape shape{1, 1};
  const auto body = [&](GpuProcess& process) {
    Problem sum = kSum;
    sum.size = 1;
    const CallPointer call = MakeCall(sum, shape.Ids(), 7);
    return process.OnEveryGpu([&](GpuRank& rank, int position) {
      const auto execution = rank.Make(sum, position, 0);
      process.machine->driver().Hold(rank.ordinal(), true);
      std::string failed = Text(call->Prepare(rank.ordinal(), execution.buffers));
      failed += Text(call->Launch(rank.ordinal(), rank.stream(), execution.buffers));
      process.fabric->ReportFailure(Status(Code::kInternal, "planted"));
      process.fabric->Shutdown();
      if (rank.api().cuStreamQuery(rank.stream()) != cuda::CUDA_ERROR_NOT_READY) failed += "ended";
      process.machine->driver().Hold(rank.ordinal(), false);
      return failed;
    });
  };
  EXPECT_EQ(OnGpus(shape, body), "");
}

// Later communicators have smaller arenas, down to what is of use.
TEST(GpuPool, TheFirstCommunicatorsDoNotTakeAll) {
  const Shape shape{1, 1};
  Options options = TestOptions();
  const auto body = [&](GpuProcess& process) -> std::string {
    // 6 of 512 KiB, then 4 of 256 KiB. By half of what is left there would be one less.
    int made = 0;
    while (process.fabric->gpus()->CommunicatorFor(0, shape.Ids(), made + 10, "psum").ok()) ++made;
    return made == 10 ? "" : StrCat(made, " communicators");
  };
  EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneEach, options), "");
}

TEST(GpuFailure, APoolThatIsFullSaysSo) {
  const Shape shape{1, 2};
  const std::string failed = OnGpus(shape, [&](GpuProcess& process) {
    return process.OnEveryGpu([&](GpuRank& rank, int position) {
      std::string wrong;
      // A communicator for every slot, until nothing is left.
      for (uint32_t slot = 10; slot < 40 && wrong.empty(); ++slot) {
        const auto made = process.fabric->gpus()->CommunicatorFor(rank.ordinal(), shape.Ids(), slot,
                                                                  "psum at train.py:42");
        if (!made.ok()) wrong = made.status().ToString();
      }
      return position == 0 ? wrong : std::string();
    });
  });
  EXPECT_EQ(Expect(failed,
                   {"RESOURCE_EXHAUSTED", "psum at train.py:42", "raise JAXFABRIC_GPU_POOL_BYTES"}),
            "");
}

}  // namespace
}  // namespace jaxfabric::testing
