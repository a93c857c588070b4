#include "control/mesh.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "base/log.h"

namespace jaxfabric {
namespace {

// Messages kept for one peer. A stopped peer gets its announcements; beyond this it is hopeless.
constexpr size_t kMaxWaiting = 1 << 16;

int PollMilliseconds(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(
      std::min<Clock::duration>(deadline.remaining(), std::chrono::seconds(1)));
  return static_cast<int>(left.count());
}

}  // namespace

Result<std::unique_ptr<Mesh>> Mesh::Create(int self, int count) {
  std::unique_ptr<Mesh> mesh(new Mesh(self, count));
  JF_ASSIGN_OR_RETURN(mesh->listener_, ListenUnixSocket(&mesh->name_));
  mesh->wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!mesh->wake_.valid()) return ErrnoStatus("eventfd", errno);
  mesh->epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!mesh->epoll_.valid()) return ErrnoStatus("epoll_create1", errno);
  return mesh;
}

Mesh::~Mesh() { Stop(); }

Status Mesh::Attach(int process, UniqueFd socket) {
  if (process < 0 || process >= static_cast<int>(peers_.size()) || process == self_) {
    return Status(Code::kInvalidArgument,
                  StrCat("a hello from process ", process, " of ", peers_.size()));
  }
  Peer& peer = peers_[static_cast<size_t>(process)];
  if (peer.open) {
    return Status(Code::kAlreadyExists, StrCat("process ", process, " connected twice"));
  }
  peer.socket = std::move(socket);
  peer.open = true;
  return OkStatus();
}

Result<std::vector<Mesh::Greeting>> Mesh::Connect(const std::vector<std::string>& names,
                                                  std::span<const std::byte> hello,
                                                  std::span<const int> fds, Deadline deadline) {
  std::vector<Greeting> greetings(peers_.size());
  for (int process = 0; process < self_; ++process) {
    JF_ASSIGN_OR_RETURN(UniqueFd socket,
                        ConnectUnixSocket(names[static_cast<size_t>(process)], deadline));
    JF_ASSIGN_OR_RETURN(greetings[static_cast<size_t>(process)].credentials,
                        CheckPeerCredentials(socket.get()));
    JF_RETURN_IF_ERROR(SendMessage(socket.get(), hello, fds, deadline));
    JF_RETURN_IF_ERROR(Attach(process, std::move(socket)));
    JF_ASSIGN_OR_RETURN(greetings[static_cast<size_t>(process)].hello, Receive(process, deadline));
  }
  int missing = static_cast<int>(peers_.size()) - self_ - 1;
  while (missing > 0) {
    pollfd waiting{listener_.get(), POLLIN, 0};
    if (::poll(&waiting, 1, PollMilliseconds(deadline)) < 0 && errno != EINTR) {
      return ErrnoStatus("poll", errno);
    }
    JF_ASSIGN_OR_RETURN(std::optional<UniqueFd> accepted, TryAcceptUnixSocket(listener_.get()));
    if (!accepted) {
      if (!deadline.expired()) continue;
      std::string late;
      for (size_t p = static_cast<size_t>(self_) + 1; p < peers_.size(); ++p) {
        if (!peers_[p].open) late += StrCat(late.empty() ? "" : ", ", p);
      }
      return Status(Code::kDeadlineExceeded,
                    StrCat("process ", self_, " was not called by process ", late));
    }
    auto credentials = CheckPeerCredentials(accepted->get());
    if (!credentials.ok()) {  // a stranger on our socket: not one of our peers
      dropped_.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    pollfd greeting{accepted->get(), POLLIN, 0};
    ::poll(&greeting, 1, PollMilliseconds(deadline));
    auto message = TryReceiveMessage(accepted->get());
    if (!message.ok() || !message.value()) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    WireReader reader(message.value()->bytes);
    const int process = static_cast<int>(reader.Get<uint32_t>());
    const bool expected = process > self_ && process < static_cast<int>(peers_.size()) &&
                          !peers_[static_cast<size_t>(process)].open;
    if (!reader.ok() || reader.type() != MessageType::kHello || !expected) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    const int socket = accepted->get();
    JF_RETURN_IF_ERROR(Attach(process, std::move(*accepted)));
    JF_RETURN_IF_ERROR(SendMessage(socket, hello, fds, deadline));
    greetings[static_cast<size_t>(process)] = {*credentials, std::move(*message.value())};
    --missing;
  }
  listener_.Reset();
  return greetings;
}

Result<SocketMessage> Mesh::Receive(int process, Deadline deadline) {
  const int socket = peers_[static_cast<size_t>(process)].socket.get();
  while (true) {
    auto received = TryReceiveMessage(socket);
    if (!received.ok()) {
      return received.status().WithContext(
          StrCat("process ", process, " went away while process ", self_, " connected"));
    }
    if (auto& message = received.value()) return std::move(*message);
    if (deadline.expired()) {
      return Status(Code::kDeadlineExceeded,
                    StrCat("process ", process, " did not answer process ", self_));
    }
    pollfd waiting{socket, POLLIN, 0};
    ::poll(&waiting, 1, PollMilliseconds(deadline));
  }
}

Result<std::vector<SocketMessage>> Mesh::Exchange(const WireWriter& message,
                                                  std::span<const int> fds, Deadline deadline) {
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) == self_) continue;
    const Status sent = SendMessage(peers_[process].socket.get(), message.bytes(), fds, deadline);
    // One that has gone is told of below.
    if (!sent.ok() && sent.code() != Code::kUnavailable) return sent;
  }
  std::vector<SocketMessage> messages(peers_.size());
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) == self_) continue;
    JF_ASSIGN_OR_RETURN(messages[process], Receive(static_cast<int>(process), deadline));
  }
  return messages;
}

void Mesh::Start(Handlers handlers) {
  handlers_ = std::move(handlers);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = static_cast<uint32_t>(self_);  // the own number stands for the wake-up
  JF_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) == 0);
  for (size_t process = 0; process < peers_.size(); ++process) {
    std::lock_guard lock(peers_[process].send_mutex);
    if (peers_[process].open) Watch(static_cast<int>(process), /*add=*/true);
  }
  thread_ = std::thread([this] { Loop(); });
  ::pthread_setname_np(thread_.native_handle(), "jf-control");
}

void Mesh::Loop() {
  while (true) {
    epoll_event events[16];
    const int ready = ::epoll_wait(epoll_.get(), events, 16, -1);
    if (ready < 0 && errno != EINTR) return;
    for (int i = 0; i < ready; ++i) {
      const int process = static_cast<int>(events[i].data.u32);
      if (process == self_) return;
      if ((events[i].events & EPOLLOUT) != 0) SendWaiting(process);
      if ((events[i].events & ~uint32_t{EPOLLOUT}) != 0) ReceiveFrom(process);
    }
  }
}

void Mesh::ReceiveFrom(int process) {
  Peer& peer = peers_[static_cast<size_t>(process)];
  while (true) {
    auto message = TryReceiveMessage(peer.socket.get());
    if (!message.ok()) {
      {
        std::lock_guard lock(peer.send_mutex);
        peer.open = false;
        peer.waiting.clear();
      }
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.socket.get(), nullptr);
      handlers_.on_gone(process);
      return;
    }
    if (!message.value()) return;
    WireReader reader(message.value()->bytes);
    if (reader.ok()) handlers_.on_message(process, reader);
    if (!reader.ok()) dropped_.fetch_add(1, std::memory_order_relaxed);
  }
}

void Mesh::Watch(int process, bool add) {
  const Peer& peer = peers_[static_cast<size_t>(process)];
  epoll_event event{};
  event.events = EPOLLIN;
  if (!peer.waiting.empty()) event.events |= EPOLLOUT;
  event.data.u32 = static_cast<uint32_t>(process);
  const int done =
      ::epoll_ctl(epoll_.get(), add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, peer.socket.get(), &event);
  // Not watched yet: Start() looks at what is kept.
  JF_CHECK(done == 0 || (!add && errno == ENOENT));
}

void Mesh::Send(int process, const WireWriter& message, Loss loss) {
  Peer& peer = peers_[static_cast<size_t>(process)];
  std::lock_guard lock(peer.send_mutex);
  if (!peer.open) return;
  const auto bytes = message.bytes();
  if (peer.waiting.empty()) {
    const Status sent = SendMessage(peer.socket.get(), bytes, {}, Deadline(Clock::now()));
    if (sent.ok() || sent.code() == Code::kUnavailable) return;
    if (sent.code() != Code::kDeadlineExceeded) {
      Log(LogLevel::kWarning,
          StrCat("no control message to process ", process, ": ", sent.message()));
      return;
    }
  }
  if (loss == Loss::kAcceptable) return;
  if (peer.waiting.size() >= kMaxWaiting) {
    Log(LogLevel::kWarning, StrCat("process ", process, " takes no control messages"));
    return;
  }
  peer.waiting.emplace_back(bytes.begin(), bytes.end());
  if (peer.waiting.size() == 1) Watch(process, /*add=*/false);
}

void Mesh::SendWaiting(int process) {
  Peer& peer = peers_[static_cast<size_t>(process)];
  std::lock_guard lock(peer.send_mutex);
  if (!peer.open) return;
  while (!peer.waiting.empty()) {
    const Status sent =
        SendMessage(peer.socket.get(), peer.waiting.front(), {}, Deadline(Clock::now()));
    if (sent.code() == Code::kDeadlineExceeded) return;
    peer.waiting.pop_front();  // Sent, or the peer is gone, which receiving tells.
  }
  Watch(process, /*add=*/false);
}

void Mesh::Broadcast(const WireWriter& message, Loss loss) {
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) != self_) Send(static_cast<int>(process), message, loss);
  }
}

void Mesh::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    JF_CHECK(::write(wake_.get(), &one, sizeof(one)) == sizeof(one));
    thread_.join();
  }
  for (Peer& peer : peers_) {
    std::lock_guard lock(peer.send_mutex);
    peer.open = false;
    peer.socket.Reset();
  }
  listener_.Reset();
  epoll_.Reset();
  wake_.Reset();
}

}  // namespace jaxfabric
