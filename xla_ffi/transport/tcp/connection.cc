// How the connections of a pair come and go: the part of Peer that is not about data.
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "transport/tcp/hub.h"
#include "transport/tcp/peer.h"
#include "transport/tcp/socket.h"

namespace jaxfabric::tcp {

void Peer::SetState(State state) {
  const auto connecting = [](State s) {
    return s == State::kCalling || s == State::kYielding || s == State::kAnswering;
  };
  if (connecting(state) != connecting(state_)) hub_->poller().Ticking(connecting(state));
  if (connecting(state) && !connecting(state_)) {
    connect_by_ = Clock::now() + hub_->options().connect_timeout;
  }
  state_ = state;
}

void Peer::CallIfIdle() {
  if (state_ != State::kIdle || !address_) return;
  SetState(State::kCalling);
  attempt_ = hub_->NextId();
  sockets_.assign(lanes_.size(), nullptr);
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Result<UniqueFd> fd = StartConnectTcp(*address_, hub_->options().socket);
    Status status = fd.status();
    if (status.ok()) {
      sockets_[i] = std::make_shared<Socket>(hub_, std::move(*fd), this, static_cast<int>(i),
                                             attempt_, *address_);
      status = hub_->Watch(sockets_[i]);
    }
    if (!status.ok()) {  // Fail() needs the lock: Expire() finds it
      end_reason_ = status;
      connect_by_ = Clock::now();
      return;
    }
  }
}

void Peer::DropSockets() {
  for (std::shared_ptr<Socket>& socket : sockets_) {
    if (socket != nullptr) socket->Close();
  }
}

bool Peer::OnHello(const std::shared_ptr<Socket>& socket) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kUp || state_ == State::kFailed) return false;
    // Both call: the call of the lower number counts.
    if (state_ == State::kCalling && hub_->self() < number_) return false;
    if (state_ != State::kAnswering || attempt_ != socket->attempt()) {
      DropSockets();
      SetState(State::kAnswering);
      attempt_ = socket->attempt();
      sockets_.assign(lanes_.size(), nullptr);
    }
    std::shared_ptr<Socket>& slot = sockets_[static_cast<size_t>(socket->lane())];
    if (slot != nullptr) return false;
    slot = socket;
    if (std::any_of(sockets_.begin(), sockets_.end(), [](auto& s) { return s == nullptr; })) {
      return true;
    }
    FrameHeader accept{.type = FrameType::kAccept};
    accept.value = attempt_;
    // Nothing was sent there before, so there is room; an error will be found by the next use.
    (void)::send(sockets_[0]->fd(), &accept, sizeof(accept), MSG_NOSIGNAL | MSG_DONTWAIT);
    BecomeUp();
  }
  (void)Push();
  return true;
}

void Peer::OnAccept(uint64_t attempt) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::kCalling || attempt != attempt_) return;
    BecomeUp();
  }
  (void)Push();
}

void Peer::BecomeUp() {
  SetState(State::kUp);
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].socket = sockets_[i];
  up_.store(true, std::memory_order_seq_cst);  // as in up()
}

void Peer::OnEnd(Socket* socket, const Status& reason, bool refused) {
  std::shared_ptr<Socket> first;
  bool fail = false;
  {
    const std::lock_guard lock(mutex_);
    const auto index = static_cast<size_t>(socket->lane());
    if (index >= sockets_.size() || sockets_[index].get() != socket) return;  // of an old attempt
    switch (state_) {
      case State::kUp:
        if (end_reason_.ok()) end_reason_ = reason;
        ending_.store(true, std::memory_order_release);
        first = sockets_[0];
        break;
      case State::kCalling:
        if (hub_->self() < number_ || !refused) {
          end_reason_ = reason;
          fail = true;
        } else {
          DropSockets();
          SetState(State::kYielding);
          end_reason_ = reason;
        }
        break;
      case State::kAnswering:
        DropSockets();
        SetState(State::kIdle);
        if (posted_ != 0) CallIfIdle();
        break;
      default:
        break;
    }
  }
  if (fail) return Fail(reason, true);
  if (first == nullptr) return;
  if (first.get() == socket && socket->ended()) return Finish();
  first->Handle();
}

void Peer::Finish() {
  Status reason;
  bool left;
  {
    const std::lock_guard lock(mutex_);
    left = left_;
    reason = left ? Status(Code::kUnavailable, "it has closed its endpoint") : end_reason_;
  }
  Fail(reason, !left);
}

void Peer::Fail(const Status& reason, bool lost) {
  {
    std::unique_lock lock(mutex_);
    if (state_ == State::kFailed) return WaitForSenders(lock);
    SetState(State::kFailed);
    failure_ = reason.WithContext(StrCat("the connection to peer ", number_, " has ended"));
    WaitForSenders(lock);
    for (Lane& lane : lanes_) lane.queue.Clear();
    DropSockets();
    failed_.store(true, std::memory_order_release);
  }
  if (lost && hub_->lost_handler) hub_->lost_handler(number_, failure());
  hub_->poller().Changed();
}

void Peer::WaitForSenders(std::unique_lock<std::mutex>& lock) {
  // sendmsg does not wait, so this does not either for long.
  while (std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.sending; })) {
    lock.unlock();
    ::sched_yield();
    lock.lock();
  }
}

void Peer::Abort() {
  bool told;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(aborting_, true)) return;
    // Memory of callers must not be read any more: then the end of the connection tells the peer.
    told = std::none_of(lanes_.begin(), lanes_.end(),
                        [](const Lane& lane) { return lane.queue.refers(); });
    if (told) {
      if (state_ != State::kFailed) AppendInOrder({.type = FrameType::kAbort}, {}, {}, ++posted_);
      CallIfIdle();
      aborted_.store(true, std::memory_order_release);
    }
  }
  if (told) {
    (void)Push();
  } else {
    Fail(Status(Code::kAborted, "aborted"), false);
    aborted_.store(true, std::memory_order_release);
  }
  hub_->poller().Changed();
}

void Peer::PostGoodbye() {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kIdle || state_ == State::kFailed) return;
    AppendInOrder({.type = FrameType::kGoodbye}, {}, {}, ++posted_);
  }
  (void)Push();
}

bool Peer::AllSent() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::kIdle || state_ == State::kFailed ||
         std::all_of(lanes_.begin(), lanes_.end(),
                     [](const Lane& lane) { return lane.queue.empty() && !lane.sending; });
}

bool Peer::Parted() const {
  const std::lock_guard lock(mutex_);
  return state_ != State::kUp || parted_;
}

void Peer::CloseForWriting() {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kUp) return;
  for (const Lane& lane : lanes_) ::shutdown(lane.socket->fd(), SHUT_WR);
}

bool Peer::Ended() const {
  const std::lock_guard lock(mutex_);
  return state_ != State::kUp;
}

void Peer::Expire(Clock::time_point now) {
  Status reason;
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::kCalling && state_ != State::kYielding && state_ != State::kAnswering) {
      return;
    }
    if (now < connect_by_) return;
    const auto seconds = std::chrono::duration<double>(hub_->options().connect_timeout).count();
    reason = !end_reason_.ok()
                 ? end_reason_
                 : Status(Code::kUnavailable, StrCat("no connection within ", seconds, " s"));
  }
  Fail(reason, true);
}

}  // namespace jaxfabric::tcp
