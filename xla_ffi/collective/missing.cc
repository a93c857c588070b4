// Whom an execution waits for, and which executions there have been.
#include <algorithm>
#include <iterator>

#include "collective/op.h"
#include "collective/participant.h"

namespace jaxfabric {

std::vector<int> Op::Missing() const {
  const Plan& plan = participant_.plan();
  std::vector<int> missing;
  switch (stage_) {
    case Stage::kSetup:
      return participant_.NotAnnounced();
    case Stage::kClaim:
      // In the order of entry: while it is not this one's turn, an earlier one knows.
      return slot_ < 0 ? participant_.ReadersOfFullSlots() : missing;
    case Stage::kTransfer:
      for (int peer = 0; peer < plan.size; ++peer) {
        if (NeedsAsSource(peer) || NeedsAsReader(peer)) missing.push_back(peer);
      }
      return missing;
    case Stage::kLinger:
      if (plan.algorithm != Algorithm::kPull) return ReadersNotSentTo();
      for (size_t reader = next_reader_; reader < plan.readers.size(); ++reader) {
        if (!participant_.ReaderDone(reader, slot_, tag_)) missing.push_back(plan.readers[reader]);
      }
      return missing;
    case Stage::kRevoke:
    case Stage::kFinished:
      return missing;
  }
  return missing;
}

bool Op::NeedsAsSource(int peer) const {
  const Plan& plan = participant_.plan();
  if (!std::binary_search(plan.sources.begin(), plan.sources.end(), peer)) return false;
  const auto index = static_cast<size_t>(peer);
  const Slot* slot = found_[index] ? found_[index] : Look(peer);
  if (plan.algorithm == Algorithm::kPattern) return PatternNeeds(peer);
  if (plan.algorithm == Algorithm::kRelay) return RelayNeeds(peer);
  if (plan.algorithm == Algorithm::kPull) return plan.reduces ? !slot : !pulled_[index];
  if (!slot) return !sources_found_;
  if (plan.algorithm == Algorithm::kHosts) return HostsNeed(peer);
  if (slot->publish.placement == Placement::kInline) return false;
  const uint64_t needed =
      plan.algorithm == Algorithm::kRagged ? ragged_.received_bytes[index] : plan.stream;
  // Acquire: as in the steps, though nothing is read here.
  if (slot->produce.produced.load(std::memory_order_acquire) < needed && consumed_ < needed) {
    return true;
  }
  return plan.algorithm == Algorithm::kTwoShot && results_consumed_ < plan.stream &&
         slot->produce.results.load(std::memory_order_acquire) < plan.stream;
}

bool Op::NeedsAsReader(int peer) const {
  const Plan& plan = participant_.plan();
  // Direct buffers: see Linger().
  if (plan.algorithm == Algorithm::kPull) return false;
  // What these need of a peer they say above.
  if (plan.algorithm == Algorithm::kHosts || plan.algorithm == Algorithm::kRelay ||
      plan.algorithm == Algorithm::kPattern) {
    return false;
  }
  if (!std::binary_search(plan.readers.begin(), plan.readers.end(), peer)) return false;
  const Slot* slot = found_[static_cast<size_t>(peer)];
  if (!slot) slot = Look(peer);
  if (Placed(peer)) return !slot && produced_ < stream_;
  const uint64_t consumed = Consumed(slot, peer, /*results=*/false);
  if (produced_ < stream_ && consumed + ring_ < stream_) return true;
  // Acknowledged() waits for every reader to have seen all tables.
  if (plan.algorithm == Algorithm::kRagged && consumed < plan.table_bytes()) return true;
  return plan.algorithm == Algorithm::kTwoShot && results_ < plan.stream &&
         Consumed(slot, peer, /*results=*/true) + result_ring_ < plan.stream;
}

bool Participant::HasEntered(uint64_t tag) const {
  // The first one, which does not know its number yet.
  if (!ready() || tag == 0) return true;
  const auto has = [tag](const std::atomic<uint64_t>& word) {
    return word.load(std::memory_order_relaxed) == tag;  // orders nothing: a look at a number
  };
  return std::any_of(std::begin(mine_->done), std::end(mine_->done), has) ||
         std::any_of(std::begin(mine_->slots), std::end(mine_->slots),
                     [&](const Slot& slot) { return has(slot.publish.tag); });
}

}  // namespace jaxfabric
