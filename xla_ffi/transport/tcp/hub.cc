#include "transport/tcp/hub.h"

#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "base/log.h"

namespace jaxfabric::tcp {
namespace {

// Edge-triggered: no call to change what is watched for, and one thread per event.
constexpr uint32_t kSocketEvents = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
constexpr uint64_t kAcceptorId = 0;  // sockets begin with 1

}  // namespace

Hub::Hub(const TcpTransportOptions& options, int self, int max_peers)
    : options_(options),
      self_(self),
      max_peers_(max_peers),
      poller_([this](uint64_t id, uint32_t events) { Handle(id, events); },
              [this] {
                const auto now = Clock::now();
                ForEachPeer([now](Peer& peer) { peer.Expire(now); });
              }) {}

Result<std::shared_ptr<Hub>> Hub::Create(const TcpTransportOptions& options, int self,
                                         int max_peers, size_t window_bytes) {
  if (options.lanes < 1 || options.lanes > static_cast<int>(kMaxLanes) ||
      options.chunk_bytes < kCopiedPutBytes || options.chunk_bytes > kMaxBodyBytes) {
    return Status(Code::kInvalidArgument,
                  StrCat("no endpoint can have ", options.lanes, " connections to each peer (1 to ",
                         kMaxLanes, ") and chunks of ", options.chunk_bytes, " bytes (",
                         kCopiedPutBytes, " to ", kMaxBodyBytes, ")"));
  }
  std::shared_ptr<Hub> hub(new Hub(options, self, max_peers));
  const size_t bytes = std::max<size_t>(window_bytes, 1);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return ErrnoStatus(StrCat("mmap of ", bytes, " bytes"), errno);
  hub->mapped_bytes_ = bytes;
  hub->window_ = {static_cast<std::byte*>(memory), window_bytes};
  hub->regions_.Add(hub->window_);
  JF_ASSIGN_OR_RETURN(hub->address_, TcpAddress::FromIp(options.ip, 0));
  hub->identity_ = {options.secret, options.incarnation, static_cast<uint32_t>(self),
                    static_cast<uint32_t>(max_peers)};
  JF_ASSIGN_OR_RETURN(UniqueFd listener, ListenTcp(&hub->address_, options.ports, options.socket));
  JF_ASSIGN_OR_RETURN(hub->acceptor_,
                      Acceptor::Create(std::move(listener), hub->identity_, Purpose::kData));
  JF_RETURN_IF_ERROR(hub->poller_.Start());
  JF_RETURN_IF_ERROR(hub->poller_.Watch(hub->acceptor_->fd(), kAcceptorId, EPOLLIN));
  return hub;
}

Hub::~Hub() {
  Close();
  if (mapped_bytes_ != 0) ::munmap(window_.data(), mapped_bytes_);
}

template <class F>
void Hub::ForEachPeer(F f) {
  std::vector<Peer*> peers;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [number, peer] : peers_) peers.push_back(peer.get());
  }
  for (Peer* peer : peers) f(*peer);
}

void Hub::Close() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
  }
  if (acceptor_ == nullptr) return;
  ForEachPeer([](Peer& peer) { peer.PostGoodbye(); });
  const auto all = [this](bool (Peer::*test)() const) {
    bool result = true;
    ForEachPeer([&](Peer& peer) { result = result && (peer.*test)(); });
    return result;
  };
  poller_.WaitUntil([&] { return all(&Peer::AllSent); }, Deadline::After(kLinger));
  // A peer that flushes is answered, and what it has not read yet is not taken from it, as closing
  // a socket with unread data would.
  poller_.WaitUntil([&] { return all(&Peer::Parted) && all(&Peer::AllSent); },
                    Deadline::After(kAwaitEnd));
  ForEachPeer([](Peer& peer) { peer.CloseForWriting(); });
  poller_.WaitUntil([&] { return all(&Peer::Ended); }, Deadline::After(kAwaitEnd));
  poller_.Stop();
  ForEachPeer([](Peer& peer) {
    peer.Fail(Status(Code::kUnavailable, "the own endpoint is closed"), false);
  });
  poller_.Unwatch(acceptor_->fd());
  {
    const std::lock_guard lock(accepting_);
    acceptor_.reset();
  }
  std::unordered_map<uint64_t, std::shared_ptr<Socket>> rest;
  {
    const std::lock_guard lock(mutex_);
    rest = sockets_;
  }
  for (auto& [id, socket] : rest) socket->Close();
}

Peer& Hub::peer(int number) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Peer>& peer = peers_[number];
  if (peer == nullptr) peer = std::make_unique<Peer>(this, number);
  return *peer;
}

Status Hub::Watch(const std::shared_ptr<Socket>& socket) {
  {
    const std::lock_guard lock(mutex_);
    sockets_.emplace(socket->id(), socket);
  }
  return poller_.Watch(socket->fd(), socket->id(), kSocketEvents);
}

void Hub::Rearm(const Socket& socket) { poller_.Rearm(socket.fd(), socket.id(), kSocketEvents); }

void Hub::Forget(const Socket& socket) {
  poller_.Unwatch(socket.fd());
  std::shared_ptr<Socket> last;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto found = sockets_.find(socket.id());
  if (found == sockets_.end()) return;
  last = std::move(found->second);
  sockets_.erase(found);
}

void Hub::Handle(uint64_t id, uint32_t events) {
  if (id == kAcceptorId) return Accept();
  std::shared_ptr<Socket> socket;
  {
    const std::lock_guard lock(mutex_);
    const auto found = sockets_.find(id);
    if (found == sockets_.end()) return;
    socket = found->second;
  }
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) socket->ExpectEnd();
  socket->Handle();
}

void Hub::Accept() {
  const std::unique_lock lock(accepting_, std::try_to_lock);
  if (!lock || acceptor_ == nullptr) return;
  for (Acceptor::Accepted& accepted : acceptor_->Advance()) {
    (void)Watch(std::make_shared<Socket>(this, std::move(accepted.socket), accepted.process,
                                         accepted.stripe));
  }
}

MessageCounters Hub::counters() const {
  MessageCounters counters;
  counters.malformed = malformed_.load(std::memory_order_relaxed);
  counters.wakeups = poller_.wakeups();
  const std::lock_guard lock(accepting_);
  if (acceptor_ != nullptr) counters.refused = acceptor_->refused();
  return counters;
}

void Hub::CountMalformed(const std::string& what) {
  if (malformed_.fetch_add(1, std::memory_order_relaxed) == 0) {
    Log(LogLevel::kWarning, StrCat("tcp: a connection is closed that carries what is malformed, ",
                                   what, "; later ones are only counted"));
  }
}

}  // namespace jaxfabric::tcp
