// One connection of the control plane: whole messages, in order, both ways. Between processes of
// one host a unix socket, which carries descriptors too; between hosts TCP.
//
// Sending is for any thread, one at a time; receiving for one thread, at the same time. Nothing
// waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "os/fd.h"
#include "os/unix_socket.h"

namespace jaxfabric {

// How a connection ended.
enum class LinkEnd {
  kNone,
  kClosed,       // in order, or the process ended
  kReset,        // the process ended with something unread
  kUnreachable,  // no sign of life of the other host's kernel
  kGarbled,      // what came is no message
};

class Link {
 public:
  virtual ~Link() = default;
  int fd() const { return socket_.get(); }

  // Takes a whole message, or nothing. kDeadlineExceeded: no room for now; kUnavailable: the peer
  // is gone, which receiving tells too.
  virtual Status TrySend(std::span<const std::byte> bytes, std::span<const int> fds) = 0;
  // The socket is writable: sends more of what was taken. As TrySend.
  virtual Status Flush() = 0;
  // Whether it goes on once the socket is writable: there was no room in it, or Flush() has to be
  // called.
  virtual bool wants_room() const = 0;
  // One message if a whole one is there. An error: the connection is over, and end() tells how.
  virtual Result<std::optional<SocketMessage>> TryReceive() = 0;
  LinkEnd end() const { return end_; }

 protected:
  explicit Link(UniqueFd socket) : socket_(std::move(socket)) {}
  UniqueFd socket_;
  LinkEnd end_ = LinkEnd::kNone;  // the receiving thread's
};

class UnixLink : public Link {
 public:
  explicit UnixLink(UniqueFd socket) : Link(std::move(socket)) {}
  Status TrySend(std::span<const std::byte> bytes, std::span<const int> fds) override;
  Status Flush() override {
    full_ = false;
    return OkStatus();
  }
  bool wants_room() const override { return full_; }
  Result<std::optional<SocketMessage>> TryReceive() override;

 private:
  bool full_ = false;  // the sending threads'
};

// Frames on a TCP connection: u32 length, then the message; length 0 and a u32 tells how much the
// receiver has consumed.
//
// A sender has no more than kCredit under way that the receiving process has not consumed. So the
// kernel of a process that is stopped always has room and answers, and a connection without an
// answer means that the host is gone (TcpOptions::unreachable_after).
class TcpLink : public Link {
 public:
  // The first two messages of a connection fit, however long.
  static constexpr size_t kCredit = 192 * 1024;
  static constexpr size_t kConsumedEvery = kCredit / 4;
  // What the kernel of the receiver must be able to hold (TcpOptions::receive_buffer).
  static constexpr int kReceiveBuffer = 2 * kCredit;
  // A small message takes more of the kernel's memory than its bytes.
  static size_t Cost(size_t bytes) { return bytes + 1024; }

  explicit TcpLink(UniqueFd socket) : Link(std::move(socket)) {}
  ~TcpLink() override;
  Status TrySend(std::span<const std::byte> bytes, std::span<const int> fds) override;
  Status Flush() override;
  bool wants_room() const override;
  Result<std::optional<SocketMessage>> TryReceive() override;

 private:
  Status Write(std::span<const std::byte> bytes);  // with mutex_
  Status FlushLocked();
  std::optional<SocketMessage> TakeMessage();
  void Consumed(size_t bytes);
  Status Over(LinkEnd end, const char* text);

  mutable std::mutex mutex_;    // guards what is sent: the receiving thread sends what it consumed
  std::vector<std::byte> out_;  // taken, and not sent yet: less than two frames
  size_t under_way_ = 0;        // cost of what was sent and is not consumed
  LinkEnd send_end_ = LinkEnd::kNone;

  // The receiving thread's.
  std::vector<std::byte> in_;
  size_t begin_ = 0;
  size_t end_of_in_ = 0;
  size_t consumed_ = 0;  // cost, not told yet
};

}  // namespace jaxfabric
