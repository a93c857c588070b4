#include "control/mesh.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/log.h"

namespace jaxfabric {
namespace {

// Messages kept for one peer. A stopped peer gets its announcements; beyond this it is hopeless.
constexpr size_t kMaxWaiting = 1 << 16;

}  // namespace

Result<std::unique_ptr<Mesh>> Mesh::Create(int self, int count, std::optional<Network> network) {
  std::unique_ptr<Mesh> mesh(new Mesh(self, count));
  JF_ASSIGN_OR_RETURN(mesh->listener_, ListenUnixSocket(&mesh->name_));
  if (network) {
    mesh->unreachable_after_ = network->unreachable_after;
    JF_ASSIGN_OR_RETURN(mesh->tcp_listener_,
                        ListenTcp(&network->address, network->ports, mesh->LinkOptions()));
    mesh->tcp_address_ = network->address.ToString();
  }
  mesh->wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!mesh->wake_.valid()) return ErrnoStatus("eventfd", errno);
  mesh->epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!mesh->epoll_.valid()) return ErrnoStatus("epoll_create1", errno);
  return mesh;
}

Mesh::~Mesh() { Stop(); }

void Mesh::Start(Handlers handlers) {
  handlers_ = std::move(handlers);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = static_cast<uint32_t>(self_);  // the own number stands for the wake-up
  JF_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) == 0);
  for (size_t process = 0; process < connections_.size(); ++process) {
    Connection& peer = connections_[process];
    std::lock_guard lock(peer.send_mutex);
    if (!peer.open) continue;
    event.data.u32 = static_cast<uint32_t>(process);
    JF_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, peer.link->fd(), &event) == 0);
    peer.watches_room = false;
    Watch(static_cast<int>(process));
  }
  thread_ = std::thread([this] { Loop(); });
  ::pthread_setname_np(thread_.native_handle(), "jf-control");
}

void Mesh::Loop() {
  // What came with an answer to Receive() is in no socket any more: nothing would wake this thread.
  for (size_t process = 0; process < connections_.size(); ++process) {
    if (connections_[process].link) ReceiveFrom(static_cast<int>(process));
  }
  while (true) {
    epoll_event events[16];
    const int ready = ::epoll_wait(epoll_.get(), events, 16, -1);
    if (ready < 0 && errno != EINTR) return;
    for (int i = 0; i < ready; ++i) {
      const int process = static_cast<int>(events[i].data.u32);
      if (process == self_) return;
      if ((events[i].events & EPOLLOUT) != 0) {
        std::lock_guard lock(connection(process).send_mutex);
        SendWaiting(process);
      }
      if ((events[i].events & ~uint32_t{EPOLLOUT}) != 0) ReceiveFrom(process);
    }
  }
}

void Mesh::ReceiveFrom(int process) {
  Connection& peer = connection(process);
  while (true) {
    auto message = peer.link->TryReceive();
    if (!message.ok()) {
      {
        std::lock_guard lock(peer.send_mutex);
        peer.open = false;
        peer.waiting.clear();
      }
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.link->fd(), nullptr);
      handlers_.on_gone(process, peer.link->end());
      return;
    }
    if (!message.value()) break;
    WireReader reader(message.value()->bytes);
    if (reader.ok()) handlers_.on_message(process, reader);
    if (!reader.ok()) dropped_.fetch_add(1, std::memory_order_relaxed);
  }
  // The peer may have told that it takes more.
  std::lock_guard lock(peer.send_mutex);
  SendWaiting(process);
}

void Mesh::Watch(int process) {
  Connection& peer = connection(process);
  const bool room = peer.link->wants_room();
  if (room == peer.watches_room) return;
  peer.watches_room = room;
  epoll_event event{};
  event.events = EPOLLIN;
  if (room) event.events |= EPOLLOUT;
  event.data.u32 = static_cast<uint32_t>(process);
  const int done = ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer.link->fd(), &event);
  JF_CHECK(done == 0 || errno == ENOENT);  // Not watched yet: Start() does.
}

void Mesh::Send(int process, const WireWriter& message, Loss loss) {
  Connection& peer = connection(process);
  std::lock_guard lock(peer.send_mutex);
  if (!peer.open) return;
  const auto bytes = message.bytes();
  if (peer.waiting.empty()) {
    const Status sent = peer.link->TrySend(bytes, {});
    if (sent.ok()) return Watch(process);
    if (sent.code() == Code::kUnavailable) return;
    if (sent.code() != Code::kDeadlineExceeded) {
      Log(LogLevel::kWarning,
          StrCat("no control message to process ", process, ": ", sent.message()));
      return;
    }
  }
  if (loss == Loss::kAcceptable) return Watch(process);
  if (peer.waiting.size() >= kMaxWaiting) {
    Log(LogLevel::kWarning, StrCat("process ", process, " takes no control messages"));
    return;
  }
  peer.waiting.emplace_back(bytes.begin(), bytes.end());
  Watch(process);
}

void Mesh::SendWaiting(int process) {
  Connection& peer = connection(process);
  if (!peer.open) return;
  // What becomes of a peer that is gone is for receiving to tell.
  [[maybe_unused]] const Status flushed = peer.link->Flush();
  while (!peer.waiting.empty()) {
    const Status sent = peer.link->TrySend(peer.waiting.front(), {});
    if (sent.code() == Code::kDeadlineExceeded) break;
    peer.waiting.pop_front();
  }
  Watch(process);
}

void Mesh::Broadcast(const WireWriter& message, Loss loss) {
  for (size_t process = 0; process < connections_.size(); ++process) {
    if (static_cast<int>(process) != self_) Send(static_cast<int>(process), message, loss);
  }
}

void Mesh::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    JF_CHECK(::write(wake_.get(), &one, sizeof(one)) == sizeof(one));
    thread_.join();
  }
  for (Connection& peer : connections_) {
    std::lock_guard lock(peer.send_mutex);
    peer.open = false;
    peer.link.reset();
  }
  listener_.Reset();
  tcp_listener_.Reset();
  epoll_.Reset();
  wake_.Reset();
}

}  // namespace jaxfabric
