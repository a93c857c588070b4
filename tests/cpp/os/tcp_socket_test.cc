#include "os/tcp_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>

#include <string>
#include <utility>
#include <vector>

#include "os/open_fds.h"
#include "os/poll.h"

namespace jaxfabric {
namespace {

Deadline Soon() { return Deadline::AfterSeconds(30); }

TcpAddress Ip(const std::string& ip, uint16_t port = 0) { return *TcpAddress::FromIp(ip, port); }

TEST(TcpAddressTest, TextGoesBothWays) {
  for (const char* text : {"10.0.0.1:4000", "0.0.0.0:0", "[fd00::1]:4000", "[::1]:65535"}) {
    const auto address = TcpAddress::Parse(text);
    ASSERT_TRUE(address.ok()) << address.status().ToString();
    EXPECT_EQ(address->ToString(), text);
    EXPECT_EQ(address->is_v6(), text[0] == '[');
    EXPECT_EQ(*TcpAddress::FromIp(address->ip(), address->port()), *address);
    const auto same = TcpAddress::FromSockaddr(address->get(), address->size());
    ASSERT_TRUE(same.ok());
    EXPECT_EQ(*same, *address);
  }
  EXPECT_EQ(Ip("10.1.2.3").ip_bytes(), std::string("\x0a\x01\x02\x03"));
  EXPECT_EQ(Ip("::1").ip_bytes(), std::string(15, '\0') + '\1');
}

TEST(TcpAddressTest, WhatIsNoAddressIsRefused) {
  for (const char* text :
       {"", ":", "10.0.0.1", "10.0.0.1:", "10.0.0.1:65536", "10.0.0.1:-1", "10.0.0.1: 1",
        "10.0.0.1:1x", "host:1", "10.0.0:1", "fd00::1:4000", "[fd00::1]", "[fd00::1:4000",
        "fd00::1]:1", "[10.0.0.1]:1", "[]:1", "[fe80::1%eth0]:1"}) {
    const auto address = TcpAddress::Parse(text);
    ASSERT_FALSE(address.ok()) << text;
    EXPECT_EQ(address.status().code(), Code::kInvalidArgument);
    EXPECT_NE(address.status().ToString().find(StrCat("\"", text, "\"")), std::string::npos);
  }
  sockaddr address{};
  address.sa_family = AF_UNIX;
  EXPECT_FALSE(TcpAddress::FromSockaddr(&address, sizeof(address)).ok());
}

TEST(PortRangeTest, Parses) {
  EXPECT_EQ(PortRange::Parse("40000-40100")->ToString(), "40000-40100");
  EXPECT_EQ(PortRange::Parse("40000")->ToString(), "40000");
  EXPECT_EQ(PortRange::Parse("")->ToString(), "any");
  for (const char* text : {"0", "0-5", "5-4", "-5", "5-", "1-65536", "a-b", "1-2-3", "1 - 2"}) {
    EXPECT_FALSE(PortRange::Parse(text).ok()) << text;
  }
}

// With both families: a machine without IPv6 skips its half.
class TcpSocketTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    before_ = OpenFds();
    address_ = Ip(GetParam());
    Result<UniqueFd> listener = ListenTcp(&address_, {});
    if (!listener.ok() && address_.is_v6()) GTEST_SKIP() << listener.status().ToString();
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    listener_ = std::move(*listener);
  }
  void TearDown() override {
    listener_.Reset();
    EXPECT_EQ(OpenFds(), before_) << "descriptors leaked";
  }
  std::pair<UniqueFd, UniqueFd> Pair(const TcpOptions& options) {
    Result<UniqueFd> client = ConnectTcp(address_, options, Soon());
    EXPECT_TRUE(client.ok()) << client.status().ToString();
    EXPECT_TRUE(WaitForSocket(listener_.get(), POLLIN, Soon()));
    TcpAddress peer;
    auto server = TryAcceptTcp(listener_.get(), &peer);
    EXPECT_TRUE(server.ok() && server->has_value());
    EXPECT_EQ(peer, *LocalTcpAddress(client->get()));
    return {std::move(*client), std::move(**server)};
  }

  TcpAddress address_;
  UniqueFd listener_;

 private:
  std::set<std::string> before_;
};

INSTANTIATE_TEST_SUITE_P(, TcpSocketTest, ::testing::Values("127.0.0.1", "::1"),
                         [](const auto& test) { return test.param[0] == ':' ? "V6" : "V4"; });

TEST_P(TcpSocketTest, ConnectsAndCarriesBytes) {
  EXPECT_NE(address_.port(), 0);
  const auto [client, server] = Pair({});
  ASSERT_EQ(::send(client.get(), "hello", 5, MSG_NOSIGNAL), 5);
  ASSERT_TRUE(WaitForSocket(server.get(), POLLIN, Soon()));
  char text[8];
  EXPECT_EQ(::recv(server.get(), text, sizeof(text), 0), 5);
  for (int fd : {listener_.get(), client.get(), server.get()}) {
    EXPECT_NE(::fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  }
}

TEST_P(TcpSocketTest, NothingPendingIsNoError) {
  TcpAddress peer;
  const auto accepted = TryAcceptTcp(listener_.get(), &peer);
  ASSERT_TRUE(accepted.ok());
  EXPECT_FALSE(accepted->has_value());
}

int Option(int socket, int level, int option) {
  int value = -1;
  socklen_t size = sizeof(value);
  EXPECT_EQ(::getsockopt(socket, level, option, &value, &size), 0);
  return value;
}

TEST_P(TcpSocketTest, AppliesOptions) {
  TcpOptions options;
  options.send_buffer = 100'000;
  options.receive_buffer = 90'000;
  options.unreachable_after = std::chrono::seconds(10);
  const auto [client, server] = Pair(options);
  const int fd = client.get();
  EXPECT_EQ(Option(fd, IPPROTO_TCP, TCP_NODELAY), 1);
  EXPECT_EQ(Option(fd, SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(Option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT), 10'000);
  const int idle = Option(fd, IPPROTO_TCP, TCP_KEEPIDLE);
  EXPECT_EQ(idle + Option(fd, IPPROTO_TCP, TCP_KEEPINTVL) * Option(fd, IPPROTO_TCP, TCP_KEEPCNT),
            10);
  EXPECT_GE(Option(fd, SOL_SOCKET, SO_SNDBUF), 100'000);
  EXPECT_GE(Option(fd, SOL_SOCKET, SO_RCVBUF), 90'000);
  // As it comes: none of it.
  EXPECT_EQ(Option(server.get(), SOL_SOCKET, SO_KEEPALIVE), 0);
}

std::string CongestionControl(int socket) {
  char name[16] = "";
  socklen_t size = sizeof(name);
  EXPECT_EQ(::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size), 0);
  return name;
}

TEST_P(TcpSocketTest, CongestionControlIsThatOfBothEnds) {
  TcpOptions options;
  options.congestion_control = "reno";
  ASSERT_TRUE(SetTcpOptions(listener_.get(), options).ok());
  const auto [client, server] = Pair(options);
  EXPECT_EQ(CongestionControl(client.get()), "reno");
  EXPECT_EQ(CongestionControl(server.get()), "reno");
}

TEST(CongestionControlTest, IsAsTheSystemsButForBbr) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const std::string usual = CongestionControl(socket.get());
  ASSERT_TRUE(SetCongestionControl(socket.get(), "system").ok());
  EXPECT_EQ(CongestionControl(socket.get()), usual);
  ASSERT_TRUE(SetCongestionControl(socket.get(), "reno").ok());
  ASSERT_TRUE(SetCongestionControl(socket.get(), "auto").ok());
  EXPECT_EQ(CongestionControl(socket.get()), "reno");
  if (!SetCongestionControl(socket.get(), "bbr").ok()) GTEST_SKIP() << "the kernel has no bbr";
  ASSERT_TRUE(SetCongestionControl(socket.get(), "auto").ok());
  EXPECT_FALSE(CongestionControl(socket.get()).starts_with("bbr"));
}

TEST(CongestionControlTest, AnUnknownOneIsNamed) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const Status status = SetCongestionControl(socket.get(), "no_such_one");
  EXPECT_NE(status.ToString().find("tcp_congestion_control \"no_such_one\" (allowed to every"),
            std::string::npos)
      << status.ToString();
  EXPECT_NE(status.ToString().find("reno"), std::string::npos) << status.ToString();
}

TEST_P(TcpSocketTest, NobodyListeningIsUnavailable) {
  listener_.Reset();
  const Status status = ConnectTcp(address_, {}, Soon()).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.ToString().find(address_.ToString()), std::string::npos);
}

TEST_P(TcpSocketTest, AFullBacklogHitsTheDeadline) {
  ASSERT_EQ(::listen(listener_.get(), 0), 0);
  std::vector<UniqueFd> pending;
  Status status;
  for (int i = 0; i < 20 && status.ok(); ++i) {
    Result<UniqueFd> socket = ConnectTcp(address_, {}, Deadline::AfterSeconds(0.05));
    status = socket.status();
    if (socket.ok()) pending.push_back(std::move(*socket));
  }
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
}

TEST_P(TcpSocketTest, APortRangeThatIsUsedUpIsNamed) {
  // Ports that are free now; some other program may take them, which changes nothing.
  const uint16_t taken = address_.port();
  TcpAddress again = Ip(GetParam());
  const Status status = ListenTcp(&again, {taken, taken}).status();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  const std::string text = status.ToString();
  EXPECT_NE(text.find("port range exhausted"), std::string::npos) << text;
  EXPECT_NE(text.find(StrCat(taken)), std::string::npos) << text;
  EXPECT_NE(text.find("net_port_range"), std::string::npos) << text;
  EXPECT_NE(text.find(GetParam()), std::string::npos) << text;
}

TEST_P(TcpSocketTest, APortRangeGivesItsPorts) {
  std::vector<UniqueFd> listeners;
  const uint16_t first = address_.port();
  if (first > 65000) GTEST_SKIP() << "at the end of the ports";
  const auto last = static_cast<uint16_t>(first + 500);
  std::set<uint16_t> ports;
  for (int i = 0; i < 5; ++i) {
    TcpAddress address = Ip(GetParam());
    Result<UniqueFd> listener = ListenTcp(&address, {first, last});
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    listeners.push_back(std::move(*listener));
    EXPECT_GT(address.port(), first);  // which is taken
    EXPECT_LE(address.port(), last);
    ports.insert(address.port());
  }
  EXPECT_EQ(ports.size(), 5u);
}

TEST(TcpListenTest, AnAddressOfAnotherHostIsRefused) {
  TcpAddress address = Ip("192.0.2.1");  // for documentation: nobody's
  const Status status = ListenTcp(&address, {}).status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.ToString().find("192.0.2.1"), std::string::npos) << status.ToString();
}

TEST(TcpListenTest, APortThatConnectionsHaveJustLeftCanBeTaken) {
  TcpAddress address = Ip("127.0.0.1");
  Result<UniqueFd> listener = ListenTcp(&address, {});
  ASSERT_TRUE(listener.ok());
  Result<UniqueFd> client = ConnectTcp(address, {}, Soon());
  ASSERT_TRUE(client.ok());
  TcpAddress peer;
  ASSERT_TRUE(WaitForSocket(listener->get(), POLLIN, Soon()));
  auto server = TryAcceptTcp(listener->get(), &peer);
  ASSERT_TRUE(server.ok() && server->has_value());
  (*server)->Reset();  // closes first: its port stays in TIME_WAIT
  client->Reset();
  listener->Reset();
  TcpAddress again = Ip("127.0.0.1");
  EXPECT_TRUE(ListenTcp(&again, {address.port(), address.port()}).ok());
}

}  // namespace
}  // namespace jaxfabric
