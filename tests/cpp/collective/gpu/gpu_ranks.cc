#include "collective/gpu/gpu_ranks.h"

#include <numeric>

namespace jaxfabric::testing {
namespace {

std::string Text(const cuda::Api& api, cuda::CUresult result, const char* what) {
  return testing::Text(cuda::ToStatus(api, result, what));
}

}  // namespace

Machine::Machine(Shape shape, int process, Gpus gpus) : shape_(shape), process_(process) {
  cuda::FakeConfig config;
  config.gpus.resize(static_cast<size_t>(shape.ranks_each));
  if (gpus == Gpus::kOneEach) {
    std::iota(config.gpus.begin(), config.gpus.end(), process * shape.ranks_each);
  } else {
    std::fill(config.gpus.begin(), config.gpus.end(), 0);
  }
  config.seed += static_cast<uint64_t>(process);
  driver_ = std::make_unique<cuda::FakeDriver>(std::move(config));
  for (auto list :
       {device::AllGatherKernels(), device::AllReduceKernels(), device::AllToAllKernels(),
        device::BarrierKernels(), device::BroadcastKernels(), device::PermuteKernels(),
        device::RaggedAllToAllKernels(), device::ReduceScatterKernels()}) {
    for (const auto& kernel : list) {
      driver_->AddKernel(kernel.name, kernel.body, kernel.argument_bytes);
    }
  }
}

Options Machine::AddTo(Options options) const {
  for (int local = 0; local < shape_.ranks_each; ++local) {
    options.gpus.push_back({shape_.LocalIds(process_)[static_cast<size_t>(local)], local});
  }
  options.gpu.api = &driver_->api();
  options.gpu.images = {"image"};
  // Threads are fibres here: fewer bytes and blocks keep a test short.
  options.gpu.pool_bytes = 4 << 20;
  options.gpu.arena_bytes = 512 << 10;
  options.gpu.block_threads = 32;
  return options;
}

GpuRank::GpuRank(const cuda::Api& api, int ordinal) : api_(api), ordinal_(ordinal) {
  auto context = cuda::PrimaryContext::Retain(api, ordinal);
  JF_CHECK(context.ok());
  context_ = *std::move(context);
  const cuda::ScopedContext current(api, context_.context());
  auto stream = cuda::Stream::Create(api);
  JF_CHECK(stream.ok());
  stream_ = *std::move(stream);
}

GpuRank::~GpuRank() = default;

GpuRank::Execution GpuRank::Make(const Problem& problem, int position, int data) {
  Execution execution;
  const cuda::ScopedContext current(api_, context());
  JF_CHECK(api_.cuMemAlloc(&execution.input, problem.input_bytes() + 16) == cuda::CUDA_SUCCESS);
  JF_CHECK(api_.cuMemAlloc(&execution.output, problem.output_bytes() + 16) == cuda::CUDA_SUCCESS);
  Buffers& buffers = execution.buffers;
  buffers.input = reinterpret_cast<const std::byte*>(execution.input);
  buffers.output = reinterpret_cast<std::byte*>(execution.output);
  buffers.input_bytes = problem.input_bytes();
  buffers.output_bytes = problem.output_bytes();
  buffers.dtype = problem.dtype;
  Fill(execution, problem, position, data);
  return execution;
}

void GpuRank::Fill(const Execution& execution, const Problem& problem, int position, int data) {
  const cuda::ScopedContext current(api_, context());
  const Bytes input = problem.Input(position, data);
  JF_CHECK(api_.cuMemcpyHtoD(execution.input, input.data(), input.size()) == cuda::CUDA_SUCCESS);
  const Bytes garbage(problem.output_bytes(), std::byte{0xa5});
  JF_CHECK(api_.cuMemcpyHtoD(execution.output, garbage.data(), garbage.size()) ==
           cuda::CUDA_SUCCESS);
}

std::string GpuRank::Check(const Execution& execution, const Problem& problem, int position,
                           int data) {
  const cuda::ScopedContext current(api_, context());
  Bytes output(problem.output_bytes());
  const std::string copied =
      Text(api_, api_.cuMemcpyDtoH(output.data(), execution.output, output.size()), "copy");
  if (!copied.empty()) return copied;
  if (output == problem.Output(position, data)) return "";
  return StrCat("wrong result: ", problem.Describe(), ", rank ", position, ", data ", data);
}

void GpuRank::Free(const Execution& execution) {
  const cuda::ScopedContext current(api_, context());
  (void)api_.cuMemFree(execution.input);
  (void)api_.cuMemFree(execution.output);
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

std::vector<Problem> GpuProblems(int ranks) {
  std::vector<Problem> problems;
  for (const size_t count : {size_t{5}, size_t{30000}}) {
    for (const Problem& problem : EveryKind(ranks, count)) {
      if (problem.kind != OpKind::kRaggedAllToAll) problems.push_back(problem);
    }
  }
  return problems;
}

}  // namespace jaxfabric::testing
