#include "os/poll.h"

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace jaxfabric {

int PollUntil(std::span<pollfd> entries, Deadline deadline) {
  // So that every deadline fits a timespec.
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::min<Clock::duration>(deadline.remaining(), std::chrono::hours(1)));
  const timespec timeout{static_cast<time_t>(left.count() / 1000000000),
                         static_cast<long>(left.count() % 1000000000)};
  return ::ppoll(entries.data(), entries.size(), &timeout, nullptr);
}

bool WaitForSocket(int socket, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{socket, events, 0};
    const int ready = PollUntil({&entry, 1}, deadline);
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
    if (deadline.expired()) return false;
  }
}

}  // namespace jaxfabric
