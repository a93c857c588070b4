#include "collective/gpu/gpu_ranks.h"

#include <numeric>
#include <thread>
#include <utility>

#include "collective/call_site.h"
#include "device/image.h"

namespace jaxfabric::testing {
namespace {

std::string Text(const cuda::Api& api, cuda::CUresult result, const char* what) {
  return testing::Text(cuda::ToStatus(api, result, what));
}

// Hardware: the driver's table, except that ordinals are the ranks of this process.
struct Hardware {
  bool used = false;
  const cuda::Api* driver = nullptr;
  cuda::Api api;
  std::vector<int> gpus;  // by such an ordinal
};
Hardware& TheHardware() {
  static auto* hardware = new Hardware;
  return *hardware;
}

cuda::CUresult GetDevice(cuda::CUdevice* device, int ordinal) {
  const Hardware& hardware = TheHardware();
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= hardware.gpus.size()) {
    return cuda::CUDA_ERROR_INVALID_DEVICE;
  }
  return hardware.driver->cuDeviceGet(device, hardware.gpus[static_cast<size_t>(ordinal)]);
}

}  // namespace

void Machine::UseHardware() { TheHardware().used = true; }
bool Machine::OnHardware() { return TheHardware().used; }

Machine::Machine(Shape shape, int process, Gpus gpus, const Peculiar& peculiar)
    : shape_(shape), process_(process) {
  if (OnHardware()) {
    const auto driver = cuda::LoadApi();
    JF_CHECK(driver.ok());
    Hardware& hardware = TheHardware();
    hardware.driver = *driver;
    hardware.api = **driver;
    hardware.api.cuDeviceGet = GetDevice;
    int count = 0;
    JF_CHECK(hardware.api.cuDeviceGetCount(&count) == cuda::CUDA_SUCCESS);
    hardware.gpus.clear();
    for (int local = 0; local < shape.ranks_each; ++local) {
      const int rank = process * shape.ranks_each + local;
      hardware.gpus.push_back(gpus == Gpus::kOneEach ? rank % count : 0);
    }
    api_ = &hardware.api;
    return;
  }
  cuda::FakeConfig config;
  config.gpus.resize(static_cast<size_t>(shape.ranks_each));
  if (gpus == Gpus::kOneEach) {
    std::iota(config.gpus.begin(), config.gpus.end(), process * shape.ranks_each);
  } else {
    std::fill(config.gpus.begin(), config.gpus.end(), 0);
  }
  config.seed += static_cast<uint64_t>(process);
  config.fabric_handles = shape.hosts > 1;
  if (peculiar.config) peculiar.config(process, config);
  driver_ = std::make_unique<cuda::FakeDriver>(std::move(config));
  api_ = &driver_->api();
  for (auto list :
       {device::AllGatherKernels(), device::AllReduceKernels(), device::AllReduceRmsNormKernels(),
        device::AllToAllKernels(), device::BarrierKernels(), device::BroadcastKernels(),
        device::PermuteKernels(), device::MulticastKernels(), device::RaggedAllToAllKernels(),
        device::ReduceScatterKernels(), device::WindowKernels()}) {
    for (const auto& kernel : list) {
      driver_->AddKernel(kernel.name, kernel.body, kernel.argument_bytes);
    }
  }
  if (peculiar.driver) peculiar.driver(process, *driver_);
}

Options Machine::AddTo(Options options) const {
  for (int local = 0; local < shape_.ranks_each; ++local) {
    options.gpus.push_back({shape_.LocalIds(process_)[static_cast<size_t>(local)], local});
  }
  options.gpu.api = api_;
  if (OnHardware()) {
    for (const KernelImage& image : KernelImages()) {
      options.gpu.images.push_back(image.bytes.data());
    }
    return options;
  }
  options.gpu.images = {"image"};
  // Threads are fibres here: fewer bytes and blocks keep a test short.
  options.gpu.pool_bytes = 4 << 20;
  options.gpu.arena_bytes = 512 << 10;
  options.gpu.block_threads = 32;
  return options;
}

GpuRank::GpuRank(const cuda::Api& api, int ordinal, size_t bytes)
    : api_(api), ordinal_(ordinal), bytes_(bytes) {
  auto primary = cuda::PrimaryContext::Retain(api, ordinal);
  JF_CHECK(primary.ok());
  context_ = *std::move(primary);
  const cuda::ScopedContext current(api, context());
  auto stream = cuda::Stream::Create(api);
  JF_CHECK(stream.ok());
  stream_ = *std::move(stream);
  JF_CHECK(api_.cuMemAlloc(&memory_, bytes_) == cuda::CUDA_SUCCESS);
}

GpuRank::~GpuRank() {
  const cuda::ScopedContext current(api_, context());
  // The real driver waits for kernels that use it; one that is held back uses it later.
  if (api_.cuStreamQuery(stream()) == cuda::CUDA_ERROR_NOT_READY) return;
  (void)api_.cuMemFree(memory_);
}

cuda::CUdeviceptr GpuRank::Take(size_t bytes) {
  JF_CHECK(bytes <= bytes_ - used_);
  return memory_ + std::exchange(used_, (used_ + bytes + 255) / 256 * 256);
}

GpuRank::Execution GpuRank::Make(const Problem& problem, int position, int data, size_t offset,
                                 bool in_place) {
  const Execution execution = Place(problem, offset, in_place);
  Fill(execution, problem, position, data);
  return execution;
}

GpuRank::Execution GpuRank::Place(const Problem& problem, size_t offset, bool in_place) {
  Execution execution;
  ++live_;
  execution.output = Take(problem.output_bytes() + offset) + offset;
  execution.input = in_place ? execution.output : Take(problem.input_bytes() + offset) + offset;
  Buffers& buffers = execution.buffers;
  buffers.input = reinterpret_cast<const std::byte*>(execution.input);
  buffers.output = reinterpret_cast<std::byte*>(execution.output);
  buffers.input_bytes = problem.input_bytes();
  buffers.output_bytes = problem.output_bytes();
  buffers.dtype = problem.dtype;
  if (problem.kind == OpKind::kRaggedAllToAll) {
    buffers.ragged_sizes = problem.Ragged();
    const size_t bytes = buffers.ragged_sizes.slices * sizeof(int64_t);
    execution.slices = Take(4 * bytes);
    const auto array = [&](size_t i) {
      return reinterpret_cast<const int64_t*>(execution.slices + i * bytes);
    };
    buffers.ragged = {buffers.output, array(0), array(1), array(2), array(3)};
  }
  if (problem.kind == OpKind::kAllReduceRmsNorm) {
    execution.new_residual = Take(problem.output_bytes() + offset) + offset;
    execution.residual =
        in_place ? execution.new_residual : Take(problem.output_bytes() + offset) + offset;
    execution.weight = Take(problem.Weight().size());
    buffers.norm = {problem.row_elements, reinterpret_cast<const std::byte*>(execution.residual),
                    reinterpret_cast<const std::byte*>(execution.weight),
                    reinterpret_cast<std::byte*>(execution.new_residual)};
  }
  return execution;
}

void GpuRank::Fill(const Execution& execution, const Problem& problem, int position, int data) {
  const cuda::ScopedContext current(api_, context());
  Bytes before(problem.output_bytes(), std::byte{0xa5});
  if (problem.kind == OpKind::kRaggedAllToAll) {
    before = problem.Initial(position, data);
    FillSlices(execution, problem, position, data);
  }
  const auto put = [&](cuda::CUdeviceptr to, const Bytes& bytes) {
    JF_CHECK(api_.cuMemcpyHtoD(to, bytes.data(), bytes.size()) == cuda::CUDA_SUCCESS);
  };
  if (problem.kind == OpKind::kAllReduceRmsNorm) {
    put(execution.new_residual, before);
    put(execution.residual, problem.Residual(position, data));
    put(execution.weight, problem.Weight());
  }
  // In place, the input is what counts.
  put(execution.output, before);
  put(execution.input, problem.Input(position, data));
}

void GpuRank::FillSlices(const Execution& execution, const Problem& problem, int position,
                         int data) {
  const cuda::ScopedContext current(api_, context());
  const Slices slices = problem.SlicesOf(position, data);
  cuda::CUdeviceptr at = execution.slices;
  for (const auto* values :
       {&slices.input_offsets, &slices.send_sizes, &slices.output_offsets, &slices.recv_sizes}) {
    const size_t bytes = values->size() * sizeof(int64_t);
    JF_CHECK(api_.cuMemcpyHtoD(at, values->data(), bytes) == cuda::CUDA_SUCCESS);
    at += bytes;
  }
}

std::string GpuRank::Check(const Execution& execution, const Problem& problem, int position,
                           int data) {
  const cuda::ScopedContext current(api_, context());
  std::string failed;
  const auto is = [&](cuda::CUdeviceptr at, const Bytes& wanted) {
    Bytes found(wanted.size());
    failed = Text(api_, api_.cuMemcpyDtoH(found.data(), at, found.size()), "copy");
    return found == wanted;
  };
  if (is(execution.output, problem.Output(position, data)) &&
      (execution.new_residual == 0 ||
       is(execution.new_residual, problem.NewResidual(position, data)))) {
    return "";
  }
  if (!failed.empty()) return failed;
  return StrCat("wrong result: ", problem.Describe(), ", rank ", position, ", data ", data);
}

void GpuRank::Free(const Execution&) {
  if (--live_ == 0) used_ = 0;
}

std::string GpuRank::Synchronize() {
  const cuda::ScopedContext current(api_, context());
  return Text(api_, api_.cuStreamSynchronize(stream()), "cuStreamSynchronize");
}

std::string RunOnGpu(GpuCall& call, GpuRank& rank, const Problem& problem, int position, int data) {
  const auto execution = rank.Make(problem, position, data);
  std::string failed = Text(call.Launch(rank.ordinal(), rank.stream(), execution.buffers));
  if (failed.empty()) failed = rank.Synchronize();
  if (failed.empty()) failed = rank.Check(execution, problem, position, data);
  rank.Free(execution);
  return failed;
}

std::vector<Problem> NormProblems(int ranks) {
  std::vector<Problem> problems;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
    for (const auto& [rows, hidden] :
         {std::pair(3, 16), std::pair(37, 1032), std::pair(2, 20008)}) {
      Problem problem{OpKind::kAllReduceRmsNorm,
                      dtype,
                      static_cast<size_t>(rows * hidden),
                      ranks,
                      ReduceOp::kSum,
                      {},
                      0};
      problem.row_elements = static_cast<size_t>(hidden);
      problems.push_back(problem);
    }
  }
  return problems;
}

std::vector<Problem> GpuProblems(int ranks) {
  std::vector<Problem> problems = EveryKind(ranks, 5);
  problems.push_back(NormProblems(ranks)[0]);
  for (const Problem& large : EveryKind(ranks, 30000)) problems.push_back(large);
  return problems;
}

std::vector<Problem> LargeGpuProblems(int ranks) {
  const size_t part = (size_t{2304} << 10) / 4 / static_cast<size_t>(ranks * ranks);
  const size_t whole = part * static_cast<size_t>(ranks);
  return {{OpKind::kAllReduce, DType::kFloat32, whole + 3, ranks, ReduceOp::kSum, {}, 0},
          {OpKind::kAllReduce, DType::kInt32, whole, ranks, ReduceOp::kMax, {}, 0},
          {OpKind::kReduceScatter, DType::kBfloat16, 2 * part + 5, ranks, ReduceOp::kSum, {}, 0},
          {OpKind::kReduceScatter, DType::kInt32, part, ranks, ReduceOp::kSum, {}, 0},
          {OpKind::kAllGather, DType::kFloat32, part + 1, ranks, ReduceOp::kSum, {}, 0}};
}

CallPointer MakeCall(const Problem& problem, const std::vector<int64_t>& ids, uint64_t site,
                     GpuCall::Slot slot) {
  return std::make_unique<GpuCall>(problem.Spec(ids, site), slot);
}

std::string GpuProcess::OnEveryGpu(const std::function<std::string(GpuRank&, int)>& body) {
  together = std::make_unique<std::barrier<>>(shape.ranks_each);
  return OnThreads(shape.ranks_each, [&](int local) {
    GpuRank rank(machine->api(), local);
    const std::string failed = body(rank, fabric->process() * shape.ranks_each + local);
    together->arrive_and_drop();
    return failed;
  });
}

std::string OnGpus(Shape shape, const std::function<std::string(GpuProcess&)>& body,
                   Machine::Gpus gpus, Options options, const Peculiar& peculiar) {
  auto process = std::make_shared<GpuProcess>();
  return InForkedProcesses(
      shape,
      [&](int number) {
        process->shape = shape;
        process->machine = std::make_unique<Machine>(shape, number, gpus, peculiar);
        return process->machine->AddTo(options);
      },
      [&](LocalRanks& ranks) {
        process->fabric = std::shared_ptr<Fabric>(&ranks.fabric(), [](Fabric*) {});
        SetCurrentFabric(process->fabric);
        if (process->fabric->gpus() == nullptr) return process->fabric->gpu_reason();
        const std::string failed = body(*process);
        SetCurrentFabric(nullptr);
        return failed;
      });
}

std::string RunAll(GpuProcess& process, const std::vector<Problem>& problems) {
  std::vector<CallPointer> calls;
  for (size_t i = 0; i < problems.size(); ++i) {
    calls.push_back(MakeCall(problems[i], process.shape.Ids(), 100 + i));
  }
  return process.OnEveryGpu([&](GpuRank& rank, int position) {
    std::string failed;
    for (size_t i = 0; i < calls.size(); ++i) {
      failed += RunOnGpu(*calls[i], rank, problems[i], position, 3);
    }
    return failed;
  });
}

std::string Expect(const std::string& text, const std::vector<std::string>& parts) {
  std::string missing;
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) missing += StrCat("no '", part, "' in: ", text, "\n");
  }
  return missing;
}

std::string FailureOf(Fabric& fabric) {
  const Deadline deadline = Deadline::AfterSeconds(20);
  while (fabric.failure().ok()) {
    if (deadline.expired()) return "no failure";
    std::this_thread::yield();
  }
  return fabric.failure().ToString();
}

}  // namespace jaxfabric::testing
