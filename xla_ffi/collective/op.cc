#include "collective/op.h"

#include <algorithm>

#include "base/log.h"
#include "collective/fabric.h"
#include "collective/participant.h"
#include "memory/copy.h"
#include "os/cores.h"

namespace jaxfabric {

void Op::Reset(const Buffers& buffers, int64_t run_id, uint32_t occurrence, uint64_t entry) {
  buffers_ = buffers;
  run_id_ = own_run_id_ = run_id;
  numbered_ = true;
  occurrence_ = occurrence;
  entry_ = entry;
  tag_ = 0;
  stage_ = Stage::kSetup;
  status_ = Status();
  slot_ = -1;
  mine_ = nullptr;
  waiting_for_ = -1;
  sources_found_ = outputs_found_ = own_copied_ = false;
  const auto size = static_cast<size_t>(participant_.size());
  if (found_.size() != size) {
    found_.resize(size);
    operands_.resize(size);
    pulled_.resize(size);
  }
  std::fill(found_.begin(), found_.end(), nullptr);
  std::fill(pulled_.begin(), pulled_.end(), uint8_t{0});
  pulled_count_ = 0;
  next_reader_ = 0;
  stream_ = produced_ = consumed_ = results_ = results_consumed_ = landed_ = 0;
  told_ = {};
  pattern_.block = nullptr;
  pattern_.begun = pattern_.awaits_sending = false;
  pattern_.sent = pattern_.taken = pattern_.collected = pattern_.entered = 0;
  tickets_.clear();
  started = reported = looked = {};
  warned = false;
}

bool Op::Advance() {
  bool moved = false;
  // Each case returns when it can do no more, or falls to the next stage.
  while (true) {
    switch (stage_) {
      case Stage::kSetup:
        if (!Setup()) return moved;
        moved = true;
        break;
      case Stage::kClaim:
        if (!Claim()) return moved;
        moved = true;
        break;
      case Stage::kTransfer: {
        bool step = false;
        switch (participant_.plan().algorithm) {
          case Algorithm::kLocal:  // see Setup()
            break;
          case Algorithm::kOneShot:
            step = StepOneShot();
            break;
          case Algorithm::kTwoShot:
            step = StepTwoShot();
            break;
          case Algorithm::kRagged:
            step = StepRagged();
            break;
          case Algorithm::kPull:
            step = StepPull();
            break;
          case Algorithm::kHosts:
            step = StepHosts();
            break;
          case Algorithm::kRelay:
            step = StepRelay();
            break;
          case Algorithm::kPattern:
            step = StepPattern();
            break;
        }
        if (!step) return moved;
        moved = true;
        break;
      }
      case Stage::kLinger:
        if (!Linger()) return moved;
        moved = true;
        break;
      case Stage::kRevoke:
        if (!Revoke()) return moved;
        moved = true;
        break;
      case Stage::kFinished:
        return moved;
    }
  }
}

bool Op::Setup() {
  if (participant_.size() == 1) {
    RunLocal();
    return true;
  }
  const std::optional<int64_t> own = participant_.instance_.clock->OwnRunId(run_id_);
  numbered_ = own.has_value();
  if (!numbered_) return false;
  own_run_id_ = *own;
  if (participant_.ready()) {
    const auto launch =
        static_cast<int32_t>(static_cast<uint32_t>(own_run_id_) - participant_.launch_base_);
    if (launch >= 0) {
      tag_ = MakeTag(static_cast<uint32_t>(launch), occurrence_) ^ participant_.salt_;
      stage_ = Stage::kClaim;
      return true;
    }
  }
  if (!participant_.Prepare(*this)) return false;
  if (stage_ == Stage::kSetup) stage_ = Stage::kClaim;
  return true;
}

void Op::RunLocal() {
  // Everything a rank gives, it gives to itself.
  const Plan& plan = participant_.plan();
  if (plan.kind == OpKind::kRaggedAllToAll) {
    if (PrepareRagged()) CopyOwnSlices();
    stage_ = Stage::kFinished;
    return;
  }
  const bool gets_nothing = plan.kind == OpKind::kPermute && !plan.from_self;
  if (gets_nothing) {
    std::memset(buffers_.output, 0, buffers_.output_bytes);
  } else {
    Copy(buffers_.output, buffers_.input, buffers_.output_bytes);
  }
  stage_ = Stage::kFinished;
}

bool Op::Claim() {
  Participant& participant = participant_;
  const Plan& plan = participant.plan();
  if (participant.communicator()->poisoned()) {
    Fail(participant.WithCaller(participant.communicator()->failure()));
    return true;
  }
  if (stream_ == 0) {
    stream_ = plan.stream;
    if (plan.kind == OpKind::kRaggedAllToAll && !PrepareRagged()) return true;
  }
  if (slot_ < 0) {
    slot_ = participant.TryClaimSlot(tag_, entry_);
    if (slot_ < 0) {
      // The peers may wait just as long, for the word that this rank has finished theirs.
      for (const RemotePeer& remote : participant.remotes_) (void)remote.channel->Push();
      return false;
    }
    mine_ = &participant.mine_->slots[slot_];
  }
  const bool relays = plan.algorithm == Algorithm::kRelay;
  const bool staged =
      (!plan.inlined || relays) && plan.algorithm != Algorithm::kPull && !plan.readers.empty();
  if (plan.algorithm == Algorithm::kPattern) {
    if (!ClaimForPattern()) return stage_ != Stage::kClaim;
  } else if (staged && plan.places && !participant.local_readers_) {
    ring_ = stream_;
  } else if (staged && !PlaceStaging(plan.ring)) {
    return false;
  }
  if (plan.places && !OpenOutput()) return true;
  tickets_.assign(participant.remotes_.size(), 0);
  Publish();
  stage_ = Stage::kTransfer;
  return true;
}

bool Op::PlaceStaging(size_t ring_bytes) {
  Participant& participant = participant_;
  const Plan& plan = participant.plan();
  auto& slot = participant.slots_[slot_];
  const auto subs = static_cast<uint64_t>(plan.sub_streams());
  const bool hosts = plan.algorithm == Algorithm::kHosts;
  const bool relays = plan.algorithm == Algorithm::kRelay;
  const uint64_t rings = hosts    ? participant.roles_.layout.rings()
                         : relays ? subs + participant.relay_rings_.count()
                                  : subs + (plan.algorithm == Algorithm::kTwoShot ? 1 : 0);
  const uint64_t counters = hosts ? participant.roles_.layout.counter_bytes() : 0;
  // Under memory pressure a smaller ring works as well, only slower.
  for (uint64_t ring = ring_bytes;; ring = 4096) {
    if (participant.StagingFor(slot, ring * rings + counters)) {
      ring_ = ring;
      staging_ = participant.fabric().window() + slot.staging.offset;
      break;
    }
    if (ring > 4096) continue;
    if (!TryPlaceInReserve(rings, counters)) return false;
    break;
  }
  if (relays || plan.algorithm == Algorithm::kTwoShot) {
    result_staging_ = staging_ + ring_ * subs;
    result_ring_ = ring_;
  }
  return true;
}

// Each slot has a share of the cell's reserve, so that no execution waits for memory that others
// hold while they wait for it. Where the rings of a large group do not fit, the slots take turns
// with the whole.
bool Op::TryPlaceInReserve(uint64_t rings, uint64_t counters) {
  constexpr uint64_t kElement = 16;  // none is longer
  std::byte* reserve = participant_.mine_->reserve;
  if (counters + rings * kElement <= kReserveShare) {
    ring_ = (kReserveShare - counters) / rings / kElement * kElement;
    staging_ = reserve + kReserveShare * static_cast<uint64_t>(slot_);
    return true;
  }
  if (counters + rings * kElement > kReserveBytes) return false;
  participant_.Enter();
  bool taken = false;
  for (auto& other : participant_.slots_) taken |= other.reserve && !participant_.SlotFree(other);
  if (!taken) participant_.slots_[slot_].reserve = true;
  participant_.Leave();
  if (taken) return false;
  ring_ = (kReserveBytes - counters) / rings / kElement * kElement;
  staging_ = reserve;
  return true;
}

void Op::Publish() {
  const Plan& plan = participant_.plan();
  PublishLine& line = mine_->publish;
  // A peer that still holds this slot by its old tag must not take the new counters for the old
  // ones: tag first, then counters; release on both so that they are seen in that order.
  line.tag.store(0, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_release);
  mine_->produce.produced.store(0, std::memory_order_release);
  mine_->produce.results.store(0, std::memory_order_release);
  mine_->consume.consumed.store(0, std::memory_order_release);
  mine_->consume.results_consumed.store(0, std::memory_order_release);
  // Acquire: the progress thread may have finished that execution; its loads from the peers' slots
  // come before the store here, which lets the peers write to them.
  line.previous_done.store(participant_.last_done_.load(std::memory_order_acquire),
                           std::memory_order_release);
  line.header.store(plan.header, std::memory_order_relaxed);
  if (plan.readers.empty()) {
    line.placement = Placement::kNone;
    line.staged.output_region = output_region_.value_or(0);
  } else if (plan.inlined) {
    line.placement = Placement::kInline;
    if (plan.stream > 0) std::memcpy(line.payload, buffers_.input, buffers_.input_bytes);
    produced_ = plan.stream;
  } else if (plan.algorithm == Algorithm::kPull) {
    line.placement = Placement::kDirect;
    line.direct.input = reinterpret_cast<uint64_t>(buffers_.input);
    line.direct.output = reinterpret_cast<uint64_t>(buffers_.output);
    line.direct.ragged = reinterpret_cast<uint64_t>(&buffers_.ragged);
  } else {
    const std::byte* window = participant_.fabric().window();
    line.placement = Placement::kStaged;
    line.staged.ring_offset = staging_ ? static_cast<uint64_t>(staging_ - window) : 0;
    line.staged.ring_bytes = ring_;
    line.staged.result_offset =
        result_staging_ ? static_cast<uint64_t>(result_staging_ - window) : 0;
    line.staged.result_bytes = result_ring_;
    line.staged.output_region =
        pattern_.block ? pattern_.block->region : output_region_.value_or(0);
    // The first segment rides with the announcement.
    if (plan.algorithm == Algorithm::kHosts) {
      ClearCounters();
      StageForHost();
    } else if (plan.algorithm == Algorithm::kPattern) {
      ShowOperand();
    } else if (!plan.places) {
      Produce();
    }
  }
  LastSeen* seen = participant_.last_seen_;
  previous_call_ = seen->call.load(std::memory_order_relaxed);
  previous_tag_ = seen->tag.load(std::memory_order_relaxed);
  seen->key.store(participant_.key_, std::memory_order_relaxed);
  seen->call.store(participant_.call_, std::memory_order_relaxed);
  seen->tag.store(plain_tag(), std::memory_order_relaxed);
  seen->core.store(CurrentCore(), std::memory_order_relaxed);
  // Release: the line, the staged bytes and the counters before it.
  line.tag.store(tag_, std::memory_order_release);
  Announce();
}

uint64_t Op::plain_tag() const { return tag_ ^ participant_.salt_; }

Slot* Op::Look(int peer) const {
  Cell* cell = participant_.peers_[static_cast<size_t>(peer)].cell;
  for (int i = 0; i < kSlots; ++i) {
    // Usually both ranks are in step and use the same slot.
    Slot& slot = cell->slots[(slot_ + i) % kSlots];
    // Acquire: pairs with Publish().
    if (slot.publish.tag.load(std::memory_order_acquire) == tag_) return &slot;
  }
  return nullptr;
}

Slot* Op::Find(int peer) {
  Slot*& found = found_[static_cast<size_t>(peer)];
  if (found) return found;
  Slot* slot = Look(peer);
  if (!slot) return nullptr;
  // Atomic, as below: the owner may not have to wait for this rank, and publish its next
  // execution meanwhile. Relaxed: the header is the same then.
  if (slot->publish.header.load(std::memory_order_relaxed) != participant_.plan().header) {
    const Status mismatch = participant_.fabric().HeaderMismatch(participant_, peer);
    participant_.fabric().ReportFailure(mismatch);
    Fail(mismatch);
    return nullptr;
  }
  participant_.peer_done_[static_cast<size_t>(peer)].store(
      slot->publish.previous_done.load(std::memory_order_acquire), std::memory_order_release);
  found = slot;
  return found;
}

uint64_t Op::Consumed(const Slot* slot, int peer, bool results) const {
  const uint64_t everything = stream_;
  if (!slot) {
    // Not there: either it has not begun, or it has finished and moved on.
    const auto& readers = participant_.plan().readers;
    const auto reader = std::lower_bound(readers.begin(), readers.end(), peer) - readers.begin();
    return participant_.ReaderDone(static_cast<size_t>(reader), slot_, tag_) ? everything : 0;
  }
  const auto& counter = results ? slot->consume.results_consumed : slot->consume.consumed;
  // Acquire: the reader's loads from the ring come before our next stores to it.
  const uint64_t consumed = counter.load(std::memory_order_acquire);
  // A recycled slot shows another tag before it shows other counters: see Publish().
  return slot->publish.tag.load(std::memory_order_acquire) == tag_ ? consumed : everything;
}

}  // namespace jaxfabric
