#include "collective/gpu/call.h"

#include <algorithm>

#include "collective/call_site.h"
#include "collective/fabric.h"
#include "collective/plan.h"
#include "device/launch.h"

namespace jaxfabric {
namespace {

// Never 0, which is no call.
uint32_t Fold(uint64_t hash) {
  const auto folded = static_cast<uint32_t>(hash ^ (hash >> 32));
  return folded == 0 ? 1 : folded;
}

Result<device::Move> MoveOf(OpKind kind) {
  switch (kind) {
    case OpKind::kAllGather:
      return device::Move::kAllGather;
    case OpKind::kAllToAll:
      return device::Move::kAllToAll;
    case OpKind::kPermute:
      return device::Move::kPermute;
    case OpKind::kBroadcast:
      return device::Move::kBroadcast;
    default:
      return Status(Code::kUnimplemented, StrCat(OpKindName(kind), " has no kernel for GPUs yet"));
  }
}

bool Reduces(OpKind kind) { return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter; }

}  // namespace

GpuCall::GpuCall(CallSpec spec, Slot slot)
    : spec_(std::move(spec)),
      slot_(slot),
      devices_(GpuCompilations::Get().Current()),
      header_(Fold(spec_.Hash())) {}

Status GpuCall::Prepare(int ordinal, const Buffers& buffers) {
  std::shared_ptr<Fabric> fabric;
  return BindingFor(ordinal, buffers, fabric).status();
}

Result<GpuCall::Binding*> GpuCall::BindingFor(int ordinal, const Buffers& buffers,
                                              std::shared_ptr<Fabric>& fabric) {
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= kMaxOrdinals) {
    return Status(Code::kInvalidArgument,
                  StrCat(spec_.label, ": GPU ", ordinal, " is not one of the ", kMaxOrdinals,
                         " that a process may have"));
  }
  // Acquire: pairs with the release below, so the binding is complete.
  Binding* binding = bindings_[ordinal].load(std::memory_order_acquire);
  if (binding != nullptr && IsCurrentFabric(binding->raw)) {
    fabric = binding->fabric.lock();
    // A new one may lie where another has been.
    if (fabric) return binding;
  }

  fabric = CurrentFabric();
  if (!fabric) {
    return Status(Code::kFailedPrecondition,
                  StrCat(spec_.label,
                         ": jaxfabric is not initialized in this process; call "
                         "jaxfabric.initialize() first"));
  }
  if (fabric->gpus() == nullptr) {
    return Status(Code::kFailedPrecondition,
                  StrCat(spec_.label, ": the fabric has no GPUs: ", fabric->gpu_reason()));
  }
  const int local = fabric->gpus()->LocalIndex(ordinal);
  if (local < 0) {
    return Status(Code::kInternal, StrCat(spec_.label, ": GPU ", ordinal,
                                          " was not there when the fabric was initialized"));
  }
  JF_RETURN_IF_ERROR(RefuseOldGraphs(*fabric, ordinal));
  auto bound = Bind(fabric, local, buffers);
  if (!bound.ok()) return bound.status();
  std::lock_guard lock(mutex_);
  owned_.push_back(*std::move(bound));
  // Release: who reads it finds it complete.
  bindings_[ordinal].store(owned_.back().get(), std::memory_order_release);
  return owned_.back().get();
}

Status GpuCall::RefuseOldGraphs(const Fabric& current, int ordinal) {
  std::lock_guard lock(mutex_);
  for (const auto& earlier : owned_) {
    // Relaxed: this thread, that of the device, has written it. Of others the domain may be gone.
    if (earlier->raw == &current || !earlier->captured.load(std::memory_order_relaxed) ||
        earlier->domain->gpu(earlier->local).ordinal() != ordinal) {
      continue;
    }
    return Status(Code::kFailedPrecondition,
                  StrCat(spec_.label, " at ", SiteRegistry::Get().Source(spec_.site),
                         ": XLA has it in a CUDA graph from before jaxfabric.shutdown(); compile "
                         "the program again, after jax.clear_caches() if jax.jit keeps it"));
  }
  return OkStatus();
}

Result<GpuCall::Group> GpuCall::GroupOf(int64_t rank) const {
  std::vector<int64_t> devices;
  if (spec_.by_position) {
    if (devices_) devices = devices_->Get();
    if (devices.empty()) {
      return Status(Code::kFailedPrecondition,
                    StrCat(spec_.label,
                           ": it names positions in a mesh, and it is not known which devices the "
                           "program runs on: compile it with jax.jit in this process"));
    }
  }
  size_t first = 0;
  for (const auto& group : spec_.groups) {
    std::vector<int64_t> ranks;
    for (int64_t member : group) {
      if (!spec_.by_position) {
        ranks.push_back(member);
      } else if (member >= 0 && static_cast<size_t>(member) < devices.size()) {
        ranks.push_back(devices[static_cast<size_t>(member)]);
      }
    }
    if (ranks.size() == group.size() &&
        std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
      return Group{std::move(ranks), first};
    }
    first += group.size();
  }
  return Status(Code::kInvalidArgument,
                StrCat(spec_.label, ": device ", rank, " is in none of the call's groups"));
}

Result<std::unique_ptr<GpuCall::Binding>> GpuCall::Bind(const std::shared_ptr<Fabric>& fabric,
                                                        int local, const Buffers& buffers) {
  GpuDomain& domain = *fabric->gpus();
  JF_ASSIGN_OR_RETURN(const Group group, GroupOf(domain.rank(local)));
  const std::vector<int64_t>& ranks = group.ranks;
  JF_RETURN_IF_ERROR(CheckSizes(spec_, static_cast<int>(ranks.size()), buffers));
  const std::string call = StrCat(spec_.label, " at ", SiteRegistry::Get().Source(spec_.site));
  domain.Describe(header_, call);
  auto binding = std::make_unique<Binding>();
  binding->local = local;
  binding->domain = &domain;
  JF_ASSIGN_OR_RETURN(const std::shared_ptr<GpuCommunicator> communicator,
                      domain.CommunicatorFor(local, ranks, static_cast<uint32_t>(slot_), call));
  binding->communicator = communicator.get();
  binding->fabric = fabric;
  binding->raw = fabric.get();
  JF_RETURN_IF_ERROR(PlanLaunch(*binding, group, buffers));
  return binding;
}

Status GpuCall::PlanLaunch(Binding& binding, const Group& group, const Buffers& buffers) {
  const device::ArenaShape& shape = binding.communicator->view().shape;
  const std::vector<int64_t>& ranks = group.ranks;
  const device::Ways ways{.multicast = binding.communicator->view().multicast != nullptr,
                          .windows = !spec_.positions.empty()};
  device::Launch launch;
  if (spec_.kind == OpKind::kRaggedAllToAll) {
    const RaggedSizes& sizes = buffers.ragged_sizes;
    const DType metadata = sizes.index_bytes == 4 ? DType::kInt32 : DType::kInt64;
    const auto slices = static_cast<uint32_t>(sizes.slices / ranks.size());
    auto planned = device::PlanRaggedAllToAll(shape, metadata, slices, buffers.input_bytes);
    if (!planned.ok()) return planned.status().WithContext(spec_.label);
    launch = *std::move(planned);
  } else if (spec_.kind == OpKind::kAllReduceRmsNorm) {
    const uint64_t hidden = buffers.norm.hidden;
    binding.amount = buffers.input_bytes / (hidden * DTypeSize(buffers.dtype));
    auto planned = device::PlanAllReduceRmsNorm(shape, buffers.dtype, binding.amount, hidden);
    if (!planned.ok()) return planned.status().WithContext(spec_.label);
    launch = *std::move(planned);
  } else if (Reduces(spec_.kind)) {
    const uint64_t bytes = buffers.output_bytes;
    launch = spec_.kind == OpKind::kAllReduce
                 ? device::PlanAllReduce(shape, buffers.dtype, spec_.reduction, bytes, ways)
                 : device::PlanReduceScatter(shape, buffers.dtype, spec_.reduction, bytes, ways);
    binding.amount = bytes / DTypeSize(buffers.dtype) *
                     device::KernelElement(buffers.dtype, spec_.reduction).factor;
  } else {
    binding.amount = buffers.input_bytes;
    if (spec_.kind == OpKind::kAllToAll) binding.amount /= ranks.size();
    if (spec_.kind == OpKind::kBarrier) {
      launch = device::PlanBarrier();
    } else {
      JF_ASSIGN_OR_RETURN(const device::Move move, MoveOf(spec_.kind));
      launch = device::PlanMove(shape, move, binding.amount, ways);
    }
  }
  binding.root = static_cast<uint32_t>(spec_.root);
  const auto position = static_cast<int64_t>(binding.communicator->view().rank);
  for (size_t i = 0; i + 1 < spec_.pairs.size(); i += 2) {
    if (spec_.pairs[i] == position) binding.target = static_cast<int32_t>(spec_.pairs[i + 1]);
    if (spec_.pairs[i + 1] == position) binding.source = static_cast<int32_t>(spec_.pairs[i]);
  }
  binding.blocks = launch.blocks;
  const auto take = [&]() -> Status {
    JF_ASSIGN_OR_RETURN(binding.function, binding.domain->Function(binding.local, launch.kernel));
    return launch.windows ? BindWindows(binding, group) : OkStatus();
  };
  // What the driver refuses here it may not refuse on the other ranks.
  return binding.domain->FailUnlessOk(take());
}

Status GpuCall::KeepIfCaptured(Binding& binding, cuda::CUstream stream,
                               const std::shared_ptr<Fabric>& fabric) {
  // Relaxed: only this thread, that of the device, writes it, and nobody reads what it stands for.
  if (binding.captured.load(std::memory_order_relaxed)) return OkStatus();
  cuda::CUstreamCaptureStatus capturing{};
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(binding.domain->api(), cuStreamIsCapturing, stream, &capturing));
  if (capturing == cuda::CU_STREAM_CAPTURE_STATUS_NONE) return OkStatus();
  if (!binding.captured.exchange(true, std::memory_order_relaxed)) binding.kept = fabric;
  return OkStatus();
}

Status GpuCall::Launch(int ordinal, cuda::CUstream stream, const Buffers& buffers) {
  std::shared_ptr<Fabric> fabric;
  JF_ASSIGN_OR_RETURN(Binding* const binding, BindingFor(ordinal, buffers, fabric));
  GpuDomain& domain = *binding->domain;
  const auto launch = [&]() -> Status {
    const cuda::ScopedContext current(domain.api(), domain.gpu(binding->local).context());
    JF_RETURN_IF_ERROR(current.status());
    JF_RETURN_IF_ERROR(KeepIfCaptured(*binding, stream, fabric));
    return LaunchBound(*binding, stream, buffers);
  };
  // The other ranks' kernels wait for this one.
  return domain.FailUnlessOk(launch());
}

Status GpuCall::Start(int ordinal, cuda::CUstream stream, const Buffers& buffers) {
  std::shared_ptr<Fabric> fabric;
  JF_ASSIGN_OR_RETURN(Binding* const binding, BindingFor(ordinal, buffers, fabric));
  const auto launch = [&](cuda::CUstream side) { return LaunchBound(*binding, side, buffers); };
  return binding->domain->FailUnlessOk(
      binding->domain->StartBeside(binding->local, stream, spec_.site, launch));
}

Status GpuCall::LaunchBound(const Binding& binding, cuda::CUstream stream, const Buffers& buffers) {
  GpuDomain& domain = *binding.domain;
  const GpuDomain::Launching launching(domain);
  if (domain.failed()) return domain.failure();
  const cuda::Api& api = domain.api();
  JF_RETURN_IF_ERROR(binding.communicator->Follow(api, stream));
  domain.NoteLaunch(binding.local, header_);
  const auto launch = [&](auto& arguments) {
    void* parameters[] = {&arguments};
    return JF_CUDA_CALL(api, cuLaunchKernel, binding.function, binding.blocks, 1, 1,
                        domain.block_threads(), 1, 1, 0, stream, parameters, nullptr);
  };
  if (Reduces(spec_.kind)) {
    device::ReduceArguments arguments{binding.communicator->view(), header_, buffers.input,
                                      buffers.output, binding.amount};
    if (!binding.windows) return launch(arguments);
    device::WindowReduceArguments windowed{arguments, binding.windows->table};
    return launch(windowed);
  }
  if (spec_.kind == OpKind::kRaggedAllToAll) {
    const RaggedSizes& sizes = buffers.ragged_sizes;
    const RaggedBuffers& ragged = buffers.ragged;
    const auto slices = sizes.slices / binding.communicator->view().shape.ranks;
    device::RaggedArguments arguments{binding.communicator->view(),
                                      header_,
                                      static_cast<uint32_t>(slices),
                                      buffers.input,
                                      ragged.initial,
                                      buffers.output,
                                      ragged.input_offsets,
                                      ragged.send_sizes,
                                      ragged.output_offsets,
                                      ragged.recv_sizes,
                                      sizes.row_bytes,
                                      sizes.input_rows,
                                      sizes.output_rows};
    return launch(arguments);
  }
  if (spec_.kind == OpKind::kAllReduceRmsNorm) {
    const NormBuffers& norm = buffers.norm;
    device::RmsNormArguments arguments{binding.communicator->view(),
                                       header_,
                                       static_cast<uint32_t>(norm.hidden),
                                       buffers.input,
                                       norm.residual,
                                       norm.weight,
                                       buffers.output,
                                       norm.new_residual,
                                       binding.amount,
                                       spec_.epsilon};
    return launch(arguments);
  }
  device::MoveArguments arguments{binding.communicator->view(),
                                  header_,
                                  binding.root,
                                  binding.target,
                                  binding.source,
                                  buffers.input,
                                  buffers.output,
                                  binding.amount};
  if (!binding.windows) return launch(arguments);
  device::WindowMoveArguments windowed{arguments, binding.windows->table};
  return launch(windowed);
}

}  // namespace jaxfabric
