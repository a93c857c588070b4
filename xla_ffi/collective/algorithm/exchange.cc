// One-shot: every rank stages its contribution once, and reads what it needs from all sources in
// rank order. Two-shot all-reduce: the contribution is cut into one part per rank; each rank
// reduces its part, stages the result, and reads the other parts.
//
//   rank 0  stage [a0 b0] -> | reduce a0+a1 -> stage | -> read b
//   rank 1  stage [a1 b1] -> | reduce b0+b1 -> stage | -> read a
//
// Streams longer than their ring go round it: a producer stays at most one ring ahead of its
// slowest reader, a consumer takes what the slowest source has. All counters only grow.
#include <algorithm>
#include <cstring>
#include <utility>

#include "collective/op.h"
#include "collective/participant.h"
#include "memory/copy.h"

namespace jaxfabric {

// The peer's staged bytes at `offset` of the sub-stream meant for this rank. Requires Find(peer).
const std::byte* Op::Contribution(int peer, size_t offset) const {
  const Plan& plan = participant_.plan();
  const PublishLine& line = found_[static_cast<size_t>(peer)]->publish;
  const size_t sub = plan.sub_streams() > 1 ? static_cast<size_t>(plan.position) : 0;
  if (line.placement == Placement::kInline) return line.payload + sub * plan.stream + offset;
  return participant_.peers_[static_cast<size_t>(peer)].window + line.staged.ring_offset +
         sub * line.staged.ring_bytes + offset % line.staged.ring_bytes;
}

// How far one can go from `offset` without wrapping in any source's ring.
size_t Op::ContiguousLimit(size_t offset) const {
  size_t limit = participant_.plan().stream - offset;
  for (int source : participant_.plan().sources) {
    const PublishLine& line = found_[static_cast<size_t>(source)]->publish;
    if (line.placement == Placement::kStaged && !Placed(source)) {
      limit = std::min(limit, UntilWrap(offset, line.staged.ring_bytes));
    }
  }
  return limit;
}

bool Op::FindSources() {
  if (sources_found_) return true;
  const std::vector<int>& sources = participant_.plan().sources;
  for (int source : sources) {
    if (!Find(source)) {
      waiting_for_ = source;
      return false;
    }
  }
  // Under memory pressure a source's ring may be smaller than planned.
  awaits_room_ = std::any_of(sources.begin(), sources.end(), [this](int source) {
    const PublishLine& line = found_[static_cast<size_t>(source)]->publish;
    return line.placement == Placement::kStaged && !Placed(source) &&
           line.staged.ring_bytes < participant_.plan().stream;
  });
  return sources_found_ = true;
}

size_t Op::SubStreamBegin(int to) const {
  const Plan& plan = participant_.plan();
  return plan.algorithm == Algorithm::kTwoShot ? plan.part_begin(to)
                                               : static_cast<size_t>(to) * plan.stream;
}

size_t Op::SubStreamEnd(int to) const {
  const Plan& plan = participant_.plan();
  if (plan.algorithm == Algorithm::kRagged) return ragged_.sent_bytes[static_cast<size_t>(to)];
  return plan.algorithm == Algorithm::kTwoShot ? plan.part_bytes(to) : plan.stream;
}

// For the readers of this host; those of others get theirs from PostInput().
void Op::StageSegment(size_t offset, size_t bytes) {
  const Plan& plan = participant_.plan();
  std::byte* ring = staging_ + offset % ring_;
  if (plan.sub_streams() == 1) {
    if (participant_.local_readers_) Copy(ring, buffers_.input + offset, bytes);
    return;
  }
  for (int to = 0; to < plan.size; ++to) {
    if (to == plan.position) continue;  // the own part is read from the input
    if (plan.algorithm == Algorithm::kRagged) {
      StageSlices(to, ring + static_cast<size_t>(to) * ring_, offset, bytes);
      continue;
    }
    const size_t end = SubStreamEnd(to);
    // What is for another host is relayed by any rank of this one, or put there.
    const bool staged =
        plan.algorithm == Algorithm::kRelay || !participant_.peers_[static_cast<size_t>(to)].remote;
    if (offset >= end || !staged) continue;
    Copy(ring + static_cast<size_t>(to) * ring_, buffers_.input + SubStreamBegin(to) + offset,
         std::min(bytes, end - offset));
  }
}

bool Op::ReadsStaged(int reader) const {
  const bool relays = participant_.plan().algorithm == Algorithm::kRelay;
  return !Placed(reader) && !(relays && participant_.peers_[static_cast<size_t>(reader)].remote);
}

// Stages the next segment if there is room for one; true if it did.
bool Op::Produce() {
  const Plan& plan = participant_.plan();
  if (plan.readers.empty() || produced_ >= stream_) return false;
  if (plan.places && !FindOutputs()) return stage_ != Stage::kTransfer;
  // Without a ring all goes at once.
  const size_t segment = staging_ ? plan.segment : stream_;
  size_t bytes = std::min({segment, stream_ - produced_, UntilWrap(produced_, ring_)});
  if (produced_ + bytes > ring_) {
    uint64_t slowest = stream_;
    for (int reader : plan.readers) {
      if (!ReadsStaged(reader)) continue;
      const uint64_t consumed = Consumed(Find(reader), reader, /*results=*/false);
      if (stage_ != Stage::kTransfer && stage_ != Stage::kClaim) return true;  // a mismatch
      if (consumed < slowest) {
        slowest = consumed;
        waiting_for_ = reader;
      }
    }
    if (produced_ + bytes > ring_ + slowest) return false;
  }
  StageSegment(produced_, bytes);
  PostInput(produced_, bytes);
  produced_ += bytes;
  // Release: the staged bytes before the count that announces them.
  mine_->produce.produced.store(produced_, std::memory_order_release);
  return true;
}

void Op::Consume(size_t offset, size_t bytes) {
  const Plan& plan = participant_.plan();
  const Store store = plan.nontemporal ? Store::kNonTemporal : Store::kCached;
  const auto me = static_cast<size_t>(plan.position);
  switch (plan.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter: {
      const size_t own = plan.kind == OpKind::kReduceScatter ? me * plan.stream : 0;
      operands_[me] = buffers_.input + own + offset;
      for (int source : plan.sources) {
        operands_[static_cast<size_t>(source)] = Contribution(source, offset);
      }
      Reduce(plan.dtype, plan.reduction, buffers_.output + offset, operands_, bytes / plan.element,
             store);
      return;
    }
    case OpKind::kAllGather:
    case OpKind::kAllToAll: {
      if (!plan.places) CopyOwn(offset, bytes);
      for (int source : plan.sources) {
        if (Placed(source)) continue;
        Copy(buffers_.output + static_cast<size_t>(source) * plan.stream + offset,
             Contribution(source, offset), bytes, store);
      }
      return;
    }
    case OpKind::kPermute:
    case OpKind::kBroadcast:
      if (!plan.sources.empty()) {
        if (Placed(plan.sources[0])) return;
        Copy(buffers_.output + offset, Contribution(plan.sources[0], offset), bytes, store);
      } else if (plan.from_self) {
        Copy(buffers_.output + offset, buffers_.input + offset, bytes, store);
      } else {
        std::memset(buffers_.output + offset, 0, bytes);
      }
      return;
    case OpKind::kBarrier:
    case OpKind::kRaggedAllToAll:    // has steps of its own
    case OpKind::kAllReduceRmsNorm:  // runs on GPUs only
      return;
  }
}

// Of what all ranks get from each, the part that this rank gives itself.
void Op::CopyOwn(size_t offset, size_t bytes) {
  const Plan& plan = participant_.plan();
  const size_t place = static_cast<size_t>(plan.position) * plan.stream + offset;
  Copy(buffers_.output + place, buffers_.input + (plan.kind == OpKind::kAllToAll ? place : offset),
       bytes, plan.nontemporal ? Store::kNonTemporal : Store::kCached);
}

bool Op::StepOneShot() {
  const Plan& plan = participant_.plan();
  bool moved = Produce();
  bool ring_peers = moved;
  if (stage_ != Stage::kTransfer) return true;
  if (plan.places && produced_ >= stream_ && !own_copied_) {
    // While the bytes travel.
    if (std::exchange(ring_peers, false)) Announce();
    own_copied_ = true;
    if (plan.kind == OpKind::kAllGather || plan.kind == OpKind::kAllToAll) CopyOwn(0, plan.stream);
  }
  if (FindSources()) {
    const bool own_only = plan.sources.empty();
    if (consumed_ < plan.stream) {
      uint64_t available = plan.stream;
      for (int source : plan.sources) {
        const Slot& slot = *found_[static_cast<size_t>(source)];
        if (slot.publish.placement == Placement::kInline) continue;
        // Acquire: pairs with the release in Produce().
        const uint64_t produced = slot.produce.produced.load(std::memory_order_acquire);
        if (produced < available) {
          available = produced;
          waiting_for_ = source;
        }
      }
      if (available > consumed_) {
        const size_t bytes =
            own_only ? plan.stream
                     : std::min<size_t>(available - consumed_, ContiguousLimit(consumed_));
        Consume(consumed_, bytes);
        consumed_ += bytes;
        // Release: this rank's loads from the rings before the count that frees them.
        mine_->consume.consumed.store(consumed_, std::memory_order_release);
        moved = true;
        ring_peers |= awaits_room_;
      }
    }
    const bool all_produced = produced_ >= plan.stream || plan.readers.empty();
    if (consumed_ >= plan.stream && all_produced) {
      if (plan.kind == OpKind::kBarrier && buffers_.output_bytes > 0) {
        Copy(buffers_.output, buffers_.input, buffers_.output_bytes);
      }
      Finish(ring_peers);
      return true;
    }
  } else if (stage_ != Stage::kTransfer) {
    return true;
  }
  if (ring_peers) Announce();
  return moved;
}

bool Op::StepTwoShot() {
  const Plan& plan = participant_.plan();
  const Store store = plan.nontemporal ? Store::kNonTemporal : Store::kCached;
  const auto me = static_cast<size_t>(plan.position);
  bool moved = Produce();
  if (stage_ != Stage::kTransfer || !FindSources()) {
    if (moved) Announce();
    return moved || stage_ != Stage::kTransfer;
  }

  // Reduce the own part, as far as every source and the own result ring allow.
  if (consumed_ < plan.stream) {
    uint64_t available = plan.stream;
    for (int source : plan.sources) {
      const uint64_t produced = found_[static_cast<size_t>(source)]->produce.produced.load(
          std::memory_order_acquire);  // pairs with Produce()
      if (produced < available) {
        available = produced;
        waiting_for_ = source;
      }
    }
    size_t bytes = 0;
    if (available > consumed_) {
      bytes = std::min({static_cast<size_t>(available - consumed_), ContiguousLimit(consumed_),
                        UntilWrap(consumed_, result_ring_)});
      if (consumed_ + bytes > result_ring_) {
        uint64_t slowest = plan.stream;
        for (int reader : plan.readers) {
          slowest = std::min(slowest, Consumed(Find(reader), reader, /*results=*/true));
        }
        if (consumed_ + bytes > result_ring_ + slowest) bytes = 0;
      }
    }
    if (bytes > 0) {
      const size_t end = plan.part_bytes(plan.position);
      if (consumed_ < end) {
        const size_t clipped = std::min(bytes, end - static_cast<size_t>(consumed_));
        const size_t at = plan.part_begin(plan.position) + consumed_;
        std::byte* result = result_staging_ + consumed_ % result_ring_;
        operands_[me] = buffers_.input + at;
        for (int source : plan.sources) {
          operands_[static_cast<size_t>(source)] = Contribution(source, consumed_);
        }
        Reduce(plan.dtype, plan.reduction, result, operands_, clipped / plan.element);
        Copy(buffers_.output + at, result, clipped, store);
        PostResults(consumed_, clipped);
      }
      consumed_ += bytes;
      results_ = consumed_;
      // Release: loads from the rings before the first, the reduced bytes before the second.
      mine_->consume.consumed.store(consumed_, std::memory_order_release);
      mine_->produce.results.store(results_, std::memory_order_release);
      moved = true;
    }
  }

  // Read the other parts, as far as every peer has reduced its own.
  if (results_consumed_ < plan.stream) {
    uint64_t available = plan.stream;
    size_t limit = plan.stream - results_consumed_;
    for (int source : plan.sources) {
      const Slot& slot = *found_[static_cast<size_t>(source)];
      const uint64_t results = slot.produce.results.load(std::memory_order_acquire);  // as above
      limit = std::min(limit, UntilWrap(results_consumed_, slot.publish.staged.result_bytes));
      if (results < available) {
        available = results;
        waiting_for_ = source;
      }
    }
    if (available > results_consumed_) {
      const size_t bytes = std::min<size_t>(available - results_consumed_, limit);
      for (int source : plan.sources) {
        const size_t end = plan.part_bytes(source);
        if (results_consumed_ >= end) continue;
        const PublishLine& line = found_[static_cast<size_t>(source)]->publish;
        Copy(buffers_.output + plan.part_begin(source) + results_consumed_,
             participant_.peers_[static_cast<size_t>(source)].window + line.staged.result_offset +
                 results_consumed_ % line.staged.result_bytes,
             std::min(bytes, end - static_cast<size_t>(results_consumed_)), store);
      }
      results_consumed_ += bytes;
      // Release: loads from the result rings before the count that frees them.
      mine_->consume.results_consumed.store(results_consumed_, std::memory_order_release);
      moved = true;
    }
  }

  if (produced_ >= plan.stream && results_consumed_ >= plan.stream && consumed_ >= plan.stream) {
    Finish(moved);
    return true;
  }
  if (moved) Announce();
  return moved;
}

}  // namespace jaxfabric
