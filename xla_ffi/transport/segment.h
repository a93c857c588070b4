// The memory of one endpoint of a load/store transport: a header, one signal line per peer, and the
// window. In a memfd (shm) or in the process's own memory (inproc); the layout is the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "transport/signal_line.h"

namespace jaxfabric {

// What a peer needs to know to check that it has the right segment. Published with the address and
// repeated at the start of the segment.
struct SegmentHeader {
  static constexpr uint64_t kMagic = 0x313047455346584a;  // "JXFSEG01"
  static constexpr uint32_t kVersion = 1;

  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  uint32_t number = 0;     // of the endpoint that owns it
  uint32_t max_peers = 0;  // signal lines
  uint32_t reserved = 0;
  uint64_t window_bytes = 0;
  uint64_t nonce = 0;  // random: tells endpoints with equal sizes apart

  bool operator==(const SegmentHeader&) const = default;
};

// The parts of a mapped segment. Copies refer to the same memory.
class Segment {
 public:
  // The size of the whole segment, in pages; kInvalidArgument for numbers that make no sense.
  static Result<size_t> Bytes(int self, int max_peers, size_t window_bytes);
  // Writes a header with a fresh nonce into zeroed memory.
  static Result<Segment> Create(std::span<std::byte> memory, int self, int max_peers,
                                size_t window_bytes);
  // Views memory made by Create, in this or another process. `expected` is what its owner
  // published; kInvalidArgument when the memory does not begin with it or is too small.
  static Result<Segment> Open(std::span<std::byte> memory, const SegmentHeader& expected);

  const SegmentHeader& header() const { return header_; }
  SignalLine& line(int peer) const { return lines_[static_cast<size_t>(peer)]; }
  std::span<std::byte> window() const { return window_; }

 private:
  Segment(std::span<std::byte> memory, const SegmentHeader& header);

  SegmentHeader header_;  // a copy: the memory's own may be overwritten by a broken peer
  std::span<SignalLine> lines_;
  std::span<std::byte> window_;
};

}  // namespace jaxfabric
