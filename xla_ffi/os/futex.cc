#include "os/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace jaxfabric {
namespace {

// Not FUTEX_PRIVATE_FLAG: the word may be in memory that processes share.
long Futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr,
                   FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, Deadline deadline) {
  // The bitset form takes an absolute time of CLOCK_MONOTONIC, which steady_clock is, so an early
  // return does not stretch the wait.
  timespec at{};
  const timespec* timeout = nullptr;
  if (deadline.at() != Clock::time_point::max()) {
    const auto since_epoch = deadline.at().time_since_epoch();
    if (since_epoch <= Clock::duration::zero()) return;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_epoch);
    at.tv_sec = static_cast<time_t>(seconds.count());
    at.tv_nsec = static_cast<long>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch - seconds).count());
    timeout = &at;
  }
  // Whatever it returns (woken, changed, timed out, interrupted), the caller looks at the word.
  Futex(word, FUTEX_WAIT_BITSET, expected, timeout);
}

void FutexWakeAll(std::atomic<uint32_t>* word) { Futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

}  // namespace jaxfabric
