#include "collective/participant.h"

#include <algorithm>

#include "base/hash.h"
#include "collective/fabric.h"
#include "os/cores.h"
#include "os/pages.h"

namespace jaxfabric {
Participant::Participant(Fabric& fabric, const CallSpec& spec, SiteRegistry::Instance instance,
                         int64_t rank, int group, int position, int64_t run_id,
                         const Buffers& buffers)
    : fabric_(fabric),
      spec_(spec),
      instance_(std::move(instance)),
      rank_(rank),
      group_(group),
      position_(position),
      plan_(spec, static_cast<int>(spec.groups[static_cast<size_t>(group)].size()), position,
            buffers, Topology{}),
      peer_done_(spec.groups[static_cast<size_t>(group)].size()) {
  Hasher hasher;
  hasher.Add(std::span<const int64_t>(spec_.groups[static_cast<size_t>(group)]));
  hasher.Add(uint64_t{spec_.by_position});
  if (spec_.by_position) {
    // Disjoint meshes of one shape may run one program at once.
    const auto devices = instance_.clock->DevicesOf(run_id);
    const bool alone = devices == 0u;
    hasher.Add(uint64_t{devices.has_value()}).Add(uint64_t{devices.value_or(0)});
    hasher.Add(static_cast<uint64_t>(alone ? fabric_.process() + 1 : 0));
  }
  group_hash_ = Hasher(hasher).Finish();
  key_ = hasher.Add(spec_.Hash()).Add(instance_.duplicate).Finish();
  call_ = Hasher().Add(spec_.Hash()).Add(instance_.duplicate).Finish();
  last_seen_ = LastSeenOf(fabric_.window(), static_cast<size_t>(fabric_.LocalIndex(rank)));
  peers_.resize(static_cast<size_t>(plan_.size));
  fabric_.Register(*this);
}

Participant::~Participant() {
  JF_CHECK(idle());
  fabric_.Unregister(*this);
}

bool Participant::TryEnter() {
  // Acquire: sees what the last thread wrote before it left.
  return !entered_.exchange(true, std::memory_order_acquire);
}

void Participant::Enter() {
  while (!TryEnter()) CpuPause();
}

void Participant::Leave() {
  // Release: hands what was written inside to the next one to enter.
  entered_.store(false, std::memory_order_release);
}

bool Participant::has_cell() {
  Enter();
  const bool found = cell_.has_value();
  Leave();
  return found;
}

Op* Participant::Begin(const Buffers& buffers, int64_t run_id) {
  // Sequentially consistent with the fabric's shutdown, which sets its flag and then waits for
  // active_ to become zero: either it sees this execution, or this one sees the flag below.
  active_.fetch_add(1, std::memory_order_seq_cst);
  if (buffers.output_bytes >= kHugeArrayBytes) {
    TryPreferHugePages({buffers.output, buffers.output_bytes});
  }
  if (TraceRing* trace = fabric_.trace()) trace->Record({rank_, key_, run_id});
  instance_.clock->Enter(run_id, fabric_.serial());
  Enter();
  const std::optional<uint32_t> count = occurrences_.Count(run_id);
  const uint64_t entry = entries_++;
  if (idle_ops_.empty()) {
    ops_.push_back(std::make_unique<Op>(*this));
    idle_ops_.reserve(ops_.size());
    idle_ops_.push_back(ops_.back().get());
  }
  Op* op = idle_ops_.back();
  idle_ops_.pop_back();
  Leave();
  op->Reset(buffers, run_id, count.value_or(0), entry);
  if (fabric_.shut_down()) {
    op->Fail(WithCaller(Status(Code::kCancelled, "jaxfabric was shut down")));
  }
  if (!count && !op->finished()) {
    const Status lost(Code::kFailedPrecondition,
                      StrCat(DescribeCall(), " on ", fabric_.DescribeRank(rank_),
                             ": a launch was overtaken by too many later ones of its program to "
                             "tell which of its loop iterations this is"));
    fabric_.ReportFailure(lost);
    op->Fail(lost);
  }
  return op;
}

void Participant::End(Op* op) {
  Enter();
  idle_ops_.push_back(op);
  Leave();
  // Release: the fabric may free what the execution used once it sees zero.
  active_.fetch_sub(1, std::memory_order_release);
}

std::string Participant::DescribeCall() const {
  return StrCat(spec_.label, " at ", SiteRegistry::Get().Source(spec_.site));
}

Status Participant::WithCaller(const Status& cause) const {
  return Status(cause.code(), StrCat(cause.message(), ", while ", fabric_.NameRank(rank_),
                                     " was in ", DescribeCall()));
}

std::string Participant::DescribePeer(int position) const {
  const auto member = fabric_.directory().Find(key_, static_cast<uint32_t>(position));
  if (member) return fabric_.DescribeRank(member->rank);
  const int64_t id = spec_.groups[static_cast<size_t>(group_)][static_cast<size_t>(position)];
  return spec_.by_position ? StrCat("mesh position ", id) : fabric_.DescribeRank(id);
}

bool Participant::Prepare(Op& op) {
  Enter();
  if (!ready()) {
    if (!cell_) first_run_id_ = instance_.clock->FirstRunId(op.own_run_id_, fabric_.serial());
    // Noted in the order of entry, whether it will be needed or not: once the peers have come, the
    // waiting executions are looked at in any order.
    const auto settled = instance_.clock->Launch(op.own_run_id_, group_hash_, fabric_.serial());
    if (!ResolvePeers(op.own_run_id_, settled)) {
      Leave();
      return false;
    }
    // Release: the fast path reads peers_, plan_, mine_ and the launch base without entering.
    ready_.store(true, std::memory_order_release);
  }
  const auto launch = static_cast<int32_t>(static_cast<uint32_t>(op.own_run_id_) - launch_base_);
  Leave();
  // Inside one process all ranks count with one clock, whatever it took for the first launch.
  if (launch < 0 && !communicator_->one_process()) {
    const Status late(Code::kFailedPrecondition,
                      StrCat(DescribeCall(), " on ", fabric_.DescribeRank(rank_),
                             ": a launch entered long after a later one of its program; launch "
                             "one program from one thread at first"));
    fabric_.ReportFailure(late);
    op.Fail(late);
    return true;
  }
  op.tag_ = MakeTag(static_cast<uint32_t>(launch), op.occurrence_) ^ salt_;
  return true;
}

bool Participant::ResolvePeers(int64_t run_id, std::optional<int32_t> settled) {
  if (!cell_) {
    cell_ = fabric_.TryAllocateCell();
    if (!cell_) return false;  // the progress thread reports it at the deadline
    cell_index_ = *cell_;
    mine_ = fabric_.OwnCell(*cell_);
    if (fabric_.messages() != nullptr) own_salt_ = fabric_.NewSalt();
    fabric_.Announce(*this);
  }
  const auto members = fabric_.directory().Complete(key_);
  if (!members || static_cast<int>(members->size()) != size()) return false;
  const bool equal_bases =
      first_run_id_ && std::all_of(members->begin(), members->end(), [this](const auto& member) {
        return member.first_run_id == first_run_id_;
      });
  if (equal_bases) {
    launch_base_ = *first_run_id_;
  } else if (settled) {
    SiteRegistry::Get().CountUnknownBase();
    launch_base_ = static_cast<uint32_t>(run_id) - static_cast<uint32_t>(*settled);
  } else {
    return false;
  }
  std::vector<int64_t> ranks;
  bells_.clear();
  remotes_.clear();
  bool one_process = true;
  for (size_t position = 0; position < members->size(); ++position) {
    const Directory::Member& member = (*members)[position];
    peers_[position] = fabric_.View(member);
    ranks.push_back(member.rank);
    one_process &= member.process == fabric_.process();
    WindowHeader* bell = fabric_.Bell(member.process);
    const bool other = static_cast<int>(position) != position_;
    if (peers_[position].remote) continue;
    if (other && std::find(bells_.begin(), bells_.end(), bell) == bells_.end()) {
      bells_.push_back(bell);
    }
  }
  communicator_ = fabric_.CommunicatorFor(ranks, one_process);
  Buffers sizes;
  sizes.input_bytes = plan_.input_bytes;
  sizes.output_bytes = plan_.output_bytes;
  sizes.dtype = plan_.dtype;
  sizes.ragged_sizes = plan_.ragged;
  const Topology topology = fabric_.TopologyOf(peers_, one_process);
  plan_ = Plan(spec_, size(), position_, sizes, topology);
  if (!topology.host_of.empty()) {
    Hasher salts;
    for (const Directory::Member& member : *members) salts.Add(member.salt);
    salt_ = salts.Finish();
    if (!FindRemotes()) return false;
  }
  // Positions of two meshes may be equal where their ranks are not.
  plan_.header ^= static_cast<uint32_t>(Hasher().Add(std::span<const int64_t>(ranks)).Finish());
  fabric_.CountRunBy(plan_.name());
  for (SlotState& slot : slots_) {
    slot.confirmed = std::vector<std::atomic<bool>>(plan_.readers.size());
  }
  return true;
}

bool Participant::ReaderDone(size_t reader, int slot, uint64_t tag) const {
  const auto& confirmed = slots_[slot].confirmed[reader];
  // Acquire: what ConfirmReaders() acquired from the reader.
  return confirmed.load(std::memory_order_acquire) || DoneLogHas(plan_.readers[reader], tag);
}

void Participant::ConfirmReaders(SlotState& slot) {
  slot.looked_at = claims_;
  for (size_t i = 0; slot.unconfirmed > 0 && i < plan_.readers.size(); ++i) {
    if (slot.confirmed[i].load(std::memory_order_relaxed)) continue;
    const int reader = plan_.readers[i];
    // Acquire, here and in DoneLogHas: the reader's last loads come before our next stores.
    if (peer_done_[static_cast<size_t>(reader)].load(std::memory_order_acquire) != slot.tag &&
        !DoneLogHas(reader, slot.tag)) {
      continue;
    }
    slot.confirmed[i].store(true, std::memory_order_release);
    --slot.unconfirmed;
  }
}

bool Participant::SlotFree(SlotState& slot) {
  if (!slot.in_use) return true;
  // Acquire: the op's last accesses to the slot come before its reuse.
  if (!slot.complete.load(std::memory_order_acquire)) return false;
  ConfirmReaders(slot);
  if (slot.unconfirmed > 0) return false;
  slot.in_use = slot.reserve = false;
  return true;
}

int Participant::TryClaimSlot(uint64_t tag, uint64_t entry) {
  Enter();
  // In the order of entry, which is the same for all devices of a process and nearly the same in
  // all processes: ranks whose slots held entirely different launches would wait forever.
  if (entry != claims_) {
    Leave();
    return -1;
  }
  // A reader's log tells for kDoneLog executions that it was done with one. Each of them needs this
  // rank: they are among the claims since, and the kSlots - 1 executions under way before. So a
  // look every so many claims misses nothing, however long a slot stays in use.
  for (SlotState& slot : slots_) {
    if (slot.in_use && claims_ - slot.looked_at >= kDoneLog - kSlots) ConfirmReaders(slot);
  }
  const int order[kSlots] = {last_slot_ ^ 1, last_slot_, 2, 3};
  for (int index : order) {
    SlotState& slot = slots_[index];
    if (!SlotFree(slot)) continue;
    slot.in_use = true;
    slot.tag = tag;
    slot.looked_at = claims_++;
    slot.complete.store(false, std::memory_order_relaxed);  // read under Enter() only
    for (auto& confirmed : slot.confirmed) confirmed.store(false, std::memory_order_relaxed);
    slot.unconfirmed = slot.confirmed.size();
    if (index < 2) last_slot_ = index;
    Leave();
    return index;
  }
  Leave();
  return -1;
}

std::vector<int> Participant::ReadersOfFullSlots() {
  std::vector<int> readers;
  Enter();
  const bool full = std::none_of(std::begin(slots_), std::end(slots_),
                                 [this](SlotState& slot) { return SlotFree(slot); });
  for (size_t i = 0; full && i < plan_.readers.size(); ++i) {
    const bool behind = std::any_of(std::begin(slots_), std::end(slots_), [i](const auto& slot) {
      // Relaxed: written under Enter() only, but for `complete`, which SlotFree() has acquired.
      return slot.complete.load(std::memory_order_relaxed) &&
             !slot.confirmed[i].load(std::memory_order_relaxed);
    });
    if (behind) readers.push_back(plan_.readers[i]);
  }
  Leave();
  return readers;
}

std::vector<int> Participant::NotAnnounced() const {
  std::vector<int> missing;
  for (int position = 0; position < size(); ++position) {
    if (!fabric_.directory().Find(key_, static_cast<uint32_t>(position))) {
      missing.push_back(position);
    }
  }
  return missing;
}

bool Participant::StagingFor(SlotState& slot, uint64_t bytes) {
  if (slot.staging.bytes >= bytes) return true;
  auto block = fabric_.TryAllocateStaging(bytes, *this);
  if (!block) return false;
  fabric_.FreeStaging(slot.staging);
  slot.staging = *block;
  return true;
}

void Participant::ReleaseIdleStaging() {
  if (!TryEnter()) return;
  for (SlotState& slot : slots_) {
    if (ready() && SlotFree(slot) && slot.staging.bytes > 0) {
      fabric_.FreeStaging(slot.staging);
      slot.staging = {};
    }
  }
  Leave();
}

bool Participant::DoneLogHas(int peer, uint64_t tag) const {
  for (const auto& done : peers_[static_cast<size_t>(peer)].cell->done) {
    if (done.load(std::memory_order_acquire) == tag) return true;
  }
  return false;
}

void Participant::LogDone(uint64_t tag) {
  const uint32_t index = done_count_.fetch_add(1, std::memory_order_relaxed) % kDoneLog;
  // Release: this rank's loads from its peers' slots come before they may be overwritten.
  mine_->done[index].store(tag, std::memory_order_release);
  for (const RemotePeer& remote : remotes_) {
    // Not urgent: it goes with what is posted next, or see Op::Finish.
    Posted(remote.channel->PostWord(tag, remote.region, WindowOffset(&mine_->done[index])));
  }
  last_done_.store(tag, std::memory_order_release);
}

void Participant::RingPeers() {
  // Orders our news before the look at `sleepers`; SleepUnless has the matching fence between its
  // entry in `sleepers` and its last look for news. One of the two sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (WindowHeader* bell : bells_) Fabric::RingIfSleeping(bell);
}

}  // namespace jaxfabric
