// A point on the monotonic clock by which something must have happened.
#pragma once

#include <chrono>

namespace jaxfabric {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  static Deadline After(Clock::duration duration) { return Deadline(Clock::now() + duration); }
  static Deadline AfterSeconds(double seconds) {
    return After(
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
  }
  static Deadline Never() { return Deadline(Clock::time_point::max()); }

  explicit Deadline(Clock::time_point at) : at_(at) {}
  bool expired() const { return Clock::now() >= at_; }
  // Zero once expired; the largest duration for Never().
  Clock::duration remaining() const {
    if (at_ == Clock::time_point::max()) return Clock::duration::max();
    const auto now = Clock::now();
    return now >= at_ ? Clock::duration::zero() : at_ - now;
  }
  Clock::time_point at() const { return at_; }

 private:
  Clock::time_point at_;
};

}  // namespace jaxfabric
