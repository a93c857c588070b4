#include "transport/tcp/peer.h"

#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/tcp/hub.h"
#include "transport/tcp/socket.h"

namespace jaxfabric::tcp {

Peer::Peer(Hub* hub, int number)
    : hub_(hub), number_(number), lanes_(static_cast<size_t>(hub->options().lanes)) {}

void Peer::SetAddress(const TcpAddress& address, uint64_t window_bytes) {
  const std::lock_guard lock(mutex_);
  if (address_) return;
  address_ = address;
  window_bytes_ = window_bytes;
}

Status Peer::failure() const {
  // acquire: the status was written before. It is the fast way to "none".
  if (!failed_.load(std::memory_order_acquire)) return OkStatus();
  const std::lock_guard lock(mutex_);
  return failure_;
}

Status Peer::status() const {
  if (aborted()) {
    return Status(Code::kAborted, StrCat("the channel to peer ", number_, " was aborted"));
  }
  return failure();
}

bool Peer::HasRoom() const {
  const std::lock_guard lock(mutex_);
  return CopiedBytes() <= hub_->options().max_queued_bytes / 2;
}

size_t Peer::CopiedBytes() const {
  size_t bytes = 0;
  for (const Lane& lane : lanes_) bytes += lane.queue.copied_bytes();
  return bytes;
}

Result<uint64_t> Peer::Post(const FrameHeader& header, std::span<const std::byte> body) {
  const std::lock_guard lock(mutex_);
  if (aborted()) {
    return Status(Code::kAborted, StrCat("the channel to peer ", number_, " was aborted"));
  }
  if (state_ == State::kFailed) return failure_;
  const size_t bytes = header.type == FrameType::kWord ? 8 : body.size();
  const uint64_t room = header.region == kWindowRegion ? window_bytes_ : ~uint64_t{0};
  const auto where = header.region == kWindowRegion ? "the window" : "any region";
  if (header.offset > room || bytes > room - header.offset) {
    return Status(Code::kOutOfRange,
                  StrCat("a put of ", bytes, " bytes at offset ", header.offset, " does not fit ",
                         where, " of peer ", number_, ", which has ", room, " bytes"));
  }
  if (CopiedBytes() > hub_->options().max_queued_bytes) {
    return Status(Code::kResourceExhausted,
                  StrCat("peer ", number_, " does not read: ", CopiedBytes(),
                         " bytes of small messages wait to be sent to it"));
  }
  const uint64_t ticket = ++posted_;
  unflushed_ = true;
  if (header.type == FrameType::kPut) {
    AppendPut(header, body, ticket);
  } else {
    AppendInOrder(header, {}, {}, ticket);
  }
  CallIfIdle();
  return ticket;
}

void Peer::AppendPut(const FrameHeader& header, std::span<const std::byte> body, uint64_t ticket) {
  const TcpTransportOptions& options = hub_->options();
  const auto append = [&](int lane, uint64_t begin, uint64_t end) {
    FrameHeader part = header;
    part.offset = begin;
    part.length = static_cast<uint32_t>(end - begin);
    const auto bytes = body.subspan(begin - header.offset, end - begin);
    const bool copied = bytes.size() <= kCopiedPutBytes;
    const auto none = std::span<const std::byte>();
    if (lane < 0) return AppendInOrder(part, copied ? bytes : none, copied ? none : bytes, ticket);
    AppendTo(lane, part, copied ? bytes : none, copied ? none : bytes, ticket);
  };
  const uint64_t end = header.offset + body.size();
  if (body.size() <= options.stripe_above || lanes_.size() == 1) {
    uint64_t begin = header.offset;
    do {
      const uint64_t stop = std::min<uint64_t>(end, begin + options.chunk_bytes);
      append(-1, begin, stop);
      begin = stop;
    } while (begin < end);
    return;
  }
  const Range& range = in_order_[header.region % in_order_.size()];
  if (header.offset < range.end && range.begin < end) FenceLanes(ticket);
  // Cut and dealt out by the place in the region, so that puts to one place stay on one lane.
  for (uint64_t begin = header.offset; begin < end;) {
    const uint64_t chunk = begin / options.chunk_bytes;
    const uint64_t stop = std::min<uint64_t>(end, (chunk + 1) * options.chunk_bytes);
    append(static_cast<int>(chunk % lanes_.size()), begin, stop);
    begin = stop;
  }
}

void Peer::AppendInOrder(const FrameHeader& header, std::span<const std::byte> copied,
                         std::span<const std::byte> body, uint64_t ticket) {
  std::vector<Lane>& lanes = lanes_;
  if (std::any_of(lanes.begin() + 1, lanes.end(),
                  [](const Lane& lane) { return lane.data_frames != lane.fenced; })) {
    std::array<uint64_t, kMaxLanes> counts{};
    for (size_t i = 1; i < lanes.size(); ++i) counts[i] = lanes[i].fenced = lanes[i].data_frames;
    const auto bytes = std::as_bytes(std::span(counts)).first(8 * lanes.size());
    FrameHeader fence{.type = FrameType::kFence};
    fence.length = static_cast<uint32_t>(bytes.size());
    AppendTo(0, fence, bytes, {}, ticket);
  }
  const uint64_t length = header.type == FrameType::kWord ? 8 : header.length;
  if (length != 0 && lanes.size() > 1) {
    Range& range = in_order_[header.region % in_order_.size()];
    const bool fresh = range.begin == range.end;
    range.begin = fresh ? header.offset : std::min(range.begin, header.offset);
    range.end = fresh ? header.offset + length : std::max(range.end, header.offset + length);
  }
  AppendTo(0, header, copied, body, ticket);
}

void Peer::FenceLanes(uint64_t ticket) {
  for (size_t i = 1; i < lanes_.size(); ++i) {
    const uint64_t count = lanes_[0].data_frames;
    FrameHeader fence{.type = FrameType::kFence};
    fence.length = sizeof(count);
    AppendTo(static_cast<int>(i), fence, std::as_bytes(std::span(&count, 1)), {}, ticket);
  }
  in_order_ = {};
}

void Peer::AppendTo(int lane, const FrameHeader& header, std::span<const std::byte> copied,
                    std::span<const std::byte> body, uint64_t ticket) {
  Lane& to = lanes_[static_cast<size_t>(lane)];
  to.queue.Append(header, copied, body, ticket);
  if (IsData(header.type)) ++to.data_frames;
}

Result<uint64_t> Peer::PostFlush() {
  const std::lock_guard lock(mutex_);
  if (!unflushed_) return flushes_;
  if (state_ == State::kFailed) return failure_;
  unflushed_ = false;
  FrameHeader flush{.type = FrameType::kFlush};
  flush.value = ++flushes_;
  AppendInOrder(flush, {}, {}, ++posted_);
  return flushes_;
}

Status Peer::Push() {
  bool more = false;
  for (size_t i = 0; i < lanes_.size(); ++i) more |= Send(static_cast<int>(i));
  // The rest in turn with what comes meanwhile: what lies in the kernel for long is read from
  // memory instead of a cache. `sockets_` is fixed, as something was sent.
  if (more) {
    for (const std::shared_ptr<Socket>& socket : sockets_) socket->Handle();
  }
  return status();
}

bool Peer::Send(int index) {
  constexpr size_t kParts = 32;
  constexpr size_t kBytesAtOnce = (256 << 10) + 4096;  // a segment with what is around it
  std::unique_lock lock(mutex_);
  Lane& lane = lanes_[static_cast<size_t>(index)];
  if (lane.sending) {
    lane.again = true;
    return false;
  }
  if (state_ != State::kUp || lane.queue.empty()) return false;
  const std::shared_ptr<Socket> socket = lane.socket;
  iovec parts[kParts];
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = lane.queue.Gather(parts, kBytesAtOnce);
  lane.sending = true;
  lane.again = false;
  lock.unlock();
  const ssize_t count = ::sendmsg(socket->fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  const int error = errno;
  lock.lock();
  lane.sending = false;
  if (count >= 0) {
    lane.queue.Consume(static_cast<size_t>(count));
    UpdateSent();
    const bool more = !lane.queue.empty() && state_ == State::kUp;
    lock.unlock();
    hub_->poller().Changed();
    return more;
  }
  // Somebody may have been told meanwhile that there is room, and has left it to this thread.
  if (error == EAGAIN || error == EWOULDBLOCK) return lane.again;
  lock.unlock();
  if (error == EINTR) return true;
  OnEnd(socket.get(), ErrnoStatus("sending", error), false);
  return false;
}

void Peer::UpdateSent() {
  uint64_t first = posted_ + 1;
  for (const Lane& lane : lanes_) {
    if (!lane.queue.empty()) first = std::min(first, lane.queue.first_ticket());
  }
  sent_.store(first - 1, std::memory_order_release);
}

const char* Peer::OnFrame(const FrameHeader& header) {
  switch (header.type) {
    case FrameType::kSignal:
      signals_.fetch_add(1, std::memory_order_release);
      return nullptr;
    case FrameType::kFlush:
      return PostControl(FrameType::kFlushed, header.value).ok() ? nullptr
                                                                 : "comes too often to be answered";
    case FrameType::kFlushed:
      flushed_.store(header.value, std::memory_order_release);
      return nullptr;
    case FrameType::kAbort:
      aborted_by_peer_.store(true, std::memory_order_release);
      return nullptr;
    case FrameType::kGoodbye: {
      uint64_t flush;
      {
        const std::lock_guard lock(mutex_);
        left_ = true;
        // Who has been told to flush, or is about to, learns whether all has come.
        if (std::exchange(unflushed_, false)) ++flushes_;
        flush = flushes_;
      }
      (void)PostControl(FrameType::kFarewell, flush);
      return nullptr;
    }
    default: {  // kFarewell
      (void)PostControl(FrameType::kFlushed, header.value);
      const std::lock_guard lock(mutex_);
      parted_ = true;
      return nullptr;
    }
  }
}

Status Peer::PostControl(FrameType type, uint64_t value) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kFailed) return OkStatus();
    if (CopiedBytes() > hub_->options().max_queued_bytes) {
      return Status(Code::kResourceExhausted, "too much is queued");
    }
    FrameHeader header{.type = type};
    header.value = value;
    AppendInOrder(header, {}, {}, ++posted_);
  }
  while (Send(0)) {
  }
  return OkStatus();
}

bool Peer::Reached(std::span<const uint64_t> counts) const {
  if (!up() || counts.size() > lanes_.size()) return false;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (sockets_[i]->applied() < counts[i]) return false;
  }
  return true;
}

bool Peer::Unreachable(std::span<const uint64_t> counts) const {
  if (counts.size() > lanes_.size()) return true;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (sockets_[i]->ended() && sockets_[i]->applied() < counts[i]) return true;
  }
  return false;
}

void Peer::WakeFences(const Socket* except) {
  if (!up()) return;
  for (const std::shared_ptr<Socket>& socket : sockets_) {
    if (socket.get() != except && socket->at_fence()) socket->Handle();
  }
}

}  // namespace jaxfabric::tcp
