// What host and kernels agree on: the arena of a communicator in every rank's memory, the arguments
// of kernels, and the record of a fault.
//
// A grid block is a lane. It has a step counter, flag cells and two areas of its own in every
// arena, and talks to the same lane of the other ranks only; docs/cuda.md has the protocol. All
// offsets are the same on all ranks. The arena is zero when the communicator starts.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define JF_HOST_DEVICE __host__ __device__
#else
#define JF_HOST_DEVICE
#endif

namespace jaxfabric::device {

// One NVLink domain: 72 GPUs in the largest that is sold.
inline constexpr uint32_t kMaxRanks = 72;
inline constexpr uint32_t kMaxLanes = 64;
inline constexpr uint32_t kLineBytes = 128;  // what a GPU moves at once
// Threads of every block, on a GPU.
inline constexpr uint32_t kBlockThreads = 512;

// 8 bytes of data that land together with the number of their step, twice: a packet needs no flag.
struct alignas(16) Packet {
  uint32_t data0, flag0, data1, flag1;
};
static_assert(sizeof(Packet) == 16);
inline constexpr uint32_t kPacketData = 8;

// The first line of an arena: what the lanes of its rank share.
struct alignas(kLineBytes) ArenaHead {
  uint32_t claimed;     // the fault record is being written
  uint32_t arrived;     // lanes in SyncGrid
  uint64_t generation;  // how often all have left it
};
static_assert(sizeof(ArenaHead) == kLineBytes);

struct alignas(kLineBytes) LaneControl {
  uint32_t step;  // the last one; only this lane of this rank reads and writes it
};
static_assert(sizeof(LaneControl) == kLineBytes);

// The shape of an arena: equal on all ranks of a communicator.
struct ArenaShape {
  uint32_t ranks;
  uint32_t lanes;
  uint32_t packet_bytes;  // of one lane, step parity and source: data, half of what they take
  uint32_t bulk_bytes;    // of one lane and step parity

  JF_HOST_DEVICE constexpr uint64_t CellLine() const {
    return (uint64_t{ranks} * 8 + kLineBytes - 1) / kLineBytes * kLineBytes;
  }
  JF_HOST_DEVICE constexpr uint64_t ControlOffset(uint32_t lane) const {
    return sizeof(ArenaHead) + uint64_t{kLineBytes} * lane;
  }
  JF_HOST_DEVICE constexpr uint64_t NoticesOffset() const { return ControlOffset(lanes); }
  JF_HOST_DEVICE constexpr uint64_t CellsOffset(uint32_t lane, uint32_t parity) const {
    return NoticesOffset() + (1 + uint64_t{lane} * 2 + parity) * CellLine();
  }
  JF_HOST_DEVICE constexpr uint64_t PacketsOffset(uint32_t lane, uint32_t parity,
                                                  uint32_t source) const {
    return CellsOffset(lanes, 0) +
           ((uint64_t{lane} * 2 + parity) * ranks + source) * packet_bytes * 2;
  }
  JF_HOST_DEVICE constexpr uint64_t BulkOffset(uint32_t lane, uint32_t parity) const {
    return PacketsOffset(lanes, 0, 0) + (uint64_t{lane} * 2 + parity) * bulk_bytes;
  }
  JF_HOST_DEVICE constexpr uint64_t Bytes() const { return BulkOffset(lanes, 0); }
  // Whether the areas are aligned as kernels need them.
  JF_HOST_DEVICE constexpr bool Valid() const {
    return ranks >= 1 && ranks <= kMaxRanks && lanes >= 1 && lanes <= kMaxLanes &&
           packet_bytes % (kLineBytes / 2) == 0 && bulk_bytes % (kLineBytes * ranks) == 0 &&
           bulk_bytes > 0 && packet_bytes > 0;
  }
  bool operator==(const ArenaShape&) const = default;
};

enum class FaultKind : uint32_t {
  kNone = 0,
  kDeadline = 1,  // `peer` did not come
  kMismatch = 2,  // `peer` is in another call
  kAborted = 3,   // the host has ended all waits
  kProtocol = 4,  // `peer` is at a step it cannot be at
  kRagged = 5,    // the sizes or offsets of `peer` and this rank do not fit
  kGone = 6,      // `peer` has ended
};

inline constexpr uint32_t kNoSlice = ~uint32_t{0};

// In pinned host memory. Whoever claims it first writes it, `kind` last.
struct FaultRecord {
  uint32_t kind;
  uint32_t rank;  // position in the communicator, as `peer`
  uint32_t peer;
  uint32_t lane;
  uint32_t step;  // this rank's
  // What the peer has shown last, or 0. kRagged: the number of the slice that does not fit, or
  // kNoSlice where the peer has found one.
  uint32_t peer_step;
  uint32_t header;       // of this rank's call
  uint32_t peer_header;  // of the peer's
};

// What the host tells kernels that are running. In pinned host memory.
struct HostControl {
  uint32_t abort;            // nonzero ends every wait
  uint32_t gone[kMaxRanks];  // nonzero ends a wait for this rank: what it did not send never comes
};

// One rank's view of its communicator: constant while it lives, and part of every kernel's
// arguments.
struct Communicator {
  ArenaShape shape;
  uint32_t rank;
  uint32_t wait_milliseconds;  // how long a wait may take
  FaultRecord* fault;
  const HostControl* control;
  std::byte* multicast;         // all arenas at once, or null
  std::byte* arena[kMaxRanks];  // as mapped into this process; [rank] is the own one
};

// The arguments of a call in which every rank works on `count` elements of one type: all_reduce
// (elements of the array), reduce_scatter (of the result).
struct ReduceArguments {
  Communicator communicator;
  uint32_t header;
  const void* input;
  void* output;
  uint64_t count;
};

// The arguments of a call that moves bytes: `bytes` from each sender to each receiver.
struct MoveArguments {
  Communicator communicator;
  uint32_t header;
  uint32_t root;   // broadcast: the sender
  int32_t target;  // permute: to whom this rank sends, or -1
  int32_t source;  // permute: from whom it receives, or -1
  const void* input;
  void* output;
  uint64_t bytes;
};

// Where the arrays of a call lie in all ranks' memory (windows.cuh). In memory of the GPU, where
// the host has it written in the order of the stream before a launch, so that a captured one finds
// what holds now.
struct WindowTable {
  const void* input;  // the arrays it is about; null: they are in no windows
  void* output;
  uint64_t input_offset, output_offset;  // of them in this rank's windows
  // Where the windows of every rank begin, as this GPU addresses them. Null where peers do not
  // address the array.
  struct Base {
    std::byte* input;
    std::byte* output;
  } base[kMaxRanks];
};
struct WriteTableArguments {
  WindowTable table;
  WindowTable* to;
};
struct WindowReduceArguments {
  ReduceArguments call;
  const WindowTable* table;
};
struct WindowMoveArguments {
  MoveArguments call;
  const WindowTable* table;
};
// What ranks tell each other in the first step: where their arrays are in their windows.
struct alignas(16) WindowPlace {
  uint64_t input, output;
};
inline constexpr uint64_t kInNoWindow = ~uint64_t{0};

// The arguments of all_reduce_rms_norm. Rows are multiples of 16 bytes.
struct RmsNormArguments {
  Communicator communicator;
  uint32_t header;
  uint32_t hidden;       // elements of a row
  const void* input;     // [rows, hidden], of which the ranks' sum is meant
  const void* residual;  // [rows, hidden]
  const void* weight;    // [hidden]
  void* output;          // [rows, hidden]
  void* new_residual;    // [rows, hidden]; may be the residual
  uint64_t rows;
  float epsilon;
};

// The arguments of ragged_all_to_all: rank i gets the slices number i * slices and following. The
// four arrays have ranks * slices elements, int32 or int64 by the kernel.
struct RaggedArguments {
  Communicator communicator;
  uint32_t header;
  uint32_t slices;  // from each rank to each
  const void* input;
  const void* initial;  // what the output holds where nothing is written; may be the output
  void* output;
  const void* input_offsets;   // rows of the input
  const void* send_sizes;      // in rows
  const void* output_offsets;  // rows of the receiver's output
  const void* recv_sizes;      // the senders' send_sizes
  uint64_t row_bytes;
  uint64_t input_rows;
  uint64_t output_rows;
};

// In a step of ragged_all_to_all: what each source has in an area is a table, and behind it rows.
struct RaggedTable {
  uint64_t steps;  // that the source needs for its rows
  uint64_t unused;
};
struct alignas(16) RaggedEntry {
  int64_t offset;  // row of the output
  int64_t rows;
};
JF_HOST_DEVICE constexpr uint64_t RaggedTableBytes(uint32_t slices) {
  return (sizeof(RaggedTable) + uint64_t{slices} * sizeof(RaggedEntry) + kLineBytes - 1) /
         kLineBytes * kLineBytes;
}

}  // namespace jaxfabric::device
