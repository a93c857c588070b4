// Who looks at the network: the threads that wait for something, by Progress(), and a thread of the
// endpoint's own while nobody does.
//
// All sockets are in one edge-triggered epoll set, so an event goes to one thread. At most one
// caller of Progress() sleeps in the kernel on that set; others that wait sleep on a word that
// changes with all news. The endpoint's own thread stays out while others poll: it sleeps for
// kPark at a time, and takes over when nobody has polled for as long.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/status.h"
#include "os/fd.h"

namespace jaxfabric::tcp {

class Poller {
 public:
  // `handle` is called with the id of a descriptor and its epoll events, by any thread; `tick` by
  // the own thread, at least every kTick while Ticking(true).
  Poller(std::function<void(uint64_t id, uint32_t events)> handle, std::function<void()> tick);
  ~Poller() { Stop(); }

  Status Start();
  // Ends the own thread. Progress() may still be called.
  void Stop();

  Status Watch(int fd, uint64_t id, uint32_t events);
  // The events that hold now are reported once more.
  void Rearm(int fd, uint64_t id, uint32_t events);
  void Unwatch(int fd);

  // See MessageEndpoint.
  bool Progress(Clock::duration wait);
  // There are news for whoever waits. Any thread.
  void Changed();
  // Waits until `done` or the deadline; what `done` looks at changes with Changed().
  template <class Done>
  bool WaitUntil(Done done, Deadline deadline) {
    for (int polls = 0; !done(); ++polls) {
      const auto left = deadline.remaining();
      Progress(polls < kPolls ? Clock::duration::zero() : std::min(left, kLongestSleep));
      if (left == Clock::duration::zero()) return done();
    }
    return true;
  }

  void Ticking(bool on);
  // Times that the own thread came back from the kernel.
  uint64_t wakeups() const { return wakeups_.load(std::memory_order_relaxed); }  // a statistic

  static constexpr Clock::duration kPark = std::chrono::milliseconds(2);
  static constexpr Clock::duration kTick = std::chrono::milliseconds(20);

 private:
  static constexpr int kPolls = 100;
  static constexpr Clock::duration kLongestSleep = std::chrono::seconds(1);

  bool Drain();
  void Sleep(uint32_t generation, Deadline deadline);
  void Run();

  const std::function<void(uint64_t, uint32_t)> handle_;
  const std::function<void()> tick_;
  const uint64_t number_;  // tells pollers apart in thread-local memory
  UniqueFd epoll_;
  UniqueFd leader_event_;
  UniqueFd thread_event_;
  std::thread thread_;
  std::mutex leader_;  // held by the caller of Progress() that sleeps on the epoll set
  // seq_cst, all four: who goes to sleep says so and looks again; who has news changes the
  // generation and looks for sleepers. One of the two sees the other.
  std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> followers_{0};
  std::atomic<bool> leader_sleeps_{false};
  std::atomic<bool> thread_sleeps_{false};
  // relaxed: they only say roughly what others do.
  std::atomic<uint64_t> polls_{0};
  std::atomic<uint64_t> wakeups_{0};
  std::atomic<int> ticking_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace jaxfabric::tcp
