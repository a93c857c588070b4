// How an execution ends: its buffers are XLA's again once nobody can touch them.
#include <algorithm>

#include "collective/fabric.h"
#include "collective/op.h"
#include "collective/participant.h"

namespace jaxfabric {

bool Op::Linger() {
  // Everybody who may touch this rank's buffers has to be done before XLA gets them back.
  if (!Sent()) {
    const std::vector<int> missing = ReadersNotSentTo();  // none, if all is sent by now
    if (!missing.empty()) waiting_for_ = missing.front();
    return false;
  }
  const auto& readers = participant_.plan().readers;
  const bool direct = participant_.plan().algorithm == Algorithm::kPull;
  while (direct && next_reader_ < readers.size()) {
    if (!participant_.ReaderDone(next_reader_, slot_, tag_)) {
      waiting_for_ = readers[next_reader_];
      return false;
    }
    ++next_reader_;
  }
  FreeSlot();
  return true;
}

void Op::Fail(Status status) {
  if (stage_ == Stage::kRevoke || stage_ == Stage::kFinished) return;
  status_ = std::move(status);
  CloseOutput();
  const bool published = stage_ == Stage::kTransfer || stage_ == Stage::kLinger;
  if (mine_ && mine_->publish.placement == Placement::kDirect && published) {
    // Sequentially consistent with a reader's store to `reading` and its load of `revoked`: either
    // it sees the revocation, or Revoke() sees it reading.
    mine_->consume.revoked.store(1, std::memory_order_seq_cst);
    stage_ = Stage::kRevoke;
  } else if (!Sent()) {
    stage_ = Stage::kRevoke;
  } else {
    stage_ = Stage::kFinished;
  }
}

bool Op::Revoke() {
  if (!Sent()) return false;  // the failure ends all channels
  const auto& plan = participant_.plan();
  for (int reader : plan.readers) {
    if (plan.algorithm != Algorithm::kPull) break;
    const PeerView& peer = participant_.peers_[static_cast<size_t>(reader)];
    // A reader in another process reads with process_vm_readv, which cannot crash, and looks at
    // `revoked` afterwards. It may be stopped in the middle: nobody waits for it.
    if (peer.process != participant_.fabric().process()) continue;
    for (Slot& slot : peer.cell->slots) {
      if (slot.publish.tag.load(std::memory_order_seq_cst) == tag_ &&
          slot.consume.reading.load(std::memory_order_seq_cst) != 0) {
        waiting_for_ = reader;
        return false;
      }
    }
  }
  stage_ = Stage::kFinished;
  return true;
}

void Op::Finish(bool ring) {
  CloseOutput();
  participant_.LogDone(tag_);
  if (ring) {
    Announce();
  } else if (participant_.plan().readers.empty() ||
             participant_.active_.load(std::memory_order_relaxed) > 1) {  // orders nothing
    // The word of this end goes with what is published next. Who has no readers may publish nothing
    // for long; and what else is under way has been published, so that its peers, out of slots,
    // could wait for the word while it waits for them.
    for (const RemotePeer& remote : participant_.remotes_) (void)remote.channel->Push();
  }
  if (Sent()) {
    FreeSlot();
  } else {
    stage_ = Stage::kLinger;
  }
}

void Op::FreeSlot() {
  GiveBlock();
  // Release: this op's accesses to the slot come before whoever claims it next.
  participant_.slots_[slot_].complete.store(true, std::memory_order_release);
  stage_ = Stage::kFinished;
}

}  // namespace jaxfabric
