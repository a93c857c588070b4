#include "transport/signal_line.h"

#include <sched.h>

#include "os/futex.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxfabric {
namespace {

// A few microseconds: what a peer that runs at the same time needs.
constexpr int kSpins = 400;
// Lets whoever else wants the core run; with more ranks than cores far cheaper than sleeping.
constexpr int kYields = 64;

void CpuRelax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

bool CoresAllowSpinning(int waiters) {
  // The affinity mask, not the machine: containers and launchers pin.
  static const int cores = [] {
    cpu_set_t set;
    return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  }();
  return waiters <= cores;
}

void SignalLine::Signal() {
  // seq_cst, twice: release, so that the bytes put before are seen with the count; and in one order
  // with the receiver's "sleeping, then look again", so that one of the two sees the other.
  word_.fetch_add(kOneSignal, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) != 0) FutexWakeAll(&word_);
}

void SignalLine::Abort(uint32_t flag) {
  word_.fetch_or(flag, std::memory_order_seq_cst);  // as in Signal()
  FutexWakeAll(&word_);
}

void SignalLine::AbortBySender() { Abort(kSenderAborted); }
void SignalLine::AbortByReceiver() { Abort(kReceiverAborted); }

SignalLine::Outcome SignalLine::Wait(uint64_t count, uint64_t* seen, bool spin, Deadline deadline) {
  uint32_t word = 0;
  Outcome outcome = Outcome::kDeadline;
  // True when the wait is over, for `outcome`.
  const auto done = [&](std::memory_order order) {
    word = word_.load(order);
    if ((word & kReceiverAborted) != 0) {
      outcome = Outcome::kAbortedByReceiver;
      return true;
    }
    // The low 30 bits of the true count are known; it is at most 2^30 - 1 ahead of *seen.
    constexpr uint32_t kMask = (1u << 30) - 1;
    *seen += ((word / kOneSignal) - static_cast<uint32_t>(*seen)) & kMask;
    outcome = *seen >= count ? Outcome::kSignalled : Outcome::kAbortedBySender;
    return *seen >= count || (word & kSenderAborted) != 0;
  };

  // acquire: the bytes put before the signal are visible once its count is.
  if (done(std::memory_order_acquire)) return outcome;
  if (spin) {
    for (int i = 0; i < kSpins; ++i) {
      CpuRelax();
      if (done(std::memory_order_acquire)) return outcome;
    }
  }
  for (int i = 0; i < kYields && !deadline.expired(); ++i) {
    ::sched_yield();
    if (done(std::memory_order_acquire)) return outcome;
  }
  for (;;) {
    // seq_cst store, then seq_cst load: see Signal().
    sleeping_.store(1, std::memory_order_seq_cst);
    const bool over = done(std::memory_order_seq_cst);
    const bool late = !over && deadline.expired();
    if (!over && !late) FutexWait(&word_, word, deadline);
    // relaxed: a stale 1 costs the sender one needless wake-up and nothing else.
    sleeping_.store(0, std::memory_order_relaxed);
    if (over) return outcome;
    if (late) return Outcome::kDeadline;
  }
}

}  // namespace jaxfabric
