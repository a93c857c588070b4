#include "transport/ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cstdio>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "os/open_fds.h"
#include "os/unix_socket.h"

namespace jaxfabric {
namespace {

// An address that owns its descriptors.
struct OwnedAddress {
  EndpointAddress address;
  std::vector<UniqueFd> fds;
};

OwnedAddress Duplicate(const EndpointAddress& address) {
  OwnedAddress copy{address, {}};
  copy.address.fds.clear();
  for (int fd : address.fds) copy.fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  return copy;
}

bool ConnectAll(Rank& rank, std::vector<OwnedAddress> addresses) {
  rank.channels.resize(addresses.size());
  for (int peer = 0; peer < rank.count; ++peer) {
    if (peer == rank.number) continue;
    OwnedAddress& address = addresses[static_cast<size_t>(peer)];
    Result<std::unique_ptr<Channel>> channel =
        rank.endpoint->Connect(address.address, std::move(address.fds), TestDeadline());
    EXPECT_TRUE(channel.ok()) << channel.status().ToString();
    if (!channel.ok()) return false;
    rank.channels[static_cast<size_t>(peer)] = std::move(*channel);
  }
  return true;
}

void RunThreads(const TransportFactory& factory, const RankOptions& options,
                const std::function<void(Rank&)>& body) {
  const auto count = static_cast<size_t>(options.count);
  const std::unique_ptr<Transport> transport = factory();
  std::vector<std::unique_ptr<Endpoint>> endpoints(count);
  std::barrier bound(options.count);
  std::barrier connected(options.count);
  std::barrier finished(options.count);
  std::vector<std::thread> threads;
  for (int number = 0; number < options.count; ++number) {
    threads.emplace_back([&, number] {
      Result<std::unique_ptr<Endpoint>> endpoint =
          transport->Bind(number, options.count, options.window_bytes);
      EXPECT_TRUE(endpoint.ok()) << endpoint.status().ToString();
      if (endpoint.ok()) endpoints[static_cast<size_t>(number)] = std::move(*endpoint);
      bound.arrive_and_wait();
      Rank rank{number, options.count, endpoints[static_cast<size_t>(number)].get(), {}};
      bool ready = true;
      std::vector<OwnedAddress> addresses;
      for (const auto& other : endpoints) {
        ready = ready && other != nullptr;
        if (ready) addresses.push_back(Duplicate(other->address()));
      }
      ready = ready && ConnectAll(rank, std::move(addresses));
      connected.arrive_and_wait();
      if (ready) body(rank);
      finished.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

SocketMessage Receive(int socket) {
  for (;;) {
    Result<std::optional<SocketMessage>> message = TryReceiveMessage(socket);
    if (!message.ok()) return {};
    if (message->has_value()) return std::move(**message);
    pollfd entry{socket, POLLIN, 0};
    ::poll(&entry, 1, 60000);
  }
}

// The body of a rank's process: sends its address to the parent and gets all of them back.
void RunChild(int number, int socket, const TransportFactory& factory, const RankOptions& options,
              const std::function<void(Rank&)>& body) {
  const std::unique_ptr<Transport> transport = factory();
  Result<std::unique_ptr<Endpoint>> endpoint =
      transport->Bind(number, options.count, options.window_bytes);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status().ToString();
  const EndpointAddress own = (*endpoint)->address();
  ASSERT_TRUE(SendMessage(socket, own.bytes, own.fds, TestDeadline()).ok());
  std::vector<OwnedAddress> addresses;
  for (int peer = 0; peer < options.count; ++peer) {
    SocketMessage message = Receive(socket);
    ASSERT_FALSE(message.bytes.empty()) << "the test's parent went away";
    addresses.push_back({{own.kind, std::move(message.bytes), {}}, std::move(message.fds)});
  }
  Rank rank{number, options.count, endpoint->get(), {}};
  if (ConnectAll(rank, std::move(addresses))) body(rank);
  // Who left now could end the channel of a rank that has just sent its last signal.
  const std::byte done{1};
  (void)SendMessage(socket, std::span(&done, 1), {}, TestDeadline());
  Receive(socket);
}

void RunProcesses(const TransportFactory& factory, const RankOptions& options,
                  const std::function<void(Rank&)>& body) {
  std::fflush(nullptr);  // a child must not print the parent's buffers again
  std::vector<UniqueFd> sockets;
  std::vector<pid_t> pids;
  for (int number = 0; number < options.count; ++number) {
    int pair[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    UniqueFd parent_end(pair[0]);
    UniqueFd child_end(pair[1]);
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      parent_end.Reset();
      sockets.clear();  // the earlier ranks' parent ends
      const auto fds = OpenFds();
      RunChild(number, child_end.get(), factory, options, body);
      EXPECT_EQ(OpenFds(), fds) << "rank " << number << " leaked descriptors";
      EXPECT_EQ(SharedMappings(), 0) << "rank " << number << " leaked mappings";
      std::fflush(nullptr);
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    sockets.push_back(std::move(parent_end));
    pids.push_back(pid);
  }
  std::vector<SocketMessage> addresses;
  for (const UniqueFd& socket : sockets) addresses.push_back(Receive(socket.get()));
  for (const UniqueFd& socket : sockets) {
    for (const SocketMessage& message : addresses) {
      std::vector<int> fds;
      for (const UniqueFd& fd : message.fds) fds.push_back(fd.get());
      EXPECT_TRUE(SendMessage(socket.get(), message.bytes, fds, TestDeadline()).ok());
    }
  }
  // Nothing comes from one that was killed.
  for (const UniqueFd& socket : sockets) Receive(socket.get());
  const std::byte all_done{1};
  for (const UniqueFd& socket : sockets) {
    (void)SendMessage(socket.get(), std::span(&all_done, 1), {}, TestDeadline());
  }
  for (int number = 0; number < options.count; ++number) {
    int status = 0;
    ASSERT_EQ(::waitpid(pids[static_cast<size_t>(number)], &status, 0),
              pids[static_cast<size_t>(number)]);
    if (number == options.killed) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "rank " << number;
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
          << "rank " << number << " failed, see above; wait status " << status;
    }
  }
}

}  // namespace

void RunRanks(RankMode mode, const TransportFactory& factory, const RankOptions& options,
              const std::function<void(Rank&)>& body) {
  const auto fds = OpenFds();
  const int mappings = SharedMappings();
  if (mode == RankMode::kThreads) {
    RunThreads(factory, options, body);
  } else {
    RunProcesses(factory, options, body);
  }
  EXPECT_EQ(OpenFds(), fds) << "descriptors leaked";
  EXPECT_EQ(SharedMappings(), mappings) << "mappings leaked";
}

void WaitUntilAsleep(int tid) {
  // "tid (name) S ..."; the name may contain anything but its end is the last parenthesis.
  for (const std::string path = StrCat("/proc/self/task/", tid, "/stat");;) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    const size_t end = line.rfind(')');
    if (end == std::string::npos || line.compare(end, 3, ") S") == 0) return;
    ::sched_yield();
  }
}

}  // namespace jaxfabric
