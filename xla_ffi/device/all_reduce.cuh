// x[count] -> y[count]: every rank gets the combination of all ranks' x.
//
// packets: every rank sends all of x to every other, which combines: one trip, for small arrays.
// two_shot: each rank combines one part of every segment and sends it to the others: two trips, and
// each byte crosses a link twice, whatever the number of ranks.
#pragma once

#include "device/combine.cuh"
#include "device/combine_packets.cuh"
#include "device/lane.cuh"

namespace jaxfabric::device {

template <class Codec, class Op>
JF_DEVICE void all_reduce_packets_body(const ReduceArguments& a) {
  Lane lane(a.communicator, a.header);
  const uint64_t bytes = a.count * sizeof(typename Codec::Storage);
  const Words input(a.input, bytes), output(a.output, bytes);
  const Slice words(Words::Count(bytes), hw::Block(), hw::Blocks(), 1);
  lane.Begin();
  lane.Signal();
  for (uint64_t i = hw::Thread(); i < words.size(); i += hw::Threads()) {
    const Packet packet = MakePacket(input.Load(words.begin + i), lane.flag());
    for (uint32_t step = 1; step < lane.ranks(); ++step) {
      // Each rank begins with another peer, so that no link gets all at once.
      const uint32_t peer = (lane.rank() + step) % lane.ranks();
      hw::StorePacket(lane.Packets(peer, lane.rank()) + i, packet);
    }
  }
  CombinePackets<Codec, Op>(lane, input, output, words);
  lane.End();
}

template <class Codec, class Op, uint32_t kAtOnce = kLoads<typename Codec::Storage>>
JF_DEVICE void all_reduce_two_shot_body(const ReduceArguments& a) {
  Lane lane(a.communicator, a.header);
  const auto* input = static_cast<const std::byte*>(a.input);
  auto* output = static_cast<std::byte*>(a.output);
  const uint64_t bytes = a.count * sizeof(typename Codec::Storage);
  const Slice slice(bytes, hw::Block(), hw::Blocks(), kLineBytes);
  const uint32_t ranks = lane.ranks(), segment_bytes = a.communicator.shape.bulk_bytes;
  for (uint64_t at = slice.begin; at < slice.end; at += segment_bytes) {
    const uint64_t segment = slice.end - at < segment_bytes ? slice.end - at : segment_bytes;
    const uint64_t part = (segment + ranks * 16 - 1) / (ranks * 16) * 16;
    const auto part_begin = [&](uint32_t rank) {
      return rank * part < segment ? rank * part : segment;
    };
    const auto part_bytes = [&](uint32_t rank) { return part_begin(rank + 1) - part_begin(rank); };

    lane.Begin();
    CopyBlock(lane.Bulk(lane.rank()), input + at, segment);
    lane.Signal();
    lane.Await();
    const uint64_t own = part_begin(lane.rank());
    const uint32_t staged = lane.parity();
    lane.Begin();
    std::byte* combined = lane.Bulk(lane.rank()) + own;
    CombineBlock<Codec, Op, kAtOnce>(
        combined, ranks, [&](uint32_t rank) { return lane.Bulk(rank, staged) + own; },
        part_bytes(lane.rank()));
    hw::SyncBlock();
    for (uint32_t step = 1; step < ranks; ++step) {
      const uint32_t peer = (lane.rank() + step) % ranks;
      CopyBlock(lane.Bulk(peer) + own, combined, part_bytes(lane.rank()));
    }
    lane.Signal();
    lane.Await();
    CopyBlock(output + at, lane.Bulk(lane.rank()), segment);
  }
  lane.End();
}

}  // namespace jaxfabric::device
