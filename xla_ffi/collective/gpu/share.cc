// How the processes of a domain come by memory that all GPUs address: the same kind on all.
//
// Every step is an exchange in which each process says how the one before went. All of them see the
// same answers, and so come to the same end without another word.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "collective/gpu/domain.h"
#include "device/launch.h"

namespace jaxfabric {
namespace {

std::string_view Text(const Gpu::Uuid& uuid) { return {uuid.data(), uuid.size()}; }

// What is attached to a message, in the order in which its fields say that there is one.
std::vector<int> Descriptors(std::span<const MemoryHandle> handles) {
  std::vector<int> fds;
  for (const MemoryHandle& handle : handles) {
    if (handle.fd.valid()) fds.push_back(handle.fd.get());
  }
  return fds;
}

// A handle from its field and, if that is empty, the next descriptor.
Result<MemoryHandle> ReadHandle(WireReader& reader, std::vector<UniqueFd>& fds) {
  JF_ASSIGN_OR_RETURN(MemoryHandle handle, MemoryHandle::FromBytes(reader.GetString()));
  if (handle.fabric || !reader.ok()) return handle;
  if (fds.empty()) return Status(Code::kInvalidArgument, "a descriptor is missing");
  handle.fd = std::move(fds.front());
  fds.erase(fds.begin());
  return handle;
}

}  // namespace

WireWriter GpuDomain::Say(Step step, const Trouble& trouble) {
  WireWriter message(MessageType::kGpuSetup);
  message.Add(static_cast<uint32_t>(step)).Add(uint32_t{trouble.unreachable});
  message.Add(std::string_view(trouble.text));
  return message;
}

WireReader GpuDomain::Hear(const SocketMessage& message, Step step, Trouble* trouble) {
  WireReader reader(message.bytes);
  const auto said = reader.Get<uint32_t>();
  trouble->unreachable = reader.Get<uint32_t>() != 0;
  trouble->text = reader.GetString();
  if (!reader.ok() || reader.type() != MessageType::kGpuSetup ||
      said != static_cast<uint32_t>(step)) {
    *trouble = {"it described its GPUs wrongly"};
  }
  return reader;
}

Result<GpuDomain::Answers> GpuDomain::Ask(const Exchange& exchange, Step step, const Trouble& own,
                                          const WireWriter& message, std::span<const int> fds) {
  Answers answers;
  JF_ASSIGN_OR_RETURN(answers.messages, exchange(message, fds));
  for (size_t process = 0; process < answers.messages.size(); ++process) {
    Trouble trouble = own;
    if (static_cast<int>(process) != process_) Hear(answers.messages[process], step, &trouble);
    if (!trouble.text.empty()) {
      trouble.text =
          StrCat(uplink_.describe_process(static_cast<int>(process)), ": ", trouble.text);
    }
    // The first, but what host memory cannot help comes before.
    const bool worse =
        answers.worst.text.empty() || (answers.worst.unreachable && !trouble.unreachable);
    if (!trouble.text.empty() && worse) answers.worst = std::move(trouble);
  }
  return answers;
}

Result<std::string> GpuDomain::Share(bool one_host, const Exchange& exchange) {
  one_host_ = one_host;
  for (const PoolPlace place : {PoolPlace::kDevice, PoolPlace::kHost, PoolPlace::kRegistered}) {
    JF_ASSIGN_OR_RETURN(const Trouble trouble, SharePools(exchange, place));
    if (trouble.text.empty()) break;
    if (place == PoolPlace::kDevice) {
      if (!one_host_) {
        // Descriptors, and so memory of a host, end with the host.
        return StrCat(
            "the job is on several hosts, and their GPUs do not share memory: ", trouble.text,
            "; fabric handles take GPUs of one NVLink domain, and ", "nvidia-imex on every host");
      }
      if (!trouble.unreachable) return trouble.text;
      unreachable_ = trouble.text;
      Log(LogLevel::kWarning, StrCat("GPUs cannot reach each other (", unreachable_,
                                     "): collectives go through pinned memory of the host"));
    } else if (place == PoolPlace::kRegistered) {
      return StrCat(unreachable_, ", nor the same memory of the host: ", trouble.text);
    }
  }
  JF_RETURN_IF_ERROR(ShareMulticast(exchange));
  return std::string();
}

std::string GpuDomain::Memory() const {
  if (!unreachable_.empty()) {
    return StrCat("GPUs cannot reach each other: staged in pinned host memory (", unreachable_,
                  ")");
  }
  return StrCat("memory of the GPUs, ", one_host_ ? "" : "between hosts by fabric handles, ",
                multicast_ ? "with multicast" : StrCat("without multicast: ", no_multicast_));
}

Result<GpuDomain::Trouble> GpuDomain::SharePools(const Exchange& exchange, PoolPlace place) {
  std::vector<MemoryHandle> handles;
  Trouble own = MakePools(place, &handles);
  WireWriter message = Say(Step::kPools, own);
  message.Add(static_cast<uint32_t>(handles.size()));
  for (size_t i = 0; i < handles.size(); ++i) {
    const Gpu& gpu = *gpus_[i].gpu;
    message.Add(gpus_[i].rank).Add(Text(gpu.uuid())).Add(gpu.multiprocessors());
    message.Add(uint32_t{known_.at(gpus_[i].rank).multicast}).Add(uint64_t{gpu.pool().bytes()});
    message.Add(std::string_view(handles[i].Bytes()));
  }
  JF_ASSIGN_OR_RETURN(Answers answers,
                      Ask(exchange, Step::kPools, own, message, Descriptors(handles)));
  if (!answers.worst.text.empty()) return answers.worst;
  own = MapPools(place, answers);
  JF_ASSIGN_OR_RETURN(Answers mapped, Ask(exchange, Step::kMapped, own, Say(Step::kMapped, own)));
  return mapped.worst;
}

GpuDomain::Trouble GpuDomain::MakePools(PoolPlace place, std::vector<MemoryHandle>* handles) {
  // What an earlier try has left.
  imported_.clear();
  known_.clear();
  if (place == PoolPlace::kDevice) {
    const auto pair = UnreachablePair(*api_, devices_);
    if (!pair.ok()) return {pair.status().ToString()};
    if (!pair->empty()) return {*pair, true};
  }
  for (Local& local : gpus_) {
    Gpu& gpu = *local.gpu;
    const Status made = gpu.MakePool(place, options_.pool_bytes, one_host_);
    if (!made.ok()) return {made.WithContext(gpu.name()).ToString()};
    const Status allowed = gpu.pool().Allow(devices_);
    if (!allowed.ok()) {
      return {allowed.WithContext(StrCat("the pool of ", gpu.name())).ToString(),
              place == PoolPlace::kDevice && SaysUnreachable(allowed)};
    }
    auto handle = gpu.pool().Export(gpu.handle_types());
    if (!handle.ok()) return {handle.status().WithContext(gpu.name()).ToString()};
    handles->push_back(*std::move(handle));
    if (Descriptors(*handles).size() > kMaxSocketMessageFds) {
      return {StrCat("a process can share ", kMaxSocketMessageFds, " GPUs, not ", gpus_.size())};
    }
    Remote& remote = known_[local.rank];
    remote.process = process_;
    remote.pool = gpu.pool().data();
    remote.pool_bytes = gpu.pool().bytes();
    remote.uuid = gpu.uuid();
    remote.multiprocessors = gpu.multiprocessors();
    remote.multicast = gpu.multicast() && options_.multicast;
  }
  return {};
}

GpuDomain::Trouble GpuDomain::MapPools(PoolPlace place, Answers& answers) {
  Trouble trouble;
  for (size_t process = 0; process < answers.messages.size(); ++process) {
    if (static_cast<int>(process) == process_) continue;
    SocketMessage& message = answers.messages[process];
    WireReader reader = Hear(message, Step::kPools, &trouble);
    const auto count = reader.Get<uint32_t>();
    if (!reader.ok() || count == 0) {
      return {StrCat("process ", process, " described its GPUs wrongly")};
    }
    for (uint32_t i = 0; i < count; ++i) {
      const Status mapped = MapPool(static_cast<int>(process), place, reader, message.fds);
      if (!mapped.ok()) return {mapped.ToString()};
      const Status allowed = imported_.back().Allow(devices_);
      if (!allowed.ok()) {
        return {allowed
                    .WithContext(StrCat("a GPU of ",
                                        uplink_.describe_process(static_cast<int>(process)),
                                        " cannot be reached"))
                    .ToString(),
                place == PoolPlace::kDevice && SaysUnreachable(allowed)};
      }
    }
  }
  return {};
}

Status GpuDomain::MapPool(int process, PoolPlace place, WireReader& reader,
                          std::vector<UniqueFd>& fds) {
  const auto rank = reader.Get<int64_t>();
  const std::string uuid = reader.GetString();
  const auto multiprocessors = reader.Get<uint32_t>();
  const bool multicast = reader.Get<uint32_t>() != 0;
  const auto bytes = reader.Get<uint64_t>();
  JF_ASSIGN_OR_RETURN(MemoryHandle handle, ReadHandle(reader, fds));
  if (!reader.ok() || uuid.size() != sizeof(Gpu::Uuid) || multiprocessors == 0 || bytes == 0) {
    return Status(Code::kInvalidArgument,
                  StrCat("process ", process, " described its GPUs wrongly"));
  }
  const Gpu& first = *gpus_.front().gpu;
  const cuda::ScopedContext current(*api_, first.context());
  JF_RETURN_IF_ERROR(current.status());
  auto pool = ImportPool(*api_, first.device(), place, std::move(handle), bytes);
  if (!pool.ok()) {
    return pool.status().WithContext(
        StrCat("the memory of rank ", rank, "'s GPU (", uplink_.describe_process(process), ")"));
  }
  const auto [entry, added] = known_.try_emplace(rank);
  Remote& remote = entry->second;
  if (!added) {
    return Status(Code::kInvalidArgument, StrCat("rank ", rank, " is a GPU of process ",
                                                 remote.process, " and of process ", process));
  }
  remote.process = process;
  remote.pool = pool->data();
  remote.pool_bytes = pool->bytes();
  std::copy(uuid.begin(), uuid.end(), remote.uuid.begin());
  remote.multiprocessors = multiprocessors;
  remote.multicast = multicast;
  imported_.push_back(*std::move(pool));
  return OkStatus();
}

// The same on all processes; empty if there is no reason not to try.
std::string GpuDomain::NoMulticast() const {
  if (!unreachable_.empty()) return "the pools are in the host's memory";
  if (known_.size() < device::kMulticastRanks) {
    return StrCat(known_.size(), " GPUs gain nothing by it");
  }
  for (auto gpu = known_.begin(); gpu != known_.end(); ++gpu) {
    if (!gpu->second.multicast) {
      return StrCat("the GPU of rank ", gpu->first, " has none, or it is switched off there");
    }
    for (auto other = known_.begin(); other != gpu; ++other) {
      if (other->second.uuid == gpu->second.uuid) {
        return StrCat("ranks ", other->first, " and ", gpu->first, " share a GPU");
      }
    }
  }
  return "";
}

Status GpuDomain::ShareMulticast(const Exchange& exchange) {
  no_multicast_ = NoMulticast();
  if (!no_multicast_.empty()) return OkStatus();
  const auto count = static_cast<unsigned>(known_.size());
  Trouble own;
  const auto note = [&](const Status& status) {
    if (own.text.empty() && !status.ok()) own.text = status.ToString();
  };
  // Ends it on all processes if it has failed on one.
  const auto agree = [&](const Answers& answers) {
    no_multicast_ = answers.worst.text;
    if (no_multicast_.empty()) return true;
    multicast_.reset();
    Log(LogLevel::kWarning, StrCat("no multicast memory: ", no_multicast_));
    return false;
  };

  MemoryHandle handle;
  const unsigned handle_types = gpus_.front().gpu->handle_types();
  if (process_ == 0) {
    size_t bytes = known_.begin()->second.pool_bytes;
    for (const auto& [rank, gpu] : known_) bytes = std::min(bytes, gpu.pool_bytes);
    auto created = MulticastPools::Create(*api_, count, bytes, handle_types);
    note(created.status());
    if (created.ok()) {
      multicast_ = *std::move(created);
      auto exported = multicast_->Export();
      note(exported.status());
      if (exported.ok()) handle = *std::move(exported);
    }
  }
  WireWriter message = Say(Step::kMulticast, own);
  message.Add(uint64_t{multicast_ ? multicast_->bytes() : 0});
  message.Add(std::string_view(handle.Bytes()));
  JF_ASSIGN_OR_RETURN(Answers created, Ask(exchange, Step::kMulticast, own, message,
                                           Descriptors(std::span(&handle, 1))));
  if (!agree(created)) return OkStatus();

  if (process_ != 0) {
    SocketMessage& from = created.messages[0];
    Trouble none;
    WireReader reader = Hear(from, Step::kMulticast, &none);
    const auto bytes = reader.Get<uint64_t>();
    const auto import = [&]() -> Status {
      JF_ASSIGN_OR_RETURN(handle, ReadHandle(reader, from.fds));
      JF_ASSIGN_OR_RETURN(multicast_,
                          MulticastPools::Import(*api_, count, handle, bytes, handle_types));
      return OkStatus();
    };
    note(import());
  }
  for (const Local& local : gpus_) {
    if (own.text.empty()) note(multicast_->Add(local.gpu->device()));
  }
  JF_ASSIGN_OR_RETURN(const Answers added,
                      Ask(exchange, Step::kAdded, own, Say(Step::kAdded, own)));
  if (!agree(added)) return OkStatus();

  for (const Local& local : gpus_) {
    if (own.text.empty()) note(multicast_->Bind(local.gpu->device(), local.gpu->pool()));
  }
  if (own.text.empty()) note(multicast_->Map(devices_));
  JF_ASSIGN_OR_RETURN(const Answers bound,
                      Ask(exchange, Step::kBound, own, Say(Step::kBound, own)));
  (void)agree(bound);
  return OkStatus();
}

// For a communicator of all GPUs, since what is written there goes to all, with its arena at the
// same place in all pools. Announced offsets are the same for everybody, and so is the answer.
std::byte* GpuDomain::MulticastFor(const GroupKey& key, uint64_t bytes) {
  auto& arenas = arenas_[key];
  const size_t offset = arenas.begin()->second.offset;
  const bool equal = std::all_of(arenas.begin(), arenas.end(),
                                 [&](const auto& arena) { return arena.second.offset == offset; });
  if (!multicast_ || key.first.size() != known_.size() || arenas.size() != known_.size() ||
      !equal || offset + bytes > multicast_->bytes()) {
    return nullptr;
  }
  return multicast_->data() + offset;
}

}  // namespace jaxfabric
