// What one endpoint knows of another: the connections to it, what is to be sent, and what has come.
//
// One lock guards the queues and the state of the connection; it is held for no system call but the
// few that set a connection up. Posts of all threads are one order, and that is the order of the
// channel. Lives as long as the hub.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "os/tcp_socket.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/send_queue.h"

namespace jaxfabric::tcp {

class Hub;
class Socket;

class Peer {
 public:
  Peer(Hub* hub, int number);
  int number() const { return number_; }

  // From the peer's address. The first one counts.
  void SetAddress(const TcpAddress& address, uint64_t window_bytes);

  // Puts, words and signals; see MessageChannel.
  Result<uint64_t> Post(const FrameHeader& header, std::span<const std::byte> body);
  Status Push();
  uint64_t sent() const { return sent_.load(std::memory_order_acquire); }
  bool HasRoom() const;
  // kAborted after Abort(), else as failure().
  Status status() const;
  // OK until the connection has ended, in whatever way.
  Status failure() const;
  void Abort();
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  uint64_t signals() const { return signals_.load(std::memory_order_acquire); }
  uint64_t flushed() const { return flushed_.load(std::memory_order_acquire); }
  bool aborted_by_peer() const { return aborted_by_peer_.load(std::memory_order_acquire); }
  // Asks the peer to tell when all posts so far are in place: flushed() reaches the returned
  // number.
  Result<uint64_t> PostFlush();

  // Sends some of what is queued for a lane. False if nothing more can be sent now.
  bool Send(int lane);

  // From sockets. True if the connection is taken; else it is to be closed.
  bool OnHello(const std::shared_ptr<Socket>& socket);
  void OnAccept(uint64_t attempt);
  const char* OnFrame(const FrameHeader& header);
  // seq_cst: a lane that stops at a fence because this is not so is seen by who makes it so.
  bool up() const { return up_.load(std::memory_order_seq_cst); }
  // True if all lanes have done so many data frames.
  bool Reached(std::span<const uint64_t> counts) const;
  // True if one of them has ended before that.
  bool Unreachable(std::span<const uint64_t> counts) const;
  // Lanes that wait at a fence look again.
  void WakeFences(const Socket* except);
  // A lane has ended: what has come on the others is taken first. `refused`: by somebody who
  // answered, and may be calling itself.
  void OnEnd(Socket* socket, const Status& reason, bool refused);
  bool ending() const { return ending_.load(std::memory_order_acquire); }
  // Nothing comes any more: after a goodbye the peer has left, else it is lost for `reason`.
  void Finish();
  void Fail(const Status& reason, bool lost);

  // Of the endpoint that closes: says goodbye, and whether all is sent.
  void PostGoodbye();
  bool AllSent() const;
  // The peer has said that nothing more of it is to be taken, or is not connected.
  bool Parted() const;
  void CloseForWriting();
  bool Ended() const;

  // Fails what has not connected by its deadline.
  void Expire(Clock::time_point now);

 private:
  enum class State { kIdle, kCalling, kYielding, kAnswering, kUp, kFailed };
  struct Lane {
    std::shared_ptr<Socket> socket;
    SendQueue queue;
    uint64_t data_frames = 0;  // queued so far
    uint64_t fenced = 0;       // of them those that lane 0 has a fence for
    bool sending = false;      // a thread is in sendmsg without the lock
    bool again = false;        // it looks once more
  };
  struct Range {
    uint64_t begin = 0, end = 0;
  };

  // All with the lock held.
  void AppendPut(const FrameHeader& header, std::span<const std::byte> body, uint64_t ticket);
  void AppendInOrder(const FrameHeader& header, std::span<const std::byte> copied,
                     std::span<const std::byte> body, uint64_t ticket);
  void AppendTo(int lane, const FrameHeader& header, std::span<const std::byte> copied,
                std::span<const std::byte> body, uint64_t ticket);
  void FenceLanes(uint64_t ticket);
  void UpdateSent();
  size_t CopiedBytes() const;
  void SetState(State state);
  void CallIfIdle();
  void DropSockets();
  void BecomeUp();
  Status PostControl(FrameType type, uint64_t value);
  void WaitForSenders(std::unique_lock<std::mutex>& lock);

  Hub* const hub_;
  const int number_;
  mutable std::mutex mutex_;
  State state_ = State::kIdle;
  std::optional<TcpAddress> address_;
  uint64_t window_bytes_ = 0;
  uint64_t attempt_ = 0;
  Clock::time_point connect_by_ = Clock::time_point::max();
  std::vector<Lane> lanes_;
  std::vector<std::shared_ptr<Socket>> sockets_;  // fixed once up
  uint64_t posted_ = 0;
  uint64_t flushes_ = 0;
  bool unflushed_ = false;  // there are posts since the last one
  // By region: cover the puts on lane 0 that the other lanes have no fence for.
  std::array<Range, 8> in_order_;
  Status failure_;
  Status end_reason_;
  bool left_ = false;    // said goodbye
  bool parted_ = false;  // answered our goodbye
  bool aborting_ = false;

  // release by who receives or sends, acquire by who looks: what was in place or sent before.
  std::atomic<uint64_t> sent_{0};
  std::atomic<uint64_t> signals_{0};
  std::atomic<uint64_t> flushed_{0};
  std::atomic<bool> aborted_by_peer_{false};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> up_{false};
  std::atomic<bool> ending_{false};
  std::atomic<bool> failed_{false};
};

}  // namespace jaxfabric::tcp
