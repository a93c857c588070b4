// What the calls take on the GPUs of this computer, beside what its memory and launches allow.
//
//   jaxfabric_gpu_timings [--json FILE] [--nccl LIBRARY] [--fake]
//
// Ranks are streams of one process, on one GPU, and on one GPU each where there are several. A time
// is that of one call in a captured graph of many, on the first rank's stream: the median of
// several replays. With several GPUs NCCL's times are beside, where there is a libnccl.so.2. --fake
// runs the same code on emulated GPUs with few and small calls, for tests; its figures mean
// nothing. Exit code 77: there is no GPU.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string_view>

#include "collective/call_site.h"
#include "collective/gpu/gpu_ranks.h"
#include "device/image.h"
#include "device/launch.h"
#include "gpu_figures.h"
#include "gpu_nccl.h"

namespace jaxfabric::testing {
namespace {

constexpr int kSkipped = 77;
constexpr size_t kMiB = size_t{1} << 20;
// Nothing, as PTX that every driver compiles.
constexpr char kEmptyImage[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry jaxfabric_empty(.param .u32 unused)\n{\n  ret;\n}\n";

double Microseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// What to run: on emulated GPUs only enough to show that it runs.
struct Plan {
  std::vector<size_t> sizes = {8,         1 << 10, 8 << 10,  24 << 10, 64 << 10,
                               256 << 10, kMiB,    8 * kMiB, 64 * kMiB};
  int replays = 9;
  int launches = 500;
  size_t copied = 256 * kMiB;
  int CallsIn(size_t bytes) const {
    return replays == 1 ? 2 : bytes <= 64 << 10 ? 100 : bytes <= kMiB ? 50 : 10;
  }
};

// Ends the program: without this there is nothing to measure.
void Must(const Status& status) {
  if (status.ok()) return;
  std::cout << "FAILED: " << status.ToString() << std::endl;
  ::_exit(1);
}

// The time of one of `calls` launches in a graph on the first of several streams; `launch` queues
// one. All threads of `process` call it.
double TimeOfReplay(GpuProcess& process, GpuRank& rank, int calls, int replays,
                    const std::function<Status()>& launch) {
  const cuda::Api& api = rank.api();
  const cuda::ScopedContext current(api, rank.context());
  cuda::CUgraph graph{};
  cuda::CUgraphExec executable{};
  cuda::CUevent begin{}, end{};
  Must(JF_CUDA_CALL(api, cuEventCreate, &begin, 0));
  Must(JF_CUDA_CALL(api, cuEventCreate, &end, 0));
  Must(
      JF_CUDA_CALL(api, cuStreamBeginCapture, rank.stream(), cuda::CU_STREAM_CAPTURE_MODE_RELAXED));
  for (int i = 0; i < calls; ++i) Must(launch());
  Must(JF_CUDA_CALL(api, cuStreamEndCapture, rank.stream(), &graph));
  Must(JF_CUDA_CALL(api, cuGraphInstantiate, &executable, graph, 0));
  std::vector<double> times;
  // The first is to warm up.
  for (int replay = 0; replay <= replays; ++replay) {
    process.together->arrive_and_wait();
    Must(JF_CUDA_CALL(api, cuEventRecord, begin, rank.stream()));
    Must(JF_CUDA_CALL(api, cuGraphLaunch, executable, rank.stream()));
    Must(JF_CUDA_CALL(api, cuEventRecord, end, rank.stream()));
    Must(JF_CUDA_CALL(api, cuStreamSynchronize, rank.stream()));
    float milliseconds = 0;
    Must(JF_CUDA_CALL(api, cuEventElapsedTime, &milliseconds, begin, end));
    if (replay > 0) times.push_back(double{milliseconds} * 1000 / calls);
  }
  process.together->arrive_and_wait();
  Must(JF_CUDA_CALL(api, cuGraphExecDestroy, executable));
  Must(JF_CUDA_CALL(api, cuGraphDestroy, graph));
  Must(JF_CUDA_CALL(api, cuEventDestroy, begin));
  Must(JF_CUDA_CALL(api, cuEventDestroy, end));
  return Median(std::move(times));
}

// `ranks` ranks of this process, with their fabric.
class Job {
 public:
  Job(int ranks, Machine::Gpus gpus) {
    process_.shape = {1, ranks};
    process_.machine = std::make_unique<Machine>(process_.shape, 0, gpus);
    if (!Machine::OnHardware()) {
      process_.machine->driver().AddKernel("jaxfabric_empty", [](const void*) {}, 4);
    }
    auto made =
        Fabric::Create(0, 1, process_.shape.LocalIds(0), process_.machine->AddTo(TestOptions()));
    Must(made.status());
    process_.fabric = *std::move(made);
    Must(process_.fabric->Connect({process_.fabric->Address()}));
    if (process_.fabric->gpus() == nullptr) {
      Must(Status(Code::kFailedPrecondition, process_.fabric->gpu_reason()));
    }
    SetCurrentFabric(process_.fabric);
  }
  ~Job() {
    SetCurrentFabric(nullptr);
    process_.fabric->Shutdown();
  }

  GpuProcess& process() { return process_; }
  GpuDomain& domain() { return *process_.fabric->gpus(); }

 private:
  GpuProcess process_;
};

// What the machine itself does: copies, and launches of nothing.
void MeasureMachine(const Plan& plan, Figures& figures) {
  Job job(1, Machine::Gpus::kOneForAll);
  GpuProcess& process = job.process();
  figures.gpu = job.domain().gpu(0).name();
  process.together = std::make_unique<std::barrier<>>(1);
  GpuRank rank(process.machine->api(), 0, 2 * plan.copied + kMiB);
  const cuda::Api& api = rank.api();
  const cuda::ScopedContext current(api, rank.context());
  const Problem bytes{OpKind::kPermute, DType::kUint8, plan.copied, 1, ReduceOp::kSum, {}, 0};
  const auto execution = rank.Place(bytes);
  const double copy = TimeOfReplay(process, rank, 10, plan.replays, [&] {
    return JF_CUDA_CALL(api, cuMemcpyDtoDAsync, execution.output, execution.input, plan.copied,
                        rank.stream());
  });
  figures.memory_bandwidth = 2 * static_cast<double>(plan.copied) / copy;

  const auto image = cuda::Module::Load(api, kEmptyImage);
  Must(image.status());
  const auto empty = image->Function("jaxfabric_empty");
  Must(empty.status());
  uint32_t unused = 0;
  void* parameters[] = {&unused};
  const auto launch_empty = [&] {
    return JF_CUDA_CALL(api, cuLaunchKernel, *empty, 1, 1, 1, 32, 1, 1, 0, rank.stream(),
                        parameters, nullptr);
  };
  figures.launch_floor = TimeOfReplay(process, rank, 100, plan.replays, launch_empty);

  const Problem problem{OpKind::kAllReduce, DType::kFloat32, 2, 1, ReduceOp::kSum, {}, 0};
  GpuCall call(problem.Spec({0}, 1), GpuCall::Slot::kInOrder);
  const auto small = rank.Place(problem);
  const auto launch_call = [&] { return call.Launch(0, rank.stream(), small.buffers); };
  Must(call.Prepare(0, small.buffers));
  const auto host_time = [&](const auto& launch) {
    std::vector<double> times;
    for (int i = 0; i <= plan.replays; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      for (int n = 0; n < plan.launches; ++n) Must(launch());
      const double time = Microseconds(std::chrono::steady_clock::now() - begin);
      Must(JF_CUDA_CALL(api, cuStreamSynchronize, rank.stream()));
      if (i > 0) times.push_back(time / plan.launches);
    }
    return Median(std::move(times));
  };
  figures.host_empty = host_time(launch_empty);
  figures.host_call = host_time(launch_call);
  figures.replay_alone = TimeOfReplay(process, rank, 100, plan.replays, launch_call);
}

// The problem whose larger array has about so many bytes.
Problem ProblemOf(OpKind kind, int ranks, size_t bytes) {
  Problem problem{kind, DType::kFloat32, bytes / 4, ranks, ReduceOp::kSum, {}, 0};
  if (problem.input_bytes() > bytes || problem.output_bytes() > bytes) {
    problem.count = std::max<size_t>(1, bytes / 4 / static_cast<size_t>(ranks));
  }
  if (kind == OpKind::kAllReduceRmsNorm) {
    // Rows of 16 KiB, as of a large model, or one of all that there is.
    problem.count = std::max<size_t>(4, problem.count);
    problem.row_elements = std::min<size_t>(4096, problem.count);
  }
  if (kind == OpKind::kRaggedAllToAll) {
    problem.slices_each = 1;
    // All that there is room for.
    problem.slices = [=](int position, int) {
      Slices all;
      const auto rows = static_cast<int64_t>(problem.count);
      for (int peer = 0; peer < ranks; ++peer) {
        all.input_offsets.push_back(peer * rows);
        all.send_sizes.push_back(rows);
        all.output_offsets.push_back(position * rows);
        all.recv_sizes.push_back(rows);
      }
      return all;
    };
  }
  return problem;
}

std::string KernelOf(const Problem& problem, const device::Communicator& communicator) {
  const device::ArenaShape& shape = communicator.shape;
  const device::Ways ways{.multicast = communicator.multicast != nullptr};
  switch (problem.kind) {
    case OpKind::kAllReduce:
      return device::PlanAllReduce(shape, problem.dtype, problem.reduction, problem.row_bytes(),
                                   ways)
          .kernel;
    case OpKind::kReduceScatter:
      return device::PlanReduceScatter(shape, problem.dtype, problem.reduction, problem.row_bytes(),
                                       ways)
          .kernel;
    case OpKind::kAllReduceRmsNorm:
      return device::PlanAllReduceRmsNorm(
                 shape, problem.dtype, problem.count / problem.row_elements, problem.row_elements)
          ->kernel;
    case OpKind::kRaggedAllToAll:
      return "ragged_all_to_all_push";
    case OpKind::kBarrier:
      return "barrier";
    default: {
      const auto move = problem.kind == OpKind::kAllGather   ? device::Move::kAllGather
                        : problem.kind == OpKind::kAllToAll  ? device::Move::kAllToAll
                        : problem.kind == OpKind::kBroadcast ? device::Move::kBroadcast
                                                             : device::Move::kPermute;
      return device::PlanMove(shape, move, problem.row_bytes(), ways).kernel;
    }
  }
}

void MeasureCalls(const Plan& plan, int ranks, Machine::Gpus gpus, const std::string& library,
                  Figures& figures) {
  Job job(ranks, gpus);
  std::unique_ptr<Nccl> nccl;
  if (gpus == Machine::Gpus::kOneEach) {
    auto opened = Nccl::Open(library, ranks);
    figures.nccl = opened.ok() ? "timed" : opened.status().ToString();
    if (opened.ok()) nccl = *std::move(opened);
  }
  GpuProcess& process = job.process();
  std::vector<Problem> problems;
  std::vector<CallPointer> calls;
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kReduceScatter,
                            OpKind::kAllToAll, OpKind::kPermute, OpKind::kBroadcast,
                            OpKind::kRaggedAllToAll, OpKind::kBarrier, OpKind::kAllReduceRmsNorm}) {
    for (const size_t size : plan.sizes) {
      if (kind == OpKind::kBarrier && size != plan.sizes[0]) continue;
      problems.push_back(ProblemOf(kind, ranks, size));
      calls.push_back(MakeCall(problems.back(), process.shape.Ids(), 100 + calls.size()));
    }
  }
  process.together = std::make_unique<std::barrier<>>(ranks);
  const std::string failed = OnThreads(ranks, [&](int local) {
    GpuRank rank(process.machine->api(), local, 4 * plan.sizes.back() + kMiB);
    process.together->arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();
    // In a slot that no call has.
    Must(job.domain().CommunicatorFor(local, process.shape.Ids(), 9, "set-up").status());
    const double setup = Microseconds(std::chrono::steady_clock::now() - begin);
    if (local == 0) figures.setup = std::max(figures.setup, setup);
    for (size_t i = 0; i < calls.size(); ++i) {
      const Problem& problem = problems[i];
      const auto execution = rank.Place(problem);
      if (execution.slices != 0) rank.FillSlices(execution, problem, local, 0);
      Must(calls[i]->Prepare(local, execution.buffers));
      const size_t bytes = std::max(problem.input_bytes(), problem.output_bytes());
      const double time = TimeOfReplay(process, rank, plan.CallsIn(bytes), plan.replays, [&] {
        return calls[i]->Launch(local, rank.stream(), execution.buffers);
      });
      double theirs = 0;
      if (nccl && Nccl::Does(problem.kind)) {
        const cuda::ScopedContext current(rank.api(), rank.context());
        const CallSpec spec = problem.Spec(process.shape.Ids(), 0);
        const auto launch = [&] {
          return nccl->Launch(spec, local, execution.buffers, rank.stream());
        };
        // The first call connects the GPUs, which a capture does not allow.
        Must(launch());
        Must(JF_CUDA_CALL(rank.api(), cuStreamSynchronize, rank.stream()));
        theirs = TimeOfReplay(process, rank, plan.CallsIn(bytes), plan.replays, launch);
      }
      if (local == 0) {
        // The residuals are as large.
        const uint64_t arrays = problem.kind == OpKind::kAllReduceRmsNorm ? 2 : 1;
        const auto communicator = job.domain().CommunicatorFor(0, process.shape.Ids(), 0, "timing");
        Must(communicator.status());
        figures.rows.push_back(
            {std::string(OpKindName(problem.kind)), KernelOf(problem, (*communicator)->view()),
             ranks, gpus == Machine::Gpus::kOneEach ? ranks : 1, bytes,
             arrays * (problem.input_bytes() + problem.output_bytes()), time, theirs});
      }
      rank.Free(execution);
    }
    process.together->arrive_and_wait();
    return std::string();
  });
}

int Main(int argc, char** argv) {
  Plan plan;
  Figures figures;
  std::string json, nccl = "libnccl.so.2";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--fake") {
      figures.fake = true;
    } else if (argument == "--json" && i + 1 < argc) {
      json = argv[++i];
    } else if (argument == "--nccl" && i + 1 < argc) {
      nccl = argv[++i];
    } else {
      std::cerr << "usage: " << argv[0] << " [--json FILE] [--nccl LIBRARY] [--fake]" << std::endl;
      return 2;
    }
  }
  int gpus = 1;
  if (figures.fake) {
    plan = {{8, 4096, 128 << 10}, 1, 10, kMiB};
    gpus = 2;
  } else {
    if (KernelImages().empty()) {
      std::cout << "SKIPPED: " << KernelImageReason() << std::endl;
      return kSkipped;
    }
    // As in gpu_main.cc: streams must not wait for each other in the driver.
    ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    const auto api = cuda::LoadApi();
    if (!api.ok()) {
      std::cout << "SKIPPED: " << api.status().ToString() << std::endl;
      return kSkipped;
    }
    Must(JF_CUDA_CALL(**api, cuDeviceGetCount, &gpus));
    Machine::UseHardware();
  }
  MeasureMachine(plan, figures);
  for (const int ranks : {2, 4, 8}) {
    MeasureCalls(plan, ranks, Machine::Gpus::kOneForAll, nccl, figures);
    if (gpus >= ranks) MeasureCalls(plan, ranks, Machine::Gpus::kOneEach, nccl, figures);
  }
  Print(figures);
  if (!json.empty()) {
    std::ofstream file(json);
    file << ToJson(figures);
    file.flush();
    if (!file) {
      std::cout << "FAILED: cannot write " << json << std::endl;
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace jaxfabric::testing

int main(int argc, char** argv) { return jaxfabric::testing::Main(argc, argv); }
