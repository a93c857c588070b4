// What ranks of one host show each other in shared memory: the window of a process, and in it one
// cell per (call instance, rank).
//
//   window:  [WindowHeader | Cell Cell Cell ... | staging pool ................]
//   cell:    [Slot x kSlots | done log | reserve]       one execution occupies one slot
//   slot:    [publish line | produce line | consume line]
//
// Every field is written by the rank that owns the cell and read by the others; the one exception
// is the doorbell, which anybody may ring. docs/memory_model.md has the orders in one table.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace jaxfabric {

inline constexpr uint64_t kWindowMagic = 0x6a66776e64303032;  // "jfwnd002"
inline constexpr int kSlots = 4;  // executions of one instance that a rank may have in flight
// The done log holds what a peer may still ask about: see Participant::TryClaimSlot.
inline constexpr int kDoneLog = 16;
inline constexpr size_t kInlineBytes = 40;
inline constexpr size_t kReserveBytes = 1152;
inline constexpr size_t kReserveShare = kReserveBytes / kSlots;  // of one slot

// Bytes from `offset` of a stream to the end of the ring that it goes round in.
inline size_t UntilWrap(size_t offset, size_t ring) { return ring - offset % ring; }

// Where a rank's contribution to one execution lies.
enum class Placement : uint32_t {
  kNone = 0,    // this rank contributes nothing (it only receives)
  kInline = 1,  // in the publish line itself
  kStaged = 2,  // in a ring of the owner's staging pool
  kDirect = 3,  // in the owner's own buffers
};

// Names one execution of an instance. Launches count from far above zero, because a few may turn
// out to be older than the one that was taken for the first; occurrences count from 1. So 0 is
// "nothing yet".
inline constexpr uint32_t kFirstLaunch = 1u << 30;
inline uint64_t MakeTag(uint32_t launch, uint32_t occurrence) {
  return uint64_t{launch + kFirstLaunch} << 32 | (uint64_t{occurrence} + 1);
}
inline int32_t TagLaunch(uint64_t tag) {
  return static_cast<int32_t>(static_cast<uint32_t>(tag >> 32) - kFirstLaunch);
}
inline uint32_t TagOccurrence(uint64_t tag) { return static_cast<uint32_t>(tag) - 1; }

// Begins every sub-stream of a ragged_all_to_all, once per slice; the rows of the slices follow.
struct RaggedSlice {
  int64_t output_offset;  // first row in the receiver's result
  int64_t rows;
};

struct alignas(64) PublishLine {
  // Written last, with release: who loads the tag with acquire sees the rest of the line, the
  // staged bytes announced by it, and zeroed progress counters.
  std::atomic<uint64_t> tag;
  // The owner's last completed execution: frees the slot of a peer without another cache miss.
  std::atomic<uint64_t> previous_done;
  std::atomic<uint32_t> header;  // hash of op, type, size, reduction and site
  Placement placement;
  union {
    std::byte payload[kInlineBytes];  // kInline
    struct {                          // kStaged: offsets in the owner's window
      uint64_t ring_offset;
      uint64_t ring_bytes;     // of one sub-stream
      uint64_t result_offset;  // two-shot: the ring of reduced bytes
      uint64_t result_bytes;
      // Plan::places, kPattern: the number of the owner's output, or of its block, into which its
      // sources put.
      uint64_t output_region;
    } staged;
    struct {  // kDirect: addresses in the owner's process
      uint64_t input;
      uint64_t output;
      uint64_t ragged;  // ragged_all_to_all: the owner's RaggedBuffers
    } direct;
  };
};
static_assert(sizeof(PublishLine) == 64);

struct alignas(64) ProduceLine {
  std::atomic<uint64_t> produced;  // bytes of each sub-stream that have been staged
  std::atomic<uint64_t> results;   // two-shot: bytes of the owner's part that have been reduced
};

struct alignas(64) ConsumeLine {
  std::atomic<uint64_t> consumed;          // bytes read of every source's sub-stream
  std::atomic<uint64_t> results_consumed;  // bytes read of every peer's results
  // Readers of direct buffers: non-zero while this rank may be touching a peer's buffers.
  std::atomic<uint32_t> reading;
  // Set by an owner that gives up: its buffers must not be touched any more.
  std::atomic<uint32_t> revoked;
};

struct Slot {
  PublishLine publish;
  ProduceLine produce;
  ConsumeLine consume;
};

struct Cell {
  Slot slots[kSlots];
  // Tags of the owner's last completed executions: the owner reads nothing of its peers for these
  // any more, and needs nothing from them.
  alignas(64) std::atomic<uint64_t> done[kDoneLog];
  // Staging of last resort, so that an execution always has some memory of its own: a share for
  // each slot.
  alignas(64) std::byte reserve[kReserveBytes];
};
static_assert(sizeof(Cell) == 2048);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

struct alignas(64) WindowHeader {
  uint64_t magic;
  uint32_t process;
  uint32_t cells;
  // The doorbell: sleepers of this process wait on `bell`; who has news for it looks at `sleepers`
  // first (one shared cache line, clean while nobody sleeps).
  alignas(64) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;
};
inline constexpr size_t kWindowHeaderBytes = 4096;
// A quarter of a window is for cells, of which a page is touched only when used; the rest is
// staging.
inline uint32_t CellsOfWindow(size_t bytes) {
  return static_cast<uint32_t>((bytes / 4 - kWindowHeaderBytes) / sizeof(Cell));
}

// What a rank published last: for messages ("last seen in ..."), and for waiting ranks to see
// whether it is in step with them. One per local rank, behind the window's header. Relaxed
// throughout: no other data depends on it.
struct LastSeen {
  std::atomic<uint64_t> key;   // of the instance on its communicator
  std::atomic<uint64_t> call;  // of the instance, the same for every group of the call
  std::atomic<uint64_t> tag;
  std::atomic<uint64_t> core;  // that the publishing thread ran on
};
inline constexpr size_t kMaxLocalRanks =
    (kWindowHeaderBytes - sizeof(WindowHeader)) / sizeof(LastSeen);
inline LastSeen* LastSeenOf(std::byte* window, size_t local_index) {
  return reinterpret_cast<LastSeen*>(window + sizeof(WindowHeader)) + local_index;
}

}  // namespace jaxfabric
