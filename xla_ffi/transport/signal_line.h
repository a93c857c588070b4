// The signals of one peer: a counter on a cache line of its own in memory that the receiver polls
// and the sender writes, possibly from another process.
//
// One 32-bit word carries the count and both ends' aborts, so that every reason to wake a sleeper
// changes the word it sleeps on and no wake-up can be lost.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace jaxfabric {

class alignas(64) SignalLine {
 public:
  // By the sender: everything it has written before is visible to who sees the new count.
  void Signal();
  // By either end, from any thread; wakes the receiver.
  void AbortBySender();
  void AbortByReceiver();

  enum class Outcome { kSignalled, kAbortedBySender, kAbortedByReceiver, kDeadline };

  // By the receiver, from one thread at a time. `seen` is the receiver's own count so far, updated
  // here; it must not fall 2^30 signals behind. Signals that came before the sender's abort count.
  Outcome Wait(uint64_t count, uint64_t* seen, bool spin, Deadline deadline);

 private:
  static constexpr uint32_t kSenderAborted = 1;
  static constexpr uint32_t kReceiverAborted = 2;
  static constexpr uint32_t kOneSignal = 4;

  void Abort(uint32_t flag);

  std::atomic<uint32_t> word_;      // signals modulo 2^30 times kOneSignal, and the two flags
  std::atomic<uint32_t> sleeping_;  // 1 while the receiver may be asleep on word_
  static_assert(std::atomic<uint32_t>::is_always_lock_free, "must work between processes");
};
static_assert(sizeof(SignalLine) == 64);

// True where `waiters` threads of this host can spin without keeping each other off the cores.
bool CoresAllowSpinning(int waiters);

}  // namespace jaxfabric
