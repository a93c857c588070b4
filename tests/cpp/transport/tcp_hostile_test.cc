// Peers of the tcp transport that send what they should not, or leave as they should not: nothing
// of it may stop the process, write where it must not, or hide who it was.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <thread>

#include "base/hash.h"
#include "os/strangers.h"
#include "transport/tcp_ends.h"

namespace jaxfabric::tcp {
namespace {

class TcpHostileTest : public ::testing::Test {
 protected:
  void ExpectLost(const std::string& text, Code code) {
    ASSERT_TRUE(end_.Await([&] { return !end_.lost().empty(); })) << text;
    EXPECT_EQ(end_.lost()[0].first, 1);
    const Status reason = end_.lost()[0].second;
    EXPECT_EQ(reason.code(), code) << reason.ToString();
    EXPECT_NE(reason.message().find(text), std::string_view::npos) << reason.ToString();
    EXPECT_NE(reason.message().find("peer 1"), std::string_view::npos) << reason.ToString();
  }

  End end_{0, 3};
};

TEST_F(TcpHostileTest, AMalformedFrameEndsTheConnectionOfItsPeerOnly) {
  const auto header = [](FrameType type, const std::function<void(FrameHeader&)>& change) {
    FrameHeader result{.type = type};
    change(result);
    return result;
  };
  const std::vector<std::pair<int, FrameHeader>> frames = {
      {0, header(FrameType::kPut, [](auto& h) { h.magic = 0; })},
      {0, header(FrameType::kPut, [](auto& h) { h.length = 0xffffffff; })},
      {0, header(FrameType::kPut, [](auto& h) { h.length = 8, h.offset = (1 << 20) - 7; })},
      {1, header(FrameType::kPut, [](auto& h) { h.length = 8, h.offset = ~uint64_t{0} - 3; })},
      {0, header(FrameType::kWord, [](auto& h) { h.offset = 1 << 20; })},
      {0, header(FrameType::kWord, [](auto& h) { h.offset = ~uint64_t{0} - 7; })},
      {1, header(FrameType::kWord, [](auto&) {})},
      {1, header(FrameType::kSignal, [](auto&) {})},
      {0, header(FrameType::kHello, [](auto& h) { h.region = 2, h.offset = 1; })},
      {0, header(FrameType::kAccept, [](auto&) {})},
      {0, header(FrameType(77), [](auto&) {})},
  };
  for (const auto& [lane, frame] : frames) {
    End end(0, 3);
    RawPeer bad(end, 2);
    RawPeer good(end, 2, true, 2);
    bad.Word(0, 3);
    ASSERT_TRUE(end.AwaitWord(0, 3));
    bad.Send(lane, frame, Filled(100, 1));
    ASSERT_TRUE(end.Await([&] { return !end.lost().empty(); }));
    EXPECT_EQ(end.lost()[0].first, 1);
    EXPECT_EQ(end.lost()[0].second.code(), Code::kDataLoss) << end.lost()[0].second.ToString();
    EXPECT_TRUE(bad.IsClosed(0) && bad.IsClosed(1));
    good.Word(0, 4);
    ASSERT_TRUE(end.AwaitWord(0, 4)) << "another peer is not concerned";
    EXPECT_EQ(end.lost().size(), 1u);
    EXPECT_EQ(end.endpoint->counters().malformed, 1u);
  }
}

TEST_F(TcpHostileTest, NothingButAHelloComesFirst) {
  for (const FrameType type : {FrameType::kPut, FrameType::kWord, FrameType::kGoodbye}) {
    RawPeer peer(end_, 1, false);
    FrameHeader frame{.type = type};
    frame.length = type == FrameType::kPut ? 8 : 0;
    peer.Send(0, frame, Filled(8, 1));
    EXPECT_TRUE(peer.IsClosed(0));
  }
  RawPeer liar(end_, 1, false);
  FrameHeader hello{.type = FrameType::kHello};
  hello.region = 2;
  hello.offset = 2;  // it has proven to be 1
  liar.Send(0, hello);
  EXPECT_TRUE(liar.IsClosed(0));
  EXPECT_EQ(end_.Word(0), 0u);
  EXPECT_TRUE(end_.lost().empty());
}

TEST_F(TcpHostileTest, StrangersAreDropped) {
  for (int i = 0; i < 20; ++i) {
    Result<UniqueFd> fd = ConnectTcp(RawPeer::Address(end_), {}, TestDeadline());
    ASSERT_TRUE(fd.ok());
    const Bytes noise = Filled(static_cast<size_t>(50 * i), i);
    (void)::send(fd->get(), noise.data(), noise.size(), MSG_NOSIGNAL);
  }
  RawPeer peer(end_, 2);
  peer.Word(0, 1);
  EXPECT_TRUE(end_.AwaitWord(0, 1));
  EXPECT_TRUE(end_.Await([&] { return end_.endpoint->counters().refused == 20; }));
  EXPECT_EQ(end_.endpoint->counters().malformed, 0u);
}

class TcpStrangersTest : public ::testing::TestWithParam<Stranger> {};

TEST_P(TcpStrangersTest, AreCountedAndLoggedOnce) {
  // More than there are handshakes at a time: those who are silent make room for others.
  constexpr int kCount = 300;
  End end(0, 3);
  ::testing::internal::CaptureStderr();
  const JobIdentity own{End::Options().secret, End::Options().incarnation, 1, 2};
  const auto strangers =
      CallByStrangers(GetParam(), kCount, RawPeer::Address(end), own, 0, Purpose::kData);
  const uint64_t expected = GetParam() == Stranger::kHalfHeader ? 40 : kCount;
  EXPECT_TRUE(end.Await([&] { return end.endpoint->counters().refused >= expected; }));
  RawPeer peer(end, 2);
  peer.Word(0, 1);
  EXPECT_TRUE(end.AwaitWord(0, 1));
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(LinesIn(log), 1) << log;
  EXPECT_NE(log.find("was refused: it "), std::string::npos) << log;
  EXPECT_LE(end.endpoint->counters().refused, static_cast<uint64_t>(kCount));
  EXPECT_EQ(end.endpoint->counters().malformed, 0u);
}

INSTANTIATE_TEST_SUITE_P(Each, TcpStrangersTest, ::testing::ValuesIn(kStrangers), StrangerName);

TEST_F(TcpHostileTest, MalformedFramesOfManyPeersAreLoggedOnce) {
  constexpr int kPeers = 30;
  End end(0, kPeers + 1);
  ::testing::internal::CaptureStderr();
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int number = 1; number <= kPeers; ++number) {
    peers.push_back(std::make_unique<RawPeer>(end, 2, true, number));
    FrameHeader frame{.type = FrameType::kPut};
    frame.length = 0xffffffff;
    peers.back()->Send(0, frame);
  }
  EXPECT_TRUE(end.Await([&] { return end.lost().size() == kPeers; }));
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(LinesIn(log), 1) << log;
  EXPECT_NE(log.find("carries what is malformed"), std::string::npos) << log;
  EXPECT_EQ(end.endpoint->counters().malformed, static_cast<uint64_t>(kPeers));
}

TEST_F(TcpHostileTest, ALostPeerIsNamedWithTheReason) {
  RawPeer peer(end_, 2);
  peer.Word(0, 9);
  peer.fds.clear();
  ExpectLost("closed the connection", Code::kUnavailable);
  EXPECT_EQ(end_.Word(0), 9u) << "what came before counts";
}

TEST_F(TcpHostileTest, EndWithinAMessage) {
  RawPeer peer(end_, 2);
  FrameHeader put{.type = FrameType::kPut};
  put.length = 10000;
  peer.Send(0, put, Filled(5000, 1));
  ::shutdown(peer.fds[0].get(), SHUT_WR);
  ExpectLost("within a message", Code::kUnavailable);
}

TEST_F(TcpHostileTest, Reset) {
  RawPeer peer(end_, 2);
  peer.Word(0, 9);
  ASSERT_TRUE(end_.AwaitWord(0, 9));
  const linger now{1, 0};
  ::setsockopt(peer.fds[1].get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  peer.fds[1].Reset();
  ExpectLost("reset", Code::kUnavailable);
  EXPECT_TRUE(peer.IsClosed(0)) << "one lane takes the others along";
}

TEST_F(TcpHostileTest, AFenceThatCannotBeReachedIsNotWaitedFor) {
  RawPeer peer(end_, 2);
  peer.Fence(0, {0, 100});
  peer.Word(0, 1);
  peer.fds[1].Reset();
  ExpectLost("closed the connection", Code::kUnavailable);
  EXPECT_EQ(end_.Word(0), 0u);
}

TEST_F(TcpHostileTest, HalfOpen) {
  RawPeer peer(end_, 2);
  ::shutdown(peer.fds[1].get(), SHUT_WR);  // and goes on to read
  ExpectLost("closed the connection", Code::kUnavailable);
  EXPECT_TRUE(peer.IsClosed(0));
}

TEST_F(TcpHostileTest, AnAddressThatDoesNotFitIsRefused) {
  const End other(1, 3);
  const auto connect = [&](size_t at, const std::string& change) {
    EndpointAddress address = other.endpoint->address();
    std::memcpy(address.bytes.data() + at, change.data(), change.size());
    const size_t checked = address.bytes.size() - sizeof(uint64_t);
    const uint64_t check =
        Hasher().Add({reinterpret_cast<const char*>(address.bytes.data()), checked}).Finish();
    std::memcpy(address.bytes.data() + checked, &check, sizeof(check));
    return end_.endpoint->ConnectMessages(address).status().code();
  };
  EXPECT_EQ(connect(8, std::string("\1\0\0\0", 4)), Code::kOk);
  for (const char* number : {"\0\0\0\0", "\3\0\0\0", "\xff\xff\xff\xff", "\0\0\0\x80"}) {
    EXPECT_EQ(connect(8, std::string(number, 4)), Code::kInvalidArgument);
  }
  EXPECT_EQ(connect(12, std::string(4, '\0')), Code::kInvalidArgument);
  // Text that fills its place, up to what follows it.
  EXPECT_EQ(connect(24, std::string(56, '1')), Code::kInvalidArgument);
}

TEST_F(TcpHostileTest, AnAnswerNobodyReadsIsNotQueuedForEver) {
  TcpTransportOptions options = End::Options();
  options.max_queued_bytes = 32 * 1024;
  options.socket.send_buffer = 8192;
  End end(0, 2, options);
  RawPeer peer(end, 2);
  FrameHeader flush{.type = FrameType::kFlush};
  std::atomic<bool> stop{false};
  std::thread sender([&] {
    while (!stop.load()) peer.Send(0, flush);
  });
  EXPECT_TRUE(end.Await([&] { return !end.lost().empty(); }));
  stop.store(true);
  sender.join();
  EXPECT_EQ(end.lost()[0].second.code(), Code::kDataLoss);
}

TEST_F(TcpHostileTest, APeerThatNeverFinishesToCallIsForgotten) {
  RawPeer peer(end_, 1, false);
  FrameHeader hello{.type = FrameType::kHello};
  hello.region = 2;
  hello.offset = 1;
  peer.Send(0, hello);
  peer.fds.clear();
  RawPeer again(end_, 2);  // the next call is taken
  again.Word(0, 1);
  EXPECT_TRUE(end_.AwaitWord(0, 1));
}

}  // namespace
}  // namespace jaxfabric::tcp
