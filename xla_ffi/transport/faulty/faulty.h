// A decorator that makes any transport misbehave as planned, for tests of what is above it.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "transport/transport.h"

namespace jaxfabric {

// `count` calls starting with number `first`.
struct FaultRun {
  uint64_t first = 0;
  uint64_t count = 0;
  bool Contains(uint64_t number) const { return number >= first && number - first < count; }
};

// Which calls of each channel are hit. Puts and signals are numbered separately from 0, per
// channel.
struct FaultPlan {
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

  FaultRun drop_puts = {};     // the bytes never arrive
  FaultRun drop_signals = {};  // the count never rises
  // Only the first half of the bytes arrives.
  FaultRun truncate_puts = {};
  // The put is held, and everything after it queues behind, as on a slow link that keeps the order.
  // Let go by the `delay_calls`-th later Put or Signal, or by Wait or Flush.
  FaultRun delay_puts = {};
  uint64_t delay_calls = 1;
  // The connection breaks at this call (puts and signals counted together): the channel is aborted,
  // this and later calls give kUnavailable, and the peer's waits end.
  uint64_t reset_at = kNever;
  // The only peer whose channel misbehaves, by the order of Connect; -1 for every peer.
  int only_channel = -1;
};

// Its addresses are the inner transport's; both ends need not be faulty.
std::unique_ptr<Transport> MakeFaultyTransport(std::unique_ptr<Transport> inner, FaultPlan plan);

}  // namespace jaxfabric
