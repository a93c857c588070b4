// What transports without a common memory add to the contract: posts that never wait, memory other
// than the window to put into, and progress by whoever waits.
//
// A message transport stores what the peer has posted and tells this process that words have come.
// One channel is ordered: a word is stored (release) after every put and word posted before it is
// in place, on however many connections they travel. Puts that no word, signal or flush separates
// land in any order if they do not overlap.
//
// Threads: everything of a MessageChannel may be called from any thread, Wait() from one at a time.
// Progress() may be called by many threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/deadline.h"
#include "base/status.h"
#include "transport/transport.h"

namespace jaxfabric {

// The window's number among the regions of an endpoint.
inline constexpr uint32_t kWindowRegion = 0;
// Puts of up to this size are copied by PostPut().
inline constexpr size_t kCopiedPutBytes = 4096;
// Puts of up to this size, if offset and size are multiples of 8, are stored word by word with
// relaxed atomics: readers may look at the words at any time.
inline constexpr size_t kWordwisePutBytes = 256;

class MessageChannel : public Channel {
 public:
  // Stores `value` at `offset` (a multiple of 8) of a region of the peer, release, after all
  // earlier posts. Never waits. kOutOfRange if it does not fit the window.
  virtual Status PostWord(uint64_t value, uint32_t region, uint64_t offset) = 0;
  Status PostWord(uint64_t value, uint64_t offset) {
    return PostWord(value, kWindowRegion, offset);
  }
  // As Put(), into a region of the peer, but never waits and does not copy more than
  // kCopiedPutBytes: `local` must stay as it is until Sent() reaches the returned ticket, or
  // status() is an error. Tickets count the posts of this channel.
  virtual Result<uint64_t> PostPut(std::span<const std::byte> local, uint32_t region,
                                   uint64_t offset) = 0;
  // Adds one to the peer's count of signals, as Signal(), but never waits.
  virtual Status PostSignal() = 0;
  // The batch ends: starts to send what was posted. Posts alone may be held back, to go together in
  // one system call.
  virtual Status Push() = 0;
  // The last post up to which the kernel has taken all (acquire). What is not sent at once is sent
  // by Progress() and by the endpoint's own thread.
  virtual uint64_t Sent() const = 0;
  // OK, or why the channel has failed for good; then no memory of a caller is read any more.
  virtual Status status() const = 0;
};

// Since Bind().
struct MessageCounters {
  uint64_t refused = 0;    // connections of strangers, or whose handshake failed
  uint64_t malformed = 0;  // connections that were closed because of what came on them
  uint64_t wakeups = 0;    // times that the endpoint's own thread came back from the kernel
};

class MessageEndpoint : public Endpoint {
 public:
  // Connect() for callers that post. The connection itself is opened with the first post.
  virtual Result<std::unique_ptr<MessageChannel>> ConnectMessages(const EndpointAddress& peer) = 0;
  // Lets peers put into `memory` (aligned to 8 bytes); they learn the returned number by other
  // ways. Numbers are never used again: what comes for an unknown one is read and dropped.
  virtual Result<uint32_t> Register(std::span<std::byte> memory) = 0;
  // Returns when nothing writes into the region any more.
  virtual void Deregister(uint32_t region) = 0;
  // By whoever waits: receives and sends what is possible now. If nothing is, waits up to `wait`
  // for the network. True if anything happened, here or in another thread since this thread's last
  // call; the caller then looks again for what it waits for. The endpoint's own thread, which does
  // the same when nobody calls this, stays asleep meanwhile.
  virtual bool Progress(Clock::duration wait) = 0;
  // Called when words or signals have come, by the thread that received them, without a lock held.
  // Set both handlers before anybody is told the address; they are called until the endpoint is
  // destroyed.
  virtual void SetArrivalHandler(std::function<void()> handler) = 0;
  // Called once per peer whose connection is lost for good, with the reason; not for one that has
  // closed its endpoint in order, or has aborted its channel. Without a lock held.
  virtual void SetLostHandler(std::function<void(int peer, const Status& reason)> handler) = 0;
  virtual MessageCounters counters() const = 0;
};

}  // namespace jaxfabric
