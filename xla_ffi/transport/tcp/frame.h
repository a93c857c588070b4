// The frames on a connection of the tcp transport, and the state machine that reads them.
//
// A frame is a header of fixed size and, for some types, a body. docs/wire_format.md has the table.
// The reader trusts nothing: whatever bytes come, it never touches memory that its sink has not
// granted for exactly that place, holds one buffer of fixed size, and fails for good at the first
// frame that makes no sense. It does no I/O: it says where the next bytes belong and is told how
// many came. One thread at a time.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "transport/message.h"

namespace jaxfabric::tcp {

inline constexpr uint32_t kFrameMagic = 0x6a616674;  // "jaft"
inline constexpr uint8_t kFrameVersion = 1;
// Connections between two processes.
inline constexpr uint32_t kMaxLanes = 16;
// Larger puts travel as several.
inline constexpr uint32_t kMaxBodyBytes = 8 << 20;

enum class FrameType : uint8_t {
  kHello = 1,     // first from the caller, on every lane
  kAccept = 2,    // first from the called, on lane 0, once it has all lanes
  kPut = 3,       // body: stored at offset of region
  kWord = 4,      // value: stored at offset of region, after all earlier frames of this lane
  kSignal = 5,    // adds one to the count of signals
  kFence = 6,     // body: a count per lane; what follows waits until that many data frames are done
  kFlush = 7,     // asks for kFlushed with the same value
  kFlushed = 8,   // all before the kFlush of that value is in place
  kAbort = 9,     // the sender has given this channel up
  kGoodbye = 10,  // the sender closes: what ends the connection after this is no failure
  kFarewell = 11,  // answers kGoodbye, behind all posts; asks for kFlushed with the same value
};

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  uint8_t version = kFrameVersion;
  FrameType type = FrameType::kPut;
  uint16_t lane = 0;    // kHello: which one this is
  uint32_t region = 0;  // kHello: how many lanes
  uint32_t length = 0;  // of the body
  uint64_t offset = 0;  // kHello: who calls
  uint64_t value = 0;   // kHello: number of the attempt, repeated by kAccept
};
static_assert(sizeof(FrameHeader) == 32);
inline constexpr size_t kHeaderBytes = sizeof(FrameHeader);

// True for puts, words and signals: what fences count.
inline bool IsData(FrameType type) {
  return type == FrameType::kPut || type == FrameType::kWord || type == FrameType::kSignal;
}

// Null if the header makes sense by itself, else what is wrong with it.
const char* CheckHeader(const FrameHeader& header);

// What the reader needs of the endpoint.
class FrameSink {
 public:
  virtual ~FrameSink() = default;

  // The place of `header`'s whole body, which stays valid until Unpin(); null data if the region is
  // unknown and the bytes are to be dropped; nothing if the body does not fit the region.
  virtual std::optional<std::span<std::byte>> Pin(const FrameHeader& header) = 0;
  virtual void Unpin(const FrameHeader& header) = 0;
  // A put whose body is in place.
  virtual void OnPut() = 0;
  // Every frame without a body. Null, or what is wrong with it.
  virtual const char* OnFrame(const FrameHeader& header) = 0;
  // Whether what follows the fence may be read; asked again by the next Resume().
  virtual bool FenceReached(std::span<const uint64_t> counts) = 0;
};

class FrameReader {
 public:
  explicit FrameReader(FrameSink* sink) : sink_(sink) {}

  enum class State { kReading, kAtFence, kMalformed };
  State state() const { return state_; }
  // Of kMalformed.
  const std::string& error() const { return error_; }

  // kReading only: where the next bytes belong, one or two places. Received() must follow, with 0
  // if nothing came.
  std::span<const iovec> Prepare();
  void Received(size_t bytes);
  // Goes on after a fence.
  void Resume() { Parse(); }
  // The fence at which it is; empty elsewhere.
  std::span<const uint64_t> fence() const;

  // True between two frames: where a connection may end.
  bool at_boundary() const { return end_ == begin_ && body_left_ == 0; }

 private:
  static constexpr size_t kBufferBytes = 32 * 1024;
  // Read behind a body that goes to its place: little, so that the next body does too.
  static constexpr size_t kAfterBodyBytes = 1024;

  void Parse();
  bool ParseOne();
  bool ParsePut(const FrameHeader& header);
  bool ParseFence(const FrameHeader& header);
  void Fail(const FrameHeader& header, const char* what);
  size_t buffered() const { return end_ - begin_; }

  FrameSink* const sink_;
  State state_ = State::kReading;
  std::string error_;
  const std::unique_ptr<std::byte[]> buffer_ = std::make_unique<std::byte[]>(kBufferBytes);
  size_t begin_ = 0;  // of what is in the buffer and not parsed yet
  size_t end_ = 0;
  FrameHeader body_;      // the put whose body goes to its place
  size_t body_left_ = 0;  // of it
  bool pinned_ = false;   // between Prepare() and Received()
  std::array<iovec, 2> places_;
  std::array<uint64_t, kMaxLanes> counts_;
};

// Stores a small body: word by word where that is promised.
void StoreBody(std::span<std::byte> to, const std::byte* from);

}  // namespace jaxfabric::tcp
