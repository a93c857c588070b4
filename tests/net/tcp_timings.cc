// Times of the tcp transport beside those of bare sockets, between two processes of this host.
//
//   jaxfabric_tcp_timings [--ips A,B] [--netns A,B] [--lanes N] [--chunk BYTES] [--seconds S]
//
// With --netns each process enters a network namespace of that name (`ip netns add`) first, so that
// the bytes cross a link; --ips are their addresses there. Prints one line per figure.
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "os/poll.h"
#include "os/tcp_socket.h"
#include "transport/tcp/tcp.h"

namespace jaxfabric {
namespace {

struct Settings {
  std::string ips[2] = {"127.0.0.1", "127.0.0.1"};
  std::string netns[2];
  double seconds = 2;
  TcpTransportOptions tcp;
};

// The two processes and a pipe between them that carries what is not measured.
struct Side {
  int number;
  int pipe;
  const Settings& settings;

  void Tell(const std::string& text) const {
    JF_CHECK(::send(pipe, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  }
  std::string Hear() const {
    std::string text(4096, '\0');
    const ssize_t size = ::recv(pipe, text.data(), text.size(), 0);
    JF_CHECK(size > 0);
    text.resize(static_cast<size_t>(size));
    return text;
  }
};

void EnterNamespace(const std::string& name) {
  if (name.empty()) return;
  const UniqueFd fd(::open(("/var/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC));
  JF_CHECK(fd.valid() && ::setns(fd.get(), CLONE_NEWNET) == 0);
}

void OnBothSides(const Settings& settings, const std::function<void(const Side&)>& body) {
  int pair[2];
  JF_CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
  std::fflush(nullptr);
  pid_t pids[2];
  for (int number = 0; number < 2; ++number) {
    pids[number] = ::fork();
    JF_CHECK(pids[number] >= 0);
    if (pids[number] != 0) continue;
    EnterNamespace(settings.netns[number]);
    body({number, pair[number], settings});
    std::fflush(nullptr);
    ::_exit(0);
  }
  for (int end : pair) ::close(end);
  for (pid_t pid : pids) {
    int status = 0;
    JF_CHECK(::waitpid(pid, &status, 0) == pid && status == 0);
  }
}

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

constexpr size_t kSmall = 64;
constexpr int kBlock = 250;  // rounds that are timed together
constexpr int kBlocks = 80;

// Calls `round` for every round; microseconds of one in the fastest block, which is what a machine
// with other work on it says least wrong.
double FastestRound(const std::function<void(uint64_t)>& round) {
  double fastest = 1e9;
  uint64_t number = 0;
  for (int block = 0; block < kBlocks; ++block) {
    const auto start = Clock::now();
    for (int i = 0; i < kBlock; ++i) round(++number);
    fastest = std::min(fastest, Seconds(start) / kBlock * 1e6);
  }
  return fastest;
}

// There and back on a bare socket, which is read blocking or polled.
void RawPingPong(const Side& side, bool blocking) {
  TcpAddress address = *TcpAddress::FromIp(side.settings.ips[0], 0);
  UniqueFd socket;
  if (side.number == 0) {
    UniqueFd listener = *ListenTcp(&address, {});
    side.Tell(address.ToString());
    JF_CHECK(WaitForSocket(listener.get(), POLLIN, Deadline::AfterSeconds(10)));
    TcpAddress from;
    socket = std::move(**TryAcceptTcp(listener.get(), &from));
    JF_CHECK(SetTcpOptions(socket.get(), {}).ok());
  } else {
    socket = *ConnectTcp(*TcpAddress::Parse(side.Hear()), {}, Deadline::AfterSeconds(10));
  }
  if (blocking) ::fcntl(socket.get(), F_SETFL, 0);
  char message[kSmall] = {};
  const auto receive = [&] {
    for (size_t got = 0; got < sizeof(message);) {
      const ssize_t count = ::recv(socket.get(), message, sizeof(message) - got, 0);
      if (count > 0) got += static_cast<size_t>(count);
    }
  };
  const auto send = [&] {
    JF_CHECK(::send(socket.get(), message, sizeof(message), 0) == sizeof(message));
  };
  const double fastest = FastestRound([&](uint64_t) {
    if (side.number == 0) send();
    receive();
    if (side.number == 1) send();
  });
  if (side.number == 0) {
    std::printf("bare socket, %-8s      %6.2f us there and back\n",
                blocking ? "blocking" : "polled", fastest);
  }
}

struct Pair {
  std::unique_ptr<MessageEndpoint> endpoint;
  std::unique_ptr<MessageChannel> channel;
  uint64_t Word(size_t offset) const {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(endpoint->window().data() + offset))
        .load(std::memory_order_acquire);
  }
};

Pair Connect(const Side& side, size_t window) {
  TcpTransportOptions options = side.settings.tcp;
  options.ip = side.settings.ips[side.number];
  options.secret = "not much of a secret";
  Pair pair;
  auto endpoint = BindTcp(options, side.number, 2, window);
  if (!endpoint.ok()) std::fprintf(stderr, "%s\n", endpoint.status().ToString().c_str());
  JF_CHECK(endpoint.ok());
  pair.endpoint = std::move(*endpoint);
  const std::vector<std::byte> own = pair.endpoint->address().bytes;
  side.Tell(std::string(reinterpret_cast<const char*>(own.data()), own.size()));
  const std::string text = side.Hear();
  EndpointAddress address{"tcp", {}, {}};
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  address.bytes.assign(bytes, bytes + text.size());
  pair.channel = std::move(*pair.endpoint->ConnectMessages(address));
  return pair;
}

long Switches() {
  rusage usage;
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nvcsw;
}

void PingPong(const Side& side, Clock::duration wait) {
  const Pair pair = Connect(side, 4096);
  const std::byte message[kSmall - 8] = {};
  const auto send = [&](uint64_t round) {
    JF_CHECK(pair.channel->PostPut(message, kWindowRegion, 64).ok());
    JF_CHECK(pair.channel->PostWord(round, 0).ok());
    JF_CHECK(pair.channel->Push().ok());
  };
  const auto receive = [&](uint64_t round) {
    while (pair.Word(0) < round) pair.endpoint->Progress(wait);
  };
  const long switches = Switches();
  const double fastest = FastestRound([&](uint64_t round) {
    if (side.number == 0) send(round);
    receive(round);
    if (side.number == 1) send(round);
  });
  if (side.number == 0) {
    std::printf("put and word, %-8s     %6.2f us there and back; %.3f sleeps per round\n",
                wait == wait.zero() ? "polled" : "sleeping", fastest,
                static_cast<double>(Switches() - switches) / (kBlock * kBlocks));
  }
  side.Tell("end");
  side.Hear();
}

void Throughput(const Side& side, size_t bytes) {
  const Pair pair = Connect(side, bytes + 64);
  const std::vector<std::byte> data(side.number == 0 ? bytes : 0, std::byte{1});
  constexpr uint64_t kAhead = 2;
  const auto wait_for = [&](auto done) {
    while (!done()) pair.endpoint->Progress(std::chrono::milliseconds(1));
  };
  if (side.number == 1) {
    std::memset(pair.endpoint->window().data(), 1, bytes);  // no page faults in what is timed
    side.Tell("ready");
    for (uint64_t put = 1;; ++put) {
      wait_for([&] { return pair.Word(bytes) >= put; });
      JF_CHECK(pair.channel->PostWord(put, bytes).ok() && pair.channel->Push().ok());
      if (pair.Word(bytes + 8) == put) break;
    }
    side.Hear();
    return;
  }
  side.Hear();
  const auto start = Clock::now();
  auto block_start = start;
  uint64_t block_first = 0;
  double fastest = 0;
  uint64_t puts = 0;
  for (bool last = false; !last;) {
    ++puts;
    last = Seconds(start) > side.settings.seconds;
    const auto ticket = pair.channel->PostPut(data, kWindowRegion, 0);
    JF_CHECK(ticket.ok());
    if (last) JF_CHECK(pair.channel->PostWord(puts, bytes + 8).ok());
    JF_CHECK(pair.channel->PostWord(puts, bytes).ok() && pair.channel->Push().ok());
    if (puts > kAhead) wait_for([&] { return pair.Word(bytes) >= puts - kAhead; });
    const double seconds = Seconds(block_start);
    if (seconds < 0.2) continue;
    const uint64_t done = pair.Word(bytes);
    fastest = std::max(fastest, static_cast<double>((done - block_first) * bytes) / seconds);
    block_first = done;
    block_start = Clock::now();
  }
  wait_for([&] { return pair.Word(bytes) >= puts; });
  std::printf("puts of %8zu bytes      %6.2f Gbit/s on %d connections; %.2f in the fastest 0.2 s\n",
              bytes, static_cast<double>(puts) * static_cast<double>(bytes) * 8e-9 / Seconds(start),
              side.settings.tcp.lanes, fastest * 8e-9);
  side.Tell("end");
}

int Main(int argc, char** argv) {
  Settings settings;
  const auto split = [](const std::string& text, std::string(&parts)[2]) {
    parts[0] = text.substr(0, text.find(','));
    parts[1] = text.substr(text.find(',') + 1);
  };
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--ips") split(value, settings.ips);
    if (name == "--netns") split(value, settings.netns);
    if (name == "--lanes") settings.tcp.lanes = std::atoi(value.c_str());
    if (name == "--chunk") settings.tcp.chunk_bytes = std::strtoull(value.c_str(), nullptr, 10);
    if (name == "--seconds") settings.seconds = std::atof(value.c_str());
  }
  OnBothSides(settings, [](const Side& side) { RawPingPong(side, true); });
  OnBothSides(settings, [](const Side& side) { RawPingPong(side, false); });
  OnBothSides(settings, [](const Side& side) { PingPong(side, Clock::duration::zero()); });
  OnBothSides(settings, [](const Side& side) { PingPong(side, std::chrono::milliseconds(10)); });
  for (const size_t bytes : {size_t{64} << 10, size_t{1} << 20, size_t{64} << 20}) {
    OnBothSides(settings, [bytes](const Side& side) { Throughput(side, bytes); });
  }
  return 0;
}

}  // namespace
}  // namespace jaxfabric

int main(int argc, char** argv) { return jaxfabric::Main(argc, argv); }
