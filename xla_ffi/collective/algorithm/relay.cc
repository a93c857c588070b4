// Small arrays between hosts that have several processes. Every rank reads what the others of its
// host contribute, and sends to one rank of each other host (more where those have more ranks)
// what that one needs of all of them:
//
//   host A  rank 0  stage a0 | a = a0 + a1 -> to rank 2 | a + b
//           rank 1  stage a1 | a = a0 + a1 -> to rank 3 | a + b
//   host B  rank 2, rank 3: the same with b
//
// So a host sends as many messages as it has ranks, not that times the other hosts' processes, and
// no rank waits for another to pass something on. What is sent goes into the mirror of the sender's
// own memory, as in exchange.cc: no receiver has to be asked. Sums are added within hosts first, in
// rank order, then in the order of hosts, so all ranks get the same bits.
//
// `consumed_` and `results_` say how far the contributions of this host are relayed,
// `results_consumed_` how far what other hosts relayed is in the result. Rings as in exchange.cc.
#include <algorithm>
#include <cstring>

#include "collective/op.h"
#include "collective/participant.h"
#include "memory/copy.h"

namespace jaxfabric {
namespace {

void Lower(uint64_t& limit, uint64_t value) { limit = std::min(limit, value); }

}  // namespace

// The line as other hosts see it, of whom nobody reads the contribution.
void Op::ShowRelayed(PublishLine& line) const {
  const uint64_t relayed = participant_.WindowOffset(result_staging_);
  line.placement = Placement::kStaged;
  line.staged = {.ring_offset = relayed,
                 .ring_bytes = result_ring_,
                 .result_offset = relayed,
                 .result_bytes = result_ring_,
                 .output_region = 0};
}

// Reads what the ranks of this host contribute, and sends it on. True if it did, or has failed.
bool Op::RelayLocals() {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  if (consumed_ >= plan.stream) return false;
  uint64_t limit = std::min<uint64_t>(plan.stream, consumed_ + UntilWrap(consumed_, result_ring_));
  for (int local : roles.locals) {
    const Slot* slot = Find(local);
    if (slot == nullptr) {
      waiting_for_ = local;
      return stage_ != Stage::kTransfer;
    }
    if (slot->publish.placement == Placement::kInline) continue;
    // Acquire: the staged bytes.
    const uint64_t produced = slot->produce.produced.load(std::memory_order_acquire);
    if (produced <= consumed_) waiting_for_ = local;
    Lower(limit, produced);
    Lower(limit, consumed_ + UntilWrap(consumed_, slot->publish.staged.ring_bytes));
  }
  if (plan.reduces) Lower(limit, results_consumed_ + result_ring_);
  for (const auto& handled : roles.handled) {
    if (limit <= result_ring_) break;  // for the first round there is room
    const uint64_t read = Consumed(Find(handled.owner), handled.owner, /*results=*/true);
    if (stage_ != Stage::kTransfer) return true;  // a header mismatch
    if (read + result_ring_ <= consumed_) waiting_for_ = handled.owner;
    Lower(limit, read + result_ring_);
  }
  if (limit <= consumed_) return false;
  Relay(limit - consumed_);
  consumed_ = results_ = limit;
  // Release: loads from the rings before the first, the relayed bytes before the second.
  mine_->consume.consumed.store(consumed_, std::memory_order_release);
  mine_->produce.results.store(results_, std::memory_order_release);
  return true;
}

// What a member of this host contributes to `sub`'s sub-stream, at `consumed_`.
const std::byte* Op::LocalContribution(int member, int sub) const {
  const Plan& plan = participant_.plan();
  const size_t at = plan.scattered ? static_cast<size_t>(sub) * plan.stream : 0;
  if (member == plan.position) return buffers_.input + at + consumed_;
  const PublishLine& line = found_[static_cast<size_t>(member)]->publish;
  if (line.placement == Placement::kInline) return line.payload + at + consumed_;
  const size_t ring = plan.scattered ? static_cast<size_t>(sub) * line.staged.ring_bytes : 0;
  return participant_.peers_[static_cast<size_t>(member)].window + line.staged.ring_offset + ring +
         consumed_ % line.staged.ring_bytes;
}

void Op::SumLocals(int sub, std::byte* to, size_t bytes) {
  const Plan& plan = participant_.plan();
  host_operands_.clear();
  for (int member : participant_.roles_.members) {
    host_operands_.push_back(LocalContribution(member, sub));
  }
  Reduce(plan.dtype, plan.reduction, to, host_operands_, bytes / plan.element);
}

void Op::PostRelayed(int to, size_t ring, size_t bytes) {
  const RemotePeer& remote = participant_.remotes_[participant_.RemoteOf(to)];
  const std::byte* from = RelayRing(ring) + consumed_ % result_ring_;
  // It stays as it is until the receiver has read it, which is later than it is sent.
  const auto posted =
      remote.channel->PostPut({from, bytes}, remote.region, participant_.WindowOffset(from));
  participant_.Posted(posted.status());
}

// The next `bytes` of this host's contributions: to other hosts, and to the own result what is for
// that as it is.
void Op::Relay(size_t bytes) {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  const RelayRings& rings = participant_.relay_rings_;
  const size_t at = consumed_ % result_ring_;
  const bool sums_differ = plan.kind == OpKind::kReduceScatter;
  if (plan.reduces) SumLocals(plan.position, RelayRing(rings.OwnPartial()) + at, bytes);
  for (size_t member = 0; !plan.reduces && member < roles.members.size(); ++member) {
    const int from = roles.members[member];
    const std::byte* own = LocalContribution(from, plan.position);
    Copy(buffers_.output + static_cast<size_t>(from) * plan.stream + consumed_, own, bytes);
    if (plan.kind == OpKind::kAllGather) Copy(RelayRing(rings.Of(0, member)) + at, own, bytes);
  }
  for (const auto& handled : roles.handled) {
    if (plan.reduces) {
      const size_t ring = rings.Of(handled.index, 0);
      if (sums_differ) SumLocals(handled.owner, RelayRing(ring) + at, bytes);
      PostRelayed(handled.owner, ring, bytes);
      continue;
    }
    for (size_t member = 0; member < roles.members.size(); ++member) {
      const size_t ring = rings.Of(handled.index, member);
      if (plan.kind == OpKind::kAllToAll) {
        Copy(RelayRing(ring) + at, LocalContribution(roles.members[member], handled.owner), bytes);
      }
      PostRelayed(handled.owner, ring, bytes);
    }
  }
}

// Takes in what other hosts have relayed. True if that was anything, or the execution has failed.
bool Op::CollectRelayed() {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  if (results_consumed_ >= plan.stream) return false;
  uint64_t limit = plan.stream;
  if (plan.reduces) {
    limit = std::min<uint64_t>(consumed_, results_consumed_ + UntilWrap(results_consumed_, ring_));
  }
  for (const auto& relay : roles.relays) {
    const Slot* slot = Find(relay.position);
    if (slot == nullptr) {
      // A local that is not there either is nearer.
      if (consumed_ > 0) waiting_for_ = relay.position;
      return stage_ != Stage::kTransfer;
    }
    // Acquire: the relayed bytes.
    const uint64_t there = slot->produce.results.load(std::memory_order_acquire);
    if (there <= results_consumed_ && consumed_ > results_consumed_) waiting_for_ = relay.position;
    Lower(limit, there);
    Lower(limit,
          results_consumed_ + UntilWrap(results_consumed_, slot->publish.staged.result_bytes));
  }
  if (limit <= results_consumed_) return false;
  const size_t bytes = limit - results_consumed_;
  const auto relayed = [&](const HostRoles::Relay& relay, size_t ring) {
    const PublishLine& line = found_[static_cast<size_t>(relay.position)]->publish;
    return participant_.peers_[static_cast<size_t>(relay.position)].window +
           line.staged.result_offset + ring * line.staged.result_bytes +
           results_consumed_ % line.staged.result_bytes;
  };
  host_operands_.assign(static_cast<size_t>(plan.hosts.count()), nullptr);
  for (size_t i = 0; i < roles.relays.size(); ++i) {
    const HostRoles::Relay& relay = roles.relays[i];
    const auto& [rings, members] = participant_.relay_sources_[i];
    if (plan.reduces) {
      host_operands_[static_cast<size_t>(relay.host)] = relayed(relay, rings.Of(relay.index, 0));
      continue;
    }
    for (size_t member = 0; member < members.size(); ++member) {
      Copy(buffers_.output + static_cast<size_t>(members[member]) * plan.stream + results_consumed_,
           relayed(relay, rings.Of(relay.index, member)), bytes);
    }
  }
  if (plan.reduces) {
    host_operands_[static_cast<size_t>(roles.host)] =
        RelayRing(participant_.relay_rings_.OwnPartial()) + results_consumed_ % result_ring_;
    Reduce(plan.dtype, plan.reduction, buffers_.output + results_consumed_, host_operands_,
           bytes / plan.element);
  }
  results_consumed_ = limit;
  // Release: loads from the rings before the count that frees them.
  mine_->consume.results_consumed.store(results_consumed_, std::memory_order_release);
  return true;
}

// Whether this rank waits for something of a peer.
bool Op::RelayNeeds(int peer) const {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  const Slot* slot = found_[static_cast<size_t>(peer)];
  if (slot == nullptr) slot = Look(peer);
  if (plan.hosts.of(peer) == roles.host) {
    const bool needs_room =
        produced_ < plan.stream && Consumed(slot, peer, /*results=*/false) + ring_ < plan.stream;
    if (needs_room) return true;
    if (consumed_ >= plan.stream) return false;
    // Acquire: as in the steps, though nothing is read here.
    return slot == nullptr ||
           (slot->publish.placement == Placement::kStaged &&
            slot->produce.produced.load(std::memory_order_acquire) < plan.stream);
  }
  for (const auto& relay : roles.relays) {
    if (relay.position != peer || results_consumed_ >= plan.stream) continue;
    if (slot == nullptr || slot->produce.results.load(std::memory_order_acquire) < plan.stream) {
      return true;
    }
  }
  return std::any_of(roles.handled.begin(), roles.handled.end(), [&](const auto& handled) {
    return handled.owner == peer && results_ < plan.stream &&
           Consumed(slot, peer, /*results=*/true) + result_ring_ < plan.stream;
  });
}

bool Op::StepRelay() {
  const Plan& plan = participant_.plan();
  bool moved = Produce();
  if (stage_ == Stage::kTransfer) moved |= RelayLocals();
  // Before what has come meanwhile is taken in: others wait for it.
  if (stage_ == Stage::kTransfer && moved) Announce();
  const bool collected = stage_ == Stage::kTransfer && CollectRelayed();
  if (stage_ != Stage::kTransfer) return true;
  if (produced_ >= plan.stream && consumed_ >= plan.stream && results_consumed_ >= plan.stream) {
    Finish(/*ring=*/false);
    return true;
  }
  if (collected) Announce();
  return moved || collected;
}

}  // namespace jaxfabric
