#include "transport/tcp/socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <utility>

#include "transport/tcp/hub.h"
#include "transport/tcp/peer.h"

namespace jaxfabric::tcp {
namespace {

// What one thread receives before it looks at other sockets again.
constexpr size_t kTurnBytes = 1 << 20;

}  // namespace

Socket::Socket(Hub* hub, UniqueFd fd, Peer* peer, int lane, uint64_t attempt,
               const TcpAddress& address)
    : hub_(hub),
      fd_(std::move(fd)),
      id_(hub->NextId()),
      called_(false),
      address_(address),
      peer_(peer),
      lane_(lane),
      attempt_(attempt),
      stage_(Stage::kConnecting),
      reader_(this) {}

Socket::Socket(Hub* hub, UniqueFd fd, uint32_t caller, uint32_t lane)
    : hub_(hub),
      fd_(std::move(fd)),
      id_(hub->NextId()),
      called_(true),
      caller_(caller),
      lane_(static_cast<int>(lane)),
      stage_(Stage::kOpen),
      reader_(this) {}

void Socket::Handle() {
  // Whoever finds nobody at it handles everything, also what is reported meanwhile.
  if (events_.fetch_add(1, std::memory_order_acq_rel) != 0) return;
  uint32_t seen = 1;
  do {
    seen = events_.load(std::memory_order_acquire);
    Process();
  } while (events_.fetch_sub(seen, std::memory_order_acq_rel) != seen);
}

void Socket::Close() {
  if (closed_.exchange(true, std::memory_order_relaxed)) return;
  ended_.store(true, std::memory_order_seq_cst);
  ::shutdown(fd_.get(), SHUT_RDWR);
  hub_->Forget(*this);
}

void Socket::Process() {
  if (stage_ == Stage::kConnecting) FinishConnecting();
  if (stage_ == Stage::kHandshake) AdvanceHandshake();
  if (stage_ != Stage::kOpen || closed_.load(std::memory_order_relaxed)) return;
  do {
    Receive();
    if (peer_ == nullptr || !peer_->up()) return;
  } while (peer_->Send(lane_));
  // Another lane has ended, and all that came on this one before is taken.
  if (lane_ == 0 && peer_->ending() &&
      (reader_.state() != FrameReader::State::kAtFence || peer_->Unreachable(reader_.fence()))) {
    peer_->Finish();
  }
}

void Socket::FinishConnecting() {
  pollfd entry{fd_.get(), POLLOUT, 0};
  if (::poll(&entry, 1, 0) <= 0) return;
  if (Status status = FinishConnectTcp(fd_.get(), address_); !status.ok()) return End(status);
  stage_ = Stage::kHandshake;
  handshake_ = Handshake::Call(hub_->identity(), static_cast<uint32_t>(peer_->number()),
                               Purpose::kData, static_cast<uint32_t>(lane_));
}

void Socket::AdvanceHandshake() {
  const Handshake::Step step = handshake_->Advance(fd_.get());
  if (step == Handshake::Step::kSend || step == Handshake::Step::kReceive) return;
  Status status;
  if (step == Handshake::Step::kRefused) {
    const Refusal refusal = handshake_->refusal();
    status = Status(refusal == Refusal::kLeft ? Code::kUnavailable : Code::kUnauthenticated,
                    StrCat("what answers at ", address_.ToString(), " ", RefusalText(refusal)));
  } else {
    stage_ = Stage::kOpen;
    handshake_.reset();
    FrameHeader hello{.type = FrameType::kHello};
    hello.lane = static_cast<uint16_t>(lane_);
    hello.region = static_cast<uint32_t>(hub_->options().lanes);
    hello.offset = static_cast<uint64_t>(hub_->self());
    hello.value = attempt_;
    // A new socket has room for that.
    if (::send(fd_.get(), &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello)) return;
    status = ErrnoStatus("sending", errno);
  }
  End(status);
}

void Socket::Receive() {
  size_t turn = 0;
  bool more = true;
  while (more && !closed_.load(std::memory_order_relaxed)) {
    if (reader_.state() == FrameReader::State::kAtFence) {
      reader_.Resume();
      if (reader_.state() == FrameReader::State::kAtFence) {
        // seq_cst: as in applied().
        at_fence_.store(true, std::memory_order_seq_cst);
        reader_.Resume();
        if (reader_.state() == FrameReader::State::kAtFence) break;
      }
      at_fence_.store(false, std::memory_order_seq_cst);
    }
    if (reader_.state() == FrameReader::State::kMalformed) break;
    const std::span<const iovec> places = reader_.Prepare();
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(places.data());
    message.msg_iovlen = places.size();
    const ssize_t count = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT);
    const int error = errno;
    size_t room = 0;
    for (const iovec& place : places) room += place.iov_len;
    reader_.Received(count > 0 ? static_cast<size_t>(count) : 0);
    if (count > 0) {
      turn += static_cast<size_t>(count);
      if (turn >= kTurnBytes) {
        hub_->Rearm(*this);
        more = false;
      } else if (static_cast<size_t>(count) < room &&
                 !end_expected_.load(std::memory_order_relaxed)) {
        // All that was there: epoll tells of more, as it does after EAGAIN.
        more = reader_.state() == FrameReader::State::kAtFence;
      }
    } else if (count == 0) {
      End(Status(Code::kUnavailable, reader_.at_boundary()
                                         ? "it closed the connection"
                                         : "it closed the connection within a message"));
      more = false;
    } else if (error != EINTR) {
      if (error != EAGAIN && error != EWOULDBLOCK) End(ErrnoStatus("receiving", error));
      more = false;
    }
  }
  if (refused_) {
    Close();
  } else if (reader_.state() == FrameReader::State::kMalformed) {
    Malformed();
  }
  // Also what had been read before may have been done only now, behind a fence.
  if (!std::exchange(moved_, false)) return;
  if (peer_ != nullptr) peer_->WakeFences(this);
  if (std::exchange(arrived_, false) && hub_->arrival_handler) hub_->arrival_handler();
  hub_->poller().Changed();
}

void Socket::End(const Status& reason) {
  // Refusing after it has answered, the other end may only have called at the same time.
  const bool refused = stage_ != Stage::kConnecting && reason.code() == Code::kUnavailable;
  stage_ = Stage::kClosed;
  // seq_cst: as in applied().
  ended_.store(true, std::memory_order_seq_cst);
  if (peer_ != nullptr) {
    peer_->OnEnd(this, reason, refused);
  } else {
    Close();
  }
}

void Socket::Malformed() {
  stage_ = Stage::kClosed;
  const std::string from = peer_ == nullptr ? "a stranger" : StrCat("peer ", peer_->number());
  hub_->CountMalformed(StrCat("from ", from, ": ", reader_.error()));
  if (peer_ != nullptr) {
    peer_->Fail(Status(Code::kDataLoss, StrCat("it sent what is malformed: ", reader_.error())),
                true);
  }
  Close();
}

std::optional<std::span<std::byte>> Socket::Pin(const FrameHeader& header) {
  if (peer_ == nullptr) return std::nullopt;
  pinned_ = hub_->regions().Pin(header.region);
  if (pinned_ == nullptr) return std::span<std::byte>();
  const std::span<std::byte> memory = pinned_->memory;
  if (header.offset > memory.size() || header.length > memory.size() - header.offset) {
    Unpin(header);
    return std::nullopt;
  }
  return memory.subspan(header.offset, header.length);
}

void Socket::Unpin(const FrameHeader&) {
  if (pinned_ != nullptr) Regions::Unpin(std::exchange(pinned_, nullptr));
}

void Socket::CountData() {
  // seq_cst: as in applied(). This socket's handler alone writes it.
  applied_.store(applied_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
}

void Socket::OnPut() {
  moved_ = true;
  CountData();
}

const char* Socket::OnFrame(const FrameHeader& header) {
  moved_ = true;
  if (header.type == FrameType::kHello) return OnHello(header);
  if (peer_ == nullptr) return "comes before the caller has said who it is";
  if (lane_ != 0) return "does not belong on this connection";
  if (header.type == FrameType::kAccept) {
    if (called_) return "comes from a caller";
    peer_->OnAccept(header.value);
    return nullptr;
  }
  if (header.type == FrameType::kWord) {
    const FrameHeader place{.region = header.region, .length = 8, .offset = header.offset};
    const std::optional<std::span<std::byte>> word = Pin(place);
    if (!word) return "does not fit its region";
    if (word->data() != nullptr) {
      // release: with what came before it.
      std::atomic_ref(*reinterpret_cast<uint64_t*>(word->data()))
          .store(header.value, std::memory_order_release);
    }
    Unpin(place);
  }
  if (IsData(header.type)) {
    arrived_ = true;
    CountData();
  }
  return header.type == FrameType::kWord ? nullptr : peer_->OnFrame(header);
}

const char* Socket::OnHello(const FrameHeader& header) {
  if (!called_ || peer_ != nullptr) return "comes twice";
  if (header.region != static_cast<uint32_t>(hub_->options().lanes)) {
    return "has another number of connections: the setting must be the same in all processes";
  }
  if (header.offset != caller_ || header.lane != lane_ ||
      caller_ >= static_cast<uint32_t>(hub_->max_peers()) ||
      caller_ == static_cast<uint32_t>(hub_->self())) {
    return "is not the caller's";
  }
  peer_ = &hub_->peer(static_cast<int>(caller_));
  attempt_ = header.value;
  refused_ = !peer_->OnHello(shared_from_this());
  return refused_ ? "is not taken" : nullptr;
}

bool Socket::FenceReached(std::span<const uint64_t> counts) {
  return peer_ != nullptr && peer_->Reached(counts);
}

}  // namespace jaxfabric::tcp
