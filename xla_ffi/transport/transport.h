// The transport contract: put, signal, wait.
//
// Every rank binds an endpoint, which owns one window: memory that its peers write into. A channel
// is the ordered, one-sided path from a local endpoint to one peer's window. Puts and signals of
// one channel arrive in order: who has waited for signal n sees every byte put before it.
//
// Transports over shared load/store memory (inproc, shm) also give the peer's window as an address,
// so that schedules read staged data where it lies; message transports return an empty span and are
// driven by put and signal alone. Transports are siblings: none includes another, all pass
// tests/cpp/transport/contract_test.cc.
//
// Threads: an endpoint may be used from one thread at a time, each channel from one thread at a
// time; Abort() from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "os/fd.h"

namespace jaxfabric {

// What a peer needs to connect: bytes to publish, and descriptors to pass along with them (over a
// unix socket, or by inheritance). `kind` names the transport and is checked on Connect.
struct EndpointAddress {
  std::string kind;
  std::vector<std::byte> bytes;
  std::vector<int> fds;  // borrowed from the endpoint
};

class Channel {
 public:
  virtual ~Channel() = default;

  // Copies `local` to `offset` of the peer's window. `local` may be reused on return.
  virtual Status Put(std::span<const std::byte> local, size_t offset) = 0;
  // Adds one to the peer's count of signals from this endpoint, after all earlier puts.
  virtual Status Signal() = 0;
  // Waits until the peer has signalled at least `count` times in total.
  virtual Status Wait(uint64_t count, Deadline deadline) = 0;
  // Returns when every put and signal so far has reached the peer's window.
  virtual Status Flush(Deadline deadline) = 0;
  // Makes this and every later call fail with kAborted, including one that is waiting now. The peer
  // sees it too: its waits on this channel end with kUnavailable.
  virtual void Abort() = 0;
  // The peer's window where it can be addressed directly, empty otherwise.
  virtual std::span<std::byte> peer_window() = 0;
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual EndpointAddress address() const = 0;
  // The local window, zeroed at Bind, page aligned.
  virtual std::span<std::byte> window() = 0;
  // `fds` are the descriptors that came with the peer's address; Connect owns them.
  virtual Result<std::unique_ptr<Channel>> Connect(const EndpointAddress& peer,
                                                   std::vector<UniqueFd> fds,
                                                   Deadline deadline) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  // OK, or why this transport cannot be used on this machine, with the remedy.
  virtual Status Probe() = 0;
  // An endpoint whose window has `window_bytes` bytes, for at most `max_peers` peers. `self`
  // (0 <= self < max_peers) is its own number among them.
  virtual Result<std::unique_ptr<Endpoint>> Bind(int self, int max_peers, size_t window_bytes) = 0;
};

}  // namespace jaxfabric
