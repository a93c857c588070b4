#include "transport/tcp/poller.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "os/futex.h"
#include "os/poll.h"

namespace jaxfabric::tcp {
namespace {

std::atomic<uint64_t> g_pollers{0};  // relaxed: only has to differ

void Ring(int event) {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the sleeper wakes all the same.
  [[maybe_unused]] const ssize_t written = ::write(event, &one, sizeof(one));
}

// Sleeps until one of the two is readable; resets the event.
void SleepOn(int epoll, int event, Deadline deadline) {
  pollfd entries[] = {{epoll, POLLIN, 0}, {event, POLLIN, 0}};
  if (PollUntil(entries, deadline) > 0 && entries[1].revents != 0) {
    uint64_t rings;
    [[maybe_unused]] const ssize_t got = ::read(event, &rings, sizeof(rings));
  }
}

}  // namespace

Poller::Poller(std::function<void(uint64_t, uint32_t)> handle, std::function<void()> tick)
    : handle_(std::move(handle)),
      tick_(std::move(tick)),
      number_(g_pollers.fetch_add(1, std::memory_order_relaxed) + 1) {}

Status Poller::Start() {
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  leader_event_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  thread_event_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !leader_event_.valid() || !thread_event_.valid()) {
    return ErrnoStatus("epoll_create1 and eventfd", errno);
  }
  thread_ = std::thread([this] { Run(); });
  return OkStatus();
}

void Poller::Stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_relaxed);
  Ring(thread_event_.get());
  thread_.join();
}

Status Poller::Watch(int fd, uint64_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoStatus("epoll_ctl", errno);
  }
  return OkStatus();
}

void Poller::Rearm(int fd, uint64_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);  // fails if it is not watched any more
}

void Poller::Unwatch(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

bool Poller::Drain() {
  epoll_event events[32];
  const int count = ::epoll_wait(epoll_.get(), events, 32, 0);
  for (int i = 0; i < count; ++i) handle_(events[i].data.u64, events[i].events);
  return count > 0;
}

bool Poller::Progress(Clock::duration wait) {
  // What this thread has seen: news since then, by whomever they were received, end its wait.
  struct Seen {
    uint64_t poller = 0;
    uint32_t generation = 0;
  };
  thread_local Seen seen;
  polls_.fetch_add(1, std::memory_order_relaxed);
  const auto look = [&] {
    const uint32_t generation = generation_.load(std::memory_order_seq_cst);
    const Seen before = std::exchange(seen, Seen{number_, generation});
    return before.poller != number_ || before.generation != generation;
  };
  Drain();
  if (look()) return true;
  if (wait <= Clock::duration::zero()) return false;
  Sleep(seen.generation,
        wait == Clock::duration::max() ? Deadline::Never() : Deadline::After(wait));
  return look();
}

void Poller::Sleep(uint32_t generation, Deadline deadline) {
  const auto lead = [&] {
    leader_sleeps_.store(true, std::memory_order_seq_cst);
    // The kernel would wake the own thread with each event: sent to bed.
    if (thread_sleeps_.load(std::memory_order_seq_cst)) Ring(thread_event_.get());
    if (generation_.load(std::memory_order_seq_cst) == generation) {
      SleepOn(epoll_.get(), leader_event_.get(), deadline);
    }
    leader_sleeps_.store(false, std::memory_order_seq_cst);
    leader_.unlock();
    Drain();
    if (followers_.load(std::memory_order_seq_cst) != 0) Changed();  // one of them leads
  };
  if (leader_.try_lock()) return lead();
  followers_.fetch_add(1, std::memory_order_seq_cst);
  if (leader_.try_lock()) {
    followers_.fetch_sub(1, std::memory_order_seq_cst);
    return lead();
  }
  FutexWait(&generation_, generation, deadline);
  followers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Poller::Changed() {
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (followers_.load(std::memory_order_seq_cst) != 0) FutexWakeAll(&generation_);
  if (leader_sleeps_.load(std::memory_order_seq_cst)) Ring(leader_event_.get());
}

void Poller::Ticking(bool on) {
  // The first one wakes the thread, which may sleep for ever.
  if (ticking_.fetch_add(on ? 1 : -1, std::memory_order_relaxed) == 0 && on) {
    Ring(thread_event_.get());
  }
}

void Poller::Run() {
  ::pthread_setname_np(::pthread_self(), "jf-network");
  uint64_t polls = 0;
  Clock::time_point ticked = Clock::now();
  while (!stopping_.load(std::memory_order_relaxed)) {
    const bool ticking = ticking_.load(std::memory_order_relaxed) > 0;
    if (ticking && Clock::now() - ticked >= kTick) {
      ticked = Clock::now();
      tick_();
    }
    const uint64_t polls_now = polls_.load(std::memory_order_relaxed);
    const bool others = polls_now != std::exchange(polls, polls_now) ||
                        leader_sleeps_.load(std::memory_order_seq_cst);
    if (others) {
      SleepOn(-1, thread_event_.get(), Deadline::After(kPark));
    } else {
      thread_sleeps_.store(true, std::memory_order_seq_cst);
      if (!leader_sleeps_.load(std::memory_order_seq_cst)) {
        SleepOn(epoll_.get(), thread_event_.get(),
                ticking ? Deadline::After(kTick) : Deadline::Never());
      }
      thread_sleeps_.store(false, std::memory_order_seq_cst);
      if (polls_.load(std::memory_order_relaxed) == polls &&
          !leader_sleeps_.load(std::memory_order_seq_cst)) {
        Drain();
      }
    }
    wakeups_.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace jaxfabric::tcp
