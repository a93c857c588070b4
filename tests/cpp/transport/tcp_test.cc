// What only the tcp transport can get wrong: order over several connections, how connections begin
// and end, memory of callers. Malformed input: tcp_hostile_test.cc.
#include "transport/tcp/tcp.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "os/open_fds.h"
#include "transport/tcp_ends.h"

namespace jaxfabric::tcp {
namespace {

constexpr uint32_t kWindow = kWindowRegion;

TcpTransportOptions WithLanes(int lanes) {
  TcpTransportOptions options = End::Options();
  options.lanes = lanes;
  return options;
}

// Two endpoints that know each other; no connection yet.
struct Two {
  explicit Two(const TcpTransportOptions& options = End::Options())
      : a(0, 2, options), b(1, 2, options) {
    a.Connect(1, b);
    b.Connect(0, a);
  }
  End a;
  End b;
};

TEST(TcpTest, WordsComeAfterWhatWasStripedBefore) {
  for (int lanes : {1, 2, 5}) {
    Two two(WithLanes(lanes));
    for (uint64_t round = 1; round <= 100; ++round) {
      const Bytes data = Filled(30000 + 777 * round, static_cast<int>(round));
      ASSERT_TRUE(two.a.to(1).PostPut(data, kWindow, 1024 + round).ok());
      ASSERT_TRUE(two.a.to(1).PostWord(round, 8).ok());
      ASSERT_TRUE(two.a.to(1).Push().ok());
      ASSERT_TRUE(two.b.AwaitWord(8, round));
      ASSERT_TRUE(two.b.Holds(1024 + round, data)) << "round " << round << ", lanes " << lanes;
      ASSERT_TRUE(two.a.Await([&] { return two.a.to(1).Sent() >= 1; }));
      ASSERT_TRUE(two.a.to(1).Flush(TestDeadline()).ok());
    }
  }
}

TEST(TcpTest, LaterPutsToTheSamePlaceWin) {
  Two two(WithLanes(4));
  for (uint64_t round = 1; round <= 50; ++round) {
    const auto seed = static_cast<int>(round);
    const Bytes large = Filled(100000, seed);
    const Bytes medium = Filled(6000, seed + 1);
    const Bytes small = Filled(100, seed + 2);
    const Bytes last = Filled(20000, seed + 3);
    ASSERT_TRUE(two.a.to(1).PostPut(small, kWindow, 50000).ok());
    ASSERT_TRUE(two.a.to(1).PostPut(large, kWindow, 1000).ok());
    ASSERT_TRUE(two.a.to(1).PostPut(medium, kWindow, 9000).ok());
    ASSERT_TRUE(two.a.to(1).PostPut(small, kWindow, 20000).ok());
    ASSERT_TRUE(two.a.to(1).PostPut(last, kWindow, 14000).ok());
    ASSERT_TRUE(two.a.to(1).PostWord(round, 0).ok());
    ASSERT_TRUE(two.a.to(1).Push().ok());
    ASSERT_TRUE(two.b.AwaitWord(0, round));
    Bytes expected = large;
    std::memcpy(expected.data() + 8000, medium.data(), medium.size());
    std::memcpy(expected.data() + 13000, last.data(), last.size());
    ASSERT_TRUE(two.b.Holds(1000, expected)) << "round " << round;
  }
}

TEST(TcpTest, StripesOutOfOrderHoldTheWordBack) {
  End end(0, 2, WithLanes(3));
  RawPeer peer(end, 3);
  const Bytes one = Filled(4096, 1);
  const Bytes two = Filled(4096, 2);
  peer.Fence(0, {0, 1, 2});
  peer.Word(0, 5);
  peer.Put(2, 8192, two);
  peer.Put(1, 4096, one);
  EXPECT_FALSE(end.Await([&] { return end.Word(0) != 0; }, 0.05)) << "one put is still missing";
  peer.Put(2, 12288, two);
  ASSERT_TRUE(end.AwaitWord(0, 5));
  EXPECT_TRUE(end.Holds(4096, one) && end.Holds(8192, two) && end.Holds(12288, two));
}

TEST(TcpTest, AnyLaneCanWaitForAnother) {
  End end(0, 2, WithLanes(2));
  RawPeer peer(end, 2);
  peer.Fence(1, {2});
  peer.Put(1, 64, Filled(64, 9));
  peer.Put(0, 64, Filled(64, 1));
  uint64_t first = 0;  // the first word of what has to wait
  std::memcpy(&first, Filled(64, 9).data(), sizeof(first));
  EXPECT_FALSE(end.Await([&] { return end.Word(64) == first; }, 0.05));
  peer.Word(0, 5);
  peer.Fence(0, {0, 1});
  peer.Word(0, 6);
  ASSERT_TRUE(end.AwaitWord(0, 6));
  EXPECT_TRUE(end.Holds(64, Filled(64, 9)));
}

TEST(TcpTest, BothMayCallAtTheSameTime) {
  const auto before = OpenFds();
  for (int round = 0; round < 40; ++round) {
    Two two(WithLanes(3));
    std::atomic<int> ready{0};
    const auto run = [&](End& self, int other) {
      ready.fetch_add(1);
      while (ready.load() < 2) {
      }
      EXPECT_TRUE(self.to(other).PostWord(7, 16).ok());
      EXPECT_TRUE(self.to(other).Push().ok());
      EXPECT_TRUE(self.AwaitWord(16, 7)) << "round " << round;
    };
    std::thread thread([&] { run(two.b, 0); });
    run(two.a, 1);
    thread.join();
    EXPECT_TRUE(two.a.lost().empty() && two.b.lost().empty());
  }
  EXPECT_EQ(OpenFds(), before);
}

TEST(TcpTest, OneEndpointServesSixtyFourPeers) {
  constexpr int kPeers = 65;
  End center(0, kPeers);
  std::vector<std::unique_ptr<End>> others;
  for (int i = 1; i < kPeers; ++i) {
    others.push_back(std::make_unique<End>(i, kPeers));
    others.back()->Connect(0, center);
    center.Connect(i, *others.back());
  }
  // Half of them call, the others are called.
  for (int i = 1; i < kPeers; ++i) {
    End& from = i % 2 == 0 ? center : *others[static_cast<size_t>(i - 1)];
    MessageChannel& channel = from.to(i % 2 == 0 ? i : 0);
    ASSERT_TRUE(channel.PostWord(static_cast<uint64_t>(i), static_cast<uint64_t>(8 * i)).ok());
    ASSERT_TRUE(channel.Push().ok());
  }
  for (int i = 1; i < kPeers; ++i) {
    End& to = i % 2 == 0 ? *others[static_cast<size_t>(i - 1)] : center;
    EXPECT_TRUE(to.AwaitWord(static_cast<size_t>(8 * i), static_cast<uint64_t>(i))) << i;
  }
  EXPECT_TRUE(center.lost().empty());
}

TEST(TcpTest, ManyThreadsPostOnOneChannel) {
  Two two(WithLanes(3));
  constexpr int kThreads = 6;
  constexpr uint64_t kPosts = 150;
  constexpr size_t kSlot = 64 * 1024;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      MessageChannel& channel = two.a.to(1);
      const size_t slot = static_cast<size_t>(i) * kSlot;
      const Bytes data = Filled(20000, i);
      for (uint64_t n = 1; n <= kPosts; ++n) {
        const size_t size = n % 3 == 0 ? 20000 : n % 3 == 1 ? 300 : 5000;
        ASSERT_TRUE(channel.PostPut(std::span(data).first(size), kWindow, slot + 64).ok());
        ASSERT_TRUE(channel.PostWord(n, slot).ok());
        ASSERT_TRUE(channel.Push().ok());
      }
      ASSERT_TRUE(two.b.AwaitWord(slot, kPosts));
      ASSERT_TRUE(two.b.Holds(slot + 64, data));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(two.b.arrivals.load(), 0);
}

TEST(TcpTest, RegionsTakePutsUntilTheyAreDeregistered) {
  Two two;
  auto memory = std::make_unique<std::array<std::byte, 40960>>();
  const Result<uint32_t> region = two.b.endpoint->Register(*memory);
  ASSERT_TRUE(region.ok());
  const Bytes data = Filled(40000, 3);
  ASSERT_TRUE(two.a.to(1).PostPut(data, *region, 96).ok());
  ASSERT_TRUE(two.a.to(1).PostWord(12, *region, 40).ok());
  ASSERT_TRUE(two.a.to(1).Flush(TestDeadline()).ok());
  EXPECT_EQ(std::memcmp(memory->data() + 96, data.data(), data.size()), 0);
  EXPECT_EQ(std::memcmp(memory->data() + 40, "\x0c\0\0\0\0\0\0\0", 8), 0);
  two.b.endpoint->Deregister(*region);
  memory.reset();
  ASSERT_TRUE(two.a.to(1).PostPut(data, *region, 96).ok());
  ASSERT_TRUE(two.a.to(1).PostWord(12, *region, 40).ok());
  ASSERT_TRUE(two.a.to(1).PostWord(1, 0).ok());
  ASSERT_TRUE(two.a.to(1).Flush(TestDeadline()).ok());
  EXPECT_EQ(two.b.Word(0), 1u) << "the rest goes on";
  EXPECT_EQ(two.b.endpoint->Register({reinterpret_cast<std::byte*>(4), 8}).status().code(),
            Code::kInvalidArgument);
}

TEST(TcpTest, DeregisterWhileDataArrive) {
  for (int round = 0; round < 10; ++round) {
    Two two;
    auto memory = std::make_unique<Bytes>(1 << 20);
    const uint32_t region = *two.b.endpoint->Register(*memory);
    const Bytes data = Filled(memory->size(), round);
    std::atomic<bool> stop{false};
    std::thread sender([&] {
      while (!stop.load()) {
        ASSERT_TRUE(two.a.to(1).PostPut(data, region, 0).ok());
        ASSERT_TRUE(two.a.to(1).PostWord(1, 0).ok());
        ASSERT_TRUE(two.a.to(1).Flush(TestDeadline()).ok());
      }
    });
    ASSERT_TRUE(two.b.AwaitWord(0, 1));
    two.b.endpoint->Deregister(region);
    memory.reset();  // a sanitizer sees who still writes
    stop.store(true);
    sender.join();
    EXPECT_TRUE(two.b.lost().empty());
  }
}

TEST(TcpTest, SmallPutsAreCopiedAndLargeOnesTold) {
  Two two;
  Bytes small = Filled(kCopiedPutBytes, 1);
  ASSERT_TRUE(two.a.to(1).PostPut(small, kWindow, 0).ok());
  small.assign(small.size(), std::byte{0});
  const Bytes large = Filled(500000, 2);
  const Result<uint64_t> ticket = two.a.to(1).PostPut(large, kWindow, 8192);
  ASSERT_TRUE(ticket.ok());
  EXPECT_EQ(*ticket, 2u);
  ASSERT_TRUE(two.a.to(1).Push().ok());
  ASSERT_TRUE(two.a.Await([&] { return two.a.to(1).Sent() >= *ticket; }));
  ASSERT_TRUE(two.a.to(1).Flush(TestDeadline()).ok());
  EXPECT_TRUE(two.b.Holds(0, Filled(kCopiedPutBytes, 1)) && two.b.Holds(8192, large));
}

TEST(TcpTest, ASlowReceiverHoldsTheSenderUp) {
  TcpTransportOptions options = WithLanes(2);
  options.max_queued_bytes = 64 * 1024;
  options.chunk_bytes = 1 << 20;
  End end(0, 2, options);
  End other(1, 2, options);
  end.Connect(1, other);  // its address; the peer below comes in its place
  RawPeer peer(end, 2);   // which never reads
  const Bytes large(32 << 20);
  const auto post_large = [&] { return end.to(1).PostPut(large, 1, 0); };
  ASSERT_TRUE(end.Await([&] {
    const Result<uint64_t> ticket = post_large();
    EXPECT_TRUE(ticket.ok() && end.to(1).Push().ok());
    return end.to(1).Sent() < *ticket;
  }));
  Status status;
  int posts = 0;
  for (; posts < 100000 && status.ok(); ++posts) {
    status = end.to(1).PostWord(1, 0);
    if (status.ok()) status = end.to(1).Push();
  }
  EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.ToString();
  EXPECT_NE(status.message().find("peer 1"), std::string_view::npos);
  EXPECT_GT(posts, 1000);
  // The memory of puts that were not sent is free when Abort() returns.
  std::thread aborter([&] { end.to(1).Abort(); });
  EXPECT_EQ(end.to(1).Signal().code(), Code::kAborted) << "it waited for room";
  aborter.join();
  EXPECT_EQ(end.to(1).status().code(), Code::kAborted);
  EXPECT_TRUE(peer.IsClosed(0)) << "so that the peer learns of it";
}

TEST(TcpTest, AnEndpointThatClosesIsNotLost) {
  End a(0, 2);
  {
    End b(1, 2);
    a.Connect(1, b);
    b.Connect(0, a);
    ASSERT_TRUE(b.to(0).PostPut(Filled(100000, 1), kWindow, 0).ok());
    ASSERT_TRUE(b.to(0).PostWord(1, 200000).ok());
  }
  ASSERT_TRUE(a.AwaitWord(200000, 1)) << "what it had posted still comes";
  EXPECT_TRUE(a.Holds(0, Filled(100000, 1)));
  ASSERT_TRUE(a.Await([&] { return !a.to(1).status().ok(); }));
  EXPECT_EQ(a.to(1).status().code(), Code::kUnavailable);
  EXPECT_TRUE(a.lost().empty());
}

TEST(TcpTest, WhatHasComeIsFlushedAlsoWhenThePeerHasLeftSince) {
  for (int round = 0; round < 20; ++round) {
    End a(0, 2);
    auto b = std::make_unique<End>(1, 2);
    a.Connect(1, *b);
    ASSERT_TRUE(a.to(1).PostPut(Filled(100000, 1), kWindow, 0).ok());
    ASSERT_TRUE(a.to(1).PostWord(1, 200000).ok());
    ASSERT_TRUE(a.to(1).Push().ok());
    std::thread leaver([&] {
      ASSERT_TRUE(b->AwaitWord(200000, 1));
      b.reset();
    });
    if (round % 2 == 0) leaver.join();
    const Status status = a.to(1).Flush(TestDeadline());
    EXPECT_TRUE(status.ok()) << status.ToString();
    if (round % 2 != 0) leaver.join();
  }
}

TEST(TcpTest, CallingSomebodyWhoIsGoneIsALoss) {
  for (int number : {0, 1}) {
    End caller(number, 2);
    {
      End gone(1 - number, 2);
      caller.Connect(1 - number, gone);
    }
    EXPECT_TRUE(caller.to(1 - number).PostWord(1, 0).ok());
    ASSERT_TRUE(caller.Await([&] { return !caller.lost().empty(); }));
    EXPECT_EQ(caller.lost()[0].first, 1 - number);
    EXPECT_EQ(caller.to(1 - number).PostWord(1, 0).code(), Code::kUnavailable);
    const Status status = caller.to(1 - number).Wait(1, TestDeadline());
    EXPECT_NE(status.message().find("refused"), std::string_view::npos) << status.ToString();
  }
}

TEST(TcpTest, BothEndsNeedTheSameSecretStartAndNumberOfConnections) {
  const auto expect_failure = [](const TcpTransportOptions& options, Code code) {
    for (int caller : {0, 1}) {
      End ours(0, 2);
      TcpTransportOptions other = options;
      other.connect_timeout = std::chrono::milliseconds(100);
      End theirs(1, 2, other);
      End& from = caller == 0 ? ours : theirs;
      from.Connect(1 - caller, caller == 0 ? theirs : ours);
      ASSERT_TRUE(from.to(1 - caller).PostWord(1, 0).ok());
      ASSERT_TRUE(from.Await([&] { return !from.lost().empty(); }));
      EXPECT_EQ(from.lost()[0].second.code(), code) << from.lost()[0].second.ToString();
    }
  };
  TcpTransportOptions options = End::Options();
  options.secret = "another secret of this test";
  expect_failure(options, Code::kUnauthenticated);
  options = End::Options();
  options.lanes = 3;
  expect_failure(options, Code::kUnavailable);
}

TEST(TcpTest, IPv6) {
  TcpTransportOptions options = End::Options();
  options.ip = "::1";
  if (!MakeTcpTransport(options)->Probe().ok()) GTEST_SKIP() << "this machine has no ::1";
  Two two(options);
  ASSERT_TRUE(two.a.to(1).PostWord(3, 0).ok());
  ASSERT_TRUE(two.a.to(1).Push().ok());
  EXPECT_TRUE(two.b.AwaitWord(0, 3));
}

TEST(TcpTest, RefusesWhatCannotWork) {
  TcpTransportOptions options = End::Options();
  options.lanes = 17;
  EXPECT_EQ(BindTcp(options, 0, 2, 64).status().code(), Code::kInvalidArgument);
  options = End::Options();
  options.secret = "short";
  EXPECT_EQ(BindTcp(options, 0, 2, 64).status().code(), Code::kInvalidArgument);
  options = End::Options();
  options.ip = "nowhere";
  EXPECT_EQ(MakeTcpTransport(options)->Probe().code(), Code::kInvalidArgument);
  Two two;
  EXPECT_EQ(two.a.to(1).PostWord(1, 4).code(), Code::kInvalidArgument);
  EXPECT_EQ(two.a.to(1).PostWord(1, 1 << 20).code(), Code::kOutOfRange);
  const Bytes data(64);
  EXPECT_EQ(two.a.to(1).PostPut(data, 3, ~uint64_t{0} - 7).status().code(), Code::kOutOfRange);
  EXPECT_FALSE(two.a.endpoint->ConnectMessages(two.a.endpoint->address()).ok());
}

TEST(TcpTest, OwnThreadSleepsWhileOthersPoll) {
  Two two;
  constexpr uint64_t kRounds = 3000;
  const auto serve = [](End& self, int other, bool first) {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      if (first) {
        ASSERT_TRUE(self.to(other).PostWord(round, 0).ok() && self.to(other).Push().ok());
      }
      while (self.Word(0) < round) self.endpoint->Progress(std::chrono::milliseconds(1));
      if (!first) {
        ASSERT_TRUE(self.to(other).PostWord(round, 0).ok() && self.to(other).Push().ok());
      }
    }
  };
  const auto wakeups = [&] {
    return two.a.endpoint->counters().wakeups + two.b.endpoint->counters().wakeups;
  };
  const uint64_t before = wakeups();
  const auto start = Clock::now();
  std::thread thread([&] { serve(two.b, 0, false); });
  serve(two.a, 1, true);
  thread.join();
  const auto parks = static_cast<uint64_t>((Clock::now() - start) / std::chrono::milliseconds(2));
  // Each looks every 2 ms, and takes over when a waiter has lost its core for as long; but it does
  // not wake with each of the messages, of which there are twice as many as rounds.
  EXPECT_LE(wakeups() - before, 4 * parks + kRounds / 2) << "in " << 2 * parks << " ms";
}

}  // namespace
}  // namespace jaxfabric::tcp
