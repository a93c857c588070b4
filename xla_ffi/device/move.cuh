// Calls that move bytes without combining them, by a pattern that says who sends what to whom.
//
// packets: data travels with its flags: one trip, for small arrays. push: a sender writes segments
// into the receivers' arenas, and the receivers copy them out.
//
// A pattern has, for arguments `a` and peers that are not the rank itself:
//   kSources                   whether a rank may have several sources (else at most one)
//   SendsTo(a, peer), SendOffset(a, peer)             bytes into the input
//   ReceivesFrom(a, source), ReceiveOffset(a, source) bytes into the output
//   Keep(a, at, bytes)         what becomes of bytes [at, at + bytes) of the rank's own data
#pragma once

#include "device/bytes.cuh"
#include "device/lane.cuh"

namespace jaxfabric::device {

enum class Sources { kOne, kAll };

template <class Pattern>
JF_DEVICE void MovePackets(const MoveArguments& a) {
  Lane lane(a.communicator, a.header);
  const auto* input = static_cast<const std::byte*>(a.input);
  auto* output = static_cast<std::byte*>(a.output);
  const Slice words(Words::Count(a.bytes), hw::Block(), hw::Blocks(), 1);
  const uint32_t ranks = lane.ranks();
  lane.Begin();
  lane.Signal();
  for (uint32_t step = 1; step < ranks; ++step) {
    const uint32_t peer = (lane.rank() + step) % ranks;
    if (!Pattern::SendsTo(a, peer)) continue;
    const Words from(input + Pattern::SendOffset(a, peer), a.bytes);
    for (uint64_t i = hw::Thread(); i < words.size(); i += hw::Threads()) {
      hw::StorePacket(lane.Packets(peer, lane.rank()) + i,
                      MakePacket(from.Load(words.begin + i), lane.flag()));
    }
  }
  // The input has been read: the output may be the same memory.
  hw::SyncBlock();
  const Slice own(a.bytes, hw::Block(), hw::Blocks(), kPacketData);
  Pattern::Keep(a, own.begin, own.size());
  lane.AwaitWithoutSync();
  for (uint32_t step = 1; step < ranks; ++step) {
    const uint32_t source = (lane.rank() + step) % ranks;
    if (!Pattern::ReceivesFrom(a, source)) continue;
    const Words to(output + Pattern::ReceiveOffset(a, source), a.bytes);
    for (uint64_t i = hw::Thread(); i < words.size(); i += hw::Threads()) {
      const Packet* packet = lane.Packets(lane.rank(), source) + i;
      to.Store(words.begin + i,
               PacketData(lane.AwaitPacket(packet, source, hw::LoadPacket(packet))));
    }
  }
  lane.End();
}

template <class Pattern>
JF_DEVICE void MovePush(const MoveArguments& a) {
  Lane lane(a.communicator, a.header);
  const auto* input = static_cast<const std::byte*>(a.input);
  auto* output = static_cast<std::byte*>(a.output);
  const Slice slice(a.bytes, hw::Block(), hw::Blocks(), kLineBytes);
  const uint32_t ranks = lane.ranks();
  const uint32_t regions = Pattern::kSources == Sources::kAll ? ranks : 1;
  const uint32_t region_bytes = a.communicator.shape.bulk_bytes / regions;
  const auto region = [&](uint32_t source) {
    return Pattern::kSources == Sources::kAll ? uint64_t{source} * region_bytes : 0;
  };
  for (uint64_t at = slice.begin; at < slice.end; at += region_bytes) {
    const uint64_t segment = slice.end - at < region_bytes ? slice.end - at : region_bytes;
    lane.Begin();
    for (uint32_t step = 1; step < ranks; ++step) {
      const uint32_t peer = (lane.rank() + step) % ranks;
      if (!Pattern::SendsTo(a, peer)) continue;
      CopyBlock(lane.Bulk(peer) + region(lane.rank()), input + Pattern::SendOffset(a, peer) + at,
                segment);
    }
    // Its SyncBlock also ends the reading of this segment's input: the output may be the same
    // memory.
    lane.Signal();
    Pattern::Keep(a, at, segment);
    lane.Await();
    for (uint32_t step = 1; step < ranks; ++step) {
      const uint32_t source = (lane.rank() + step) % ranks;
      if (!Pattern::ReceivesFrom(a, source)) continue;
      CopyBlock(output + Pattern::ReceiveOffset(a, source) + at,
                lane.Bulk(lane.rank()) + region(source), segment);
    }
  }
  lane.End();
}

}  // namespace jaxfabric::device
