// What a process hears last is not taken for the cause.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <sstream>

#include "collective/world.h"
#include "os/tcp_socket.h"
#include "transport/tcp_ends.h"

namespace jaxfabric::testing {
namespace {

struct Together {
  std::atomic<pid_t> pids[3];
  std::atomic<bool> told, heard;
};

bool IsStopped(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::stringstream text;
  text << file.rdbuf();
  const std::string stat = text.str();
  return stat.find(") T ") != std::string::npos;
}

template <class Condition>
void Await(Condition condition) {
  const Deadline deadline = Deadline::AfterSeconds(20);
  while (!condition()) {
    JF_CHECK(!deadline.expired());
    std::this_thread::yield();
  }
}

// A job goes on while strangers call, and says how many there were.
TEST(NewsTest, StrangersAreCounted) {
  World world({2, 1, 2});
  const size_t call = world.Add({OpKind::kAllReduce, DType::kFloat32, 10, 2});
  const auto launch = [&](int number) {
    return world.OnEveryRank(
        [&](LocalRanks& ranks, int local) { return Text(ranks.Run(call, local, number)); });
  };
  EXPECT_EQ(launch(0), "");
  Fabric& called = world.fabric(1);
  const uint64_t before = called.Counters()["refused_connections"];
  for (int i = 0; i < 3; ++i) {
    const Result<UniqueFd> fd =
        ConnectTcp(tcp::RawPeer::Address(*called.messages()), {}, Deadline::AfterSeconds(20));
    ASSERT_TRUE(fd.ok());
    const std::string noise(200, 'x');
    EXPECT_EQ(::send(fd->get(), noise.data(), noise.size(), MSG_NOSIGNAL), 200);
  }
  Await([&] { return called.Counters()["refused_connections"] == before + 3; });
  EXPECT_EQ(called.Counters()["malformed_connections"], 0u);
  EXPECT_EQ(launch(1), "");
}

// Process 2 is stopped and its queue is full when process 0 says what has failed, and process 1,
// which has heard, leaves. Then process 2 goes on.
TEST(NewsTest, WhoLeavesAfterAFailureHasSaidWhich) {
  auto* const memory = static_cast<Together*>(
      ::mmap(nullptr, sizeof(Together), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(memory, MAP_FAILED);
  Together& together = *memory;
  EXPECT_EQ(InForkedProcesses({3, 1}, TestOptions(),
                              [&](LocalRanks& ranks) -> std::string {
                                Fabric& fabric = ranks.fabric();
                                const int self = fabric.process();
                                together.pids[self] = ::getpid();
                                const auto pid = [&](int process) {
                                  Await([&] { return together.pids[process] != 0; });
                                  return together.pids[process].load();
                                };
                                if (self == 0) {
                                  Await([&] { return IsStopped(pid(2)); });
                                  // Announced to all: more than a socket takes.
                                  std::vector<std::unique_ptr<LocalRanks::Execution>> executions;
                                  for (int call = 0; call < 500; ++call) {
                                    ranks.Add(EveryKind(3, 1)[0]);
                                    executions.push_back(
                                        ranks.EnterPartly(static_cast<size_t>(call), 0, 0));
                                  }
                                  fabric.ReportFailure(Status(Code::kUnavailable, "rank 77 died"));
                                  for (auto& execution : executions) ranks.GiveUp(*execution);
                                  Await([&] { return together.told.load(); });
                                  ::raise(SIGSTOP);  // its control connections stay open
                                  return "";
                                }
                                if (self == 1) {
                                  Await([&] { return !fabric.failure().ok(); });
                                  together.told = true;
                                  Await([&] { return IsStopped(pid(0)); });
                                  fabric.Shutdown();
                                  ::kill(pid(2), SIGCONT);
                                  Await([&] { return together.heard.load(); });
                                  ::kill(pid(0), SIGCONT);
                                  return "";
                                }
                                ::raise(SIGSTOP);
                                Await([&] { return !fabric.failure().ok(); });
                                together.heard = true;
                                const std::string text = fabric.failure().ToString();
                                return text.find("rank 77 died") != std::string::npos ? "" : text;
                              }),
            "");
  ::munmap(memory, sizeof(Together));
}

}  // namespace
}  // namespace jaxfabric::testing
