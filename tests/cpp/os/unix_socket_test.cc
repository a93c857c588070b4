#include "os/unix_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "os/mapping.h"
#include "os/open_fds.h"

namespace jaxfabric {
namespace {

std::vector<std::byte> Bytes(std::string_view text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

Deadline Soon() { return Deadline::AfterSeconds(30); }

// Both ends of one connection.
struct Connection {
  UniqueFd listener;
  UniqueFd client;
  UniqueFd server;
};

class UnixSocketTest : public ::testing::Test {
 protected:
  void SetUp() override {
    before_ = OpenFds();
    Result<UniqueFd> listener = ListenUnixSocket(&name_);
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    connection_.listener = std::move(*listener);
    Result<UniqueFd> client = ConnectUnixSocket(name_, Soon());
    ASSERT_TRUE(client.ok()) << client.status().ToString();
    connection_.client = std::move(*client);
    Result<std::optional<UniqueFd>> server = TryAcceptUnixSocket(connection_.listener.get());
    ASSERT_TRUE(server.ok() && server->has_value());
    connection_.server = std::move(**server);
  }
  void TearDown() override {
    connection_ = {};
    EXPECT_EQ(OpenFds(), before_) << "descriptors leaked";
  }

  int client() const { return connection_.client.get(); }
  int server() const { return connection_.server.get(); }

  std::string name_;
  Connection connection_;

 private:
  std::set<std::string> before_;
};

TEST_F(UnixSocketTest, NothingPendingIsNoError) {
  const Result<std::optional<UniqueFd>> accepted = TryAcceptUnixSocket(connection_.listener.get());
  ASSERT_TRUE(accepted.ok());
  EXPECT_FALSE(accepted->has_value());
  const Result<std::optional<SocketMessage>> received = TryReceiveMessage(server());
  ASSERT_TRUE(received.ok());
  EXPECT_FALSE(received->has_value());
}

TEST_F(UnixSocketTest, SocketsDoNotBlockAndCloseOnExec) {
  for (int fd : {connection_.listener.get(), client(), server()}) {
    EXPECT_NE(::fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  }
  EXPECT_EQ(name_.rfind("jaxfabric-", 0), 0u);
}

TEST_F(UnixSocketTest, CarriesWholeMessagesAndDescriptors) {
  Result<UniqueFd> memory = CreateSharedMemory("jaxfabric-test", 4096);
  ASSERT_TRUE(memory.ok());
  const std::vector<int> fds = {memory->get(), STDERR_FILENO};
  ASSERT_TRUE(SendMessage(client(), Bytes("first"), fds, Soon()).ok());
  ASSERT_TRUE(SendMessage(client(), Bytes("second message"), {}, Soon()).ok());

  Result<std::optional<SocketMessage>> first = TryReceiveMessage(server());
  ASSERT_TRUE(first.ok() && first->has_value());
  EXPECT_EQ((*first)->bytes, Bytes("first"));
  ASSERT_EQ((*first)->fds.size(), 2u);
  EXPECT_NE(::fcntl((*first)->fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(*SealedSize((*first)->fds[0].get()), 4096u);

  Result<std::optional<SocketMessage>> second = TryReceiveMessage(server());
  ASSERT_TRUE(second.ok() && second->has_value());
  EXPECT_EQ((*second)->bytes, Bytes("second message"));
  EXPECT_TRUE((*second)->fds.empty());
}

TEST_F(UnixSocketTest, LargestMessagePasses) {
  const std::vector<std::byte> bytes(kMaxSocketMessageBytes, std::byte{5});
  const std::vector<int> fds(kMaxSocketMessageFds, STDERR_FILENO);
  ASSERT_TRUE(SendMessage(client(), bytes, fds, Soon()).ok());
  Result<std::optional<SocketMessage>> received = TryReceiveMessage(server());
  ASSERT_TRUE(received.ok() && received->has_value());
  EXPECT_EQ((*received)->bytes, bytes);
  EXPECT_EQ((*received)->fds.size(), kMaxSocketMessageFds);
}

TEST_F(UnixSocketTest, EmptyAndOversizedAreRefusedBySender) {
  const std::vector<std::byte> large(kMaxSocketMessageBytes + 1);
  const std::vector<int> many(kMaxSocketMessageFds + 1, STDERR_FILENO);
  EXPECT_EQ(SendMessage(client(), {}, {}, Soon()).code(), Code::kInvalidArgument);
  EXPECT_EQ(SendMessage(client(), large, {}, Soon()).code(), Code::kInvalidArgument);
  EXPECT_EQ(SendMessage(client(), Bytes("x"), many, Soon()).code(), Code::kInvalidArgument);
}

// What a sender that does not keep our limits could send. TearDown finds a leaked descriptor.
void SendRaw(int socket, size_t bytes, size_t fd_count) {
  std::vector<char> data(bytes, 'x');
  std::vector<int> fds(fd_count, STDERR_FILENO);
  std::vector<char> control(CMSG_SPACE(fd_count * sizeof(int)));
  iovec vector{data.data(), data.size()};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
  std::memcpy(CMSG_DATA(part), fds.data(), fd_count * sizeof(int));
  ASSERT_EQ(::sendmsg(socket, &message, 0), static_cast<ssize_t>(bytes));
}

TEST_F(UnixSocketTest, TruncatedBytesAreRefused) {
  SendRaw(client(), kMaxSocketMessageBytes + 1, 3);
  EXPECT_EQ(TryReceiveMessage(server()).status().code(), Code::kInvalidArgument);
  ASSERT_TRUE(SendMessage(client(), Bytes("next"), {}, Soon()).ok());
  EXPECT_TRUE(TryReceiveMessage(server())->has_value()) << "the connection must stay usable";
}

TEST_F(UnixSocketTest, TruncatedDescriptorsAreRefused) {
  SendRaw(client(), 4, kMaxSocketMessageFds + 20);
  EXPECT_EQ(TryReceiveMessage(server()).status().code(), Code::kInvalidArgument);
}

TEST_F(UnixSocketTest, ClosedPeerIsUnavailable) {
  ASSERT_TRUE(SendMessage(client(), Bytes("last"), {}, Soon()).ok());
  connection_.client.Reset();
  EXPECT_TRUE(TryReceiveMessage(server())->has_value()) << "sent before it closed";
  EXPECT_EQ(TryReceiveMessage(server()).status().code(), Code::kUnavailable);
  EXPECT_EQ(SendMessage(server(), Bytes("x"), {}, Soon()).code(), Code::kUnavailable);
}

TEST_F(UnixSocketTest, WhatAPeerSentBeforeItClosedArrivesAlthoughItHasNotReadEverything) {
  ASSERT_TRUE(SendMessage(server(), Bytes("not read"), {}, Soon()).ok());
  ASSERT_TRUE(SendMessage(client(), Bytes("goodbye"), {}, Soon()).ok());
  connection_.client.Reset();
  const Result<std::optional<SocketMessage>> received = TryReceiveMessage(server());
  ASSERT_TRUE(received.ok()) << received.status().ToString();
  ASSERT_TRUE(received->has_value());
  EXPECT_EQ((*received)->bytes, Bytes("goodbye"));
  EXPECT_EQ(TryReceiveMessage(server()).status().code(), Code::kUnavailable);
}

TEST_F(UnixSocketTest, PeerThatDoesNotReadHitsTheDeadline) {
  const std::vector<std::byte> bytes(kMaxSocketMessageBytes);
  const Deadline deadline = Deadline::AfterSeconds(0.05);
  Status status;
  for (int i = 0; i < 10000 && status.ok(); ++i) {
    status = SendMessage(client(), bytes, {}, deadline);
  }
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
  EXPECT_TRUE(deadline.expired());
}

TEST_F(UnixSocketTest, NobodyListeningIsUnavailable) {
  connection_.listener.Reset();
  EXPECT_EQ(ConnectUnixSocket(name_, Soon()).status().code(), Code::kUnavailable);
  EXPECT_EQ(ConnectUnixSocket("", Soon()).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(ConnectUnixSocket(std::string(200, 'x'), Soon()).status().code(),
            Code::kInvalidArgument);
}

TEST_F(UnixSocketTest, FullBacklogHitsTheDeadline) {
  ASSERT_EQ(::listen(connection_.listener.get(), 0), 0);
  std::vector<UniqueFd> pending;
  Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) {
    Result<UniqueFd> socket = ConnectUnixSocket(name_, Deadline::AfterSeconds(0.02));
    status = socket.status();
    if (socket.ok()) pending.push_back(std::move(*socket));
  }
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
}

TEST_F(UnixSocketTest, SameUserIsAccepted) {
  const Result<PeerCredentials> credentials = CheckPeerCredentials(server());
  ASSERT_TRUE(credentials.ok()) << credentials.status().ToString();
  EXPECT_EQ(credentials->pid, ::getpid());
  EXPECT_EQ(credentials->uid, ::geteuid());
}

TEST_F(UnixSocketTest, OtherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const pid_t child = ::fork();
  if (child == 0) {
    const bool connected =
        ::setresuid(65534, 65534, 65534) == 0 && ConnectUnixSocket(name_, Soon()).ok();
    ::_exit(connected ? 0 : 1);
  }
  int exit_status = 0;
  ASSERT_EQ(::waitpid(child, &exit_status, 0), child);
  ASSERT_EQ(exit_status, 0);
  Result<std::optional<UniqueFd>> socket = TryAcceptUnixSocket(connection_.listener.get());
  ASSERT_TRUE(socket.ok() && socket->has_value());
  const Result<PeerCredentials> credentials = CheckPeerCredentials((*socket)->get());
  EXPECT_EQ(credentials.status().code(), Code::kPermissionDenied);
}

}  // namespace
}  // namespace jaxfabric
