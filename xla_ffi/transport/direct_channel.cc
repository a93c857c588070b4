#include "transport/direct_channel.h"

#include <cstring>
#include <utility>

#include "memory/copy.h"

namespace jaxfabric {

Result<std::unique_ptr<Channel>> DirectChannel::Create(Segment local,
                                                       std::shared_ptr<void> local_owner,
                                                       Segment peer,
                                                       std::shared_ptr<void> peer_owner) {
  if (peer.header().number >= local.header().max_peers ||
      local.header().number >= peer.header().max_peers) {
    return Status(Code::kInvalidArgument,
                  StrCat("endpoint ", local.header().number, " of ", local.header().max_peers,
                         " cannot connect to endpoint ", peer.header().number, " of ",
                         peer.header().max_peers));
  }
  return std::unique_ptr<Channel>(
      new DirectChannel(local, std::move(local_owner), peer, std::move(peer_owner)));
}

DirectChannel::DirectChannel(Segment local, std::shared_ptr<void> local_owner, Segment peer,
                             std::shared_ptr<void> peer_owner)
    : local_(local),
      peer_(peer),
      local_owner_(std::move(local_owner)),
      peer_owner_(std::move(peer_owner)),
      inbox_(local.line(static_cast<int>(peer.header().number))),
      outbox_(peer.line(static_cast<int>(local.header().number))),
      spin_(CoresAllowSpinning(static_cast<int>(local.header().max_peers))) {}

Status DirectChannel::CheckNotAborted() const {
  // relaxed: the flag guards no other data.
  if (!aborted_.load(std::memory_order_relaxed)) return OkStatus();
  return Status(Code::kAborted, StrCat("the channel to peer ", peer_number(), " was aborted"));
}

Status DirectChannel::Put(std::span<const std::byte> local, size_t offset) {
  JF_RETURN_IF_ERROR(CheckNotAborted());
  const std::span<std::byte> window = peer_.window();
  if (offset > window.size() || local.size() > window.size() - offset) {
    return Status(Code::kOutOfRange, StrCat("a put of ", local.size(), " bytes at offset ", offset,
                                            " does not fit the window of peer ", peer_number(),
                                            ", which has ", window.size(), " bytes"));
  }
  const Store store = local.size() >= NonTemporalThreshold() ? Store::kNonTemporal : Store::kCached;
  Copy(window.data() + offset, local.data(), local.size(), store);
  return OkStatus();
}

Status DirectChannel::Signal() {
  JF_RETURN_IF_ERROR(CheckNotAborted());
  outbox_.Signal();
  return OkStatus();
}

Status DirectChannel::Wait(uint64_t count, Deadline deadline) {
  switch (inbox_.Wait(count, &seen_, spin_, deadline)) {
    case SignalLine::Outcome::kSignalled:
      return OkStatus();
    case SignalLine::Outcome::kAbortedBySender:
      return Status(Code::kUnavailable, StrCat("peer ", peer_number(), " aborted the channel"));
    case SignalLine::Outcome::kAbortedByReceiver:
      return Status(Code::kAborted, StrCat("the channel to peer ", peer_number(), " was aborted"));
    case SignalLine::Outcome::kDeadline:
      break;
  }
  return Status(Code::kDeadlineExceeded,
                StrCat("peer ", peer_number(), " had signalled ", seen_, " times, not ", count,
                       ", when the deadline passed"));
}

// Copies and signals are in the peer's memory when their calls return.
Status DirectChannel::Flush(Deadline) { return CheckNotAborted(); }

void DirectChannel::Abort() {
  aborted_.store(true, std::memory_order_relaxed);  // as in CheckNotAborted()
  outbox_.AbortBySender();
  inbox_.AbortByReceiver();
}

std::vector<std::byte> EncodeSegmentHeader(const SegmentHeader& header) {
  std::vector<std::byte> bytes(sizeof(header));
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

Result<SegmentHeader> DecodeSegmentHeader(const EndpointAddress& address, std::string_view kind) {
  if (address.kind != kind) {
    return Status(Code::kInvalidArgument, StrCat("an address of transport '", address.kind,
                                                 "' cannot be reached by '", kind, "'"));
  }
  SegmentHeader header;
  if (address.bytes.size() != sizeof(header)) {
    return Status(Code::kInvalidArgument,
                  StrCat("an address of transport '", kind, "' has ", address.bytes.size(),
                         " bytes instead of ", sizeof(header)));
  }
  std::memcpy(&header, address.bytes.data(), sizeof(header));
  return header;
}

}  // namespace jaxfabric
