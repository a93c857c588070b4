// x[ranks, count] -> y[count]: rank i gets the combination of all ranks' x[i].
//
// packets: rows travel with their flags: one trip, for small arrays. pull: each rank stages
// segments of all rows, and combines what it reads from the others.
#pragma once

#include "device/combine.cuh"
#include "device/combine_packets.cuh"
#include "device/lane.cuh"

namespace jaxfabric::device {

template <class Codec, class Op>
JF_DEVICE void reduce_scatter_packets_body(const ReduceArguments& a) {
  Lane lane(a.communicator, a.header);
  const uint64_t bytes = a.count * sizeof(typename Codec::Storage);
  const auto row = [&](uint32_t rank) {
    return Words(static_cast<const std::byte*>(a.input) + rank * bytes, bytes);
  };
  const Words own = row(lane.rank()), output(a.output, bytes);
  const Slice words(Words::Count(bytes), hw::Block(), hw::Blocks(), 1);
  lane.Begin();
  lane.Signal();
  for (uint32_t step = 1; step < lane.ranks(); ++step) {
    const uint32_t peer = (lane.rank() + step) % lane.ranks();
    const Words from = row(peer);
    for (uint64_t i = hw::Thread(); i < words.size(); i += hw::Threads()) {
      hw::StorePacket(lane.Packets(peer, lane.rank()) + i,
                      MakePacket(from.Load(words.begin + i), lane.flag()));
    }
  }
  // The output may be any row of the input: who has sent a word of each row also writes it.
  CombinePackets<Codec, Op>(lane, own, output, words);
  lane.End();
}

template <class Codec, class Op>
JF_DEVICE void reduce_scatter_pull_body(const ReduceArguments& a) {
  Lane lane(a.communicator, a.header);
  const auto* input = static_cast<const std::byte*>(a.input);
  auto* output = static_cast<std::byte*>(a.output);
  const uint64_t bytes = a.count * sizeof(typename Codec::Storage);
  const Slice slice(bytes, hw::Block(), hw::Blocks(), kLineBytes);
  const uint32_t ranks = lane.ranks(), region_bytes = a.communicator.shape.bulk_bytes / ranks;
  for (uint64_t at = slice.begin; at < slice.end; at += region_bytes) {
    const uint64_t segment = slice.end - at < region_bytes ? slice.end - at : region_bytes;
    lane.Begin();
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      CopyBlock(lane.Bulk(lane.rank()) + rank * region_bytes, input + rank * bytes + at, segment);
    }
    lane.Signal();
    lane.Await();
    const uint32_t staged = lane.parity();
    std::byte* combined = lane.Bulk(lane.rank()) + lane.rank() * region_bytes;
    CombineBlock<Codec, Op>(
        combined, ranks,
        [&](uint32_t rank) { return lane.Bulk(rank, staged) + lane.rank() * region_bytes; },
        segment);
    hw::SyncBlock();
    CopyBlock(output + at, combined, segment);
  }
  lane.End();
}

}  // namespace jaxfabric::device
