#include "os/acceptor.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>

#include "base/log.h"

namespace jaxfabric {
namespace {

// Connections accepted at once: the others have their turn between.
constexpr int kMostAtOnce = 64;
constexpr std::chrono::milliseconds kPause{200};
constexpr uint64_t kTimer = 1;

}  // namespace

Result<std::unique_ptr<Acceptor>> Acceptor::Create(UniqueFd listener, const JobIdentity& own,
                                                   Purpose purpose, Limits limits) {
  JF_RETURN_IF_ERROR(CheckSecret(own));
  std::unique_ptr<Acceptor> acceptor(new Acceptor(std::move(listener), own, purpose, limits));
  acceptor->epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!acceptor->epoll_.valid()) return ErrnoStatus("epoll_create1", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  if (::epoll_ctl(acceptor->fd(), EPOLL_CTL_ADD, acceptor->listener_.get(), &event) != 0) {
    return ErrnoStatus("epoll_ctl", errno);
  }
  // Of the clock that Clock is.
  acceptor->timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!acceptor->timer_.valid()) return ErrnoStatus("timerfd_create", errno);
  event.data.u64 = kTimer;
  if (::epoll_ctl(acceptor->fd(), EPOLL_CTL_ADD, acceptor->timer_.get(), &event) != 0) {
    return ErrnoStatus("epoll_ctl", errno);
  }
  return acceptor;
}

void Acceptor::SetTimer() {
  const auto next =
      pending_.empty() ? paused_until_ : std::min(pending_.begin()->second.deadline, paused_until_);
  itimerspec at{};  // zero: never
  if (next != Clock::time_point::max()) {
    const auto time = std::chrono::ceil<std::chrono::nanoseconds>(next.time_since_epoch());
    at.it_value.tv_sec = static_cast<time_t>(time.count() / 1000000000);
    at.it_value.tv_nsec = static_cast<long>(time.count() % 1000000000);
  }
  // Sets it back, too, if it has gone off.
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &at, nullptr);
}

std::vector<Acceptor::Accepted> Acceptor::Advance() {
  std::vector<Accepted> accepted;
  epoll_event events[kMostAtOnce];
  const int ready = ::epoll_wait(fd(), events, kMostAtOnce, 0);
  bool calls = false;
  // Those that have come so far first: new ones may make them go.
  for (int i = 0; i < ready; ++i) {
    if (events[i].data.u64 == 0) {
      calls = true;
    } else if (events[i].data.u64 != kTimer) {
      AdvanceOne(events[i].data.u64, accepted);
    }
  }
  if (calls) Accept(accepted);
  const auto now = Clock::now();
  while (!pending_.empty() && pending_.begin()->second.deadline <= now) {
    Drop(pending_.begin()->first, Refusal::kTooSlow);
  }
  if (paused_until_ <= now) Listen(true);
  SetTimer();
  return accepted;
}

// A listener whose callers cannot be accepted would be ready all the time.
void Acceptor::Listen(bool listen) {
  epoll_event event{};
  if (listen) event.events = EPOLLIN;
  ::epoll_ctl(fd(), EPOLL_CTL_MOD, listener_.get(), &event);
  paused_until_ = listen ? Clock::time_point::max() : Clock::now() + kPause;
  if (listen || pending_.empty()) return;
  Drop(pending_.begin()->first, Refusal::kTooMany);
}

void Acceptor::Accept(std::vector<Accepted>& accepted) {
  for (int i = 0; i < kMostAtOnce; ++i) {
    TcpAddress address;
    auto socket = TryAcceptTcp(listener_.get(), &address);
    if (socket.status().code() == Code::kResourceExhausted) return Listen(false);
    if (!socket.ok() || !socket->has_value()) return;
    if (pending_.size() >= limits_.pending) Drop(pending_.begin()->first, Refusal::kTooMany);
    const uint64_t id = ++last_id_;
    const auto [entry, added] = pending_.emplace(
        id, Pending{std::move(**socket), address, Handshake::Answer(own_, purpose_),
                    Clock::now() + limits_.patience});
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = id;
    if (::epoll_ctl(fd(), EPOLL_CTL_ADD, entry->second.socket.get(), &event) != 0) {
      Drop(id, Refusal::kTooMany);
      continue;
    }
    AdvanceOne(id, accepted);
  }
}

void Acceptor::AdvanceOne(uint64_t id, std::vector<Accepted>& accepted) {
  const auto found = pending_.find(id);
  if (found == pending_.end()) return;
  Pending& pending = found->second;
  const auto step = pending.handshake.Advance(pending.socket.get());
  if (step == Handshake::Step::kRefused) return Drop(id, pending.handshake.refusal());
  if (step == Handshake::Step::kDone) {
    ::epoll_ctl(fd(), EPOLL_CTL_DEL, pending.socket.get(), nullptr);
    accepted.push_back(
        {std::move(pending.socket), pending.handshake.peer(), pending.handshake.stripe()});
    pending_.erase(found);
    return;
  }
  const bool needs_room = step == Handshake::Step::kSend;
  if (needs_room == pending.watched_for_room) return;
  pending.watched_for_room = needs_room;
  epoll_event event{};
  event.events = needs_room ? EPOLLOUT : EPOLLIN;
  event.data.u64 = id;
  ::epoll_ctl(fd(), EPOLL_CTL_MOD, pending.socket.get(), &event);
}

void Acceptor::Drop(uint64_t id, Refusal reason) {
  const auto found = pending_.find(id);
  refused_[static_cast<size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  // Processes of the job that call each other at the same time give up one of the calls.
  if (reason != Refusal::kLeft && !logged_) {
    logged_ = true;
    Log(LogLevel::kWarning,
        StrCat("a connection from ", found->second.address.ToString(), " was refused: it ",
               std::string(RefusalText(reason)), "; others will only be counted"));
  }
  pending_.erase(found);
}

uint64_t Acceptor::refused() const {
  uint64_t sum = 0;
  for (const auto& count : refused_) sum += count.load(std::memory_order_relaxed);
  return sum;
}

}  // namespace jaxfabric
