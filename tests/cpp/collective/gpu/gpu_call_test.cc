// Calls on emulated GPUs, end to end: pools, exchange, communicators, launches; in one process and
// across forked ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <numeric>
#include <thread>

#include "collective/call_site.h"
#include "collective/gpu/compilation.h"
#include "collective/gpu/gpu_ranks.h"

namespace jaxfabric::testing {
namespace {

class GpuCalls : public GpuShapes {};

TEST_P(GpuCalls, EveryOpMovesTheRightBytes) {
  const Shape shape = GetParam();
  EXPECT_EQ(OnGpus(shape,
                   [&](GpuProcess& process) {
                     const std::vector<Problem> problems = GpuProblems(shape.size());
                     std::vector<CallPointer> calls;
                     for (size_t i = 0; i < problems.size(); ++i) {
                       calls.push_back(MakeCall(problems[i], shape.Ids(), 100 + i));
                     }
                     return process.OnEveryGpu([&](GpuRank& rank, int position) {
                       std::string failed;
                       for (int data = 0; data < 3; ++data) {
                         for (size_t i = 0; i < calls.size(); ++i) {
                           failed += RunOnGpu(*calls[i], rank, problems[i], position, data);
                         }
                       }
                       return failed;
                     });
                   }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuCalls,
                         ::testing::Values(Shape{1, 2}, Shape{1, 4}, Shape{2, 1}, Shape{2, 2},
                                           Shape{3, 1}, Shape{2, 1, 2}, Shape{2, 2, 2},
                                           Shape{4, 1, 2}),
                         ShapeName);

TEST(GpuCall, RanksMayShareAGpu) {
  const Shape shape{2, 1};
  const Problem problem = GpuProblems(2)[0];
  const auto body = [&](GpuProcess& process) {
    const CallPointer call = MakeCall(problem, shape.Ids(), 7);
    return process.OnEveryGpu([&](GpuRank& rank, int position) {
      const std::string failed = RunOnGpu(*call, rank, problem, position, 0);
      const auto communicator =
          process.fabric->gpus()->CommunicatorFor(0, shape.Ids(), 0, "the same call");
      // The blocks of both have to be resident together.
      const uint32_t lanes = (*communicator)->view().shape.lanes;
      const uint32_t most = process.fabric->gpus()->gpu(0).multiprocessors() / 4;
      return failed + (lanes <= std::max(most, 1u) ? "" : StrCat(lanes, " lanes"));
    });
  };
  EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneForAll), "");
}

TEST(GpuCall, MemoryIsMadeAccessibleOnceToAGpuOfSeveralRanks) {
  if (Machine::OnHardware()) GTEST_SKIP() << "needs no GPU";
  Machine machine({1, 2}, 0);
  const auto devices = FindDevices(machine.api(), std::vector<int>{0, 1, 0});
  ASSERT_TRUE(devices.ok());
  EXPECT_EQ(devices->size(), 2u);
}

// Groups of a program's call: each rank has one communicator, made when it first needs it.
TEST(GpuCall, GroupsAreIndependent) {
  const Shape shape{2, 2};
  EXPECT_EQ(OnGpus(shape,
                   [&](GpuProcess& process) {
                     const Problem problem = GpuProblems(2)[0];
                     CallSpec spec = problem.Spec({0, 1}, 3);
                     spec.groups = {{0, 2048}, {1, 2049}};
                     GpuCall call(spec, GpuCall::Slot::kInOrder);
                     return process.OnEveryGpu([&](GpuRank& rank, int position) {
                       return RunOnGpu(call, rank, problem, position / 2, 5);
                     });
                   }),
            "");
}

TEST(GpuCall, PositionsAreLookedUpInTheDevicesOfTheExecutable) {
  const Shape shape{2, 1};
  EXPECT_EQ(OnGpus(shape,
                   [&](GpuProcess& process) {
                     const Problem problem = GpuProblems(2)[1];
                     CallSpec spec = problem.Spec({0, 1}, 3);
                     spec.by_position = true;
                     GpuCompilations::Get().Begin();
                     GpuCall call(spec, GpuCall::Slot::kInOrder);
                     // The mesh runs the other way round.
                     const std::vector<int64_t> devices = {2048, 0};
                     GpuCompilations::Get().End(devices);
                     return process.OnEveryGpu([&](GpuRank& rank, int position) {
                       return RunOnGpu(call, rank, problem, 1 - position, 5);
                     });
                   }),
            "");
}

// Each compiles for a mesh of its own, and makes its calls while the other does.
TEST(GpuCall, ThreadsMayCompileAtOnce) {
  const Shape shape{1, 2};
  EXPECT_EQ(OnGpus(shape,
                   [&](GpuProcess& process) {
                     const Problem problem = GpuProblems(2)[1];
                     std::barrier<> together(2);
                     CallPointer calls[2];
                     const std::string failed = OnThreads(2, [&](int thread) {
                       CallSpec spec = problem.Spec({0, 1}, 3);
                       spec.by_position = true;
                       GpuCompilations::Get().Begin();
                       together.arrive_and_wait();
                       calls[thread] = std::make_unique<GpuCall>(spec, GpuCall::Slot::kInOrder);
                       together.arrive_and_wait();
                       const std::vector<int64_t> devices = {thread, 1 - thread};
                       GpuCompilations::Get().End(devices);
                       return std::string();
                     });
                     return failed + process.OnEveryGpu([&](GpuRank& rank, int position) {
                       return RunOnGpu(*calls[0], rank, problem, position, 5) +
                              RunOnGpu(*calls[1], rank, problem, 1 - position, 5);
                     });
                   }),
            "");
}

TEST(GpuCompilation, OfAnotherThreadIsKnownIfItIsTheOnlyOne) {
  GpuCompilations compilations;
  EXPECT_EQ(compilations.Current(), nullptr);
  compilations.Begin();
  const auto own = compilations.Current();
  std::shared_ptr<const ExecutableDevices> alone, beside;
  std::thread([&] {
    alone = compilations.Current();
    compilations.Begin();
    beside = compilations.Current();
    std::thread([&] { EXPECT_EQ(compilations.Current(), nullptr); }).join();
    compilations.End(std::vector<int64_t>{5});
  }).join();
  EXPECT_EQ(alone, own);
  EXPECT_NE(beside, own);
  EXPECT_EQ(compilations.Current(), own);
  compilations.End(std::vector<int64_t>{4, 2});
  EXPECT_EQ(own->Get(), (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(beside->Get(), std::vector<int64_t>{5});
  EXPECT_EQ(compilations.Current(), nullptr);
}

// The memory of a fabric ends with it, unless a graph may still use it.
TEST(GpuCall, KeepsAFabricOnlyForGraphs) {
  const Shape shape{1, 2};
  const auto body = [&](GpuProcess& process) {
    const Problem problem = GpuProblems(2)[0];
    const CallPointer call = MakeCall(problem, shape.Ids(), 7);
    const long owners = process.fabric.use_count();
    std::string failed = process.OnEveryGpu(
        [&](GpuRank& rank, int position) { return RunOnGpu(*call, rank, problem, position, 0); });
    if (process.fabric.use_count() != owners) failed += "a launch keeps the fabric";
    failed += process.OnEveryGpu([&](GpuRank& rank, int position) {
      const cuda::Api& api = rank.api();
      const auto execution = rank.Make(problem, position, 0);
      const cuda::ScopedContext current(api, rank.context());
      cuda::CUgraph graph{};
      std::string wrong;
      wrong += Text(cuda::ToStatus(
          api, api.cuStreamBeginCapture(rank.stream(), cuda::CU_STREAM_CAPTURE_MODE_RELAXED),
          "begin"));
      wrong += Text(call->Launch(rank.ordinal(), rank.stream(), execution.buffers));
      wrong += Text(cuda::ToStatus(api, api.cuStreamEndCapture(rank.stream(), &graph), "end"));
      wrong += Text(cuda::ToStatus(api, api.cuGraphDestroy(graph), "destroy"));
      return wrong;
    });
    return failed + (process.fabric.use_count() == owners + 2 ? "" : "a capture keeps no fabric");
  };
  EXPECT_EQ(OnGpus(shape, body), "");
}

TEST(GpuCall, UnknownPositionsAreAnError) {
  const Shape shape{1, 2};
  const std::string failed = OnGpus(shape, [&](GpuProcess& process) {
    CallSpec spec = GpuProblems(2)[0].Spec({0, 1}, 3);
    spec.by_position = true;
    GpuCall call(spec, GpuCall::Slot::kInOrder);
    return process.OnEveryGpu([&](GpuRank& rank, int position) {
      return RunOnGpu(call, rank, GpuProblems(2)[0], position, 0);
    });
  });
  EXPECT_NE(failed.find("it is not known which devices the program runs on"), std::string::npos)
      << failed;
}

// A graph that was captured once runs again and again with what is then in the buffers: nothing of
// the host takes part.
class GpuReplay : public GpuShapes {};

TEST_P(GpuReplay, NeedsNoHost) {
  const Shape shape = GetParam();
  // Slow are processes that share a real GPU, on which they take turns, and ranks of one process on
  // emulated ones, which are one thread of the host.
  const bool slow = Machine::OnHardware() == (shape.processes > 1);
  // Under sanitizers a change of fibres takes long.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  const int replays = slow ? 12 : 60;
#else
  const int replays = !slow ? 1000 : Machine::OnHardware() ? 60 : 250;
#endif
  EXPECT_EQ(OnGpus(shape,
                   [&](GpuProcess& process) {
                     const std::vector<Problem> problems = GpuProblems(shape.size());
                     std::vector<CallPointer> calls;
                     for (size_t i = 0; i < problems.size(); ++i) {
                       calls.push_back(MakeCall(problems[i], shape.Ids(), 100 + i));
                     }
                     return process.OnEveryGpu([&](GpuRank& rank, int position) {
                       const cuda::Api& api = rank.api();
                       std::vector<GpuRank::Execution> executions;
                       std::string failed;
                       for (size_t i = 0; i < calls.size(); ++i) {
                         executions.push_back(rank.Make(problems[i], position, 0));
                         failed += Text(calls[i]->Prepare(rank.ordinal(), executions[i].buffers));
                       }
                       const cuda::ScopedContext current(api, rank.context());
                       cuda::CUgraph graph{};
                       cuda::CUgraphExec replay{};
                       (void)api.cuStreamBeginCapture(rank.stream(),
                                                      cuda::CU_STREAM_CAPTURE_MODE_RELAXED);
                       for (size_t i = 0; i < calls.size(); ++i) {
                         failed += Text(calls[i]->Launch(rank.ordinal(), rank.stream(),
                                                         executions[i].buffers));
                       }
                       if (api.cuStreamEndCapture(rank.stream(), &graph) != cuda::CUDA_SUCCESS ||
                           api.cuGraphInstantiate(&replay, graph, 0) != cuda::CUDA_SUCCESS) {
                         return failed + "no graph";
                       }
                       process.together->arrive_and_wait();
                       for (int data = 0; data < replays && failed.empty(); ++data) {
                         for (size_t i = 0; i < calls.size(); ++i) {
                           rank.Fill(executions[i], problems[i], position, data);
                         }
                         if (api.cuGraphLaunch(replay, rank.stream()) != cuda::CUDA_SUCCESS) {
                           failed += "no launch";
                         }
                         failed += rank.Synchronize();
                         for (size_t i = 0; i < calls.size(); ++i) {
                           failed += rank.Check(executions[i], problems[i], position, data);
                         }
                         // Calls between replays count on.
                         if (data % 20 == 7) {
                           failed += RunOnGpu(*calls[0], rank, problems[0], position, data);
                         }
                       }
                       process.together->arrive_and_wait();
                       (void)api.cuGraphExecDestroy(replay);
                       (void)api.cuGraphDestroy(graph);
                       for (const auto& execution : executions) rank.Free(execution);
                       return failed;
                     });
                   }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuReplay,
                         ::testing::Values(Shape{2, 1}, Shape{1, 4}, Shape{2, 1, 2}), ShapeName);

// After a shutdown the graph of an executable has its kernels in memory that nobody minds any more:
// where a peer was lost they would trap, and elsewhere wait for ranks that are in the new fabric.
TEST(GpuCall, AGraphOfAnEarlierFabricIsNotLaunched) {
  const Shape shape{1, 2};
  const Options options = TestOptions();
  const auto body = [&](GpuProcess& process) {
    const Problem problem = GpuProblems(2)[0];
    const CallPointer captured = MakeCall(problem, shape.Ids(), 7);
    const CallPointer launched = MakeCall(problem, shape.Ids(), 8);
    std::string failed = process.OnEveryGpu([&](GpuRank& rank, int position) {
      std::string wrong = RunOnGpu(*launched, rank, problem, position, 0);
      const auto execution = rank.Make(problem, position, 0);
      const cuda::ScopedContext current(rank.api(), rank.context());
      cuda::CUgraph graph{};
      wrong += Text(captured->Prepare(rank.ordinal(), execution.buffers));
      (void)rank.api().cuStreamBeginCapture(rank.stream(), cuda::CU_STREAM_CAPTURE_MODE_RELAXED);
      wrong += Text(captured->Launch(rank.ordinal(), rank.stream(), execution.buffers));
      (void)rank.api().cuStreamEndCapture(rank.stream(), &graph);
      (void)rank.api().cuGraphDestroy(graph);
      // In the same fabric it may be.
      return wrong + Text(captured->Prepare(rank.ordinal(), execution.buffers));
    });
    process.fabric->Shutdown();
    const std::shared_ptr<Fabric> second =
        *Fabric::Create(0, 1, shape.LocalIds(0), process.machine->AddTo(options));
    failed += Text(second->Connect({second->Address()}));
    SetCurrentFabric(second);
    const CallPointer compiled_again = MakeCall(problem, shape.Ids(), 7);
    failed += process.OnEveryGpu([&](GpuRank& rank, int position) {
      std::string wrong = RunOnGpu(*compiled_again, rank, problem, position, 0);
      wrong += RunOnGpu(*launched, rank, problem, position, 1);
      const auto execution = rank.Make(problem, position, 0);
      // Every execution asks anew.
      for (int i = 0; i < 2; ++i) {
        wrong += Expect(captured->Prepare(rank.ordinal(), execution.buffers).ToString(),
                        {"FAILED_PRECONDITION", "all_reduce", "CUDA graph", "jax.clear_caches()"});
      }
      return wrong;
    });
    SetCurrentFabric(nullptr);
    return failed;
  };
  EXPECT_EQ(OnGpus(shape, body, Machine::Gpus::kOneEach, options), "");
}

// One rank alternates between streams; the other does not.
TEST(GpuCall, AStreamFollowsTheLast) {
  const Shape shape{1, 2};
  EXPECT_EQ(OnGpus(shape,
                   [&](GpuProcess& process) {
                     const Problem problem = GpuProblems(2)[0];
                     const CallPointer call = MakeCall(problem, shape.Ids(), 7);
                     return process.OnEveryGpu([&](GpuRank& rank, int position) {
                       GpuRank other(rank.api(), rank.ordinal());
                       std::vector<GpuRank::Execution> executions;
                       std::string failed;
                       for (int data = 0; data < 50; ++data) {
                         executions.push_back(rank.Make(problem, position, data));
                         GpuRank& on = position == 1 && data % 3 == 0 ? other : rank;
                         failed += Text(
                             call->Launch(rank.ordinal(), on.stream(), executions.back().buffers));
                       }
                       failed += rank.Synchronize() + other.Synchronize();
                       for (int data = 0; data < 50; ++data) {
                         const auto& execution = executions[static_cast<size_t>(data)];
                         failed += rank.Check(execution, problem, position, data);
                         rank.Free(execution);
                       }
                       return failed;
                     });
                   }),
            "");
}

// A call in two halves runs beside the stream, and its end is what the second half waits for.
TEST(GpuCall, StartedCallsRunBesideTheStream) {
  const Shape shape{2, 1};
  const auto body = [&](GpuProcess& process) {
    std::vector<Problem> problems = GpuProblems(2);
    std::erase_if(problems, [](const Problem& p) {
      return p.kind == OpKind::kRaggedAllToAll || p.kind == OpKind::kBarrier;
    });
    const Problem between{OpKind::kAllReduce, DType::kFloat32, 9, 2, ReduceOp::kSum, {}, 0};
    std::vector<CallPointer> calls;
    for (size_t i = 0; i < problems.size(); ++i) {
      calls.push_back(MakeCall(problems[i], shape.Ids(), 100 + i, GpuCall::Slot::kStarted));
    }
    const CallPointer other = MakeCall(between, shape.Ids(), 99);
    return process.OnEveryGpu([&](GpuRank& rank, int position) {
      std::string failed;
      for (int data = 0; data < 3; ++data) {
        std::vector<GpuRank::Execution> executions;
        for (size_t i = 0; i < calls.size(); ++i) {
          executions.push_back(rank.Make(problems[i], position, data));
          failed += Text(calls[i]->Start(rank.ordinal(), rank.stream(), executions[i].buffers));
        }
        failed += RunOnGpu(*other, rank, between, position, data);
        for (size_t i = calls.size(); i-- > 0;) {
          failed += Text(process.fabric->gpus()->Finish(rank.ordinal(), rank.stream(), 100 + i));
        }
        failed += rank.Synchronize();
        for (size_t i = 0; i < calls.size(); ++i) {
          failed += rank.Check(executions[i], problems[i], position, data);
          rank.Free(executions[i]);
        }
      }
      const Status twice = process.fabric->gpus()->Finish(rank.ordinal(), rank.stream(), 100);
      return failed + (twice.code() == Code::kFailedPrecondition ? "" : "finished twice");
    });
  };
  EXPECT_EQ(OnGpus(shape, body), "");
}

}  // namespace
}  // namespace jaxfabric::testing
