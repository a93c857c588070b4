// Both ends of the handshake byte by byte, and an acceptor among strangers.
#include "os/handshake.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "os/acceptor.h"
#include "os/open_fds.h"
#include "os/poll.h"

namespace jaxfabric {
namespace {

using Step = Handshake::Step;
using Bytes = std::vector<std::byte>;

JobIdentity Identity(uint32_t process) {
  return {"0123456789abcdef0123456789abcdef", 7, process, 4};
}

// What one end sends next, and gives it to the other: at most `most` bytes at a time.
Bytes Carry(Handshake& from, Handshake& to, size_t most = 1000) {
  Bytes carried;
  while (from.step() == Step::kSend && to.step() == Step::kReceive) {
    const auto out = from.outgoing();
    const auto in = to.incoming();
    const size_t size = std::min({most, out.size(), in.size()});
    std::copy_n(out.begin(), size, in.begin());
    carried.insert(carried.end(), out.begin(), out.begin() + static_cast<ptrdiff_t>(size));
    from.Sent(size);
    to.Received(size);
  }
  return carried;
}

void Shake(Handshake& caller, Handshake& called, size_t most = 1000) {
  Carry(caller, called, most);
  Carry(called, caller, most);
  Carry(caller, called, most);
}

// Gives bytes to one end; false if it does not want all of them.
bool Give(Handshake& to, std::span<const std::byte> bytes) {
  while (!bytes.empty() && to.step() == Step::kReceive) {
    const size_t size = std::min(bytes.size(), to.incoming().size());
    std::copy_n(bytes.begin(), size, to.incoming().begin());
    to.Received(size);
    bytes = bytes.subspan(size);
  }
  return bytes.empty();
}

TEST(HandshakeTest, BothEndsProveThemselves) {
  for (size_t most : {1, 7, 1000}) {
    Handshake caller = Handshake::Call(Identity(1), 2, Purpose::kData, 3);
    Handshake called = Handshake::Answer(Identity(2), Purpose::kData);
    Shake(caller, called, most);
    EXPECT_EQ(caller.step(), Step::kDone);
    EXPECT_EQ(called.step(), Step::kDone);
    EXPECT_EQ(caller.peer(), 2u);
    EXPECT_EQ(called.peer(), 1u);
    EXPECT_EQ(called.stripe(), 3u);
  }
}

TEST(HandshakeTest, AWrongSecretIsFoundByEitherEnd) {
  JobIdentity stranger = Identity(1);
  for (size_t at : {0, 15, 16, 31}) {  // each byte of it counts
    stranger.secret = Identity(1).secret;
    stranger.secret[at] ^= 1;
    Handshake caller = Handshake::Call(stranger, 0, Purpose::kControl, 0);
    Handshake called = Handshake::Answer(Identity(0), Purpose::kControl);
    Shake(caller, called);
    EXPECT_EQ(caller.step(), Step::kRefused);
    EXPECT_EQ(caller.refusal(), Refusal::kSecret);
    EXPECT_EQ(called.step(), Step::kReceive);
    // One that goes on all the same.
    Bytes proof(24, std::byte{1});
    std::memcpy(proof.data(), &kHandshakeMagic, 4);
    std::memcpy(proof.data() + 4, &kHandshakeVersion, 4);
    Give(called, proof);
    EXPECT_EQ(called.refusal(), Refusal::kSecret);
  }
}

TEST(HandshakeTest, WithoutASecretNothingIsSaid) {
  JobIdentity none = Identity(1);
  none.secret = std::string(kMinSecretBytes - 1, 's');
  EXPECT_EQ(Handshake::Call(none, 0, Purpose::kControl, 0).step(), Step::kRefused);
  EXPECT_EQ(Handshake::Answer(none, Purpose::kControl).step(), Step::kRefused);
  none.secret.clear();
  EXPECT_EQ(Handshake::Call(none, 0, Purpose::kControl, 0).step(), Step::kRefused);
  EXPECT_EQ(Handshake::Answer(none, Purpose::kControl).step(), Step::kRefused);
}

TEST(HandshakeTest, OnlyTheOnesMeantAreTaken) {
  struct Case {
    JobIdentity caller;
    uint32_t called;
    Purpose purpose;
    uint32_t stripe;
    Refusal refusal;
  };
  JobIdentity old = Identity(1);
  old.incarnation = 6;
  JobIdentity beyond = Identity(4);
  const std::vector<Case> cases = {
      {Identity(1), 0, Purpose::kData, 0, Refusal::kNone},
      {old, 0, Purpose::kData, 0, Refusal::kIncarnation},
      {beyond, 0, Purpose::kData, 0, Refusal::kMisdirected},
      {Identity(0), 0, Purpose::kData, 0, Refusal::kMisdirected},
      {Identity(1), 2, Purpose::kData, 0, Refusal::kMisdirected},
      {Identity(1), 0, Purpose::kControl, 0, Refusal::kMisdirected},
      {Identity(1), 0, Purpose::kData, kMaxStripes, Refusal::kMisdirected},
  };
  for (const Case& c : cases) {
    Handshake caller = Handshake::Call(c.caller, c.called, c.purpose, c.stripe);
    Handshake called = Handshake::Answer(Identity(0), Purpose::kData);
    Shake(caller, called);
    EXPECT_EQ(called.refusal(), c.refusal) << RefusalText(called.refusal());
    EXPECT_EQ(called.step() == Step::kDone, c.refusal == Refusal::kNone);
  }
}

TEST(HandshakeTest, AnyChangedByteIsRefused) {
  for (size_t at = 0; at < 48 + 40 + 24; ++at) {
    Handshake caller = Handshake::Call(Identity(1), 0, Purpose::kData, 0);
    Handshake called = Handshake::Answer(Identity(0), Purpose::kData);
    size_t seen = 0;
    for (int frame = 0; frame < 3; ++frame) {
      Handshake& from = frame == 1 ? called : caller;
      Handshake& to = frame == 1 ? caller : called;
      if (from.step() != Step::kSend) break;
      Bytes bytes(from.outgoing().begin(), from.outgoing().end());
      if (at >= seen && at < seen + bytes.size()) bytes[at - seen] ^= std::byte{4};
      seen += bytes.size();
      from.Sent(bytes.size());
      Give(to, bytes);
    }
    EXPECT_NE(called.step(), Step::kDone) << at;
  }
}

TEST(HandshakeTest, ARecordedCallIsOfNoUse) {
  Handshake caller = Handshake::Call(Identity(1), 0, Purpose::kControl, 0);
  Handshake called = Handshake::Answer(Identity(0), Purpose::kControl);
  Bytes recorded = Carry(caller, called);
  Carry(called, caller);
  const Bytes proof = Carry(caller, called);
  ASSERT_EQ(called.step(), Step::kDone);

  Handshake again = Handshake::Answer(Identity(0), Purpose::kControl);
  Give(again, recorded);
  again.Sent(again.outgoing().size());
  Give(again, proof);
  EXPECT_EQ(again.refusal(), Refusal::kSecret);
}

TEST(HandshakeTest, NothingThatAnEndSendsProvesAnythingToIt) {
  // The called one's MAC comes back as the proof.
  Handshake caller = Handshake::Call(Identity(1), 0, Purpose::kControl, 0);
  Handshake called = Handshake::Answer(Identity(0), Purpose::kControl);
  Carry(caller, called);
  Bytes challenge(called.outgoing().begin(), called.outgoing().end());
  called.Sent(challenge.size());
  Bytes proof(challenge.begin(), challenge.begin() + 8);
  proof.insert(proof.end(), challenge.begin() + 24, challenge.end());
  Give(called, proof);
  EXPECT_EQ(called.refusal(), Refusal::kSecret);

  // The caller's own call comes back as the challenge.
  Handshake alone = Handshake::Call(Identity(1), 0, Purpose::kControl, 0);
  Bytes call(alone.outgoing().begin(), alone.outgoing().end());
  alone.Sent(call.size());
  Give(alone, call);
  EXPECT_EQ(alone.refusal(), Refusal::kSecret);

  // The caller's call, given to the caller's own listener and to another process's, to have it
  // answered there.
  for (uint32_t process : {1, 2}) {
    Handshake other = Handshake::Answer(Identity(process), Purpose::kControl);
    Give(other, call);
    EXPECT_EQ(other.refusal(), Refusal::kMisdirected);
  }
}

// A listening process 0, and who calls it.
class AcceptorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    before_ = OpenFds();
    Listen({});
  }
  void TearDown() override {
    acceptor_.reset();
    EXPECT_EQ(OpenFds(), before_) << "descriptors leaked";
  }
  void Listen(Acceptor::Limits limits) {
    acceptor_.reset();
    address_ = *TcpAddress::FromIp("127.0.0.1", 0);
    auto listener = ListenTcp(&address_, {});
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    auto acceptor = Acceptor::Create(*std::move(listener), Identity(0), Purpose::kData, limits);
    ASSERT_TRUE(acceptor.ok()) << acceptor.status().ToString();
    acceptor_ = *std::move(acceptor);
  }
  UniqueFd Connect() {
    auto socket = ConnectTcp(address_, {}, Deadline::AfterSeconds(20));
    EXPECT_TRUE(socket.ok()) << socket.status().ToString();
    return socket.ok() ? std::move(*socket) : UniqueFd();
  }
  UniqueFd Say(std::string_view text) {
    UniqueFd socket = Connect();
    EXPECT_EQ(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
    return socket;
  }
  // Advances until `done`, and keeps what was accepted.
  template <class Done>
  void AdvanceUntil(Done done) {
    const Deadline deadline = Deadline::AfterSeconds(20);
    while (!done() && !deadline.expired()) {
      WaitForSocket(acceptor_->fd(), POLLIN, deadline);
      for (auto& accepted : acceptor_->Advance()) accepted_.push_back(std::move(accepted));
    }
    EXPECT_TRUE(done());
  }
  void CallAndExpectAccepted() {
    accepted_.clear();
    UniqueFd socket = Connect();
    Handshake caller = Handshake::Call(Identity(3), 0, Purpose::kData, 5);
    AdvanceUntil([&] {
      caller.Advance(socket.get());
      return !accepted_.empty();
    });
    ASSERT_EQ(accepted_.size(), 1u);
    EXPECT_EQ(caller.step(), Step::kDone);
    EXPECT_EQ(accepted_[0].process, 3u);
    EXPECT_EQ(accepted_[0].stripe, 5u);
    // What follows the proof is the connection's.
    ASSERT_EQ(::send(socket.get(), "data", 4, MSG_NOSIGNAL), 4);
    ASSERT_TRUE(WaitForSocket(accepted_[0].socket.get(), POLLIN, Deadline::AfterSeconds(20)));
    char text[8];
    EXPECT_EQ(::recv(accepted_[0].socket.get(), text, sizeof(text), 0), 4);
    accepted_.clear();
  }

  TcpAddress address_;
  std::unique_ptr<Acceptor> acceptor_;
  std::vector<Acceptor::Accepted> accepted_;

 private:
  std::set<std::string> before_;
};

TEST_F(AcceptorTest, TakesWhoProvesItself) {
  CallAndExpectAccepted();
  CallAndExpectAccepted();
  EXPECT_EQ(acceptor_->refused(), 0u);
}

TEST_F(AcceptorTest, NeedsASecret) {
  for (size_t size : {0, 15}) {
    JobIdentity none = Identity(0);
    none.secret.resize(size);
    const Status status = Acceptor::Create(UniqueFd(), none, Purpose::kData).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.ToString().find("secret"), std::string::npos);
  }
}

TEST_F(AcceptorTest, RefusesWhatIsNotTheProtocol) {
  std::mt19937 random(1);
  std::vector<UniqueFd> strangers;
  constexpr int kRandom = 50;
  for (int i = 0; i < kRandom; ++i) {
    std::string bytes(48 + random() % 5000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    strangers.push_back(Say(bytes));
  }
  strangers.push_back(Say("GET / HTTP/1.1\r\nHost: somewhere\r\nUser-Agent: a browser\r\n\r\n"));
  strangers.push_back(Say(std::string(1 << 17, '\xff')));  // were it a length, a huge one
  std::string next(64, '\0');                              // our protocol's next version
  std::memcpy(next.data(), &kHandshakeMagic, 4);
  next[4] = static_cast<char>(kHandshakeVersion + 1);
  strangers.push_back(Say(next));
  const auto all = strangers.size();
  AdvanceUntil([&] { return acceptor_->refused(Refusal::kMalformed) == all; });
  EXPECT_EQ(acceptor_->pending(), 0u);
  CallAndExpectAccepted();
}

TEST_F(AcceptorTest, DropsWhoLeavesAndWhoIsSilent) {
  Listen({.pending = 256, .patience = std::chrono::milliseconds(100)});
  ::testing::internal::CaptureStderr();
  Say("half a").Reset();
  AdvanceUntil([&] { return acceptor_->refused(Refusal::kLeft) == 1; });
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "processes of the job do this too";
  ::testing::internal::CaptureStderr();
  const UniqueFd silent = Connect();
  const UniqueFd half = Say(std::string_view("hfaj\1\0\0\0half a header", 21));
  AdvanceUntil([&] { return acceptor_->refused(Refusal::kTooSlow) == 2; });
  EXPECT_TRUE(::testing::internal::GetCapturedStderr().find("was refused: it ") !=
              std::string::npos);
  EXPECT_EQ(acceptor_->pending(), 0u);
  EXPECT_FALSE(WaitForSocket(acceptor_->fd(), POLLIN, Deadline(Clock::now())));
  CallAndExpectAccepted();
}

TEST_F(AcceptorTest, AThousandStrangersKeepNobodyOut) {
  constexpr size_t kPending = 32;
  Listen({.pending = kPending, .patience = std::chrono::seconds(60)});
  std::vector<UniqueFd> strangers;  // some of them, so that not all have closed their end
  for (int i = 0; i < 1000; ++i) {
    UniqueFd stranger = i % 2 == 0 ? Connect() : Say("something");
    if (strangers.size() < 200) strangers.push_back(std::move(stranger));
    if (i % 50 == 0) {
      acceptor_->Advance();
      EXPECT_LE(acceptor_->pending(), kPending);
    }
  }
  CallAndExpectAccepted();
  EXPECT_LE(acceptor_->pending(), kPending);
  EXPECT_GE(acceptor_->refused(Refusal::kTooMany), 100u);
}

TEST_F(AcceptorTest, WithoutDescriptorsItWaitsUntilThereAreSome) {
  const UniqueFd stranger = Connect();
  AdvanceUntil([&] { return acceptor_->pending() == 1; });
  UniqueFd socket = Connect();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 3;  // of those that are open none is closed
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const bool ready = WaitForSocket(acceptor_->fd(), POLLIN, Deadline::AfterSeconds(20));
  const bool accepted = !acceptor_->Advance().empty();
  const bool ready_again = WaitForSocket(acceptor_->fd(), POLLIN, Deadline(Clock::now()));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(ready);
  EXPECT_FALSE(accepted);
  EXPECT_FALSE(ready_again) << "whoever waits for it would never sleep";
  EXPECT_EQ(acceptor_->refused(Refusal::kTooMany), 1u);  // made room
  Handshake caller = Handshake::Call(Identity(3), 0, Purpose::kData, 5);
  AdvanceUntil([&] {
    caller.Advance(socket.get());
    return !accepted_.empty();
  });
  accepted_.clear();
}

TEST_F(AcceptorTest, ACallOfAnEarlierStartIsRefused) {
  JobIdentity old = Identity(1);
  old.incarnation = 6;
  UniqueFd socket = Connect();
  Handshake caller = Handshake::Call(old, 0, Purpose::kData, 0);
  AdvanceUntil([&] {
    caller.Advance(socket.get());
    return caller.step() == Step::kRefused;
  });
  EXPECT_EQ(acceptor_->refused(Refusal::kIncarnation), 1u);
  const Status status = RefusedCall(caller, address_);
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.ToString().find(address_.ToString()), std::string::npos);
}

TEST_F(AcceptorTest, CallProcessTellsWhatIsWrong) {
  // A listener that answers nothing, and one that is no jaxfabric.
  const auto call = [&](double seconds) {
    return CallProcess(address_, {}, Identity(1), 0, Purpose::kData, 0,
                       Deadline::AfterSeconds(seconds))
        .status();
  };
  EXPECT_EQ(call(0.05).code(), Code::kDeadlineExceeded);
  UniqueFd listener;
  acceptor_.reset();
  address_.set_port(0);
  listener = *ListenTcp(&address_, {});
  EXPECT_NE(call(0.05).ToString().find("process 0"), std::string::npos);
  listener.Reset();
  EXPECT_EQ(call(20).code(), Code::kUnavailable);
}

}  // namespace
}  // namespace jaxfabric
