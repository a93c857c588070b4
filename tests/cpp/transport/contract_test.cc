// What every transport must do, run on each of them. A new transport adds one line to Cases().
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "memory/copy.h"
#include "transport/faulty/faulty.h"
#include "transport/inproc/inproc.h"
#include "transport/ranks.h"
#include "transport/shm/shm.h"
#include "transport/tcp/tcp.h"

namespace jaxfabric {
namespace {

struct Case {
  std::string name;
  TransportFactory factory;
  RankMode mode;
};

void PrintTo(const Case& parameter, std::ostream* out) { *out << parameter.name; }

// Late but in order: a transport is allowed to be that, so the contract holds.
std::unique_ptr<Transport> MakeLate(std::unique_ptr<Transport> inner) {
  FaultPlan plan;
  plan.delay_puts = {0, FaultPlan::kNever};
  plan.delay_calls = 3;
  return MakeFaultyTransport(std::move(inner), plan);
}

std::unique_ptr<Transport> MakeTcp() {
  TcpTransportOptions options;
  options.secret = "known to every process";
  return MakeTcpTransport(options);
}

std::vector<Case> Cases() {
  const TransportFactory late_inproc = [] { return MakeLate(MakeInprocTransport()); };
  const TransportFactory late_shm = [] { return MakeLate(MakeShmTransport()); };
  const TransportFactory tcp = MakeTcp;
  const TransportFactory late_tcp = [] { return MakeLate(MakeTcp()); };
  return {
      // inproc is not run as processes: it is by definition the transport inside one.
      {"inproc_threads", MakeInprocTransport, RankMode::kThreads},
      {"shm_threads", MakeShmTransport, RankMode::kThreads},
      {"shm_processes", MakeShmTransport, RankMode::kProcesses},
      {"tcp_threads", tcp, RankMode::kThreads},
      {"tcp_processes", tcp, RankMode::kProcesses},
      {"late_inproc_threads", late_inproc, RankMode::kThreads},
      {"late_shm_processes", late_shm, RankMode::kProcesses},
      {"late_tcp_threads", late_tcp, RankMode::kThreads},
      {"late_tcp_processes", late_tcp, RankMode::kProcesses},
  };
}

class TransportContract : public ::testing::TestWithParam<Case> {
 protected:
  void Run(const RankOptions& options, const std::function<void(Rank&)>& body) {
    RunRanks(GetParam().mode, GetParam().factory, options, body);
  }
};

std::vector<std::byte> Pattern(size_t bytes, uint32_t seed) {
  std::vector<std::byte> pattern(bytes);
  uint32_t state = seed * 2654435761u + 1;
  for (std::byte& byte : pattern) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::byte>(state >> 24);
  }
  return pattern;
}

bool WindowHolds(const Rank& rank, size_t offset, const std::vector<std::byte>& bytes) {
  return std::memcmp(rank.endpoint->window().data() + offset, bytes.data(), bytes.size()) == 0;
}

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

TEST_P(TransportContract, ProbeSucceedsHere) {
  const Status status = GetParam().factory()->Probe();
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST_P(TransportContract, WindowIsZeroedAndPageAligned) {
  Run({.count = 2, .window_bytes = 10001}, [](Rank& rank) {
    const std::span<std::byte> window = rank.endpoint->window();
    ASSERT_EQ(window.size(), 10001u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(window.data()) % 4096, 0u);
    for (std::byte byte : window) ASSERT_EQ(byte, std::byte{0});
  });
}

TEST_P(TransportContract, BindRefusesNonsense) {
  const std::unique_ptr<Transport> transport = GetParam().factory();
  EXPECT_EQ(transport->Bind(-1, 2, 4096).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(transport->Bind(2, 2, 4096).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(transport->Bind(0, 0, 4096).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(transport->Bind(0, 1, ~size_t{0}).status().code(), Code::kInvalidArgument);
}

TEST_P(TransportContract, PutSignalWaitBothWays) {
  Run({}, [](Rank& rank) {
    Channel& peer = rank.to(1 - rank.number);
    for (uint32_t round = 1; round <= 500; ++round) {
      const auto sent = Pattern(200, 2 * round + static_cast<uint32_t>(rank.number));
      const auto expected = Pattern(200, 2 * round + static_cast<uint32_t>(1 - rank.number));
      ASSERT_TRUE(peer.Put(sent, 64).ok());
      ASSERT_TRUE(peer.Signal().ok());
      const Status status = peer.Wait(2 * round - 1, TestDeadline());
      ASSERT_TRUE(status.ok()) << status.ToString();
      ASSERT_TRUE(WindowHolds(rank, 64, expected)) << "round " << round;
      // The peer may overwrite only when it knows that this has been read.
      ASSERT_TRUE(peer.Signal().ok());
      ASSERT_TRUE(peer.Wait(2 * round, TestDeadline()).ok());
    }
  });
}

TEST_P(TransportContract, EveryRankReachesEveryOther) {
  constexpr size_t kSlot = 128;
  Run({.count = 5, .window_bytes = 5 * kSlot}, [](Rank& rank) {
    for (int peer = 0; peer < rank.count; ++peer) {
      if (peer == rank.number) continue;
      const auto seed = static_cast<uint32_t>(100 * rank.number + peer);
      const size_t slot = static_cast<size_t>(rank.number) * kSlot;
      ASSERT_TRUE(rank.to(peer).Put(Pattern(kSlot, seed), slot).ok());
      ASSERT_TRUE(rank.to(peer).Signal().ok());
      ASSERT_TRUE(rank.to(peer).Flush(TestDeadline()).ok());
    }
    for (int peer = 0; peer < rank.count; ++peer) {
      if (peer == rank.number) continue;
      const auto seed = static_cast<uint32_t>(100 * peer + rank.number);
      ASSERT_TRUE(rank.to(peer).Wait(1, TestDeadline()).ok());
      ASSERT_TRUE(WindowHolds(rank, static_cast<size_t>(peer) * kSlot, Pattern(kSlot, seed)));
    }
  });
}

// Who has waited for signal n sees every byte put before it, without waiting for each.
TEST_P(TransportContract, SignalsFollowTheirPuts) {
  constexpr uint64_t kSlots = 16;
  constexpr uint64_t kRounds = 40;
  Run({}, [](Rank& rank) {
    Channel& peer = rank.to(1 - rank.number);
    for (uint64_t round = 0; round < kRounds; ++round) {
      if (rank.number == 0) {
        for (uint64_t slot = 0; slot < kSlots; ++slot) {
          const uint64_t value = round * kSlots + slot + 1;
          ASSERT_TRUE(peer.Put(std::as_bytes(std::span(&value, 1)), slot * 64).ok());
          ASSERT_TRUE(peer.Signal().ok());
        }
        ASSERT_TRUE(peer.Wait(round + 1, TestDeadline()).ok());
        continue;
      }
      for (uint64_t slot = 0; slot < kSlots; slot += 1 + round % 3) {
        const uint64_t expected = round * kSlots + slot + 1;
        ASSERT_TRUE(peer.Wait(expected, TestDeadline()).ok());
        uint64_t value;
        std::memcpy(&value, rank.endpoint->window().data() + slot * 64, sizeof(value));
        ASSERT_EQ(value, expected);
      }
      ASSERT_TRUE(peer.Wait((round + 1) * kSlots, TestDeadline()).ok());
      ASSERT_TRUE(peer.Signal().ok());
    }
  });
}

TEST_P(TransportContract, WaitCountsSignalsInTotal) {
  Run({}, [](Rank& rank) {
    Channel& peer = rank.to(1 - rank.number);
    for (int i = 0; i < 1000; ++i) ASSERT_TRUE(peer.Signal().ok());
    ASSERT_TRUE(peer.Wait(0, Deadline::AfterSeconds(0)).ok()) << "zero signals are always there";
    ASSERT_TRUE(peer.Wait(1000, TestDeadline()).ok());
    ASSERT_TRUE(peer.Wait(1, Deadline::AfterSeconds(0)).ok()) << "an old signal stays";
    const Status status = peer.Wait(1001, Deadline::AfterSeconds(0));
    // The peer may be through, which a transport may notice.
    EXPECT_TRUE(status.code() == Code::kDeadlineExceeded || status.code() == Code::kUnavailable)
        << status.ToString();
  });
}

TEST_P(TransportContract, LargePuts) {
  const size_t bytes = NonTemporalThreshold() + 12345;  // of an odd size at an odd offset
  constexpr size_t kOffset = 3;
  Run({.count = 2, .window_bytes = bytes + kOffset}, [bytes](Rank& rank) {
    Channel& peer = rank.to(1 - rank.number);
    auto data = Pattern(bytes, static_cast<uint32_t>(rank.number));
    ASSERT_TRUE(peer.Put(data, kOffset).ok());
    data.assign(bytes, std::byte{0});  // the caller may reuse it at once
    ASSERT_TRUE(peer.Signal().ok());
    ASSERT_TRUE(peer.Wait(1, TestDeadline()).ok());
    EXPECT_TRUE(WindowHolds(rank, kOffset, Pattern(bytes, static_cast<uint32_t>(1 - rank.number))));
    // Nobody leaves while the other may still put.
    ASSERT_TRUE(peer.Signal().ok());
    ASSERT_TRUE(peer.Wait(2, TestDeadline()).ok());
  });
}

TEST_P(TransportContract, PutsAreBounded) {
  Run({.count = 2, .window_bytes = 1000}, [](Rank& rank) {
    Channel& peer = rank.to(1 - rank.number);
    const std::vector<std::byte> data(200);
    ASSERT_TRUE(peer.Put(data, 800).ok());
    ASSERT_TRUE(peer.Put({}, 1000).ok());
    ASSERT_TRUE(peer.Flush(TestDeadline()).ok());  // a late transport may tell only now
    for (size_t offset : {size_t{801}, size_t{5000}, ~size_t{0}}) {
      Status status = peer.Put(data, offset);
      if (status.ok()) status = peer.Flush(TestDeadline());
      EXPECT_EQ(status.code(), Code::kOutOfRange);
      EXPECT_TRUE(Contains(status.message(), StrCat(offset))) << status.message();
      EXPECT_TRUE(Contains(status.message(), "1000 bytes")) << status.message();
    }
    ASSERT_TRUE(peer.Signal().ok()) << "the channel must stay usable";
    ASSERT_TRUE(peer.Wait(1, TestDeadline()).ok());
  });
}

TEST_P(TransportContract, DeadlineNamesThePeerAndBreaksNothing) {
  Run({.count = 3}, [](Rank& rank) {
    if (rank.number == 2) return;
    Channel& peer = rank.to(1 - rank.number);
    if (rank.number == 0) {
      const Deadline deadline = Deadline::AfterSeconds(0.05);
      const Status status = peer.Wait(1, deadline);
      EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
      EXPECT_TRUE(Contains(status.message(), "peer 1")) << status.message();
      EXPECT_TRUE(deadline.expired());
      ASSERT_TRUE(peer.Signal().ok());
    } else {
      ASSERT_TRUE(peer.Wait(1, TestDeadline()).ok());
      ASSERT_TRUE(peer.Signal().ok());
    }
    if (rank.number == 0) {
      ASSERT_TRUE(peer.Wait(1, TestDeadline()).ok());
    }
  });
}

TEST_P(TransportContract, AbortEndsBothEndsWaits) {
  Run({}, [](Rank& rank) {
    Channel& peer = rank.to(1 - rank.number);
    if (rank.number == 1) {
      const Status status = peer.Wait(1, TestDeadline());
      EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
      EXPECT_TRUE(Contains(status.message(), "peer 0")) << status.message();
      return;
    }
    const pid_t waiter = ::gettid();
    std::thread aborter([&peer, waiter] {
      WaitUntilAsleep(waiter);
      peer.Abort();
    });
    const Status status = peer.Wait(1, TestDeadline());
    aborter.join();
    EXPECT_EQ(status.code(), Code::kAborted) << status.ToString();
    EXPECT_TRUE(Contains(status.message(), "peer 1")) << status.message();
    const std::vector<std::byte> data(8);
    EXPECT_EQ(peer.Put(data, 0).code(), Code::kAborted);
    EXPECT_EQ(peer.Signal().code(), Code::kAborted);
    EXPECT_EQ(peer.Wait(0, TestDeadline()).code(), Code::kAborted);
    EXPECT_EQ(peer.Flush(TestDeadline()).code(), Code::kAborted);
  });
}

TEST_P(TransportContract, SignalsBeforeAnAbortStillCount) {
  Run({.count = 3}, [](Rank& rank) {
    if (rank.number == 0) {
      Channel& peer = rank.to(1);
      ASSERT_TRUE(peer.Put(Pattern(100, 1), 0).ok());
      ASSERT_TRUE(peer.Signal().ok());
      ASSERT_TRUE(peer.Flush(TestDeadline()).ok());
      peer.Abort();
      ASSERT_TRUE(rank.to(2).Signal().ok()) << "other channels are not affected";
      ASSERT_TRUE(rank.to(2).Flush(TestDeadline()).ok());
    } else if (rank.number == 1) {
      EXPECT_EQ(rank.to(0).Wait(2, TestDeadline()).code(), Code::kUnavailable);
      EXPECT_TRUE(rank.to(0).Wait(1, TestDeadline()).ok());
      EXPECT_TRUE(WindowHolds(rank, 0, Pattern(100, 1)));
    } else {
      EXPECT_TRUE(rank.to(0).Wait(1, TestDeadline()).ok());
    }
  });
}

TEST_P(TransportContract, KilledPeerEndsWaitsByTheDeadline) {
  if (GetParam().mode == RankMode::kThreads) GTEST_SKIP() << "a thread cannot be killed alone";
  Run({.count = 3, .killed = 1}, [](Rank& rank) {
    if (rank.number == 1) {
      // After a handshake, so that the peer is known to have been connected and alive.
      ASSERT_TRUE(rank.to(0).Signal().ok());
      ASSERT_TRUE(rank.to(0).Flush(TestDeadline()).ok());
      ::raise(SIGKILL);
    }
    if (rank.number == 2) return;
    ASSERT_TRUE(rank.to(1).Wait(1, TestDeadline()).ok());
    const Status status = rank.to(1).Wait(2, Deadline::AfterSeconds(0.2));
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(Contains(status.message(), "peer 1")) << status.message();
    const std::vector<std::byte> data(100);
    (void)rank.to(1).Put(data, 0);  // to nobody: may fail, must not crash
  });
}

TEST_P(TransportContract, ConnectRefusesForeignAddresses) {
  Run({}, [](Rank& rank) {
    const EndpointAddress own = rank.endpoint->address();
    EndpointAddress other_kind = own;
    other_kind.kind = "pigeon";
    EXPECT_EQ(rank.endpoint->Connect(other_kind, {}, TestDeadline()).status().code(),
              Code::kInvalidArgument);
    for (size_t bytes = 0; bytes < own.bytes.size(); ++bytes) {
      EndpointAddress cut = own;
      cut.bytes.resize(bytes);
      EXPECT_FALSE(rank.endpoint->Connect(cut, {}, TestDeadline()).ok());
    }
    for (size_t at = 0; at < own.bytes.size(); ++at) {
      EndpointAddress damaged = own;
      damaged.bytes[at] ^= std::byte{0x81};
      std::vector<UniqueFd> fds;
      for (int fd : own.fds) fds.emplace_back(::dup(fd));
      EXPECT_FALSE(rank.endpoint->Connect(damaged, std::move(fds), TestDeadline()).ok())
          << "byte " << at;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, TransportContract, ::testing::ValuesIn(Cases()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace jaxfabric
