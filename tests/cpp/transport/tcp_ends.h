// Endpoints of the tcp transport in one process, and a peer that sends what it likes.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "os/handshake.h"
#include "os/poll.h"
#include "transport/ranks.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/tcp.h"

namespace jaxfabric::tcp {

using Bytes = std::vector<std::byte>;

inline Bytes Filled(size_t size, int seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>(i * 37 + (i >> 8) + static_cast<size_t>(seed));
  }
  return bytes;
}

// One endpoint with channels to others, and what its handlers were told.
class End {
 public:
  static TcpTransportOptions Options() {
    TcpTransportOptions options;
    options.secret = "a secret of this test";
    options.stripe_above = 8192;
    options.chunk_bytes = 4096;
    return options;
  }

  End(int number, int peers, const TcpTransportOptions& options = Options(),
      size_t window = 1 << 20) {
    Result<std::unique_ptr<MessageEndpoint>> bound = BindTcp(options, number, peers, window);
    EXPECT_TRUE(bound.ok()) << bound.status().ToString();
    endpoint = std::move(*bound);
    endpoint->SetArrivalHandler([this] { arrivals.fetch_add(1); });
    endpoint->SetLostHandler([this](int peer, const Status& reason) {
      const std::lock_guard lock(mutex_);
      lost_.emplace_back(peer, reason);
    });
    channels.resize(static_cast<size_t>(peers));
  }

  void Connect(int peer, const End& other) {
    auto channel = endpoint->ConnectMessages(other.endpoint->address());
    ASSERT_TRUE(channel.ok()) << channel.status().ToString();
    channels[static_cast<size_t>(peer)] = std::move(*channel);
  }
  MessageChannel& to(int peer) { return *channels[static_cast<size_t>(peer)]; }
  uint64_t Word(size_t offset) const {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(endpoint->window().data() + offset))
        .load(std::memory_order_acquire);
  }
  bool Holds(size_t offset, const Bytes& bytes) const {
    return std::memcmp(endpoint->window().data() + offset, bytes.data(), bytes.size()) == 0;
  }
  // False if it takes too long.
  template <class Done>
  bool Await(Done done, double seconds = 30) {
    const Deadline deadline = Deadline::AfterSeconds(seconds);
    while (!done()) {
      if (deadline.expired()) return false;
      endpoint->Progress(std::chrono::milliseconds(20));
    }
    return true;
  }
  bool AwaitWord(size_t offset, uint64_t value) {
    return Await([&] { return Word(offset) == value; });
  }
  std::vector<std::pair<int, Status>> lost() {
    const std::lock_guard lock(mutex_);
    return lost_;
  }

  std::atomic<int> arrivals{0};

 private:
  std::mutex mutex_;
  std::vector<std::pair<int, Status>> lost_;

 public:  // the last to be made and the first to go: its handlers use the others
  std::unique_ptr<MessageEndpoint> endpoint;
  std::vector<std::unique_ptr<MessageChannel>> channels;
};

// A process that knows the secret, calls an endpoint, and then sends what a test wants.
class RawPeer {
 public:
  // Opens the lanes; with `hello` also says so on each, and waits until it is accepted.
  RawPeer(const End& called, int lanes, bool hello = true, int number = 1, int called_number = 0) {
    JobIdentity own{End::Options().secret, 0, static_cast<uint32_t>(number), 2};
    for (int lane = 0; lane < lanes; ++lane) {
      Result<UniqueFd> fd =
          CallProcess(Address(called), {}, own, static_cast<uint32_t>(called_number),
                      Purpose::kData, static_cast<uint32_t>(lane), TestDeadline());
      EXPECT_TRUE(fd.ok()) << fd.status().ToString();
      fds.push_back(std::move(*fd));
      if (!hello) continue;
      FrameHeader header{.type = FrameType::kHello};
      header.lane = static_cast<uint16_t>(lane);
      header.region = static_cast<uint32_t>(lanes);
      header.offset = static_cast<uint64_t>(number);
      header.value = 77;
      Send(lane, header);
    }
    if (hello) {
      EXPECT_EQ(Receive(0).type, FrameType::kAccept);
    }
  }

  // From what the endpoint publishes: "ip:port" within it.
  static TcpAddress Address(const End& end) { return Address(*end.endpoint); }
  static TcpAddress Address(const MessageEndpoint& endpoint) {
    const Bytes bytes = endpoint.address().bytes;
    return *TcpAddress::Parse(reinterpret_cast<const char*>(bytes.data()) + 24);
  }

  void Send(int lane, const FrameHeader& header, std::span<const std::byte> body = {}) {
    SendBytes(lane, std::as_bytes(std::span(&header, 1)));
    SendBytes(lane, body);
  }
  void SendBytes(int lane, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const int fd = fds[static_cast<size_t>(lane)].get();
      const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) bytes = bytes.subspan(static_cast<size_t>(sent));
      if (sent < 0 && errno != EAGAIN) return;  // the other end may have closed it
      if (sent < 0 && !WaitForSocket(fd, POLLOUT, Deadline::AfterSeconds(5))) return;
    }
  }
  void Put(int lane, uint64_t offset, const Bytes& body, uint32_t region = 0) {
    FrameHeader header{.type = FrameType::kPut};
    header.region = region;
    header.offset = offset;
    header.length = static_cast<uint32_t>(body.size());
    Send(lane, header, body);
  }
  void Word(uint64_t offset, uint64_t value) {
    FrameHeader header{.type = FrameType::kWord};
    header.offset = offset;
    header.value = value;
    Send(0, header);
  }
  void Fence(int lane, const std::vector<uint64_t>& counts) {
    FrameHeader header{.type = FrameType::kFence};
    header.length = static_cast<uint32_t>(8 * counts.size());
    Send(lane, header, std::as_bytes(std::span(counts)));
  }
  // The next frame without a body; zeros if the connection ends.
  FrameHeader Receive(int lane) {
    FrameHeader header{.magic = 0};
    const int fd = fds[static_cast<size_t>(lane)].get();
    for (size_t got = 0; got < sizeof(header);) {
      if (!WaitForSocket(fd, POLLIN, TestDeadline())) break;
      const ssize_t count =
          ::recv(fd, reinterpret_cast<char*>(&header) + got, sizeof(header) - got, 0);
      if (count <= 0) return {.magic = 0};
      got += static_cast<size_t>(count);
    }
    return header;
  }
  // True if the other end closes this lane.
  bool IsClosed(int lane) {
    const int fd = fds[static_cast<size_t>(lane)].get();
    static char bytes[1 << 16];
    for (;;) {
      if (!WaitForSocket(fd, POLLIN, TestDeadline())) return false;
      const ssize_t count = ::recv(fd, bytes, sizeof(bytes), 0);
      if (count == 0 || (count < 0 && errno != EAGAIN)) return true;
    }
  }

  std::vector<UniqueFd> fds;
};

}  // namespace jaxfabric::tcp
