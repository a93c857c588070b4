// The second half of a reduction by packets: every peer has sent, or will send, its part.
#pragma once

#include "device/combine.cuh"
#include "device/lane.cuh"

namespace jaxfabric::device {

// Words `words` of output = the combination of this rank's `own` and of the packets that the peers
// send in this step, in rank order.
template <class Codec, class Op>
JF_DEVICE void CombinePackets(Lane& lane, const Words& own, const Words& output,
                              const Slice& words) {
  lane.AwaitWithoutSync();
  for (uint64_t i = hw::Thread(); i < words.size(); i += hw::Threads()) {
    const uint64_t result = Combine<Codec, Op, uint64_t, Packet>(
        lane.ranks(),
        [&](uint32_t source) {
          return source == lane.rank() ? MakePacket(own.Load(words.begin + i), lane.flag())
                                       : hw::LoadPacket(lane.Packets(lane.rank(), source) + i);
        },
        [&](const Packet& seen, uint32_t source) {
          return PacketData(lane.AwaitPacket(lane.Packets(lane.rank(), source) + i, source, seen));
        });
    output.Store(words.begin + i, result);
  }
}

}  // namespace jaxfabric::device
