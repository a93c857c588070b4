// Pull: ranks read each other's own buffers, by address inside one process and with
// process_vm_readv between two. One copy, no staging; in exchange a rank keeps its buffers until
// every reader is done (Op::Linger), and a rank that fails revokes them (Op::Fail, Op::Revoke).
#include <algorithm>
#include <cstring>

#include "collective/fabric.h"
#include "collective/op.h"
#include "collective/participant.h"
#include "memory/copy.h"
#include "os/process_memory.h"

namespace jaxfabric {

Status Op::ReadPeer(int peer, uint64_t address, void* destination, size_t bytes) {
  const PeerView& view = participant_.peers_[static_cast<size_t>(peer)];
  Status status;
  if (view.process == participant_.fabric().process()) {
    const Store store = participant_.plan().nontemporal ? Store::kNonTemporal : Store::kCached;
    Copy(destination, reinterpret_cast<const void*>(address), bytes, store);
  } else {
    status = ReadProcessMemory(view.pid, address, destination, bytes);
    if (!status.ok()) {
      status = status.WithContext(StrCat("reading from ", participant_.DescribePeer(peer)));
    }
  }
  return status;
}

// The owner has given up: what was read from it may be anything. It tells everybody why, or its
// process has died or left, so this op is failed by the progress thread, which knows the cause.
bool Op::Revoked(int peer) {
  const Slot& slot = *found_[static_cast<size_t>(peer)];
  if (slot.consume.revoked.load(std::memory_order_seq_cst) == 0) return false;
  waiting_for_ = peer;
  return true;
}

// Copies the own share of one source's buffer; false when it could not.
bool Op::PullFrom(int source) {
  const Plan& plan = participant_.plan();
  if (plan.kind == OpKind::kRaggedAllToAll) return PullSlices(source);
  const uint64_t input = found_[static_cast<size_t>(source)]->publish.direct.input;
  const auto me = static_cast<size_t>(plan.position);
  uint64_t from = input;
  std::byte* to = buffers_.output;
  if (plan.kind == OpKind::kAllToAll) from += me * plan.stream;
  if (plan.kind == OpKind::kAllToAll || plan.kind == OpKind::kAllGather) {
    to += static_cast<size_t>(source) * plan.stream;
  }
  Status status = ReadPeer(source, from, to, plan.stream);
  if (Revoked(source)) return false;
  if (status.ok()) return true;
  if (status.code() == Code::kUnavailable) {
    // No such process: the control plane is about to say so, with the name.
    waiting_for_ = source;
    return false;
  }
  participant_.fabric().ReportFailure(status);
  Fail(participant_.WithCaller(status));
  return false;
}

// Same process only: the operands are the ranks' own inputs.
void Op::ReduceDirect() {
  const Plan& plan = participant_.plan();
  const Store store = plan.nontemporal ? Store::kNonTemporal : Store::kCached;
  const auto me = static_cast<size_t>(plan.position);
  const bool scatter = plan.kind == OpKind::kReduceScatter;
  const size_t begin = scatter         ? me * plan.stream
                       : plan.part > 0 ? plan.part_begin(plan.position)
                                       : 0;
  const size_t bytes = plan.part > 0 ? plan.part_bytes(plan.position) : plan.stream;
  std::byte* output = buffers_.output + (scatter ? 0 : begin);
  const auto operands_at = [&](size_t offset) {
    for (int rank = 0; rank < plan.size; ++rank) {
      const auto index = static_cast<size_t>(rank);
      operands_[index] =
          (rank == plan.position
               ? buffers_.input
               : reinterpret_cast<const std::byte*>(found_[index]->publish.direct.input)) +
          begin + offset;
    }
  };
  if (plan.part == 0) {
    operands_at(0);
    Reduce(plan.dtype, plan.reduction, output, operands_, bytes / plan.element, store);
    return;
  }
  // Each rank reduces its part and writes it to every output, block by block while it is in cache.
  constexpr size_t kBlock = 32 * 1024;
  for (size_t offset = 0; offset < bytes; offset += kBlock) {
    const size_t block = std::min(kBlock, bytes - offset);
    operands_at(offset);
    Reduce(plan.dtype, plan.reduction, output + offset, operands_, block / plan.element);
    for (int rank : plan.sources) {
      auto* peer_output =
          reinterpret_cast<std::byte*>(found_[static_cast<size_t>(rank)]->publish.direct.output);
      Copy(peer_output + begin + offset, output + offset, block, store);
    }
  }
}

bool Op::StepPull() {
  const Plan& plan = participant_.plan();
  bool moved = false;
  // From here until the store below, peers that revoke their buffers wait for this rank.
  // Sequentially consistent with Op::Fail: one of the two sees the other.
  const auto guarded = [&](auto&& body) {
    mine_->consume.reading.store(1, std::memory_order_seq_cst);
    body();
    // Release: the last access to the peers' buffers comes before it.
    mine_->consume.reading.store(0, std::memory_order_release);
  };

  if (plan.reduces) {
    if (!FindSources()) return stage_ != Stage::kTransfer;
    bool ok = true;
    guarded([&] {
      for (int source : plan.sources) ok &= !Revoked(source);
      if (!ok) return;
      ReduceDirect();
      for (int source : plan.sources) ok &= !Revoked(source);
    });
    if (!ok) return false;
    moved = true;
  } else {
    if (consumed_ == 0) {
      // The own share needs nobody.
      const auto me = static_cast<size_t>(plan.position);
      const Store store = plan.nontemporal ? Store::kNonTemporal : Store::kCached;
      if (plan.kind == OpKind::kAllToAll || plan.kind == OpKind::kAllGather) {
        const size_t own = plan.kind == OpKind::kAllToAll ? me * plan.stream : 0;
        Copy(buffers_.output + me * plan.stream, buffers_.input + own, plan.stream, store);
      } else if (plan.kind == OpKind::kRaggedAllToAll) {
        CopyOwnSlices();
      } else if (plan.sources.empty() && plan.from_self) {
        Copy(buffers_.output, buffers_.input, buffers_.output_bytes, store);
      } else if (plan.sources.empty()) {
        std::memset(buffers_.output, 0, buffers_.output_bytes);
      }
      consumed_ = 1;
      moved = true;
    }
    for (int source : plan.sources) {
      if (pulled_[static_cast<size_t>(source)]) continue;
      if (!Find(source)) {
        if (stage_ != Stage::kTransfer) return true;
        waiting_for_ = source;
        continue;
      }
      bool ok = false;
      guarded([&] { ok = !Revoked(source) && PullFrom(source); });
      if (stage_ != Stage::kTransfer) return true;
      if (!ok) return moved;
      pulled_[static_cast<size_t>(source)] = 1;
      ++pulled_count_;
      moved = true;
    }
    if (pulled_count_ < static_cast<int>(plan.sources.size())) return moved;
  }
  if (stage_ != Stage::kTransfer) return true;
  participant_.LogDone(tag_);
  Announce();
  stage_ = Stage::kLinger;
  return true;
}

}  // namespace jaxfabric
