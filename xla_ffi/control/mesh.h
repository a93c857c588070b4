// The control plane of one process: a connection to every other one, and one thread that receives
// on all of them. It carries set-up, diagnosis and death; never data.
//
// Processes of one host are connected by unix sockets, those of several by TCP, where both ends
// prove that they know the job's secret. A peer that dies closes its socket, which every other
// process notices at once, whatever its ranks are doing; one whose host is gone is noticed after a
// while. Malformed messages are counted and dropped; strangers are counted and closed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "control/link.h"
#include "control/wire.h"
#include "os/acceptor.h"
#include "os/fd.h"
#include "os/handshake.h"
#include "os/tcp_socket.h"
#include "os/unix_socket.h"

namespace jaxfabric {

class Mesh {
 public:
  // How processes of other hosts reach this one.
  struct Network {
    TcpAddress address;  // the IP counts
    PortRange ports;
    // A host that has not answered for so long is gone; at least a few seconds.
    Clock::duration unreachable_after = std::chrono::seconds(10);
  };
  struct Peer {
    bool same_host = true;
    std::string name;         // of its unix socket; for the same host
    std::string tcp_address;  // for another host
  };
  // What all processes of the job have in common, and no other one.
  struct Job {
    std::string secret;
    uint64_t incarnation = 0;
  };
  struct Handlers {
    // On the mesh's thread, one at a time. The reader stands behind the message type.
    std::function<void(int process, WireReader& message)> on_message;
    // The connection is gone, and how; after it nothing more comes from this process.
    std::function<void(int process, LinkEnd how)> on_gone;
  };
  struct Greeting {
    PeerCredentials credentials;  // zero for a process of another host
    SocketMessage hello;
  };

  // Listens; `name()` and `tcp_address()` are what the peers need. Without a network there is no
  // TCP address, and only processes of this host can connect.
  static Result<std::unique_ptr<Mesh>> Create(int self, int count,
                                              std::optional<Network> network = std::nullopt);
  ~Mesh();

  const std::string& name() const { return name_; }
  // Empty without a network.
  const std::string& tcp_address() const { return tcp_address_; }

  // Connects to every other process: lower numbers are called, higher ones call. Sends `hello` on
  // every connection, with `fds` where the peer is on this host, and returns the peers' hellos by
  // process (the own one is empty). A hello begins with the u32 number of its process. `job` is
  // needed if a peer is on another host.
  Result<std::vector<Greeting>> Connect(const std::vector<Peer>& peers, const Job& job,
                                        std::span<const std::byte> hello, std::span<const int> fds,
                                        Deadline deadline);
  // Receives the next message from `process` before Start, for hand-shakes.
  Result<SocketMessage> Receive(int process, Deadline deadline);

  // Sends to all and receives one from each, by process, before Start.
  Result<std::vector<SocketMessage>> Exchange(const WireWriter& message, std::span<const int> fds,
                                              Deadline deadline);

  void Start(Handlers handlers);
  // Sends to one process and never waits: what a peer has no room for (it may be stopped) is kept
  // and sent when it has. A peer that is gone is left to on_gone.
  enum class Loss { kNever, kAcceptable };  // kAcceptable: not worth keeping
  void Send(int process, const WireWriter& message, Loss loss = Loss::kNever);
  void Broadcast(const WireWriter& message, Loss loss = Loss::kNever);
  // Ends the thread and closes every socket. Idempotent. Not from a handler.
  void Stop();

  uint64_t dropped_messages() const { return dropped_.load(std::memory_order_relaxed); }
  // Connections to the TCP port that were no process of the job.
  uint64_t refused_connections() const { return refused_.load(std::memory_order_relaxed); }

 private:
  struct Connection {
    std::mutex send_mutex;  // keeps messages whole; never taken on a data path
    std::unique_ptr<Link> link;
    bool open = false;                           // guarded by send_mutex
    bool watches_room = false;                   // guarded by send_mutex
    std::deque<std::vector<std::byte>> waiting;  // kept messages; guarded by send_mutex
  };

  Mesh(int self, int count) : self_(self), connections_(static_cast<size_t>(count)) {}
  Connection& connection(int process) { return connections_[static_cast<size_t>(process)]; }
  TcpOptions LinkOptions() const;
  Result<std::unique_ptr<Link>> CallUnix(int process, const Peer& peer, Deadline deadline,
                                         PeerCredentials* credentials);
  Result<std::unique_ptr<Link>> CallTcp(int process, const Peer& peer, const JobIdentity& identity,
                                        Deadline deadline);
  // The greeting of a caller on the unix socket; empty if it is nobody who is expected.
  std::optional<std::pair<int, Greeting>> Greet(Link& link, Deadline deadline);
  Status BeCalled(const std::vector<Peer>& peers, const JobIdentity& identity,
                  std::span<const std::byte> hello, std::span<const int> fds, Deadline deadline,
                  std::vector<Greeting>& greetings);
  bool Expects(int process) const;
  Status SendNow(int process, std::span<const std::byte> bytes, std::span<const int> fds,
                 Deadline deadline);
  Status CheckHello(int process, const SocketMessage& hello) const;
  void Attach(int process, std::unique_ptr<Link> link);
  void Loop();
  void ReceiveFrom(int process);
  // With the connection's send_mutex:
  void SendWaiting(int process);
  void Watch(int process);

  int self_;
  std::string name_;
  std::string tcp_address_;
  UniqueFd listener_;
  UniqueFd tcp_listener_;
  Clock::duration unreachable_after_{};
  UniqueFd wake_;  // eventfd: ends the loop
  UniqueFd epoll_;
  std::vector<Connection> connections_;
  Handlers handlers_;
  std::thread thread_;
  // Relaxed, as every use of them: counters that order nothing.
  std::atomic<uint64_t> dropped_{0};
  std::atomic<uint64_t> refused_{0};
};

}  // namespace jaxfabric
