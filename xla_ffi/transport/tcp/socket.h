// One connection of a pair of endpoints: a lane.
//
// Events may come to any thread; one at a time handles them (Handle()), so the reading half needs
// no lock. The sending half is the peer's (peer.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/status.h"
#include "os/fd.h"
#include "os/handshake.h"
#include "os/tcp_socket.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/regions.h"

namespace jaxfabric::tcp {

class Hub;
class Peer;

class Socket : private FrameSink, public std::enable_shared_from_this<Socket> {
 public:
  // The calling end of lane `lane`: `fd` is connecting.
  Socket(Hub* hub, UniqueFd fd, Peer* peer, int lane, uint64_t attempt, const TcpAddress& address);
  // The called end: `caller` has proven who it is, and repeats it in its first frame.
  Socket(Hub* hub, UniqueFd fd, uint32_t caller, uint32_t lane);

  int fd() const { return fd_.get(); }
  uint64_t id() const { return id_; }
  uint64_t attempt() const { return attempt_; }
  int lane() const { return lane_; }

  // Does all that the socket allows now. If another thread is at it, that one looks again.
  void Handle();
  // What is there now may be all that comes, without a further event.
  void ExpectEnd() { end_expected_.store(true, std::memory_order_relaxed); }
  // Nothing is received any more, and the other end learns of it.
  void Close();

  // Data frames that are in place.
  uint64_t applied() const {
    // seq_cst: of a lane that stops at a fence and one that has done what it waits for, one sees
    // the other. Also acquires what is in place.
    return applied_.load(std::memory_order_seq_cst);
  }
  bool at_fence() const { return at_fence_.load(std::memory_order_seq_cst); }  // as above
  bool ended() const { return ended_.load(std::memory_order_seq_cst); }        // as above

 private:
  enum class Stage { kConnecting, kHandshake, kOpen, kClosed };

  void Process();
  void FinishConnecting();
  void AdvanceHandshake();
  void Receive();
  void End(const Status& reason);
  void Malformed();

  std::optional<std::span<std::byte>> Pin(const FrameHeader& header) override;
  void Unpin(const FrameHeader& header) override;
  void OnPut() override;
  const char* OnFrame(const FrameHeader& header) override;
  const char* OnHello(const FrameHeader& header);
  bool FenceReached(std::span<const uint64_t> counts) override;
  void CountData();

  Hub* const hub_;
  const UniqueFd fd_;
  const uint64_t id_;
  const bool called_;
  const TcpAddress address_;            // of the other end, where this one calls
  const uint32_t caller_ = 0;           // where the other one calls
  std::optional<Handshake> handshake_;  // until it is over
  Peer* peer_ = nullptr;                // null until its first frame, where the other one calls
  int lane_ = 0;
  uint64_t attempt_ = 0;
  Stage stage_;
  bool refused_ = false;
  bool moved_ = false;    // anything was done since the last look
  bool arrived_ = false;  // words or signals were
  FrameReader reader_;
  Regions::Region* pinned_ = nullptr;
  std::atomic<uint32_t> events_{0};        // 0 when nobody handles; acq_rel: hands the socket over
  std::atomic<bool> end_expected_{false};  // relaxed: events_ hands it over
  std::atomic<bool> closed_{false};        // relaxed: only stops early what would fail anyway
  std::atomic<uint64_t> applied_{0};
  std::atomic<bool> at_fence_{false};
  std::atomic<bool> ended_{false};
};

}  // namespace jaxfabric::tcp
