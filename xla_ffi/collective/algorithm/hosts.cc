// Between hosts, every byte crosses the network once per host. The array has one part per rank:
//
//   stage     what the ranks of a host contribute to each other's parts
//   reduce    a part's handler adds what its host contributes, and puts the sum to the owner
//   combine   the owner adds the sums of the hosts, in their order, stages the result for its
//             host, and puts it to the part's handlers on the others
//   collect   every rank copies all results, from their owners or from their handlers
//
//   host A  rank 0  stage | reduce a, c -> c to rank 2 | combine a -> to rank 2 | collect b, c, d
//           rank 1  stage | reduce b, d -> d to rank 3 | combine b -> to rank 3 | collect a, c, d
//   host B  rank 2, rank 3: the same for c and d
//
// reduce_scatter ends with the owner's sum; all_gather and broadcast begin with it. All four run at
// the same time on different bytes of the parts, round rings as in exchange.cc. A handler puts
// partial sums only as far as the results that answer them will find room, so none has to ask.
#include <algorithm>
#include <cstring>

#include "collective/op.h"
#include "collective/participant.h"
#include "memory/copy.h"

namespace jaxfabric {
namespace {

std::atomic<uint64_t>& Counter(std::byte* block, size_t offset) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(block + offset);
}

void Lower(uint64_t& limit, uint64_t value) { limit = std::min(limit, value); }

}  // namespace

// The memory that a peer on this host, or this rank itself, shows to the others.
std::byte* Op::BlockOf(int position) {
  if (position == participant_.position()) return staging_;
  return participant_.peers_[static_cast<size_t>(position)].window +
         found_[static_cast<size_t>(position)]->publish.staged.ring_offset;
}

size_t Op::RingOf(int position) const {
  if (position == participant_.position()) return ring_;
  return found_[static_cast<size_t>(position)]->publish.staged.ring_bytes;
}

size_t Op::PartBegin(int part) const {
  const Plan& plan = participant_.plan();
  if (plan.kind == OpKind::kAllReduce) return plan.part_begin(part);
  return plan.kind == OpKind::kBroadcast ? 0 : static_cast<size_t>(part) * plan.stream;
}

size_t Op::PartBytes(int part) const {
  const Plan& plan = participant_.plan();
  return plan.kind == OpKind::kAllReduce ? plan.part_bytes(part) : plan.stream;
}

void Op::ClearCounters() {
  const HostsLayout& layout = participant_.roles_.layout;
  for (size_t i = 0; i < layout.counters(); ++i) {
    // Relaxed: published with the tag.
    Counter(staging_, i * sizeof(uint64_t)).store(0, std::memory_order_relaxed);
  }
}

// Puts to the block of a partner on another host, and counts there.
void Op::PutToPartner(int position, const std::byte* from, size_t bytes, size_t place,
                      size_t counter, uint64_t count) {
  const size_t index = participant_.RemoteOf(position);
  const RemotePeer& remote = participant_.remotes_[index];
  const uint64_t block = found_[static_cast<size_t>(position)]->publish.staged.ring_offset;
  if (bytes > 0) {
    const Result<uint64_t> ticket =
        remote.channel->PostPut({from, bytes}, remote.window_region, block + place);
    if (ticket.ok()) tickets_[index] = *ticket;
    participant_.Posted(ticket.status());
  }
  participant_.Posted(remote.channel->PostWord(count, remote.window_region, block + counter));
}

bool Op::StageForHost() {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  if (!plan.reduces || roles.locals.empty()) produced_ = plan.stream;
  if (produced_ >= plan.stream) return false;
  size_t bytes = std::min({plan.segment, plan.stream - produced_, UntilWrap(produced_, ring_)});
  if (produced_ + bytes > ring_) {
    uint64_t slowest = plan.stream;
    for (int local : roles.locals) {
      const uint64_t consumed = Consumed(Find(local), local, /*results=*/false);
      if (stage_ != Stage::kTransfer) return true;  // a header mismatch
      if (consumed < slowest) {
        slowest = consumed;
        waiting_for_ = local;
      }
    }
    if (produced_ + bytes > ring_ + slowest) return false;
  }
  const HostsLayout layout = roles.layout.With(ring_);
  for (int part = 0; part < plan.size; ++part) {
    if (plan.hosts.Handler(roles.host, part) == plan.position) continue;  // read from the input
    const size_t end = PartBytes(part);
    if (produced_ >= end) continue;
    Copy(staging_ + layout.Contribution(part) + produced_ % ring_,
         buffers_.input + PartBegin(part) + produced_, std::min(bytes, end - produced_));
  }
  produced_ += bytes;
  // Release: the staged bytes before the count that announces them.
  mine_->produce.produced.store(produced_, std::memory_order_release);
  return true;
}

// Sums up what this host contributes to [offset, offset + bytes) of a part.
void Op::ReduceHost(int part, size_t offset, size_t bytes, std::byte* to) {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  host_operands_.clear();
  for (int member : roles.members) {
    if (member == plan.position) {
      host_operands_.push_back(buffers_.input + PartBegin(part) + offset);
      continue;
    }
    const size_t ring = RingOf(member);
    const HostsLayout layout = participant_.LocalLayout(member).With(ring);
    host_operands_.push_back(BlockOf(member) + layout.Contribution(part) + offset % ring);
  }
  Reduce(plan.dtype, plan.reduction, to, host_operands_, bytes / plan.element);
}

bool Op::ReduceForOwners() {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  if (consumed_ >= plan.stream) return false;
  uint64_t limit = std::min<uint64_t>(plan.stream, consumed_ + UntilWrap(consumed_, ring_));
  for (int local : roles.locals) {
    const Slot& slot = *found_[static_cast<size_t>(local)];
    // Acquire: the staged bytes.
    const uint64_t produced = slot.produce.produced.load(std::memory_order_acquire);
    if (produced <= consumed_) waiting_for_ = local;
    Lower(limit, produced);
    Lower(limit, consumed_ + UntilWrap(consumed_, slot.publish.staged.ring_bytes));
    if (plan.collects() && !roles.handled.empty()) {
      // The answer needs room that this peer has read.
      const uint64_t read = Consumed(&slot, local, /*results=*/true);
      if (read + ring_ <= consumed_) waiting_for_ = local;
      Lower(limit, read + ring_);
    }
  }
  if (plan.collects()) Lower(limit, results_consumed_ + ring_);
  Lower(limit, results_ + ring_);  // the own partial sums are combined
  for (const auto& handled : roles.handled) {
    const Slot& owner = *found_[static_cast<size_t>(handled.owner)];
    const uint64_t ring = owner.publish.staged.ring_bytes;
    const uint64_t combined = owner.produce.results.load(std::memory_order_acquire);
    if (combined + std::min(ring, ring_) <= consumed_) waiting_for_ = handled.owner;
    Lower(limit, combined + std::min(ring, ring_));
    Lower(limit, consumed_ + UntilWrap(consumed_, ring));
  }
  if (limit <= consumed_) return false;
  const auto clip = [&](int part) {
    const size_t end = PartBytes(part);
    return consumed_ >= end ? size_t{0} : std::min<size_t>(limit, end) - consumed_;
  };
  const HostsLayout layout = roles.layout.With(ring_);
  if (const size_t bytes = clip(plan.position); bytes > 0) {
    ReduceHost(plan.position, consumed_, bytes, staging_ + layout.OwnPartial() + consumed_ % ring_);
  }
  for (const auto& handled : roles.handled) {
    const size_t bytes = clip(handled.owner);
    const std::byte* from = buffers_.input + PartBegin(handled.owner) + consumed_;
    if (bytes > 0 && !roles.locals.empty()) {
      std::byte* sum = staging_ + layout.SentPartial(handled.index) + consumed_ % ring_;
      ReduceHost(handled.owner, consumed_, bytes, sum);
      from = sum;
    }
    const size_t ring = RingOf(handled.owner);
    const HostsLayout theirs = handled.layout.With(ring);
    PutToPartner(handled.owner, from, bytes, theirs.Partial(roles.host) + consumed_ % ring,
                 theirs.PartialCount(roles.host), limit);
  }
  consumed_ = limit;
  // Release: loads from the rings before the count that frees them.
  mine_->consume.consumed.store(consumed_, std::memory_order_release);
  return true;
}

bool Op::CombineOwn() {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  const bool gives = plan.kind != OpKind::kBroadcast || plan.root == plan.position;
  if (!gives) results_ = plan.stream;
  if (results_ >= plan.stream) return false;
  uint64_t limit = std::min<uint64_t>(plan.stream, results_ + UntilWrap(results_, ring_));
  const HostsLayout layout = roles.layout.With(ring_);
  if (plan.reduces) {
    Lower(limit, consumed_);
    for (const auto& relay : roles.relays) {
      // Acquire: the partial sums before their count.
      const uint64_t landed =
          Counter(staging_, layout.PartialCount(relay.host)).load(std::memory_order_acquire);
      if (landed <= results_) waiting_for_ = relay.position;
      Lower(limit, landed);
    }
  }
  if (plan.collects()) {
    for (int local : roles.locals) {
      const uint64_t read = Consumed(Find(local), local, /*results=*/true);
      if (read + ring_ <= results_) waiting_for_ = local;
      Lower(limit, read + ring_);
    }
    for (const auto& relay : roles.relays) {
      const Slot& slot = *found_[static_cast<size_t>(relay.position)];
      const uint64_t ring = slot.publish.staged.ring_bytes;
      Lower(limit, results_ + UntilWrap(results_, ring));
      if (plan.reduces) continue;  // it put the partial sums because there is room
      const uint64_t credit = slot.consume.consumed.load(std::memory_order_acquire);
      if (credit + ring <= results_) waiting_for_ = relay.position;
      Lower(limit, credit + ring);
    }
    // Small enough for the peers to follow closely.
    Lower(limit, results_ + plan.segment);
  }
  if (limit <= results_) return false;
  const size_t end = PartBytes(plan.position);
  const size_t bytes = results_ >= end ? 0 : std::min<size_t>(limit, end) - results_;
  const std::byte* from = buffers_.input + results_;
  if (plan.reduces && bytes > 0) {
    host_operands_.clear();
    for (int host = 0; host < plan.hosts.count(); ++host) {
      const size_t ring = host == roles.host ? layout.OwnPartial() : layout.Partial(host);
      host_operands_.push_back(staging_ + ring + results_ % ring_);
    }
    std::byte* to = buffers_.output + (plan.collects() ? PartBegin(plan.position) : 0) + results_;
    Reduce(plan.dtype, plan.reduction, to, host_operands_, bytes / plan.element);
    from = to;
  } else if (bytes > 0) {
    Copy(buffers_.output + PartBegin(plan.position) + results_, from, bytes);
  }
  if (plan.collects()) {
    if (bytes > 0 && !roles.locals.empty()) {
      Copy(staging_ + layout.OwnResult() + results_ % ring_, from, bytes);
    }
    for (const auto& relay : roles.relays) {
      const size_t ring = RingOf(relay.position);
      const HostsLayout theirs = relay.layout.With(ring);
      PutToPartner(relay.position, from, bytes, theirs.Result(relay.index) + results_ % ring,
                   theirs.ResultCount(relay.index), limit);
    }
  }
  results_ = limit;
  // Release: the result before its count, and the loads from the rings.
  mine_->produce.results.store(results_, std::memory_order_release);
  return true;
}

bool Op::CollectResults() {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  const bool broadcast = plan.kind == OpKind::kBroadcast;
  if (!plan.collects() || (broadcast && plan.root == plan.position)) {
    results_consumed_ = plan.stream;
  }
  bool moved = false;
  if (results_consumed_ < plan.stream) {
    uint64_t limit = plan.stream;
    for (const auto& result : roles.results) {
      if (broadcast && result.part != plan.root) continue;
      const size_t ring = RingOf(result.holder);
      // Acquire: the bytes before their count.
      const uint64_t there =
          result.relayed ? Counter(BlockOf(result.holder), result.layout.ResultCount(result.index))
                               .load(std::memory_order_acquire)
                         : found_[static_cast<size_t>(result.holder)]->produce.results.load(
                               std::memory_order_acquire);
      if (there <= results_consumed_) {
        waiting_for_ = result.holder == plan.position ? result.part : result.holder;
      }
      Lower(limit, there);
      Lower(limit, results_consumed_ + UntilWrap(results_consumed_, ring));
    }
    if (limit > results_consumed_) {
      const Store store = plan.nontemporal ? Store::kNonTemporal : Store::kCached;
      for (const auto& result : roles.results) {
        if (broadcast && result.part != plan.root) continue;
        const size_t end = PartBytes(result.part);
        if (results_consumed_ >= end) continue;
        const size_t ring = RingOf(result.holder);
        const HostsLayout layout = result.layout.With(ring);
        const size_t place = result.relayed ? layout.Result(result.index) : layout.OwnResult();
        Copy(buffers_.output + PartBegin(result.part) + results_consumed_,
             BlockOf(result.holder) + place + results_consumed_ % ring,
             std::min<size_t>(limit, end) - results_consumed_, store);
      }
      results_consumed_ = limit;
      // Release: loads from the rings before the count that frees them.
      mine_->consume.results_consumed.store(results_consumed_, std::memory_order_release);
      moved = true;
    }
  }
  return moved;
}

// What has arrived for this host's ranks, who cannot see it come, and what owners may put here.
bool Op::ServeHost() {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  if (!plan.collects() || roles.handled.empty()) return false;
  bool moved = false;
  const HostsLayout layout = roles.layout.With(ring_);
  uint64_t landed = 0;
  for (const auto& handled : roles.handled) {
    landed += Counter(staging_, layout.ResultCount(handled.index)).load(std::memory_order_acquire);
  }
  if (landed != landed_) {
    landed_ = landed;
    moved = !roles.locals.empty();
  }
  if (plan.reduces) return moved;
  uint64_t read = results_consumed_;
  for (int local : roles.locals) {
    Lower(read, Consumed(found_[static_cast<size_t>(local)], local, /*results=*/true));
  }
  if (read > consumed_) {
    consumed_ = read;
    mine_->consume.consumed.store(consumed_, std::memory_order_release);
    moved = true;
  }
  return moved;
}

// Whether this rank waits for something of a peer that has published.
bool Op::HostsNeed(int peer) const {
  const Plan& plan = participant_.plan();
  const HostRoles& roles = participant_.roles_;
  if (!sources_found_) return false;
  const auto count = [this](size_t offset) {
    return Counter(staging_, offset).load(std::memory_order_acquire);
  };
  const auto given = [&plan](int part) {
    return plan.kind != OpKind::kBroadcast || part == plan.root;
  };
  for (const auto& relay : roles.relays) {
    if (relay.position != peer || results_ >= plan.stream) continue;
    if (!plan.reduces || count(roles.layout.PartialCount(relay.host)) < plan.stream) return true;
  }
  for (const auto& handled : roles.handled) {
    if (handled.owner != peer) continue;
    const bool answers = plan.collects() && given(handled.owner) && results_consumed_ < plan.stream;
    if (answers && count(roles.layout.ResultCount(handled.index)) < plan.stream) return true;
    if (plan.reduces && consumed_ < plan.stream) return true;
  }
  if (plan.hosts.of(peer) != roles.host) return false;
  const Slot& slot = *found_[static_cast<size_t>(peer)];
  const bool reduces = plan.reduces && consumed_ < plan.stream;
  if (reduces && slot.produce.produced.load(std::memory_order_acquire) < plan.stream) return true;
  if (!plan.collects() || results_consumed_ >= plan.stream) return false;
  // It holds results: its own, or those of others, and says itself for whom it waits.
  return std::any_of(roles.results.begin(), roles.results.end(), [&](const auto& result) {
    return result.holder == peer && given(result.part);
  });
}

bool Op::StepHosts() {
  const Plan& plan = participant_.plan();
  bool moved = StageForHost();
  if (stage_ != Stage::kTransfer || !FindSources()) {
    if (moved && stage_ == Stage::kTransfer) Announce();
    return moved || stage_ != Stage::kTransfer;
  }
  if (plan.reduces) moved |= ReduceForOwners();
  moved |= CombineOwn();
  moved |= CollectResults();
  moved |= ServeHost();
  const bool reduced = !plan.reduces || (produced_ >= plan.stream && consumed_ >= plan.stream);
  if (reduced && results_ >= plan.stream && results_consumed_ >= plan.stream) {
    Finish(/*ring=*/true);
    return true;
  }
  if (moved) Announce();
  return moved;
}

}  // namespace jaxfabric
