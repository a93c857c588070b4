// A lane of a communicator, as the threads of its block use it.
//
// A kernel is a sequence of steps, the same number on every rank. In a step a lane writes what its
// peers need, signals, awaits the signals of all peers, and reads what they have written:
//
//   lane.Begin();  write areas of parity();  lane.Signal();  lane.Await();  read areas of parity();
//
// Signal(k) says "what I write in step k is there, and I have read all of step k - 1". So nobody is
// ever more than one step ahead of another, and what is written in step k replaces what was written
// in step k - 2, which everybody has read: all have signalled k - 1, and this rank has awaited
// that. The counter lives in device memory, so a captured launch can be replayed as it is.
//
// A signal carries the call's header. Two ranks that meet in different calls both fail, and so do
// all others: who fails for a reason that is not the silence of a peer leaves a notice in every
// arena, since a kernel that traps may not have signalled everybody.
#pragma once

#include "device/hardware.cuh"

namespace jaxfabric::device {

class Lane {
 public:
  JF_DEVICE Lane(const Communicator& communicator, uint32_t header)
      : c_(communicator), header_(header), lane_(hw::Block()) {
    first_ = step_ = Control()->step;
  }

  JF_DEVICE uint32_t rank() const { return c_.rank; }
  JF_DEVICE uint32_t ranks() const { return c_.shape.ranks; }
  JF_DEVICE uint32_t parity() const { return step_ & 1; }
  // What packets of this step carry; never 0.
  JF_DEVICE uint32_t flag() const { return step_; }
  // Areas of this lane and step parity in a rank's arena.
  JF_DEVICE std::byte* Bulk(uint32_t rank) const { return Bulk(rank, parity()); }
  JF_DEVICE std::byte* Bulk(uint32_t rank, uint32_t parity) const {
    return c_.arena[rank] + c_.shape.BulkOffset(lane_, parity);
  }
  JF_DEVICE std::byte* MulticastBulk() const {
    return c_.multicast + c_.shape.BulkOffset(lane_, parity());
  }
  JF_DEVICE Packet* Packets(uint32_t rank, uint32_t source) const {
    return reinterpret_cast<Packet*>(c_.arena[rank] +
                                     c_.shape.PacketsOffset(lane_, parity(), source));
  }

  JF_DEVICE void Begin() { step_ = Next(step_); }

  // Tells every peer. All threads of the block have written before it.
  JF_DEVICE void Signal() {
    hw::SyncBlock();
    for (uint32_t peer = hw::Thread(); peer < ranks(); peer += hw::Threads()) {
      // Release: orders the block's writes to all arenas, which SyncBlock has put before this.
      if (peer != rank()) hw::ReleaseStore(Cell(peer, rank()), uint64_t{header_} << 32 | step_);
    }
  }

  // Returns when every peer has signalled this step in the same call.
  JF_DEVICE void Await() {
    AwaitWithoutSync();
    hw::SyncBlock();
  }
  // The same, but a thread may return before others: for steps whose data brings flags of its own.
  JF_DEVICE void AwaitWithoutSync() {
    for (uint32_t peer = hw::Thread(); peer < ranks(); peer += hw::Threads()) {
      if (peer != rank()) AwaitPeer(peer);
    }
  }

  // The packet at `address`, once it is there; it comes from `source`, and `seen` was loaded
  // before.
  JF_DEVICE Packet AwaitPacket(const Packet* address, uint32_t source, Packet seen) {
    uint64_t since = 0;
    for (uint32_t spins = 1; seen.flag0 != flag() || seen.flag1 != flag(); ++spins) {
      hw::Pause();
      // Who is in another call never sends it: the thread that awaits his signal ends the kernel.
      if (spins % kSpinsPerLook == 0) CheckPatience(source, spins / kSpinsPerLook, since);
      seen = hw::LoadPacket(address);
    }
    return seen;
  }

  // Returns when all lanes of this rank have called it: what they did before is done.
  JF_DEVICE void SyncGrid() {
    hw::SyncBlock();
    if (hw::Thread() == 0) {
      ArenaHead* head = Head(c_);
      const uint64_t generation = hw::AcquireLoad(&head->generation);
      // Release: the block's writes, which SyncBlock has put before this, are for whom the last one
      // to arrive releases; acquire: that one has them all.
      if (hw::AcquireReleaseAdd(&head->arrived, 1) + 1 == hw::Blocks()) {
        head->arrived = 0;
        hw::ReleaseStore(&head->generation, generation + 1);
      }
      uint64_t since = 0;
      for (uint32_t spins = 1; hw::AcquireLoad(&head->generation) == generation; ++spins) {
        hw::Pause();
        if (spins % kSpinsPerLook == 0) CheckPatience(rank(), spins / kSpinsPerLook, since);
      }
    }
    hw::SyncBlock();
  }

  // The lane's last word: keeps the counter for the next kernel.
  JF_DEVICE void End() {
    // Packets have 32 bits of step. Before these come again, nobody may find a packet of old.
    if ((first_ ^ step_) >> kCleanBits != 0) Clean();
    hw::SyncBlock();
    if (hw::Thread() == 0) Control()->step = step_;
  }

  // Ends the kernel, with the reason in the fault record for the host. `cell`: of the peer.
  [[noreturn]] JF_DEVICE void Fail(FaultKind kind, uint32_t peer, uint64_t cell) {
    Stop(c_, {static_cast<uint32_t>(kind), rank(), peer, lane_, step_, static_cast<uint32_t>(cell),
              header_, static_cast<uint32_t>(cell >> 32)});
  }

 private:
  static constexpr uint32_t kSpinsPerLook = 64;
  static constexpr uint32_t kCleanBits = 30;
  // In place of the beginning of a wait.
  static constexpr uint64_t kSawItGone = ~uint64_t{0};

  // 0 is what fresh memory holds. Leaves out 1 as well, so that parities alternate.
  static JF_DEVICE uint32_t Next(uint32_t step) { return step + 1 == 0 ? 2 : step + 1; }

  // Apart, so that it takes no registers from what is fast.
  [[noreturn]] static JF_COLD void Stop(const Communicator& c, FaultRecord fault) {
    // The first of all lanes and threads tells.
    if (hw::TryClaim(&Head(c)->claimed)) {
      const auto kind = static_cast<FaultKind>(fault.kind);
      // Before the record is whole, since then the others end the kernel.
      if (kind == FaultKind::kMismatch || kind == FaultKind::kRagged) {
        for (uint32_t to = 0; to < c.shape.ranks; ++to) {
          // Relaxed would do: only the value is used.
          hw::ReleaseStore(Notice(c, to, c.rank), uint64_t{fault.header} << 32 | fault.kind);
        }
      }
      c.fault->rank = fault.rank;
      c.fault->peer = fault.peer;
      c.fault->lane = fault.lane;
      c.fault->step = fault.step;
      c.fault->peer_step = fault.peer_step;
      c.fault->header = fault.header;
      c.fault->peer_header = fault.peer_header;
      // Release: the host that sees the kind sees the rest.
      hw::HostReleaseStore(&c.fault->kind, fault.kind);
      hw::SystemFence();
      hw::Trap();
    }
    // The record must be whole before the context ends.
    for (;;) {
      hw::Pause();
      if (hw::HostLoad(&c.fault->kind) != 0) hw::Trap();
    }
  }

  static JF_DEVICE ArenaHead* Head(const Communicator& c) {
    return reinterpret_cast<ArenaHead*>(c.arena[c.rank]);
  }
  JF_DEVICE LaneControl* Control() const {
    return reinterpret_cast<LaneControl*>(c_.arena[rank()] + c_.shape.ControlOffset(lane_));
  }
  // Where `source` signals `rank`: one of each parity, since a peer may be a step ahead.
  JF_DEVICE uint64_t* Cell(uint32_t rank, uint32_t source, uint32_t parity) const {
    return reinterpret_cast<uint64_t*>(c_.arena[rank] + c_.shape.CellsOffset(lane_, parity)) +
           source;
  }
  JF_DEVICE uint64_t* Cell(uint32_t rank, uint32_t source) const {
    return Cell(rank, source, parity());
  }
  // Where `source` tells `rank` why it has failed: its header and the kind.
  static JF_DEVICE uint64_t* Notice(const Communicator& c, uint32_t rank, uint32_t source) {
    return reinterpret_cast<uint64_t*>(c.arena[rank] + c.shape.NoticesOffset()) + source;
  }
  // The newer of the peer's signals.
  JF_DEVICE uint64_t LastSignal(uint32_t peer) const {
    const uint64_t a = hw::AcquireLoad(Cell(rank(), peer, 0));
    const uint64_t b = hw::AcquireLoad(Cell(rank(), peer, 1));
    return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b)) > 0 ? a : b;
  }

  JF_DEVICE void AwaitPeer(uint32_t peer) {
    uint64_t since = 0;
    for (uint32_t spins = 1;; ++spins) {
      // Acquire: pairs with Signal; SyncBlock passes it on to the block's other threads.
      const uint64_t cell = hw::AcquireLoad(Cell(rank(), peer));
      CheckCell(peer, cell);
      if (static_cast<uint32_t>(cell) == step_) return;
      hw::Pause();
      if (spins % kSpinsPerLook == 0) CheckPatience(peer, spins / kSpinsPerLook, since);
    }
  }

  JF_DEVICE void CheckCell(uint32_t peer, uint64_t cell) {
    const auto step = static_cast<uint32_t>(cell);
    if (step == step_) {
      if (static_cast<uint32_t>(cell >> 32) != header_) Fail(FaultKind::kMismatch, peer, cell);
    } else if (static_cast<int32_t>(step - step_) > 0) {
      Fail(FaultKind::kProtocol, peer, cell);
    }
  }

  // Fails when another rank has, or when the wait that began at `since` (0: has just begun) has
  // lasted too long. The looks of a wait go from rank to rank.
  JF_DEVICE void CheckPatience(uint32_t peer, uint32_t look, uint64_t& since) {
    const uint32_t from = look % ranks();
    const uint64_t notice = hw::AcquireLoad(Notice(c_, rank(), from));
    if (notice != 0) {
      const auto kind = static_cast<FaultKind>(static_cast<uint32_t>(notice));
      // One in this call may have failed because another is not: that one says so itself.
      const bool stranger = static_cast<uint32_t>(notice >> 32) != header_;
      if (stranger) Fail(FaultKind::kMismatch, from, notice >> 32 << 32);
      if (kind == FaultKind::kRagged) Fail(kind, from, notice | kNoSlice);
    }
    const uint64_t now = hw::Nanoseconds();
    if (since == 0) since = now;
    FaultKind kind = FaultKind::kNone;
    if (now - since >= uint64_t{c_.wait_milliseconds} * 1000000) kind = FaultKind::kDeadline;
    if (hw::HostLoad(&c_.control->gone[peer]) != 0) {
      // What it sent before it ended may have come since the last look: there is another.
      kind = since == kSawItGone ? FaultKind::kGone : FaultKind::kNone;
      since = kSawItGone;
    }
    if (hw::HostLoad(&c_.control->abort) != 0) kind = FaultKind::kAborted;
    if (kind != FaultKind::kNone) Fail(kind, peer, LastSignal(peer));
  }

  // Two steps around the erasure: before the first everybody has read all packets, and nobody sends
  // new ones before the second is over.
  JF_DEVICE void Clean() {
    Begin();
    Signal();
    Await();
    auto* packets =
        reinterpret_cast<Vector*>(c_.arena[rank()] + c_.shape.PacketsOffset(lane_, 0, 0));
    const uint64_t bytes =
        c_.shape.PacketsOffset(lane_ + 1, 0, 0) - c_.shape.PacketsOffset(lane_, 0, 0);
    for (uint64_t i = hw::Thread(); i < bytes / sizeof(Vector); i += hw::Threads()) {
      packets[i] = Vector{};
    }
    Begin();
    Signal();
    Await();
  }

  const Communicator& c_;
  const uint32_t header_;
  const uint32_t lane_;
  uint32_t first_, step_;
};

}  // namespace jaxfabric::device
