// The control plane between hosts: who is let in, what ends a connection, and what does not.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/meshes.h"
#include "os/open_fds.h"
#include "os/poll.h"
#include "os/strangers.h"

namespace jaxfabric {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class MeshTcpTest : public MeshTest {};

TEST_F(MeshTcpTest, ProcessesOfSeveralHostsExchangeMessages) {
  fds_ = {STDERR_FILENO};
  Create(5, 2);
  StartConnecting();
  FinishConnecting();
  Start();
  // Descriptors only reach the same host.
  EXPECT_EQ(greetings_[0][1].hello.fds.size(), 0u);
  EXPECT_EQ(greetings_[0][1].credentials.pid, 0);
  EXPECT_EQ(greetings_[0][2].hello.fds.size(), 1u);
  EXPECT_EQ(greetings_[0][2].credentials.pid, ::getpid());
  EXPECT_EQ(greetings_[4][1].hello.fds.size(), 0u);
  EXPECT_EQ(greetings_[3][1].hello.fds.size(), 1u);
  ExpectEveryMessageInOrder();
  meshes_[1]->Stop();
  for (int other : {0, 2, 3, 4}) {
    EXPECT_EQ(inboxes_[static_cast<size_t>(other)].WaitUntilGone(1), LinkEnd::kClosed);
  }
}

// One read of a connection brings the answer that is waited for, and what a peer that is ahead has
// sent after it.
TEST_F(MeshTcpTest, MessagesBehindAnAnswerAreNotLeftLying) {
  Create(2, 2);
  StartConnecting();
  FinishConnecting();
  ASSERT_TRUE(connected_[0].ok() && connected_[1].ok());
  meshes_[1]->Start(inboxes_[1].Handlers());
  for (const uint64_t i : {1, 2, 3}) meshes_[1]->Broadcast(WireWriter(MessageType::kRetire).Add(i));
  const WireWriter own(MessageType::kReady);
  ASSERT_TRUE(meshes_[0]->Exchange(own, {}, Deadline::AfterSeconds(20)).ok());
  meshes_[0]->Start(inboxes_[0].Handlers());
  EXPECT_EQ(inboxes_[0].WaitForMessages(2).size(), 2u);
}

TEST_F(MeshTcpTest, OverIPv6) {
  TcpAddress address = *TcpAddress::FromIp("::1", 0);
  if (!ListenTcp(&address, {}).ok()) GTEST_SKIP() << "no IPv6 here";
  Create(2, 2, "::1");
  EXPECT_EQ(meshes_[0]->tcp_address().rfind("[::1]:", 0), 0u);
  StartConnecting();
  FinishConnecting();
  Start();
  ExpectEveryMessageInOrder();
}

TEST_F(MeshTcpTest, SixtyFourHostsConnectQuickly) {
  const auto before = OpenFds();
  const auto begin = Clock::now();
  Create(64, 64);
  StartConnecting(60);
  FinishConnecting();
  const double took = std::chrono::duration<double>(Clock::now() - begin).count();
  RecordProperty("seconds", std::to_string(took));
  std::printf("64 processes connected in %.3f s\n", took);
  Start();
  for (auto& mesh : meshes_) EXPECT_EQ(mesh->dropped_messages() + mesh->refused_connections(), 0u);
  meshes_.clear();
  EXPECT_EQ(OpenFds(), before) << "descriptors leaked";
}

TEST_F(MeshTcpTest, WithoutSecretOrNetworkThereIsAnError) {
  Create(2, 2);
  jobs_[0].secret = "short";
  const auto status =
      meshes_[0]->Connect(Peers(0), jobs_[0], Hello(0).bytes(), {}, Deadline::AfterSeconds(1));
  EXPECT_EQ(status.status().code(), Code::kInvalidArgument);
  auto alone = Mesh::Create(0, 2);
  ASSERT_TRUE(alone.ok());
  const auto refused =
      (*alone)->Connect(Peers(0), jobs_[1], Hello(0).bytes(), {}, Deadline::AfterSeconds(1));
  EXPECT_EQ(refused.status().code(), Code::kFailedPrecondition);
}

TEST_F(MeshTcpTest, AProcessWithAnotherSecretOrOfAnotherStartIsKeptOut) {
  for (bool secret : {true, false}) {
    meshes_.clear();
    jobs_.clear();
    Create(2, 2);
    if (secret) {
      jobs_[1].secret[31] ^= 1;
    } else {
      jobs_[1].incarnation = 2;
    }
    StartConnecting(0.5);
    FinishConnecting();
    EXPECT_EQ(connected_[0].code(), Code::kDeadlineExceeded);
    EXPECT_EQ(connected_[1].code(), secret ? Code::kUnauthenticated : Code::kUnavailable);
    EXPECT_NE(connected_[1].ToString().find("process 0"), std::string::npos)
        << connected_[1].ToString();
    EXPECT_GE(meshes_[0]->refused_connections(), 1u);
  }
}

TEST_F(MeshTcpTest, StrangersDoNotKeepTheJobFromConnecting) {
  Create(3, 3);
  const TcpAddress address = *TcpAddress::Parse(meshes_[0]->tcp_address());
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 300; ++i) {
    auto socket = ConnectTcp(address, {}, Deadline::AfterSeconds(20));
    ASSERT_TRUE(socket.ok()) << socket.status().ToString();
    const std::string text(static_cast<size_t>(i * 7 % 200), static_cast<char>(i));
    if (!text.empty()) ::send(socket->get(), text.data(), text.size(), MSG_NOSIGNAL);
    strangers.push_back(*std::move(socket));
  }
  StartConnecting();
  FinishConnecting();
  Start();
  EXPECT_GE(meshes_[0]->refused_connections(), 40u);
  ExpectEveryMessageInOrder();
}

class MeshStrangersTest : public MeshTcpTest, public ::testing::WithParamInterface<Stranger> {};

// Process 1 comes last.
TEST_P(MeshStrangersTest, AreCountedAndLoggedOnceAndTheJobConnects) {
  // More than there are handshakes at a time: those who are silent make room for others.
  constexpr int kCount = 300;
  Create(2, 2);
  const TcpAddress address = *TcpAddress::Parse(meshes_[0]->tcp_address());
  const JobIdentity own{jobs_[1].secret, jobs_[1].incarnation, 1, 2};
  ::testing::internal::CaptureStderr();
  std::thread first([&] {
    auto greetings =
        meshes_[0]->Connect(Peers(0), jobs_[0], Hello(0).bytes(), fds_, Deadline::AfterSeconds(60));
    connected_[0] = greetings.status();
    if (greetings.ok()) greetings_[0] = *std::move(greetings);
  });
  const auto strangers = CallByStrangers(GetParam(), kCount, address, own, 0, Purpose::kControl);
  auto greetings =
      meshes_[1]->Connect(Peers(1), jobs_[1], Hello(1).bytes(), fds_, Deadline::AfterSeconds(60));
  connected_[1] = greetings.status();
  first.join();
  Start();
  ExpectEveryMessageInOrder();
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(LinesIn(log), 1) << log;
  EXPECT_NE(log.find("was refused: it "), std::string::npos) << log;
  const uint64_t refused = meshes_[0]->refused_connections();
  if (GetParam() == Stranger::kHalfHeader) {
    EXPECT_GE(refused, 40u);
  } else {
    EXPECT_EQ(refused, static_cast<uint64_t>(kCount));
  }
}

INSTANTIATE_TEST_SUITE_P(Each, MeshStrangersTest, ::testing::ValuesIn(kStrangers), StrangerName);

// Process 0 has a mesh; process 1, on another host, speaks through a link of its own.
class MeshPeerTest : public MeshTcpTest {
 protected:
  void Connect(Clock::duration unreachable_after = seconds(10)) {
    unreachable_after_ = unreachable_after;
    const auto later = Deadline::AfterSeconds(20);
    auto mesh = Mesh::Create(
        0, 2, Mesh::Network{*TcpAddress::FromIp("127.0.0.1", 0), {}, unreachable_after});
    ASSERT_TRUE(mesh.ok()) << mesh.status().ToString();
    meshes_.push_back(*std::move(mesh));
    const std::string secret = "0123456789abcdef0123456789abcdef";
    std::thread peer([&] {
      TcpOptions options;
      options.receive_buffer = TcpLink::kReceiveBuffer;
      auto socket = CallProcess(*TcpAddress::Parse(meshes_[0]->tcp_address()), options,
                                {secret, 1, 1, 2}, 0, Purpose::kControl, 0, later);
      ASSERT_TRUE(socket.ok()) << socket.status().ToString();
      link_ = std::make_unique<TcpLink>(*std::move(socket));
      ASSERT_TRUE(link_->TrySend(Hello(1).bytes(), {}).ok());
      ASSERT_EQ(Receive().size(), Hello(0).bytes().size());
    });
    const auto greetings = meshes_[0]->Connect({{}, {false, "", "127.0.0.1:1"}}, {secret, 1},
                                               Hello(0).bytes(), {}, later);
    peer.join();
    ASSERT_TRUE(greetings.ok()) << greetings.status().ToString();
    meshes_[0]->Start(inbox_.Handlers());
  }
  // The next message; empty at the end.
  std::vector<std::byte> Receive() {
    while (true) {
      auto message = link_->TryReceive();
      if (!message.ok()) return {};
      if (*message) return (*message)->bytes;
      if (!WaitForSocket(link_->fd(), POLLIN, Deadline::AfterSeconds(20))) return {};
    }
  }
  void SendRaw(std::string_view bytes) {
    ASSERT_EQ(::send(link_->fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void SendNumber(uint64_t number) {
    WireWriter message(MessageType::kRetire);
    meshes_[0]->Send(1, message.Add(number));
  }
  // Nothing arrives at the peer's socket any more, and so it answers nothing either.
  void CutOff() {
    sock_filter nothing = {BPF_RET | BPF_K, 0, 0, 0};
    const sock_fprog program = {1, &nothing};
    ASSERT_EQ(::setsockopt(link_->fd(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)),
              0);
  }
  void Restore() {
    const int unused = 0;
    ASSERT_EQ(::setsockopt(link_->fd(), SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof(unused)), 0);
  }
  void TearDown() override {
    link_.reset();
    MeshTcpTest::TearDown();
  }

  std::unique_ptr<TcpLink> link_;
  Inbox inbox_;
};

TEST_F(MeshPeerTest, MalformedMessagesAreCountedAndTheRestArrives) {
  Connect();
  WireWriter good(MessageType::kRetire);
  good.Add(uint64_t{1});
  size_t bad = 0;
  for (size_t size = 1; size < good.bytes().size(); ++size, ++bad) {
    ASSERT_TRUE(link_->TrySend(good.bytes().first(size), {}).ok());
  }
  ASSERT_TRUE(link_->TrySend(good.bytes(), {}).ok());
  // Byte by byte, too.
  std::string frame(4, '\0');
  frame[0] = static_cast<char>(good.bytes().size());
  frame.append(reinterpret_cast<const char*>(good.bytes().data()), good.bytes().size());
  for (char byte : frame) SendRaw({&byte, 1});
  EXPECT_EQ(inbox_.WaitForMessages(2).size(), 2u);
  EXPECT_EQ(meshes_[0]->dropped_messages(), bad);
  link_.reset();
  EXPECT_EQ(inbox_.WaitUntilGone(1), LinkEnd::kClosed);
}

TEST_F(MeshPeerTest, WhatIsNoFrameEndsTheConnection) {
  for (const std::string& frame :
       {std::string("\x01\x00\x01\x00", 4), std::string("\xff\xff\xff\xff", 4),
        std::string("\0\0\0\0\xff\xff\xff\xff", 8)}) {
    Connect();
    SendRaw(frame);
    EXPECT_EQ(inbox_.WaitUntilGone(1), LinkEnd::kGarbled);
    SendNumber(1);  // without effect
    meshes_[0]->Stop();
    meshes_.clear();
    inbox_.Forget();
  }
}

TEST_F(MeshPeerTest, AResetIsTold) {
  Connect();
  sockaddr nobody{};
  nobody.sa_family = AF_UNSPEC;  // aborts the connection
  ASSERT_EQ(::connect(link_->fd(), &nobody, sizeof(nobody)), 0);
  EXPECT_EQ(inbox_.WaitUntilGone(1), LinkEnd::kReset);
}

TEST_F(MeshPeerTest, WhatWasSentBeforeTheEndArrivesAlthoughNotAllWasRead) {
  Connect();
  for (uint64_t i = 0; i < 50; ++i) SendNumber(i);
  WireWriter last(MessageType::kGoodbye);
  ASSERT_TRUE(link_->TrySend(last.Add(uint64_t{0}).bytes(), {}).ok());
  link_.reset();
  ASSERT_EQ(inbox_.WaitForMessages(1).size(), 1u);
  EXPECT_EQ(inbox_.WaitForMessages(1)[0].type, MessageType::kGoodbye);
  EXPECT_NE(inbox_.WaitUntilGone(1), LinkEnd::kNone);
}

TEST_F(MeshPeerTest, AHostThatDoesNotAnswerIsUnreachable) {
  Connect(seconds(2));
  CutOff();  // an idle connection
  const auto begin = Clock::now();
  EXPECT_EQ(inbox_.WaitUntilGone(1), LinkEnd::kUnreachable);
  EXPECT_LT(Clock::now() - begin, seconds(8));
}

TEST_F(MeshPeerTest, AHostThatDoesNotAnswerIsUnreachableWhileSomethingIsUnderWay) {
  Connect(seconds(2));
  CutOff();
  SendNumber(1);
  const auto begin = Clock::now();
  EXPECT_EQ(inbox_.WaitUntilGone(1), LinkEnd::kUnreachable);
  EXPECT_GT(Clock::now() - begin, seconds(1));
  EXPECT_LT(Clock::now() - begin, seconds(8));
}

TEST_F(MeshPeerTest, AnOutageOfASecondIsSurvived) {
  Connect(seconds(3));
  CutOff();
  SendNumber(7);
  EXPECT_EQ(inbox_.WaitUntilGone(1, seconds(1)), LinkEnd::kNone);
  Restore();
  const auto bytes = Receive();
  WireReader reader(bytes);
  EXPECT_EQ(reader.Get<uint64_t>(), 7u);
}

TEST_F(MeshPeerTest, AStoppedProcessIsNotGoneAndGetsEverything) {
  Connect(seconds(1));
  // Much more than the connection holds, in small and in large messages, with nobody reading.
  constexpr uint64_t kCount = 3000;
  const std::string large(4000, 'x');
  const auto begin = Clock::now();
  for (uint64_t i = 0; i < kCount; ++i) {
    WireWriter message(MessageType::kRetire);
    message.Add(i);
    if (i % 10 == 0) message.Add(std::string_view(large));
    meshes_[0]->Send(1, message);
  }
  EXPECT_LT(Clock::now() - begin, seconds(10));  // never waits
  EXPECT_EQ(inbox_.WaitUntilGone(1, milliseconds(2500)), LinkEnd::kNone);
  for (uint64_t i = 0; i < kCount; ++i) {
    const auto bytes = Receive();
    WireReader reader(bytes);
    ASSERT_EQ(reader.Get<uint64_t>(), i);
    ASSERT_TRUE(reader.ok());
  }
}

}  // namespace
}  // namespace jaxfabric
