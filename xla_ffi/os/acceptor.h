// A listener that hands out only connections whose caller has proven itself (os/handshake.h).
//
// A stranger costs one descriptor and some hundred bytes until the deadline or until others come.
// Nothing it sends is an error of this process. One thread at a time; counters may be read by any.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "os/fd.h"
#include "os/handshake.h"
#include "os/tcp_socket.h"

namespace jaxfabric {

class Acceptor {
 public:
  struct Limits {
    size_t pending = 256;  // handshakes at a time; beyond it the oldest makes room
    Clock::duration patience = std::chrono::seconds(10);  // for one handshake
  };
  struct Accepted {
    UniqueFd socket;
    uint32_t process;
    uint32_t stripe;
  };

  // kInvalidArgument without a secret: nobody can be let in then.
  static Result<std::unique_ptr<Acceptor>> Create(UniqueFd listener, const JobIdentity& own,
                                                  Purpose purpose, Limits limits);
  static Result<std::unique_ptr<Acceptor>> Create(UniqueFd listener, const JobIdentity& own,
                                                  Purpose purpose) {
    return Create(std::move(listener), own, purpose, Limits());
  }

  // Readable when Advance() has something to do, be it to drop who is too slow (for poll or epoll).
  int fd() const { return epoll_.get(); }
  // Does what can be done now, without waiting. A process may come twice: that is for the caller.
  std::vector<Accepted> Advance();

  size_t pending() const { return pending_.size(); }
  uint64_t refused() const;
  uint64_t refused(Refusal reason) const {
    // Relaxed, as every use of them: counters that order nothing.
    return refused_[static_cast<size_t>(reason)].load(std::memory_order_relaxed);
  }

 private:
  struct Pending {
    UniqueFd socket;
    TcpAddress address;
    Handshake handshake;
    Clock::time_point deadline;
    bool watched_for_room = false;
  };

  Acceptor(UniqueFd listener, const JobIdentity& own, Purpose purpose, Limits limits)
      : listener_(std::move(listener)), own_(own), purpose_(purpose), limits_(limits) {}
  void Accept(std::vector<Accepted>& accepted);
  void Listen(bool listen);
  void SetTimer();
  void AdvanceOne(uint64_t id, std::vector<Accepted>& accepted);
  void Drop(uint64_t id, Refusal reason);

  UniqueFd listener_;
  UniqueFd epoll_;
  UniqueFd timer_;
  const JobIdentity own_;
  const Purpose purpose_;
  const Limits limits_;
  uint64_t last_id_ = 1;                 // 0 stands for the listener, 1 for the timer
  std::map<uint64_t, Pending> pending_;  // oldest first
  // While there are no descriptors for those who call: when to look again; else max.
  Clock::time_point paused_until_ = Clock::time_point::max();
  bool logged_ = false;
  std::array<std::atomic<uint64_t>, static_cast<size_t>(Refusal::kLast) + 1> refused_{};
};

}  // namespace jaxfabric
