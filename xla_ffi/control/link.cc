#include "control/link.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace jaxfabric {
namespace {

constexpr size_t kLengthBytes = 4;
constexpr size_t kConsumedBytes = 8;  // length 0, then the number

LinkEnd EndOf(int error_number) {
  switch (error_number) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EHOSTDOWN:
    case ENETDOWN:
      return LinkEnd::kUnreachable;
    default:
      return LinkEnd::kReset;
  }
}

}  // namespace

Status UnixLink::TrySend(std::span<const std::byte> bytes, std::span<const int> fds) {
  Status sent = SendMessage(fd(), bytes, fds, Deadline(Clock::now()));
  full_ = sent.code() == Code::kDeadlineExceeded;
  return sent;
}

Result<std::optional<SocketMessage>> UnixLink::TryReceive() {
  auto message = TryReceiveMessage(fd());
  if (!message.ok()) {
    const Code code = message.status().code();
    end_ = code == Code::kUnavailable       ? LinkEnd::kClosed
           : code == Code::kInvalidArgument ? LinkEnd::kGarbled
                                            : LinkEnd::kReset;
  }
  return message;
}

TcpLink::~TcpLink() {
  // Closed with something unread, it would take back what the peer has not received yet.
  ::shutdown(fd(), SHUT_WR);
  std::byte unread[4096];
  while (::recv(fd(), unread, sizeof(unread), MSG_DONTWAIT) > 0) {
  }
}

Status TcpLink::TrySend(std::span<const std::byte> bytes, std::span<const int> fds) {
  if (bytes.empty() || bytes.size() > kMaxSocketMessageBytes || !fds.empty()) {
    return Status(Code::kInvalidArgument,
                  StrCat("a message of ", bytes.size(), " bytes and ", fds.size(),
                         " descriptors to another host is empty or too large"));
  }
  std::lock_guard lock(mutex_);
  JF_RETURN_IF_ERROR(FlushLocked());
  const size_t cost = Cost(bytes.size());
  if (!out_.empty() || under_way_ + cost > kCredit) {
    return Status(Code::kDeadlineExceeded, "the other host's process does not read");
  }
  under_way_ += cost;
  std::vector<std::byte> frame(kLengthBytes + bytes.size());
  const auto length = static_cast<uint32_t>(bytes.size());
  std::memcpy(frame.data(), &length, kLengthBytes);
  std::memcpy(frame.data() + kLengthBytes, bytes.data(), bytes.size());
  return Write(frame);
}

Status TcpLink::Flush() {
  std::lock_guard lock(mutex_);
  return FlushLocked();
}

bool TcpLink::wants_room() const {
  std::lock_guard lock(mutex_);
  return !out_.empty();
}

Status TcpLink::FlushLocked() {
  if (out_.empty()) return OkStatus();
  std::vector<std::byte> rest;
  rest.swap(out_);
  return Write(rest);
}

Status TcpLink::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      bytes = bytes.subspan(static_cast<size_t>(sent));
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      out_.assign(bytes.begin(), bytes.end());
      return OkStatus();
    }
    // The kernel tells an error once: receiving would find a mere end.
    if (send_end_ == LinkEnd::kNone && errno != EPIPE) send_end_ = EndOf(errno);
    return Status(Code::kUnavailable, "the connection to another host's process has ended");
  }
  return OkStatus();
}

Status TcpLink::Over(LinkEnd end, const char* text) {
  end_ = end;
  if (end == LinkEnd::kClosed) {
    std::lock_guard lock(mutex_);
    if (send_end_ != LinkEnd::kNone) end_ = send_end_;
  }
  return Status(end_ == LinkEnd::kGarbled ? Code::kInvalidArgument : Code::kUnavailable, text);
}

Result<std::optional<SocketMessage>> TcpLink::TryReceive() {
  while (true) {
    const size_t have = end_of_in_ - begin_;
    uint32_t length = 0;
    if (have >= kLengthBytes) std::memcpy(&length, in_.data() + begin_, kLengthBytes);
    if (length > kMaxSocketMessageBytes) return Over(LinkEnd::kGarbled, "too long a message");
    size_t wanted = kConsumedBytes;
    if (have >= kLengthBytes && length > 0) wanted = kLengthBytes + length;
    if (have >= wanted && length == 0) {
      uint32_t consumed;
      std::memcpy(&consumed, in_.data() + begin_ + kLengthBytes, sizeof(consumed));
      begin_ += kConsumedBytes;
      std::lock_guard lock(mutex_);
      if (consumed > under_way_) return Over(LinkEnd::kGarbled, "more consumed than sent");
      under_way_ -= consumed;
      continue;
    }
    if (have >= kLengthBytes && length > 0 && have >= wanted) {
      SocketMessage message;
      const auto* begin = in_.data() + begin_ + kLengthBytes;
      message.bytes.assign(begin, begin + length);
      begin_ += wanted;
      Consumed(length);
      return std::optional<SocketMessage>(std::move(message));
    }
    // Room for what is missing, and for some more small ones.
    if (begin_ == end_of_in_) begin_ = end_of_in_ = 0;
    if (in_.size() - begin_ < std::max(wanted, size_t{1024})) {
      if (have > 0) std::memmove(in_.data(), in_.data() + begin_, have);
      begin_ = 0;
      end_of_in_ = have;
      in_.resize(std::max({in_.size(), wanted, size_t{4096}}));
    }
    const ssize_t received =
        ::recv(fd(), in_.data() + end_of_in_, in_.size() - end_of_in_, MSG_DONTWAIT);
    if (received > 0) {
      end_of_in_ += static_cast<size_t>(received);
      continue;
    }
    if (received == 0) return Over(LinkEnd::kClosed, "the peer closed its end");
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<SocketMessage>();
    return Over(EndOf(errno), "the connection to another host's process has ended");
  }
}

void TcpLink::Consumed(size_t bytes) {
  consumed_ += Cost(bytes);
  if (consumed_ < kConsumedEvery) return;
  std::byte frame[kConsumedBytes] = {};
  const auto consumed = static_cast<uint32_t>(consumed_);
  consumed_ = 0;
  std::memcpy(frame + kLengthBytes, &consumed, sizeof(consumed));
  std::lock_guard lock(mutex_);
  if (out_.empty()) {
    // An error is told by the next receive.
    if (!Write(frame).ok()) return;
  } else {
    out_.insert(out_.end(), std::begin(frame), std::end(frame));
  }
}

}  // namespace jaxfabric
