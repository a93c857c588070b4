// The progress thread: executions whose peers are late, and what becomes of them when the peers
// stay away. It never runs a completion itself: that may take as long as the user's next matmul.
#include <algorithm>

#include "base/log.h"
#include "collective/fabric.h"

namespace jaxfabric {
namespace {

constexpr auto kCheckInterval = std::chrono::milliseconds(20);

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

bool Fabric::TryHandOff(Op* op) {
  handed_off_.fetch_add(1, std::memory_order_relaxed);
  if (op->started == Clock::time_point{}) op->started = Clock::now();
  {
    std::lock_guard lock(queue_mutex_);
    if (progress_ended_) return false;
    queue_.push_back(op);
    queue_filled_.notify_one();
    // It may watch other executions, asleep at the bell; the mutex orders this look at `sleepers`
    // after its own at the queue. Inside, because once the progress thread has the op it may finish
    // it, and a shutdown unmaps the bell.
    RingIfSleeping(peers_[static_cast<size_t>(process_)].header);
  }
  return true;
}

bool Fabric::AdvanceAll() {
  {
    std::lock_guard lock(queue_mutex_);
    pending_.insert(pending_.end(), queue_.begin(), queue_.end());
    queue_.clear();
  }
  bool moved = false;
  for (size_t i = 0; i < pending_.size();) {
    Op* op = pending_[i];
    moved |= op->Advance();
    if (!op->finished()) {
      ++i;
      continue;
    }
    moved = true;
    pending_[i] = pending_.back();
    pending_.pop_back();
    completions_->Run([op] {
      auto on_finished = std::move(op->on_finished);
      op->on_finished = nullptr;
      const Status status = op->status();
      op->participant().End(op);
      on_finished(status);
    });
  }
  return moved;
}

void Fabric::ProgressLoop() {
  auto next_check = Clock::now();
  int idle = 0;
  while (true) {
    const bool moved = AdvanceAll();
    const auto now = Clock::now();
    if (now >= next_check) {
      CheckWaits();
      next_check = now + kCheckInterval;
    }
    if (moved) {
      idle = 0;
      continue;
    }
    const bool nothing = pending_.empty();
    if (nothing && stopping_.load(std::memory_order_acquire)) {
      std::lock_guard lock(queue_mutex_);
      progress_ended_ = queue_.empty();
      if (progress_ended_) return;
      continue;
    }
    if (nothing) {
      // Not at the bell: every call of every peer would ring it.
      std::unique_lock lock(queue_mutex_);
      queue_filled_.wait(
          lock, [this] { return !queue_.empty() || stopping_.load(std::memory_order_acquire); });
      continue;
    }
    // A short burst of yields catches peers that are about to come; then sleep.
    if (++idle < 16) {
      std::this_thread::yield();
      continue;
    }
    idle = 0;
    const auto again = [this] {
      if (stopping_.load(std::memory_order_acquire)) return true;
      return AdvanceAll();
    };
    const bool setting_up = std::any_of(pending_.begin(), pending_.end(), [](const Op* op) {
      return op->stage() == Op::Stage::kSetup;
    });
    const bool unsent = std::any_of(pending_.begin(), pending_.end(),
                                    [](const Op* op) { return op->awaits_sending(); });
    if (stopping_.load(std::memory_order_acquire)) {
      std::this_thread::yield();  // only waits for executions to fail
      next_check = now;
    } else if (setting_up) {
      // The launch clock settles by time, not by news.
      SleepUnless(again, Deadline(now + LaunchClock::kSettle / 4));
    } else if (unsent) {
      // The network does not ring when all is sent.
      SleepUnless(again, Deadline(now + std::chrono::milliseconds(1)));
    } else {
      SleepUnless(again, Deadline(next_check));
    }
  }
}

void Fabric::CheckWaits() {
  const auto now = Clock::now();
  CheckLost(now);
  for (Op* op : pending_) {
    if (!op->finished() && op->stage() != Op::Stage::kRevoke) CheckWait(*op, now);
  }
}

// Tells the late rank's process, or everybody who needs to know.
void Fabric::ReportStuck(const Op& op, std::optional<int64_t> late_rank,
                         const std::optional<Stuck>& other) {
  const Participant& participant = op.participant();
  WireWriter stuck(MessageType::kStuck);
  stuck.Add(participant.key()).Add(op.tag()).Add(participant.spec().place);
  stuck.Add(participant.spec().site).Add(participant.rank()).Add(late_rank.value_or(-1));
  stuck.Add(other ? other->key : uint64_t{0}).Add(other ? other->tag : uint64_t{0});
  stuck.Add(std::string_view(participant.DescribeCall()));
  const auto process = late_rank ? process_of_.find(*late_rank) : process_of_.end();
  // Between hosts others wait for the late rank through this one, and have to know.
  const bool through_others =
      op.participant().ready() && (participant.plan().algorithm == Algorithm::kHosts ||
                                   participant.plan().algorithm == Algorithm::kRelay ||
                                   participant.plan().algorithm == Algorithm::kPattern);
  const bool all = process == process_of_.end() || through_others;
  if (all) mesh_->Broadcast(stuck, Mesh::Loss::kAcceptable);
  if (all || process->second == process_) {
    WireReader own(stuck.bytes());
    OnStuck(own);
  } else {
    mesh_->Send(process->second, stuck, Mesh::Loss::kAcceptable);
  }
}

bool Fabric::FailIfLeft(Op& op) {
  const Participant& participant = op.participant();
  const auto gone = [&](int position) {
    const auto rank = RankAt(participant, position);
    return rank ? HasLeft(*rank) : !MayCome(participant);
  };
  std::vector<int> left = op.Missing();
  std::erase_if(left, [&](int position) { return !gone(position); });
  if (left.empty()) return false;
  // What they published before they left can still be used: one more look.
  op.Advance();
  if (op.finished()) return true;
  const std::vector<int> missing = op.Missing();
  std::erase_if(left, [&](int position) {
    return std::find(missing.begin(), missing.end(), position) == missing.end();
  });
  if (left.empty()) return false;
  const Status status(
      Code::kUnavailable,
      StrCat(participant.DescribePeer(left.front()),
             RankAt(participant, left.front()) ? " has left"
                                               : " will not come: every other process has left,",
             " and ", NameRank(participant.rank()), " waits for it in ",
             participant.DescribeCall()));
  Poison(status);
  op.Fail(status);
  return true;
}

void Fabric::CheckWait(Op& op, Clock::time_point now) {
  Participant& participant = op.participant();
  Communicator* communicator = participant.communicator();
  if (communicator != nullptr && communicator->poisoned()) {
    op.Fail(participant.WithCaller(communicator->failure()));
    return;
  }
  // A communicator may have been made after the shutdown looked for those to poison.
  if (stopping_.load(std::memory_order_acquire)) {
    op.Fail(participant.WithCaller(Status(Code::kCancelled, "jaxfabric was shut down")));
    return;
  }
  if (communicator == nullptr) {
    const Status failed = failure();
    if (!failed.ok()) {
      op.Fail(participant.WithCaller(failed));
      return;
    }
  }
  if (FailIfLeft(op)) return;
  const double waited = Seconds(now - op.started);
  if (waited >= compare_after()) {
    const std::vector<int> missing = op.Missing();
    const bool due = now - op.reported >= ReportInterval();
    if (due) op.reported = now;
    bool told_all = false;
    for (int position : missing) {
      const auto rank = RankAt(participant, position);
      const auto other = rank ? Disagreement(participant, *rank) : std::nullopt;
      if (other && other->other_key == participant.key() && other->other_tag == op.tag()) {
        Status mismatch = MismatchError(participant, *other);
        Poison(mismatch);
        op.Fail(std::move(mismatch));
        return;
      }
      // A disagreement is answered at once.
      const bool answer = other && other->received >= op.looked;
      if (answer || (due && (rank || !told_all))) ReportStuck(op, rank, other);
      told_all |= !rank;
    }
    op.looked = now;
  }
  if (waited >= options_.warn_after && !op.warned) {
    op.warned = true;
    Log(LogLevel::kWarning, StrCat(NameRank(participant.rank()), " has waited ", waited, " s in ",
                                   participant.DescribeCall(), DescribeLate(op)));
  }
  if (waited >= options_.deadline) {
    Status error = DeadlineError(op, waited);
    Poison(error);
    op.Fail(std::move(error));
  }
}

}  // namespace jaxfabric
