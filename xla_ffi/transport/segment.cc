#include "transport/segment.h"

#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace jaxfabric {
namespace {

constexpr int kMaxPeers = 1 << 20;
constexpr size_t kMaxWindowBytes = size_t{1} << 46;
constexpr size_t kLinesOffset = 64;  // the header's line
static_assert(sizeof(SegmentHeader) <= kLinesOffset);

// The window starts on a page of its own, of whatever size pages have here.
size_t RoundUpToPage(size_t bytes) {
  static const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

size_t WindowOffset(size_t max_peers) {
  return RoundUpToPage(kLinesOffset + max_peers * sizeof(SignalLine));
}

}  // namespace

Segment::Segment(std::span<std::byte> memory, const SegmentHeader& header)
    : header_(header),
      lines_(reinterpret_cast<SignalLine*>(memory.data() + kLinesOffset), header.max_peers),
      window_(memory.subspan(WindowOffset(header.max_peers), header.window_bytes)) {}

Result<size_t> Segment::Bytes(int self, int max_peers, size_t window_bytes) {
  if (max_peers < 1 || max_peers > kMaxPeers || self < 0 || self >= max_peers ||
      window_bytes > kMaxWindowBytes) {
    return Status(Code::kInvalidArgument,
                  StrCat("no endpoint can be number ", self, " of ", max_peers,
                         " with a window of ", window_bytes, " bytes"));
  }
  return WindowOffset(static_cast<size_t>(max_peers)) + RoundUpToPage(window_bytes);
}

Result<Segment> Segment::Create(std::span<std::byte> memory, int self, int max_peers,
                                size_t window_bytes) {
  SegmentHeader header;
  header.number = static_cast<uint32_t>(self);
  header.max_peers = static_cast<uint32_t>(max_peers);
  header.window_bytes = window_bytes;
  if (::getrandom(&header.nonce, sizeof(header.nonce), 0) != sizeof(header.nonce)) {
    return ErrnoStatus("getrandom", errno);
  }
  std::memcpy(memory.data(), &header, sizeof(header));
  return Segment(memory, header);
}

Result<Segment> Segment::Open(std::span<std::byte> memory, const SegmentHeader& expected) {
  if (expected.magic != SegmentHeader::kMagic || expected.version != SegmentHeader::kVersion) {
    return Status(Code::kInvalidArgument,
                  StrCat("the peer's segment has layout version ", expected.version, ", not ",
                         SegmentHeader::kVersion, ": all processes need the same jaxfabric"));
  }
  JF_ASSIGN_OR_RETURN(const size_t bytes,
                      Bytes(static_cast<int>(expected.number), static_cast<int>(expected.max_peers),
                            expected.window_bytes));
  SegmentHeader found;
  if (memory.size() != bytes) {
    return Status(Code::kInvalidArgument, StrCat("the segment of peer ", expected.number, " has ",
                                                 memory.size(), " bytes instead of ", bytes));
  }
  std::memcpy(&found, memory.data(), sizeof(found));
  if (found != expected) {
    return Status(Code::kInvalidArgument, StrCat("the segment does not belong to the endpoint that "
                                                 "peer ",
                                                 expected.number, " published"));
  }
  return Segment(memory, expected);
}

}  // namespace jaxfabric
