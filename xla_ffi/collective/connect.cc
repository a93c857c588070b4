// How the processes of a job find each other: addresses, windows, and what all of them agree on.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <span>

#include "collective/address.h"
#include "collective/fabric.h"
#include "os/cores.h"
#include "os/process_memory.h"

namespace jaxfabric {
std::string Fabric::Address() const {
  ProcessAddress address;
  address.process = process_;
  address.pid = ::getpid();
  address.name = mesh_->name();
  address.host = host_;
  address.host_id = host_id_;
  address.ranks = local_ranks_;
  address.tcp_address = mesh_->tcp_address();
  address.network = network_reason_;
  return address.Encode();
}

Status Fabric::Connect(const std::vector<std::string>& addresses, const Mesh::Job& job) {
  if (addresses.size() != peers_.size()) {
    return Status(Code::kInvalidArgument,
                  StrCat("got ", addresses.size(), " addresses for ", peers_.size(), " processes"));
  }
  const Deadline deadline = Deadline::AfterSeconds(options_.connect_timeout);
  std::vector<Mesh::Peer> peers;
  size_t ranks = 0;
  for (size_t process = 0; process < peers_.size(); ++process) {
    JF_ASSIGN_OR_RETURN(ProcessAddress address, ProcessAddress::Decode(addresses[process]));
    if (address.process != static_cast<int>(process)) {
      return Status(Code::kInvalidArgument,
                    StrCat("address ", process, " belongs to process ", address.process,
                           ": addresses go in process order"));
    }
    Peer& peer = peers_[process];
    peer.pid = address.pid;
    peer.host = address.host;
    peer.host_id = address.host_id;
    peer.ranks = address.ranks;
    ranks += address.ranks.size();
    peers.push_back({SharesMemory(static_cast<int>(process)), address.name, address.tcp_address});
    for (int64_t rank : address.ranks) {
      const auto [owner, added] = process_of_.emplace(rank, static_cast<int>(process));
      if (!added) {
        return Status(Code::kInvalidArgument, StrCat("rank ", rank, " belongs to process ",
                                                     owner->second, " and to process ", process));
      }
    }
    if (!SharesMemory(static_cast<int>(process))) {
      if (address.tcp_address.empty()) {
        return Status(Code::kFailedPrecondition,
                      StrCat("process ", process, " on ", address.host,
                             " cannot be reached from other hosts: ", address.network));
      }
      return Status(
          Code::kUnimplemented,
          StrCat("process ", process, " on ", address.host, " does not share memory with process ",
                 process_, " on ", host_,
                 ": this version connects the processes of one host (and one container) only"));
    }
  }
  Peer& self = peers_[static_cast<size_t>(process_)];
  self.window = window_;
  self.header = reinterpret_cast<WindowHeader*>(window_.data());

  const EndpointAddress own = endpoint_->address();
  WireWriter hello(MessageType::kHello);
  hello.Add(static_cast<uint32_t>(process_)).Add(std::string_view(own.kind));
  hello.Add(std::string_view(reinterpret_cast<const char*>(own.bytes.data()), own.bytes.size()));
  hello.Add(reinterpret_cast<uint64_t>(window_.data()));
  // The GPUs' descriptors follow the endpoint's.
  std::vector<int> fds = own.fds;
  hello.Add(static_cast<uint32_t>(fds.size()));
  hello.Add(std::string_view(gpus_ ? gpus_->Hello() : std::string()));
  hello.Add(std::string_view(gpus_ ? std::string() : gpu_reason_));
  if (gpus_) {
    const std::vector<int> pools = gpus_->HelloFds();
    fds.insert(fds.end(), pools.begin(), pools.end());
  }
  JF_ASSIGN_OR_RETURN(std::vector<Mesh::Greeting> greetings,
                      mesh_->Connect(peers, job, hello.bytes(), fds, deadline));
  process_reads_ = peers_.size() > 1;
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) == process_) continue;
    JF_RETURN_IF_ERROR(Greet(static_cast<int>(process), greetings[process],
                             std::move(greetings[process].hello.fds)));
  }
  JF_RETURN_IF_ERROR(AgreeOnMachine(ranks, deadline));

  const auto microseconds = [](double count) {
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double, std::micro>(count));
  };
  waiting_.in_step = microseconds(options_.in_step_microseconds);
  waiting_.out_of_step = microseconds(options_.out_of_step_microseconds);

  mesh_->Start({.on_message = [this](int process, WireReader& m) { OnMessage(process, m); },
                .on_gone = [this](int process, LinkEnd how) { OnGone(process, how); }});
  if (gpus_) gpus_->Start();
  progress_ = std::thread([this] { ProgressLoop(); });
  ::pthread_setname_np(progress_.native_handle(), "jf-progress");
  return OkStatus();
}

Status Fabric::Greet(int process, const Mesh::Greeting& greeting, std::vector<UniqueFd> fds) {
  Peer& peer = peers_[static_cast<size_t>(process)];
  WireReader reader(greeting.hello.bytes);
  EndpointAddress address;
  reader.Get<uint32_t>();
  address.kind = reader.GetString();
  const std::string bytes = reader.GetString();
  const auto window_address = reader.Get<uint64_t>();
  const auto endpoint_fds = reader.Get<uint32_t>();
  const std::string gpus = reader.GetString();
  const std::string no_gpus = reader.GetString();
  if (!reader.ok() || endpoint_fds > fds.size() || reader.type() != MessageType::kHello ||
      (SharesMemory(process) && greeting.credentials.pid != peer.pid)) {
    return Status(Code::kInvalidArgument, StrCat("process ", process, " sent a malformed hello"));
  }
  std::vector<UniqueFd> pools(std::make_move_iterator(fds.begin() + endpoint_fds),
                              std::make_move_iterator(fds.end()));
  fds.resize(endpoint_fds);
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
  address.bytes.assign(begin, begin + bytes.size());
  JF_ASSIGN_OR_RETURN(peer.channel,
                      endpoint_->Connect(address, std::move(fds),
                                         Deadline::AfterSeconds(options_.connect_timeout)));
  peer.window = peer.channel->peer_window();
  peer.header = reinterpret_cast<WindowHeader*>(peer.window.data());
  if (peer.window.size() < kWindowHeaderBytes || peer.header->magic != kWindowMagic ||
      peer.header->process != static_cast<uint32_t>(process)) {
    return Status(Code::kInvalidArgument,
                  StrCat("the window of process ", process, " is not ours"));
  }
  uint64_t magic = 0;
  process_reads_ &= ReadProcessMemory(peer.pid, window_address, &magic, sizeof(magic)).ok() &&
                    magic == kWindowMagic;
  if (gpus_) {
    if (gpus.empty()) {
      GiveUpGpus(StrCat("process ", process, ": ", no_gpus));
    } else if (const Status greeted = gpus_->Greet(process, gpus, std::move(pools));
               !greeted.ok()) {
      GiveUpGpus(greeted.ToString());
    }
  }
  return OkStatus();
}

// What decides over algorithms has to be the same everywhere: process_vm_readv is used if it works
// for all, the cores are those that any process may use, and GPUs are used if all can be.
Status Fabric::AgreeOnMachine(size_t ranks, Deadline deadline) {
  const std::vector<int64_t> own_cores = UsableCores();
  std::set<int64_t> cores(own_cores.begin(), own_cores.end());
  WireWriter ready(MessageType::kReady);
  int64_t quota = CoreQuota("/sys/fs/cgroup").value_or(INT32_MAX);
  ready.Add(uint32_t{process_reads_}).Add(std::span<const int64_t>(own_cores)).Add(quota);
  ready.Add(std::string_view(gpus_ ? std::string() : gpu_reason_));
  mesh_->Broadcast(ready);
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) == process_) continue;
    JF_ASSIGN_OR_RETURN(SocketMessage message, mesh_->Receive(static_cast<int>(process), deadline));
    WireReader reader(message.bytes);
    const bool reads = reader.Get<uint32_t>() != 0;
    const std::vector<int64_t> peer_cores = reader.GetInts();
    const auto peer_quota = reader.Get<int64_t>();
    const std::string no_gpus = reader.GetString();
    if (!reader.ok() || reader.type() != MessageType::kReady) {
      return Status(Code::kInvalidArgument,
                    StrCat("process ", process, " sent a malformed answer"));
    }
    if (gpus_ && !no_gpus.empty()) GiveUpGpus(StrCat("process ", process, ": ", no_gpus));
    process_reads_ &= reads;
    cores.insert(peer_cores.begin(), peer_cores.end());
    quota = std::min(quota, peer_quota);
  }
  waiting_.shared_cores = ranks > std::min(cores.size(), static_cast<size_t>(quota));
  // With a core for every rank only. On a shared one a reader that is not running yet makes the
  // owner of the buffer wait twice.
  process_reads_ &= !waiting_.shared_cores;
  return OkStatus();
}

}  // namespace jaxfabric
