// How a mesh comes to be: who calls whom, and the hellos.

#include <algorithm>
#include <cerrno>
#include <utility>

#include "control/mesh.h"
#include "os/poll.h"

namespace jaxfabric {
namespace {

// A caller that was closed before it could prove itself had to make room for strangers.
constexpr int kMostCalls = 5;

}  // namespace

TcpOptions Mesh::LinkOptions() const {
  TcpOptions options;
  options.receive_buffer = TcpLink::kReceiveBuffer;
  options.unreachable_after = unreachable_after_;
  return options;
}

bool Mesh::Expects(int process) const {
  return process > self_ && process < static_cast<int>(connections_.size()) &&
         !connections_[static_cast<size_t>(process)].open;
}

void Mesh::Attach(int process, std::unique_ptr<Link> link) {
  Connection& peer = connection(process);
  std::lock_guard lock(peer.send_mutex);
  peer.link = std::move(link);
  peer.open = true;
}

Status Mesh::SendNow(int process, std::span<const std::byte> bytes, std::span<const int> fds,
                     Deadline deadline) {
  Link& link = *connection(process).link;
  Status sent = link.TrySend(bytes, fds);
  while (sent.code() == Code::kDeadlineExceeded || (sent.ok() && link.wants_room())) {
    if (!WaitForSocket(link.fd(), POLLOUT, deadline)) {
      return Status(Code::kDeadlineExceeded, StrCat("process ", process, " does not read"));
    }
    sent = sent.ok() ? link.Flush() : link.TrySend(bytes, fds);
  }
  return sent.WithContext(StrCat("nothing can be sent to process ", process));
}

Status Mesh::CheckHello(int process, const SocketMessage& hello) const {
  WireReader reader(hello.bytes);
  const auto number = reader.Get<uint32_t>();
  if (reader.ok() && reader.type() == MessageType::kHello &&
      number == static_cast<uint32_t>(process)) {
    return OkStatus();
  }
  return Status(Code::kInvalidArgument, StrCat("process ", process, " sent a malformed hello"));
}

Result<std::vector<Mesh::Greeting>> Mesh::Connect(const std::vector<Peer>& peers, const Job& job,
                                                  std::span<const std::byte> hello,
                                                  std::span<const int> fds, Deadline deadline) {
  const JobIdentity identity{job.secret, job.incarnation, static_cast<uint32_t>(self_),
                             static_cast<uint32_t>(connections_.size())};
  const bool several_hosts =
      std::any_of(peers.begin(), peers.end(), [](const Peer& peer) { return !peer.same_host; });
  if (several_hosts) {
    JF_RETURN_IF_ERROR(CheckSecret(identity));
    if (tcp_address_.empty()) {
      return Status(Code::kFailedPrecondition,
                    StrCat("process ", self_, " has no network to reach other hosts' processes"));
    }
  }
  std::vector<Greeting> greetings(connections_.size());
  for (int process = 0; process < self_; ++process) {
    const Peer& peer = peers[static_cast<size_t>(process)];
    Greeting& greeting = greetings[static_cast<size_t>(process)];
    auto link = peer.same_host ? CallUnix(process, peer, deadline, &greeting.credentials)
                               : CallTcp(process, peer, identity, deadline);
    if (!link.ok()) return link.status();
    Attach(process, *std::move(link));
    JF_RETURN_IF_ERROR(
        SendNow(process, hello, peer.same_host ? fds : std::span<const int>(), deadline));
    JF_ASSIGN_OR_RETURN(greeting.hello, Receive(process, deadline));
    JF_RETURN_IF_ERROR(CheckHello(process, greeting.hello));
  }
  JF_RETURN_IF_ERROR(BeCalled(peers, identity, hello, fds, deadline, greetings));
  listener_.Reset();
  tcp_listener_.Reset();
  return greetings;
}

Result<std::unique_ptr<Link>> Mesh::CallUnix(int process, const Peer& peer, Deadline deadline,
                                             PeerCredentials* credentials) {
  auto socket = ConnectUnixSocket(peer.name, deadline);
  if (!socket.ok()) return socket.status().WithContext(StrCat("calling process ", process));
  JF_ASSIGN_OR_RETURN(*credentials, CheckPeerCredentials(socket->get()));
  return std::unique_ptr<Link>(std::make_unique<UnixLink>(*std::move(socket)));
}

Result<std::unique_ptr<Link>> Mesh::CallTcp(int process, const Peer& peer,
                                            const JobIdentity& identity, Deadline deadline) {
  JF_ASSIGN_OR_RETURN(const TcpAddress address, TcpAddress::Parse(peer.tcp_address));
  Status status;
  for (int call = 0; call < kMostCalls && !deadline.expired(); ++call) {
    auto socket = CallProcess(address, LinkOptions(), identity, static_cast<uint32_t>(process),
                              Purpose::kControl, 0, deadline);
    if (socket.ok()) return std::unique_ptr<Link>(std::make_unique<TcpLink>(*std::move(socket)));
    status = socket.status();
    if (status.code() != Code::kUnavailable) break;
    ::poll(nullptr, 0, 10 << call);
  }
  return status.WithContext(StrCat("calling process ", process));
}

// A stranger on our socket, or not one of our peers: none.
std::optional<std::pair<int, Mesh::Greeting>> Mesh::Greet(Link& link, Deadline deadline) {
  auto credentials = CheckPeerCredentials(link.fd());
  if (!credentials.ok()) return std::nullopt;
  WaitForSocket(link.fd(), POLLIN,
                Deadline(std::min(deadline.at(), Clock::now() + std::chrono::seconds(1))));
  auto message = link.TryReceive();
  if (!message.ok() || !message.value()) return std::nullopt;
  WireReader reader(message.value()->bytes);
  const auto process = static_cast<int>(reader.Get<uint32_t>());
  if (!reader.ok() || reader.type() != MessageType::kHello || !Expects(process)) return {};
  return std::pair(process, Greeting{*credentials, std::move(*message.value())});
}

Status Mesh::BeCalled(const std::vector<Peer>& peers, const JobIdentity& identity,
                      std::span<const std::byte> hello, std::span<const int> fds, Deadline deadline,
                      std::vector<Greeting>& greetings) {
  int missing = static_cast<int>(connections_.size()) - self_ - 1;
  std::unique_ptr<Acceptor> acceptor;
  if (std::any_of(peers.begin() + self_, peers.end(),
                  [](const Peer& peer) { return !peer.same_host; })) {
    JF_ASSIGN_OR_RETURN(acceptor,
                        Acceptor::Create(std::move(tcp_listener_), identity, Purpose::kControl));
  }
  while (missing > 0) {
    pollfd waiting[] = {{listener_.get(), POLLIN, 0}, {acceptor ? acceptor->fd() : -1, POLLIN, 0}};
    if (PollUntil(waiting, deadline) < 0 && errno != EINTR) {
      return ErrnoStatus("poll", errno);
    }
    const int before = missing;
    if (acceptor) {
      for (auto& accepted : acceptor->Advance()) {
        const auto process = static_cast<int>(accepted.process);
        if (!Expects(process) || peers[accepted.process].same_host) {
          dropped_.fetch_add(1, std::memory_order_relaxed);
          continue;
        }
        Attach(process, std::make_unique<TcpLink>(std::move(accepted.socket)));
        JF_RETURN_IF_ERROR(SendNow(process, hello, {}, deadline));
        --missing;
      }
      refused_.store(acceptor->refused(), std::memory_order_relaxed);
    }
    JF_ASSIGN_OR_RETURN(std::optional<UniqueFd> accepted, TryAcceptUnixSocket(listener_.get()));
    if (accepted) {
      auto link = std::make_unique<UnixLink>(std::move(*accepted));
      if (auto greeting = Greet(*link, deadline)) {
        const int process = greeting->first;
        Attach(process, std::move(link));
        JF_RETURN_IF_ERROR(SendNow(process, hello, fds, deadline));
        greetings[static_cast<size_t>(process)] = std::move(greeting->second);
        --missing;
      } else {
        dropped_.fetch_add(1, std::memory_order_relaxed);
      }
    }
    if (missing < before || !deadline.expired()) continue;
    std::string late;
    for (size_t p = static_cast<size_t>(self_) + 1; p < connections_.size(); ++p) {
      if (!connections_[p].open) late += StrCat(late.empty() ? "" : ", ", p);
    }
    return Status(Code::kDeadlineExceeded,
                  StrCat("process ", self_, " was not called by process ", late));
  }
  // They have proven who they are: their hellos are worth waiting for.
  for (size_t process = static_cast<size_t>(self_) + 1; process < peers.size(); ++process) {
    if (peers[process].same_host) continue;
    JF_ASSIGN_OR_RETURN(greetings[process].hello, Receive(static_cast<int>(process), deadline));
    JF_RETURN_IF_ERROR(CheckHello(static_cast<int>(process), greetings[process].hello));
  }
  return OkStatus();
}

Result<SocketMessage> Mesh::Receive(int process, Deadline deadline) {
  Link& link = *connection(process).link;
  while (true) {
    auto received = link.TryReceive();
    if (!received.ok()) {
      return received.status().WithContext(
          StrCat("process ", process, " went away while process ", self_, " connected"));
    }
    if (auto& message = received.value()) return std::move(*message);
    if (deadline.expired()) {
      return Status(Code::kDeadlineExceeded,
                    StrCat("process ", process, " did not answer process ", self_));
    }
    WaitForSocket(link.fd(), POLLIN, deadline);
  }
}

Result<std::vector<SocketMessage>> Mesh::Exchange(const WireWriter& message,
                                                  std::span<const int> fds, Deadline deadline) {
  for (size_t process = 0; process < connections_.size(); ++process) {
    if (static_cast<int>(process) == self_) continue;
    const Status sent = SendNow(static_cast<int>(process), message.bytes(), fds, deadline);
    // One that has gone is told of below.
    if (!sent.ok() && sent.code() != Code::kUnavailable) return sent;
  }
  std::vector<SocketMessage> messages(connections_.size());
  for (size_t process = 0; process < connections_.size(); ++process) {
    if (static_cast<int>(process) == self_) continue;
    JF_ASSIGN_OR_RETURN(messages[process], Receive(static_cast<int>(process), deadline));
  }
  return messages;
}

}  // namespace jaxfabric
