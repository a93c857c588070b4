// The control plane of one host: a socket between every two processes, and one thread that receives
// on all of them. It carries set-up, diagnosis and death; never data.
//
// A peer that dies closes its socket, which every other process notices at once, whatever its ranks
// are doing. Malformed messages are counted and dropped.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "control/wire.h"
#include "os/fd.h"
#include "os/unix_socket.h"

namespace jaxfabric {

class Mesh {
 public:
  struct Handlers {
    // On the mesh's thread, one at a time. The reader stands behind the message type.
    std::function<void(int process, WireReader& message)> on_message;
    // The connection is gone; after it nothing more comes from this process.
    std::function<void(int process)> on_gone;
  };
  struct Greeting {
    PeerCredentials credentials;
    SocketMessage hello;
  };

  // Listens; `name()` is what the peers need.
  static Result<std::unique_ptr<Mesh>> Create(int self, int count);
  ~Mesh();

  const std::string& name() const { return name_; }

  // Connects to every other process: lower numbers are called, higher ones call. Sends `hello` with
  // `fds` on every connection and returns the peers' hellos by process (the own one is empty).
  Result<std::vector<Greeting>> Connect(const std::vector<std::string>& names,
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

 private:
  struct Peer {
    std::mutex send_mutex;  // keeps messages whole; never taken on a data path
    UniqueFd socket;
    bool open = false;                           // guarded by send_mutex
    std::deque<std::vector<std::byte>> waiting;  // kept messages; guarded by send_mutex
  };

  Mesh(int self, int count) : self_(self), peers_(static_cast<size_t>(count)) {}
  Status Attach(int process, UniqueFd socket);
  void Loop();
  void ReceiveFrom(int process);
  void SendWaiting(int process);
  // What the loop waits for on a peer's socket; with its send_mutex.
  void Watch(int process, bool add);

  int self_;
  std::string name_;
  UniqueFd listener_;
  UniqueFd wake_;  // eventfd: ends the loop
  UniqueFd epoll_;
  std::vector<Peer> peers_;
  Handlers handlers_;
  std::thread thread_;
  std::atomic<uint64_t> dropped_{0};
};

}  // namespace jaxfabric
