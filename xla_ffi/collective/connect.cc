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
namespace {

std::string_view TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::byte> BytesOf(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

}  // namespace

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
  address.window_bytes = window_.size();
  return address.Encode();
}

Status Fabric::Connect(const std::vector<std::string>& addresses, const Mesh::Job& job) {
  if (addresses.size() != peers_.size()) {
    return Status(Code::kInvalidArgument,
                  StrCat("got ", addresses.size(), " addresses for ", peers_.size(), " processes"));
  }
  const Deadline deadline = Deadline::AfterSeconds(options_.connect_timeout);
  std::vector<Mesh::Peer> peers;
  std::map<std::string, int> host_numbers;
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
    peers.push_back({SharesMemory(static_cast<int>(process)), address.name, address.tcp_address});
    for (int64_t rank : address.ranks) {
      const auto [owner, added] = process_of_.emplace(rank, static_cast<int>(process));
      if (!added) {
        return Status(Code::kInvalidArgument, StrCat("rank ", rank, " belongs to process ",
                                                     owner->second, " and to process ", process));
      }
    }
    peer.remote = !SharesMemory(static_cast<int>(process));
    peer.host_number =
        host_numbers.emplace(address.host_id, static_cast<int>(host_numbers.size())).first->second;
    peer.window_bytes = address.window_bytes;
    if (!peer.remote) ranks += address.ranks.size();
    if (peer.remote && (address.tcp_address.empty() || !network_)) {
      const bool theirs = address.tcp_address.empty();
      return Status(Code::kFailedPrecondition,
                    StrCat("process ", theirs ? static_cast<int>(process) : process_, " on ",
                           theirs ? address.host : host_, " cannot be reached from other hosts: ",
                           theirs ? address.network : network_reason_));
    }
  }
  if (host_numbers.size() > 1) {
    JF_RETURN_IF_ERROR(BindMessages(job));
    JF_RETURN_IF_ERROR(MirrorRemotes());
  }
  data_port_.Reset();
  Peer& self = peers_[static_cast<size_t>(process_)];
  self.window = window_;
  self.header = reinterpret_cast<WindowHeader*>(window_.data());

  const EndpointAddress own = endpoint_->address();
  WireWriter hello(MessageType::kHello);
  hello.Add(static_cast<uint32_t>(process_)).Add(std::string_view(own.kind));
  hello.Add(TextOf(own.bytes));
  hello.Add(reinterpret_cast<uint64_t>(window_.data()));
  hello.Add(std::string_view(gpus_ ? std::string() : gpu_reason_));
  std::vector<int64_t> mirrors;
  for (const Peer& peer : peers_) mirrors.push_back(peer.mirror_region);
  const EndpointAddress data = messages_ ? messages_->address() : EndpointAddress{};
  hello.Add(std::string_view(data.kind)).Add(TextOf(data.bytes));
  hello.Add(std::span<const int64_t>(mirrors)).Add(window_region_);
  JF_ASSIGN_OR_RETURN(std::vector<Mesh::Greeting> greetings,
                      mesh_->Connect(peers, job, hello.bytes(), own.fds, deadline));
  process_reads_ = peers_.size() > 1;
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) == process_) continue;
    JF_RETURN_IF_ERROR(Greet(static_cast<int>(process), greetings[process],
                             std::move(greetings[process].hello.fds)));
  }
  JF_RETURN_IF_ERROR(AgreeOnMachine(ranks, deadline));
  if (host_numbers.size() > 1) JF_RETURN_IF_ERROR(AgreeOnCosts(deadline));
  // All have GPUs or none has: every process has seen every hello.
  if (gpus_) {
    JF_ASSIGN_OR_RETURN(std::string unusable,
                        gpus_->Share(host_numbers.size() == 1,
                                     [&](const WireWriter& message, std::span<const int> fds) {
                                       return mesh_->Exchange(message, fds, deadline);
                                     }));
    if (!unusable.empty()) GiveUpGpus(std::move(unusable));
  }

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
  const std::string no_gpus = reader.GetString();
  const EndpointAddress data{reader.GetString(), BytesOf(reader.GetString()), {}};
  const std::vector<int64_t> mirrors = reader.GetInts();
  peer.window_region = reader.Get<uint32_t>();
  if (!reader.ok() || mirrors.size() != peers_.size() || reader.type() != MessageType::kHello ||
      (!peer.remote && greeting.credentials.pid != peer.pid)) {
    return Status(Code::kInvalidArgument, StrCat("process ", process, " sent a malformed hello"));
  }
  if (gpus_ && !no_gpus.empty()) GiveUpGpus(StrCat(DescribeProcess(process), ": ", no_gpus));
  if (peer.remote) {
    peer.address = data;
    peer.region = static_cast<uint32_t>(mirrors[static_cast<size_t>(process_)]);
    return OkStatus();
  }
  address.bytes = BytesOf(bytes);
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
  const Status read = ReadProcessMemory(peer.pid, window_address, &magic, sizeof(magic));
  if (!read.ok() || magic != kWindowMagic) {
    process_reads_ = false;
    no_process_reads_ = StrCat("process_vm_readv does not work: ", read.message());
  }
  return OkStatus();
}

// What decides over algorithms has to be the same everywhere: on a host process_vm_readv is used if
// it works for all, and the cores are those that any process may use. `ranks`: of this host.
Status Fabric::AgreeOnMachine(size_t ranks, Deadline deadline) {
  const std::vector<int64_t> own_cores = UsableCores();
  std::set<int64_t> cores(own_cores.begin(), own_cores.end());
  WireWriter ready(MessageType::kReady);
  int64_t quota = CoreQuota("/sys/fs/cgroup").value_or(INT32_MAX);
  ready.Add(uint32_t{process_reads_}).Add(std::span<const int64_t>(own_cores)).Add(quota);
  JF_ASSIGN_OR_RETURN(const std::vector<SocketMessage> answers,
                      mesh_->Exchange(ready, {}, deadline));
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) == process_) continue;
    WireReader reader(answers[process].bytes);
    const bool reads = reader.Get<uint32_t>() != 0;
    const std::vector<int64_t> peer_cores = reader.GetInts();
    const auto peer_quota = reader.Get<int64_t>();
    if (!reader.ok() || reader.type() != MessageType::kReady) {
      return Status(Code::kInvalidArgument,
                    StrCat("process ", process, " sent a malformed answer"));
    }
    if (peers_[process].remote) continue;  // another machine
    if (process_reads_ && !reads) {
      process_reads_ = false;
      no_process_reads_ = StrCat("process_vm_readv does not work on process ", process);
    }
    cores.insert(peer_cores.begin(), peer_cores.end());
    quota = std::min(quota, peer_quota);
  }
  const size_t usable = std::min(cores.size(), static_cast<size_t>(quota));
  waiting_.shared_cores = ranks > usable;
  // With a core for every rank only. On a shared one a reader that is not running yet makes the
  // owner of the buffer wait twice.
  if (process_reads_ && waiting_.shared_cores) {
    process_reads_ = false;
    no_process_reads_ = StrCat(ranks, " ranks share ", usable, " core(s)");
  }
  return OkStatus();
}

}  // namespace jaxfabric
