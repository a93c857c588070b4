// Calls whose arrays are in windows, through the stages that XLA runs: on emulated GPUs, over a
// fake of XLA's extension for collectives and of NCCL.
#include "windows/stages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "collective/call_site.h"
#include "collective/gpu/gpu_ranks.h"
#include "windows/fake_xla.h"

namespace jaxfabric::testing {
namespace {

const WindowCore& Core() {
  static const WindowCore core = {
      .type_id = [] { return int64_t{7}; },
      .attach =
          [](void* state, int ordinal, cuda::CUstream stream, const Buffers& buffers,
             const GpuWindows& windows) {
            return static_cast<GpuCall*>(state)->Attach(ordinal, stream, buffers, windows);
          },
  };
  return core;
}

std::vector<Problem> Problems(int ranks) {
  std::vector<Problem> problems;
  for (const Problem& problem : EveryKind(ranks, 30000)) {
    if (problem.kind == OpKind::kBarrier || problem.kind == OpKind::kRaggedAllToAll) continue;
    problems.push_back(problem);
  }
  return problems;
}

CallSpec SpecOf(const Problem& problem, Shape shape, uint64_t site) {
  CallSpec spec = problem.Spec(shape.Ids(), site);
  spec.positions.resize(static_cast<size_t>(shape.size()));
  std::iota(spec.positions.begin(), spec.positions.end(), 0);
  return spec;
}

// The calls of `problems` on the ranks of one process.
class Job {
 public:
  Job(GpuProcess& process, nccl::FakeNccl& nccl, const std::vector<Problem>& problems)
      : process_(process), xla_(nccl, process.shape.size()), problems_(problems) {
    for (size_t i = 0; i < problems.size(); ++i) {
      specs_.push_back(SpecOf(problems[i], process.shape, 100 + i));
      calls_.push_back(std::make_unique<GpuCall>(specs_[i], GpuCall::Slot::kInOrder));
    }
  }
  FakeXla& xla() { return xla_; }
  cuda::FakeDriver& driver() { return process_.machine->driver(); }
  size_t count() const { return calls_.size(); }
  GpuCall& call(size_t i) { return *calls_[i]; }
  const CallSpec& spec(size_t i) const { return specs_[i]; }
  uint64_t Counter(const char* name) const { return process_.fabric->Counters().at(name); }

  std::string Stages(size_t i, GpuRank& rank, int position, const GpuRank::Execution& execution,
                     size_t shift) {
    return xla_.Run(position, specs_[i], execution.buffers, calls_[i].get(), rank.ordinal(),
                    rank.stream(), shift);
  }
  // Once through all stages, with arrays `offset` bytes further on.
  std::string Run(size_t i, GpuRank& rank, int position, int data, size_t shift, size_t offset = 0,
                  bool in_place = false) {
    const auto execution = rank.Make(problems_[i], position, data, offset, in_place);
    std::string failed = Stages(i, rank, position, execution, shift);
    if (failed.empty()) {
      failed = Text(calls_[i]->Launch(rank.ordinal(), rank.stream(), execution.buffers));
    }
    if (failed.empty()) failed = rank.Synchronize();
    if (failed.empty()) failed = rank.Check(execution, problems_[i], position, data);
    rank.Free(execution);
    return failed;
  }

 private:
  GpuProcess& process_;
  FakeXla xla_;
  const std::vector<Problem> problems_;
  std::vector<CallSpec> specs_;
  std::vector<CallPointer> calls_;
};

// Runs body(job, rank, position) on every rank, then after(job).
std::string OnJob(int ranks, const std::vector<Problem>& problems,
                  const std::function<void(Job&)>& before,
                  const std::function<std::string(Job&, GpuRank&, int)>& body,
                  const std::function<std::string(Job&)>& after) {
  auto nccl = std::make_unique<nccl::FakeNccl>();
  Options options = TestOptions();
  options.gpu.nccl = &nccl->api();
  const auto in_process = [&](GpuProcess& process) {
    std::string failed = Text(ConnectCore(&Core()));
    Job job(process, *nccl, problems);
    before(job);
    failed +=
        process.OnEveryGpu([&](GpuRank& rank, int position) { return body(job, rank, position); });
    return failed + after(job);
  };
  return OnGpus({1, ranks}, in_process, Machine::Gpus::kOneEach, options);
}

std::string Expect(const char* what, uint64_t got, uint64_t wanted) {
  return got == wanted ? "" : StrCat(what, ": ", got, ", not ", wanted, "\n");
}

class WindowStages : public ::testing::TestWithParam<int> {};

TEST_P(WindowStages, EveryOpIsDoneInWindowsThatMove) {
  const int ranks = GetParam();
  const int rounds = 3;
  const auto body = [&](Job& job, GpuRank& rank, int position) {
    std::string failed;
    for (int data = 0; data < rounds && failed.empty(); ++data) {
      for (size_t i = 0; i < job.count() && failed.empty(); ++i) {
        // Another place in the window on every rank.
        failed = job.Run(i, rank, position, data, static_cast<size_t>(data),
                         static_cast<size_t>(256 * ((data + position) % 3)));
      }
    }
    return failed;
  };
  const auto after = [&](Job& job) {
    std::string failed;
    for (int rank = 1; rank < ranks; ++rank) {
      if (job.xla().requests(rank) != job.xla().requests(0)) failed += "requests differ\n";
    }
    const uint64_t all = job.count() * static_cast<uint64_t>(rounds * ranks);
    return failed + Expect("found", job.Counter("gpu_windows_found"), all) +
           Expect("missing", job.Counter("gpu_windows_missing"), 0);
  };
  EXPECT_EQ(OnJob(ranks, Problems(ranks), [](Job&) {}, body, after), "");
}

INSTANTIATE_TEST_SUITE_P(Ranks, WindowStages, ::testing::Values(2, 3, 4));

TEST(WindowStage, ResultsMayBeWhereOperandsAre) {
  std::vector<Problem> problems;
  for (const Problem& problem : Problems(2)) {
    if (problem.input_bytes() == problem.output_bytes()) problems.push_back(problem);
  }
  const auto body = [&](Job& job, GpuRank& rank, int position) {
    std::string failed;
    for (size_t i = 0; i < job.count(); ++i) {
      failed += job.Run(i, rank, position, 3, 1, 0, true);
    }
    return failed;
  };
  const auto after = [&](Job& job) {
    // Of all_reduce alone each part is read by none but the rank that writes it.
    return Expect("found", job.Counter("gpu_windows_found"), 2) +
           Expect("missing", job.Counter("gpu_windows_missing"), 2 * (job.count() - 1));
  };
  EXPECT_EQ(OnJob(2, problems, [](Job&) {}, body, after), "");
}

struct Fault {
  const char* name;
  void (*set)(XlaFaults&);
};
class WindowFaults : public ::testing::TestWithParam<Fault> {};

TEST_P(WindowFaults, OnOneRankMakeAllCopy) {
  const std::vector<Problem> problems = Problems(3);
  const auto before = [&](Job& job) { GetParam().set(job.xla().faults(1)); };
  const auto body = [&](Job& job, GpuRank& rank, int position) {
    std::string failed;
    for (size_t i = 0; i < job.count() && failed.empty(); ++i) {
      failed = job.Run(i, rank, position, 4, 0);
    }
    return failed;
  };
  const auto after = [&](Job& job) {
    return job.Counter("gpu_windows_missing") >= job.count() ? "" : "windows were found";
  };
  EXPECT_EQ(OnJob(3, problems, before, body, after), "");
}

INSTANTIATE_TEST_SUITE_P(
    All, WindowFaults,
    ::testing::Values(Fault{"NoExtension", [](XlaFaults& f) { f.no_extension = true; }},
                      Fault{"OtherMajor", [](XlaFaults& f) { f.major += 1; }},
                      Fault{"OlderMinor", [](XlaFaults& f) { f.minor -= 1; }},
                      Fault{"SmallerExtension", [](XlaFaults& f) { f.struct_size -= 8; }},
                      Fault{"NullWindow", [](XlaFaults& f) { f.null_window = true; }},
                      Fault{"GetFails", [](XlaFaults& f) { f.get_fails = true; }},
                      Fault{"WindowNotAtAPage", [](XlaFaults& f) { f.not_at_page = true; }},
                      Fault{"NotAddressable", [](XlaFaults& f) { f.not_addressable = true; }},
                      Fault{"OtherRank", [](XlaFaults& f) { f.other_rank = true; }}),
    [](const auto& tested) { return tested.param.name; });

TEST(WindowStage, ANewerMinorVersionIsKnown) {
  const std::vector<Problem> problems = {Problems(2)[0]};
  const auto before = [](Job& job) {
    for (int rank = 0; rank < 2; ++rank) {
      job.xla().faults(rank).minor += 3;
      job.xla().faults(rank).struct_size += 16;
    }
  };
  const auto body = [](Job& job, GpuRank& rank, int position) {
    return job.Run(0, rank, position, 4, 0);
  };
  const auto after = [](Job& job) { return Expect("found", job.Counter("gpu_windows_found"), 2); };
  EXPECT_EQ(OnJob(2, problems, before, body, after), "");
}

TEST(WindowStage, ARequestThatXlaRefusesIsAnError) {
  const std::vector<Problem> problems = {Problems(2)[0]};
  const auto before = [](Job& job) {
    for (int rank = 0; rank < 2; ++rank) job.xla().faults(rank).request_fails = true;
  };
  const auto body = [](Job& job, GpuRank& rank, int position) {
    return job.Run(0, rank, position, 4, 0);
  };
  const std::string failed = OnJob(2, problems, before, body, [](Job&) { return ""; });
  EXPECT_NE(failed.find("no such group"), std::string::npos) << failed;
}

TEST(WindowStage, ATableThatCannotBeWrittenFailsAllRanks) {
  const std::vector<Problem> problems = {Problems(2)[0]};
  const auto body = [&](Job& job, GpuRank& rank, int position) {
    const auto execution = rank.Make(problems[0], position, 0);
    std::string failed = Text(job.call(0).Prepare(rank.ordinal(), execution.buffers));
    job.xla().Acquire(position, 0);
    if (position == 0) {
      job.driver().FailCall("cuLaunchKernel", 1, cuda::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    }
    failed += job.Run(0, rank, position, 4, 0);
    return failed.empty() ? "it did not fail" : StrCat(position, ": ", failed, "\n");
  };
  const std::string failed = OnJob(2, problems, [](Job&) {}, body, [](Job&) { return ""; });
  EXPECT_NE(failed.find("cuLaunchKernel"), std::string::npos) << failed;
  EXPECT_EQ(failed.find("did not fail"), std::string::npos) << failed;
}

// Groups whose members are not in the order of their positions: XLA's communicator has them so.
TEST(WindowStage, MembersAreRanksInTheOrderOfTheirPositions) {
  const auto requested = [](Job& job) { return job.xla().requests(0); };
  const Problem problem = Problems(2)[0];
  std::string requests;
  const auto body = [&](Job& job, GpuRank& rank, int position) {
    const auto execution = rank.Make(problem, position, 0);
    CallSpec spec = job.spec(0);
    spec.groups = {{1, 0}, {9, 8}};
    spec.positions = {5, 2, 1, 0};
    GpuCall call(spec, GpuCall::Slot::kInOrder);
    // Rank 1 of the job is the first of the group, and the second of the communicator.
    const std::string failed =
        job.xla().Run(position, spec, execution.buffers, &call, rank.ordinal(), rank.stream(), 0);
    return failed;
  };
  const auto after = [&](Job& job) {
    const std::string wanted = "communicator mode 3 id 27238 ( 2 5 ) ( 0 1 )\n";
    return (requested(job).starts_with(wanted) ? "" : requested(job)) +
           Expect("found", job.Counter("gpu_windows_found"), 2);
  };
  EXPECT_EQ(OnJob(2, {problem}, [](Job&) {}, body, after), "");
}

// A graph is replayed with what the initialize stage of each execution has found: this rank's
// launch is as it was captured, while the other rank's arrays, and the windows, are others.
TEST(WindowStage, AReplayFindsArraysThatHaveMoved) {
  const std::vector<Problem> problems = Problems(2);
  const auto body = [&](Job& job, GpuRank& rank, int position) {
    const cuda::Api& api = rank.api();
    const cuda::ScopedContext current(api, rank.context());
    std::string failed;
    for (size_t i = 0; i < job.count() && failed.empty(); ++i) {
      const auto fixed = rank.Make(problems[i], position, 0);
      cuda::CUgraph graph{};
      cuda::CUgraphExec replay{};
      failed = Text(job.call(i).Prepare(rank.ordinal(), fixed.buffers));
      (void)api.cuStreamBeginCapture(rank.stream(), cuda::CU_STREAM_CAPTURE_MODE_RELAXED);
      failed += Text(job.call(i).Launch(rank.ordinal(), rank.stream(), fixed.buffers));
      if (api.cuStreamEndCapture(rank.stream(), &graph) != cuda::CUDA_SUCCESS ||
          api.cuGraphInstantiate(&replay, graph, 0) != cuda::CUDA_SUCCESS) {
        failed += "no graph";
      }
      for (int data = 1; data < 5 && failed.empty(); ++data) {
        const auto moved = rank.Make(problems[i], position, data, static_cast<size_t>(256 * data));
        const auto& execution = position == 0 ? fixed : moved;
        rank.Fill(execution, problems[i], position, data);
        failed = job.Stages(i, rank, position, execution, static_cast<size_t>(data % 3));
        if (position == 0) {
          if (api.cuGraphLaunch(replay, rank.stream()) != cuda::CUDA_SUCCESS) failed += "no launch";
        } else {
          failed += Text(job.call(i).Launch(rank.ordinal(), rank.stream(), moved.buffers));
        }
        failed += rank.Synchronize();
        failed += rank.Check(execution, problems[i], position, data);
        rank.Free(moved);
      }
      (void)api.cuGraphExecDestroy(replay);
      (void)api.cuGraphDestroy(graph);
      rank.Free(fixed);
    }
    return failed;
  };
  const auto after = [](Job& job) {
    return Expect("missing", job.Counter("gpu_windows_missing"), 0);
  };
  EXPECT_EQ(OnJob(2, problems, [](Job&) {}, body, after), "");
}

// An executable may go after its fabric, and one with a graph of an earlier fabric is not run.
TEST(WindowStage, CallsOutliveTheirFabric) {
  const Shape shape{1, 2};
  const Problem problem = Problems(2)[0];
  nccl::FakeNccl nccl;
  Options options = TestOptions();
  options.gpu.nccl = &nccl.api();
  const auto in_process = [&](GpuProcess& process) {
    std::string failed = Text(ConnectCore(&Core()));
    FakeXla xla(nccl, shape.size());
    const CallSpec spec = SpecOf(problem, shape, 7);
    GpuCall call(spec, GpuCall::Slot::kInOrder);
    std::shared_ptr<Fabric> second;  // goes before the call
    const auto change = [&] {
      second = *Fabric::Create(0, 1, shape.LocalIds(0), process.machine->AddTo(options));
      SetCurrentFabric(second);
      return Text(second->Connect({second->Address()}));
    };
    failed += process.OnEveryGpu([&](GpuRank& rank, int position) {
      const cuda::Api& api = rank.api();
      const cuda::ScopedContext current(api, rank.context());
      const auto execution = rank.Make(problem, position, 0);
      const auto stages = [&] {
        return xla.Run(position, spec, execution.buffers, &call, rank.ordinal(), rank.stream(), 0);
      };
      std::string wrong = stages();
      cuda::CUgraph graph{};
      cuda::CUgraphExec replay{};
      (void)api.cuStreamBeginCapture(rank.stream(), cuda::CU_STREAM_CAPTURE_MODE_RELAXED);
      wrong += Text(call.Launch(rank.ordinal(), rank.stream(), execution.buffers));
      (void)api.cuStreamEndCapture(rank.stream(), &graph);
      if (api.cuGraphInstantiate(&replay, graph, 0) != cuda::CUDA_SUCCESS) wrong += "no graph";
      process.together->arrive_and_wait();
      if (position == 0) wrong += change();
      process.together->arrive_and_wait();
      wrong += testing::Expect(stages(), {"XLA has it in a CUDA graph"});
      (void)api.cuGraphExecDestroy(replay);
      (void)api.cuGraphDestroy(graph);
      rank.Free(execution);
      return wrong;
    });
    SetCurrentFabric(process.fabric);
    return failed + (second.use_count() == 1 ? "" : "a launch keeps its fabric");
  };
  EXPECT_EQ(OnGpus(shape, in_process, Machine::Gpus::kOneEach, options), "");
}

TEST(WindowStage, TablesAreUsedAgainWhenTheirCallIsGone) {
  const std::vector<Problem> problems = {Problems(2)[0]};
  uint64_t left = 0;
  const auto body = [&](Job& job, GpuRank& rank, int position) {
    std::string failed;
    for (uint64_t site = 0; site < 40; ++site) {
      GpuCall call(SpecOf(problems[0], {1, 2}, site), GpuCall::Slot::kInOrder);
      const auto execution = rank.Make(problems[0], position, 0);
      failed += Text(call.Prepare(rank.ordinal(), execution.buffers));
      rank.Free(execution);
      // All wait for each other here.
      job.xla().Acquire(position, 0);
      if (site == 0 && position == 0) left = job.Counter("gpu_pool_free_bytes");
      job.xla().Acquire(position, 0);
    }
    return failed;
  };
  const auto after = [&](Job& job) {
    return Expect("left", job.Counter("gpu_pool_free_bytes"), left);
  };
  EXPECT_EQ(OnJob(2, problems, [](Job&) {}, body, after), "");
}

TEST(WindowStage, ModulesOfTwoBuildsAreNotConnected) {
  WindowCore other = Core();
  other.version += 1;
  EXPECT_EQ(ConnectCore(&other).message(),
            "the modules of jaxfabric are of two builds; install it again");
  other = Core();
  other.sizes += 8;
  EXPECT_FALSE(ConnectCore(&other).ok());
  EXPECT_TRUE(ConnectCore(&Core()).ok());
}

}  // namespace
}  // namespace jaxfabric::testing
