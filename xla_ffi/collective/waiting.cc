// How the thread that entered a call waits for its peers, until the progress thread takes over.
#include <sched.h>

#include "collective/fabric.h"
#include "collective/participant.h"
#include "os/cores.h"

namespace jaxfabric {

bool Participant::InStep(const Op& op) const {
  const int peer = op.waiting_for();
  if (peer < 0 || op.stage() == Op::Stage::kClaim) return false;
  const LastSeen* seen = peers_[static_cast<size_t>(peer)].last_seen;
  const uint64_t call = seen->call.load(std::memory_order_relaxed);
  const uint64_t tag = seen->tag.load(std::memory_order_relaxed);
  return (call == op.previous_call_ && tag == op.previous_tag_) ||
         (call == call_ && tag == op.plain_tag());
}

bool Participant::OnThisCore(const Op& op) const {
  const int peer = op.waiting_for();
  if (peer < 0) return false;
  const LastSeen* seen = peers_[static_cast<size_t>(peer)].last_seen;
  return seen->core.load(std::memory_order_relaxed) == CurrentCore();
}

bool Participant::WaitsForRemote(const Op& op) const {
  return op.waiting_for() >= 0 && peers_[static_cast<size_t>(op.waiting_for())].remote;
}

bool Participant::WaitInline(Op& op) {
  const Fabric::Waiting& policy = fabric_.waiting();
  // A pause is about 15 ns, a clock twice that, a yield 300 ns. A peer that runs comes within the
  // pauses, and no system call is made. One that may be waiting for this very core is let in soon:
  // because ranks outnumber cores, or because the scheduler has put it here, next to a third
  // process on the other cores.
  constexpr int kPausesForRunning = 1024;
  constexpr int kPausesForWaiting = 8;
  constexpr int kPausesPerYield = 64;
  // A look at the network is a system call itself, and what other hosts send may need this core to
  // come: for a peer of this host that hands it on, or for processes that nobody here knows of.
  constexpr int kLooksPerYield = 8;
  // Sharing cores, a rank yields for the time of a few turns of its peers, then sleeps. Sleeping at
  // once costs a wake-up on both sides, three times the time of a small call. Yielding on beside
  // other busy processes hands them a whole time slice at each turn, where the wake-up of a sleeper
  // comes before them.
  constexpr Clock::duration kYielding = std::chrono::microseconds(30);
  // News of this host that come meanwhile are seen no later than this.
  constexpr Clock::duration kNetworkNap = std::chrono::milliseconds(1);
  int idle_rounds = 0;
  Clock::time_point start{};
  while (true) {
    const bool moved = op.Advance();
    if (op.finished()) return true;
    if (moved) {
      idle_rounds = 0;
      start = {};
      continue;
    }
    // The first execution waits for announcements and the launch clock: not worth a core.
    if (op.stage() == Op::Stage::kSetup) return false;
    ++idle_rounds;
    const bool networked = !remotes_.empty();
    // Whatever comes may be for others: no reason not to let them run.
    if (networked) {
      fabric_.messages()->Progress(Clock::duration::zero());
      if (idle_rounds % kLooksPerYield == 0) ::sched_yield();
    }
    if (idle_rounds <= kPausesForWaiting) {
      CpuPause();
      continue;
    }
    const bool shared = policy.shared_cores || OnThisCore(op);
    if (!shared && (idle_rounds <= kPausesForRunning || idle_rounds % kPausesPerYield != 0)) {
      CpuPause();
      continue;
    }
    if (communicator_->poisoned()) return false;
    const auto now = Clock::now();
    if (start == Clock::time_point{}) start = now;
    const Clock::duration limit = InStep(op) ? policy.in_step : policy.out_of_step;
    if (now - start >= limit) return false;
    if (!policy.shared_cores || now - start < kYielding) {
      ::sched_yield();
      continue;
    }
    if (networked && WaitsForRemote(op)) {
      // Where its news come from, without another thread between them and this one.
      fabric_.messages()->Progress(std::min<Clock::duration>(kNetworkNap, start + limit - now));
      continue;
    }
    fabric_.SleepUnless([&op] { return op.Advance() || op.finished(); }, Deadline(start + limit));
    if (op.finished()) return true;
  }
}

}  // namespace jaxfabric
