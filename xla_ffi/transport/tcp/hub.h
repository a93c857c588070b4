// An endpoint of the tcp transport: its window and regions, its sockets, its peers. Shared by the
// endpoint and its channels; Close() ends it, and what is left fails from then on. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>

#include "base/status.h"
#include "os/acceptor.h"
#include "os/handshake.h"
#include "os/tcp_socket.h"
#include "transport/tcp/peer.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/regions.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp.h"

namespace jaxfabric::tcp {

class Hub {
 public:
  static Result<std::shared_ptr<Hub>> Create(const TcpTransportOptions& options, int self,
                                             int max_peers, size_t window_bytes);
  ~Hub();
  // Says goodbye, sends what is queued for up to kLinger, and closes everything.
  void Close();

  const TcpTransportOptions& options() const { return options_; }
  int self() const { return self_; }
  int max_peers() const { return max_peers_; }
  std::span<std::byte> window() const { return window_; }
  const TcpAddress& address() const { return address_; }
  const JobIdentity& identity() const { return identity_; }
  Regions& regions() { return regions_; }
  Poller& poller() { return poller_; }
  // Made when first asked for; lives as long as the hub.
  Peer& peer(int number);

  std::function<void()> arrival_handler;
  std::function<void(int, const Status&)> lost_handler;

  // For sockets and peers.
  Status Watch(const std::shared_ptr<Socket>& socket);
  void Rearm(const Socket& socket);
  void Forget(const Socket& socket);
  uint64_t NextId() { return last_id_.fetch_add(1, std::memory_order_relaxed) + 1; }
  void CountMalformed(const std::string& what);
  MessageCounters counters() const;

 private:
  static constexpr auto kLinger = std::chrono::seconds(1);
  static constexpr auto kAwaitEnd = std::chrono::milliseconds(200);

  Hub(const TcpTransportOptions& options, int self, int max_peers);
  void Handle(uint64_t id, uint32_t events);
  void Accept();
  template <class F>
  void ForEachPeer(F f);

  const TcpTransportOptions options_;
  const int self_;
  const int max_peers_;
  std::span<std::byte> window_;
  size_t mapped_bytes_ = 0;
  Regions regions_;
  TcpAddress address_;
  JobIdentity identity_;
  mutable std::mutex
      accepting_;  // of the acceptor; who does not get it leaves the work to the other
  std::unique_ptr<Acceptor> acceptor_;
  std::mutex mutex_;  // of the two maps; nothing else is locked while it is held
  std::map<int, std::unique_ptr<Peer>> peers_;
  std::unordered_map<uint64_t, std::shared_ptr<Socket>> sockets_;
  std::atomic<uint64_t> last_id_{0};    // relaxed: only has to differ
  std::atomic<uint64_t> malformed_{0};  // relaxed: a statistic
  bool closed_ = false;
  Poller poller_;
};

}  // namespace jaxfabric::tcp
