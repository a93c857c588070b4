// A channel over memory that both ends can load and store: a put is a copy, a signal an atomic add.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/segment.h"
#include "transport/transport.h"

namespace jaxfabric {

class DirectChannel : public Channel {
 public:
  // A channel between endpoint `local` and endpoint `peer`, kInvalidArgument when they cannot
  // belong together. The owners keep the two segments mapped for as long as the channel lives.
  static Result<std::unique_ptr<Channel>> Create(Segment local, std::shared_ptr<void> local_owner,
                                                 Segment peer, std::shared_ptr<void> peer_owner);

  Status Put(std::span<const std::byte> local, size_t offset) override;
  Status Signal() override;
  Status Wait(uint64_t count, Deadline deadline) override;
  Status Flush(Deadline deadline) override;
  void Abort() override;
  std::span<std::byte> peer_window() override { return peer_.window(); }

 private:
  DirectChannel(Segment local, std::shared_ptr<void> local_owner, Segment peer,
                std::shared_ptr<void> peer_owner);

  int peer_number() const { return static_cast<int>(peer_.header().number); }
  Status CheckNotAborted() const;

  const Segment local_;
  const Segment peer_;
  const std::shared_ptr<void> local_owner_;
  const std::shared_ptr<void> peer_owner_;
  SignalLine& inbox_;   // written by the peer
  SignalLine& outbox_;  // written by this end
  const bool spin_;
  uint64_t seen_ = 0;  // signals taken note of by Wait
  std::atomic<bool> aborted_{false};
};

// The bytes of an address: the header of the segment.
std::vector<std::byte> EncodeSegmentHeader(const SegmentHeader& header);
// `kind` is the transport that decodes; kInvalidArgument for another kind or malformed bytes.
Result<SegmentHeader> DecodeSegmentHeader(const EndpointAddress& address, std::string_view kind);

}  // namespace jaxfabric
