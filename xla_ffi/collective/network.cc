// The processes of other hosts: mirrors of their windows here, and the channels to theirs.
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "base/hash.h"
#include "collective/fabric.h"
#include "collective/plan.h"
#include "os/interfaces.h"
#include "os/tcp_socket.h"
#include "transport/tcp/tcp.h"

namespace jaxfabric {
namespace {

// What is still on its way when a healthy process leaves.
constexpr double kFlushSeconds = 5;
// The control connection's time to say why a process cannot be reached.
constexpr auto kControlFirst = std::chrono::seconds(1);

Status CheckCongestionControl(const std::string& name) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoStatus("socket", errno);
  return SetCongestionControl(socket.get(), name);
}

}  // namespace

Status Fabric::ChooseNetwork() {
  Mesh::Network network;
  JF_ASSIGN_OR_RETURN(network.ports, PortRange::Parse(options_.net_port_range));
  std::optional<TcpAddress> coordinator;
  if (auto parsed = TcpAddress::Parse(options_.coordinator); parsed.ok()) coordinator = *parsed;
  JF_ASSIGN_OR_RETURN(const std::vector<Interface> interfaces, ListInterfaces());
  JF_ASSIGN_OR_RETURN(const InterfaceChoice choice,
                      ChooseInterface(interfaces, options_.net_interface, coordinator));
  network.address = choice.chosen.address;
  network.unreachable_after = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(options_.unreachable_after));
  // Found out now, when the others can still be told. Where any port will do there are enough.
  JF_RETURN_IF_ERROR(CheckCongestionControl(options_.tcp_congestion_control));
  if (network.ports.first != 0) {
    TcpAddress data = network.address;
    JF_ASSIGN_OR_RETURN(data_port_, ListenTcp(&data, network.ports));
  }
  network_ = network;
  network_reason_ = choice.why;
  return OkStatus();
}

Status Fabric::BindMessages(const Mesh::Job& job) {
  constexpr size_t kNoWindow = 4096;  // windows have mirrors, which are regions
  TcpTransportOptions tcp;
  tcp.ip = network_->address.ip();
  tcp.ports = network_->ports;
  tcp.secret = job.secret;
  tcp.incarnation = job.incarnation;
  tcp.lanes = options_.tcp_sockets;
  // What an execution has under way at a time is a ring: it has a part for each lane.
  const size_t part = kRingBytes / std::max<size_t>(1, tcp.lanes) / tcp.stripe_above;
  tcp.chunk_bytes = std::min(tcp.chunk_bytes, part * tcp.stripe_above);
  tcp.socket.congestion_control = options_.tcp_congestion_control;
  // The rings bound what executions post: all of the staging, with a header for each of the
  // smallest pieces, and the words.
  tcp.max_queued_bytes = 4 * window_.size() + (size_t{64} << 20);
  tcp.connect_timeout = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(options_.connect_timeout));
  data_port_.Reset();
  JF_ASSIGN_OR_RETURN(messages_,
                      BindTcp(tcp, process_, static_cast<int>(peers_.size()), kNoWindow));
  if (::getrandom(&nonce_, sizeof(nonce_), 0) != sizeof(nonce_)) {
    return ErrnoStatus("getrandom", errno);
  }
  messages_->SetArrivalHandler([this] {
    // Orders what has arrived before the look at `sleepers`, as in Participant::RingPeers.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    RingIfSleeping(reinterpret_cast<WindowHeader*>(window_.data()));
  });
  messages_->SetLostHandler([this](int process, const Status& status) { OnLost(process, status); });
  return OkStatus();
}

// Room for the windows of processes whose memory cannot be addressed. A page that nothing is put to
// costs nothing.
Status Fabric::MirrorRemotes() {
  JF_ASSIGN_OR_RETURN(window_region_, messages_->Register(window_));
  for (size_t process = 0; process < peers_.size(); ++process) {
    Peer& peer = peers_[process];
    if (!peer.remote) continue;
    if (peer.window_bytes < 4 * (kWindowHeaderBytes + sizeof(Cell))) {
      return Status(Code::kInvalidArgument,
                    StrCat("process ", process, " has a window of ", peer.window_bytes, " bytes"));
    }
    JF_ASSIGN_OR_RETURN(peer.mirror, Mapping::MapPrivate(peer.window_bytes));
    peer.window = peer.mirror.bytes();
    JF_ASSIGN_OR_RETURN(peer.mirror_region, messages_->Register(peer.window));
    peer.header = reinterpret_cast<WindowHeader*>(peer.window.data());
    peer.header->magic = kWindowMagic;
    peer.header->process = static_cast<uint32_t>(process);
    peer.header->cells = CellsOfWindow(peer.window_bytes);
  }
  return OkStatus();
}

uint64_t Fabric::NewSalt() {
  // Relaxed: only the numbers matter.
  static std::atomic<uint64_t> last{0};
  return Hasher().Add(nonce_).Add(last.fetch_add(1, std::memory_order_relaxed)).Finish();
}

Topology Fabric::TopologyOf(const std::vector<PeerView>& peers, bool one_process) const {
  const bool one_host =
      std::none_of(peers.begin(), peers.end(), [](const PeerView& peer) { return peer.remote; });
  std::set<int> processes;
  for (const PeerView& peer : peers) processes.insert(peer.process);
  Topology topology{
      one_process, process_reads_ && one_host, {}, static_cast<int>(processes.size()), patterns_};
  for (const PeerView& peer : peers) {
    if (!one_host) {
      topology.host_of.push_back(peers_[static_cast<size_t>(peer.process)].host_number);
    }
  }
  return topology;
}

Result<Fabric::Link> Fabric::LinkTo(int process) {
  Peer& peer = peers_[static_cast<size_t>(process)];
  std::lock_guard lock(links_mutex_);
  if (!peer.link) {
    JF_ASSIGN_OR_RETURN(peer.link, messages_->ConnectMessages(peer.address));
  }
  return Link{peer.link.get(), peer.region, peer.window_region};
}

void Fabric::AbortLinks() {
  std::lock_guard lock(links_mutex_);
  for (Peer& peer : peers_) {
    if (peer.link) peer.link->Abort();
  }
}

void Fabric::FlushLinks() {
  const Deadline deadline = Deadline::AfterSeconds(kFlushSeconds);
  std::vector<MessageChannel*> links;
  {
    std::lock_guard lock(links_mutex_);  // not while it waits: a failure aborts the links
    for (Peer& peer : peers_) {
      // A peer that has left needs nothing any more; one that fails is told in other ways.
      if (peer.link && !peer.gone.load(std::memory_order_relaxed)) links.push_back(peer.link.get());
    }
  }
  for (MessageChannel* link : links) (void)link->Push();
  for (MessageChannel* link : links) (void)link->Flush(deadline);
}

void Fabric::OnLost(int process, const Status& status) {
  {
    std::lock_guard lock(mutex_);
    lost_.push_back({process, status, Clock::now()});
  }
  Ring(reinterpret_cast<WindowHeader*>(window_.data()));
}

// A process that leaves, fails or dies says so on its control connection, or the end of that does.
// Where neither comes, its host is there and the data's way is not.
void Fabric::CheckLost(Clock::time_point now) {
  std::string unreachable;
  {
    std::lock_guard lock(mutex_);
    for (const Lost& lost : lost_) {
      const Peer& peer = peers_[static_cast<size_t>(lost.process)];
      if (now - lost.since < kControlFirst || peer.gone.load(std::memory_order_relaxed)) continue;
      unreachable =
          StrCat(DescribeProcess(lost.process), " is unreachable: ", lost.reason.message());
    }
  }
  if (!unreachable.empty()) Poison(Status(Code::kUnavailable, unreachable));
}

}  // namespace jaxfabric
