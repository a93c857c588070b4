#include "collective/gpu/windows.h"

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "collective/call_site.h"
#include "collective/fabric.h"
#include "collective/gpu/call.h"

namespace jaxfabric {
namespace {

// Of memory that NCCL makes windows of.
constexpr uintptr_t kPageBytes = 4096;
constexpr int kTablesAtOnce = 16;
constexpr unsigned kWriteThreads = 32;

// Peers may write the output while others still read the input: see windows.cuh.
bool AreApart(OpKind kind, const Buffers& buffers) {
  if (kind == OpKind::kAllReduce && buffers.input == buffers.output) return true;
  return buffers.input >= buffers.output + buffers.output_bytes ||
         buffers.output >= buffers.input + buffers.input_bytes;
}

}  // namespace

Result<const nccl::Api*> GpuDomain::nccl() const {
  if (options_.nccl != nullptr) return options_.nccl;
  return nccl::LoadedApi();
}

Result<device::WindowTable*> GpuDomain::TakeWindowTable(int local) {
  std::lock_guard lock(mutex_);
  Local& owner = gpus_[static_cast<size_t>(local)];
  if (owner.spare_tables.empty()) {
    JF_ASSIGN_OR_RETURN(const size_t offset,
                        owner.gpu->Allocate(kTablesAtOnce * sizeof(device::WindowTable)));
    auto* const tables = reinterpret_cast<device::WindowTable*>(owner.gpu->pool().data() + offset);
    for (int i = 0; i < kTablesAtOnce; ++i) owner.spare_tables.push_back(tables + i);
  }
  device::WindowTable* const table = owner.spare_tables.back();
  owner.spare_tables.pop_back();
  return table;
}

void GpuDomain::GiveWindowTable(int local, device::WindowTable* table) {
  if (table == nullptr) return;
  std::lock_guard lock(mutex_);
  gpus_[static_cast<size_t>(local)].spare_tables.push_back(table);
}

GpuCall::Windowed::~Windowed() {
  if (const std::shared_ptr<Fabric> owner = fabric.lock()) {
    owner->gpus()->GiveWindowTable(local, table);
  }
}

Status GpuCall::BindWindows(Binding& binding, const Group& group) const {
  auto windows = std::make_unique<Windowed>(binding.fabric, binding.local);
  JF_ASSIGN_OR_RETURN(windows->write,
                      binding.domain->Function(binding.local, "jaxfabric_write_window_table"));
  JF_ASSIGN_OR_RETURN(windows->table, binding.domain->TakeWindowTable(binding.local));
  // XLA is asked for a communicator of the positions in ascending order, which has its ranks in
  // that order, by whatever rule.
  const auto begin = spec_.positions.begin() + static_cast<std::ptrdiff_t>(group.first);
  const auto end = begin + static_cast<std::ptrdiff_t>(group.ranks.size());
  for (auto position = begin; position != end; ++position) {
    windows->peers.push_back(static_cast<int>(
        std::count_if(begin, end, [&](int64_t other) { return other < *position; })));
  }
  binding.windows = std::move(windows);
  return OkStatus();
}

Status GpuCall::Attach(int ordinal, cuda::CUstream stream, const Buffers& buffers,
                       const GpuWindows& windows) {
  std::shared_ptr<Fabric> fabric;
  JF_ASSIGN_OR_RETURN(Binding* const binding, BindingFor(ordinal, buffers, fabric));
  if (!binding->windows) return OkStatus();
  GpuDomain& domain = *binding->domain;
  Windowed& state = *binding->windows;
  auto found = FindWindows(*binding, buffers, windows);
  domain.CountWindows(found.ok());
  const GpuDomain::Launching launching(domain);
  Status written = domain.failed() ? domain.failure() : OkStatus();
  std::lock_guard lock(state.mutex);
  if (!found.ok() && !std::exchange(state.told, true)) {
    Log(LogLevel::kWarning,
        StrCat(spec_.label, " at ", SiteRegistry::Get().Source(spec_.site),
               ": its arrays are copied, as they are in no windows: ", found.status().message()));
  }
  if (written.ok()) {
    written = WriteTable(*binding, stream, found.ok() ? *found : device::WindowTable{});
  }
  // The other ranks' kernels wait for this one's.
  return domain.FailUnlessOk(std::move(written));
}

Status GpuCall::WriteTable(Binding& binding, cuda::CUstream stream,
                           const device::WindowTable& table) const {
  Windowed& state = *binding.windows;
  if (state.stream == stream && std::memcmp(&table, &state.written, sizeof table) == 0) {
    return OkStatus();
  }
  const cuda::Api& api = binding.domain->api();
  const cuda::ScopedContext current(api, binding.domain->gpu(binding.local).context());
  JF_RETURN_IF_ERROR(current.status());
  // A launch on another stream has the table before it, and this has the launches so far.
  JF_RETURN_IF_ERROR(binding.communicator->Follow(api, stream));
  device::WriteTableArguments arguments{table, state.table};
  void* parameters[] = {&arguments};
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuLaunchKernel, state.write, 1, 1, 1, kWriteThreads, 1, 1, 0,
                                  stream, parameters, nullptr));
  state.written = table;
  state.stream = stream;
  return OkStatus();
}

Result<device::WindowTable> GpuCall::FindWindows(const Binding& binding, const Buffers& buffers,
                                                 const GpuWindows& windows) const {
  const auto none = [](const auto&... why) {
    return Status(Code::kFailedPrecondition, StrCat(why...));
  };
  const std::vector<int>& peers = binding.windows->peers;
  if (windows.communicator == nullptr) return none("XLA has no communicator for it");
  if (!AreApart(spec_.kind, buffers)) return none("its result overlaps its operand");
  JF_ASSIGN_OR_RETURN(const nccl::Api* const api, binding.domain->nccl());
  int count = 0, rank = 0;
  JF_RETURN_IF_ERROR(JF_NCCL_CALL(*api, ncclCommCount, windows.communicator, &count));
  JF_RETURN_IF_ERROR(JF_NCCL_CALL(*api, ncclCommUserRank, windows.communicator, &rank));
  const int own = peers[binding.communicator->view().rank];
  if (count != static_cast<int>(peers.size()) || rank != own) {
    return none("this is rank ", rank, " of ", count, " in XLA's communicator, and rank ", own,
                " of ", peers.size(), " in the call");
  }
  device::WindowTable table{};
  const auto fill = [&](const char* what, const std::byte* array, const GpuWindows::Place& place,
                        uint64_t& offset, std::byte* device::WindowTable::Base::* base) -> Status {
    if (place.window == nullptr) return none("XLA has no window around its ", what);
    if (api->ncclWinGetUserPtr != nullptr) {
      void* begin = nullptr;
      JF_RETURN_IF_ERROR(
          JF_NCCL_CALL(*api, ncclWinGetUserPtr, windows.communicator, place.window, &begin));
      if (reinterpret_cast<uintptr_t>(begin) % kPageBytes != 0 ||
          static_cast<std::byte*>(begin) + place.offset != array) {
        return none("the window around its ", what, " does not begin at a page, or elsewhere");
      }
    }
    // Reductions, which are what reads, take whole vectors.
    if (PeersReadInput(spec_.kind) &&
        reinterpret_cast<uintptr_t>(array) % sizeof(device::Packet) != 0) {
      return none("its ", what, " is not aligned to ", sizeof(device::Packet), " bytes");
    }
    offset = place.offset;
    for (size_t i = 0; i < peers.size(); ++i) {
      void* address = nullptr;
      JF_RETURN_IF_ERROR(
          JF_NCCL_CALL(*api, ncclGetPeerDevicePointer, place.window, 0, peers[i], &address));
      if (address == nullptr) return none("this GPU does not address the ", what, " of rank ", i);
      table.base[i].*base = static_cast<std::byte*>(address);
    }
    return OkStatus();
  };
  if (PeersReadInput(spec_.kind)) {
    JF_RETURN_IF_ERROR(fill("operand", buffers.input, windows.input, table.input_offset,
                            &device::WindowTable::Base::input));
  }
  if (PeersWriteOutput(spec_.kind)) {
    JF_RETURN_IF_ERROR(fill("result", buffers.output, windows.output, table.output_offset,
                            &device::WindowTable::Base::output));
  }
  table.input = buffers.input;
  table.output = buffers.output;
  return table;
}

}  // namespace jaxfabric
