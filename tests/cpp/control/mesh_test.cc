// The control plane between processes played by threads, with strangers and broken peers among
// them.
#include "control/mesh.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "control/meshes.h"

namespace jaxfabric {
namespace {

TEST_F(MeshTest, EveryMessageArrivesInOrder) {
  Create(4);
  StartConnecting();
  FinishConnecting();
  Start();
  ExpectEveryMessageInOrder();
}

TEST_F(MeshTest, StrangersAreCountedAndDropped) {
  Create(3);
  const auto later = Deadline::AfterSeconds(20);
  // Kept open until the end: a stranger that stays connected delays nobody for long.
  std::vector<UniqueFd> strangers;
  const std::vector<std::string> openings = {
      "",                                  // silent, closed at once
      "GET / HTTP/1.1\r\n",                // another protocol
      std::string("\x62\x66\x61\x6a", 4),  // our magic and no more
      std::string(4096, '\xff'),           //
  };
  for (const std::string& opening : openings) {
    auto socket = ConnectUnixSocket(meshes_[0]->name(), later);
    ASSERT_TRUE(socket.ok());
    if (opening.empty()) continue;
    ASSERT_TRUE(SendMessage(socket->get(), Raw(opening), {}, later).ok());
    strangers.push_back(*std::move(socket));
  }
  // Well-formed, from somebody who is not expected.
  for (int process : {0, 3, -1, 1 << 30}) {
    auto socket = ConnectUnixSocket(meshes_[0]->name(), later);
    ASSERT_TRUE(socket.ok());
    ASSERT_TRUE(SendMessage(socket->get(), Hello(process).bytes(), {}, later).ok());
    strangers.push_back(*std::move(socket));
  }
  // A hello of another version, one that ends early, another message.
  WireWriter truncated(MessageType::kHello);
  WireWriter other(MessageType::kGoodbye);
  other.Add(uint32_t{1});
  for (const WireWriter& message : {truncated, other}) {
    auto socket = ConnectUnixSocket(meshes_[0]->name(), later);
    ASSERT_TRUE(socket.ok());
    ASSERT_TRUE(SendMessage(socket->get(), message.bytes(), {}, later).ok());
    strangers.push_back(*std::move(socket));
  }
  StartConnecting();
  FinishConnecting();
  Start();
  EXPECT_EQ(meshes_[0]->dropped_messages(), openings.size() + 4 + 2);
  WireWriter message(MessageType::kRetire);
  meshes_[0]->Broadcast(message.Add(uint64_t{7}));
  EXPECT_EQ(inboxes_[1].WaitForMessages(1).size(), 1u);
  EXPECT_EQ(inboxes_[2].WaitForMessages(1).size(), 1u);
}

TEST_F(MeshTest, AMissingProcessIsNamed) {
  Create(3);
  meshes_.pop_back();
  connected_.pop_back();
  // Process 2 listens no more and never calls.
  StartConnecting(0.3);
  FinishConnecting();
  EXPECT_EQ(connected_[0].code(), Code::kDeadlineExceeded);
  EXPECT_NE(connected_[0].ToString().find("process 2"), std::string::npos)
      << connected_[0].ToString();
}

TEST_F(MeshTest, MalformedMessagesAreCountedAndTheRestArrives) {
  // Process 1 speaks through a socket of its own.
  auto mesh = Mesh::Create(0, 2);
  ASSERT_TRUE(mesh.ok());
  const auto later = Deadline::AfterSeconds(20);
  UniqueFd peer;
  std::thread speaker([&] {
    auto socket = ConnectUnixSocket((*mesh)->name(), later);
    ASSERT_TRUE(socket.ok());
    ASSERT_TRUE(SendMessage(socket->get(), Hello(1).bytes(), {}, later).ok());
    peer = *std::move(socket);
  });
  const auto greetings = (*mesh)->Connect({{}, {}}, {}, Hello(0).bytes(), {}, later);
  speaker.join();
  ASSERT_TRUE(greetings.ok()) << greetings.status().ToString();
  Inbox inbox;
  (*mesh)->Start(inbox.Handlers());

  WireWriter good(MessageType::kRetire);
  good.Add(uint64_t{1});
  const auto bytes = good.bytes();
  size_t bad = 0;
  const auto send = [&](std::span<const std::byte> message) {
    ASSERT_TRUE(SendMessage(peer.get(), message, {}, later).ok());
  };
  // Every truncation, then every header byte changed.
  for (size_t size = 1; size < bytes.size(); ++size, ++bad) send(bytes.first(size));
  for (size_t at = 0; at < 8; ++at, ++bad) {
    std::vector<std::byte> changed(bytes.begin(), bytes.end());
    changed[at] ^= std::byte{0x40};
    send(changed);
  }
  send(bytes);
  EXPECT_EQ(inbox.WaitForMessages(1).size(), 1u);
  EXPECT_EQ((*mesh)->dropped_messages(), bad);

  peer.Reset();
  EXPECT_EQ(inbox.WaitUntilGone(1), LinkEnd::kClosed);
  (*mesh)->Stop();
}

TEST_F(MeshTest, APeerThatStopsIsGone) {
  Create(3);
  StartConnecting();
  FinishConnecting();
  Start();
  meshes_[1]->Stop();
  EXPECT_EQ(inboxes_[0].WaitUntilGone(1), LinkEnd::kClosed);
  EXPECT_EQ(inboxes_[2].WaitUntilGone(1), LinkEnd::kClosed);
  // To a peer that is gone, without effect.
  WireWriter message(MessageType::kRetire);
  meshes_[0]->Broadcast(message.Add(uint64_t{1}));
  EXPECT_EQ(inboxes_[2].WaitForMessages(1).size(), 1u);
}

TEST(WireTest, AReaderNeverReadsPastTheEnd) {
  WireWriter writer(MessageType::kInstance);
  const std::vector<int64_t> ints = {1, -2, 3};
  writer.Add(uint64_t{5}).Add(std::string_view("psum")).Add(std::span<const int64_t>(ints));
  const auto bytes = writer.bytes();
  for (size_t size = 0; size <= bytes.size(); ++size) {
    // A copy of its own, so that a sanitizer sees a read past it.
    const std::vector<std::byte> part(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
    WireReader reader(part);
    const auto number = reader.Get<uint64_t>();
    const std::string text = reader.GetString();
    const std::vector<int64_t> read = reader.GetInts();
    EXPECT_EQ(reader.ok(), size == bytes.size());
    if (reader.ok()) {
      EXPECT_EQ(number, 5u);
      EXPECT_EQ(text, "psum");
      EXPECT_EQ(read, ints);
    }
  }
}

TEST(WireTest, LengthsThatLieAreRefused) {
  WireWriter writer(MessageType::kInstance);
  writer.Add(uint32_t{0xffffffff});
  WireReader text(writer.bytes());
  EXPECT_EQ(text.GetString(), "");
  EXPECT_FALSE(text.ok());
  WireReader ints(writer.bytes());
  EXPECT_TRUE(ints.GetInts().empty());
  EXPECT_FALSE(ints.ok());
}

}  // namespace
}  // namespace jaxfabric
