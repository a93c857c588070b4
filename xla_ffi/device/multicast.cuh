// Calls through multicast memory: the switch combines what all ranks have, and writes to all of
// them. Each byte crosses a link once or twice, whatever the number of ranks.
//
// all_reduce: ranks stage segments in their own arenas; each has the switch combine one part of
// them and write it to all. reduce_scatter: the same without the writing. all_gather: each writes
// to all.
#pragma once

#include "device/lane.cuh"
#include "device/multimem.cuh"

namespace jaxfabric::device {

JF_DEVICE Vector* VectorsAt(std::byte* address) { return reinterpret_cast<Vector*>(address); }

template <class Codec, class Op>
JF_DEVICE void all_reduce_multicast_body(const ReduceArguments& a) {
  Lane lane(a.communicator, a.header);
  const auto* input = static_cast<const std::byte*>(a.input);
  auto* output = static_cast<std::byte*>(a.output);
  const uint64_t bytes = a.count * sizeof(typename Codec::Storage);
  const Slice slice(bytes, hw::Block(), hw::Blocks(), kLineBytes);
  const uint32_t segment_bytes = a.communicator.shape.bulk_bytes;
  for (uint64_t at = slice.begin; at < slice.end; at += segment_bytes) {
    const uint64_t rest = slice.end - at;
    const auto segment = static_cast<uint32_t>(rest < segment_bytes ? rest : segment_bytes);
    lane.Begin();
    CopyBlock(lane.Bulk(lane.rank()), input + at, segment);
    hw::AliasFence();
    lane.Signal();
    lane.Await();
    hw::AliasFence();
    const Vector* staged = VectorsAt(lane.MulticastBulk());
    lane.Begin();
    Vector* combined = VectorsAt(lane.MulticastBulk());
    const uint32_t vectors = (segment + sizeof(Vector) - 1) / sizeof(Vector);
    const Slice part(vectors, lane.rank(), lane.ranks(), 1);
    for (uint64_t i = part.begin + hw::Thread(); i < part.end; i += hw::Threads()) {
      hw::MulticastStore(combined + i, hw::LoadReduce<Codec, Op>(staged + i));
    }
    hw::AliasFence();
    lane.Signal();
    lane.Await();
    hw::AliasFence();
    CopyBlock(output + at, lane.Bulk(lane.rank()), segment);
  }
  lane.End();
}

template <class Codec, class Op>
JF_DEVICE void reduce_scatter_multicast_body(const ReduceArguments& a) {
  Lane lane(a.communicator, a.header);
  const auto* input = static_cast<const std::byte*>(a.input);
  auto* output = static_cast<std::byte*>(a.output);
  const uint64_t bytes = a.count * sizeof(typename Codec::Storage);
  const Slice slice(bytes, hw::Block(), hw::Blocks(), kLineBytes);
  const uint32_t ranks = lane.ranks(), region_bytes = a.communicator.shape.bulk_bytes / ranks;
  for (uint64_t at = slice.begin; at < slice.end; at += region_bytes) {
    const uint64_t rest = slice.end - at;
    const auto segment = static_cast<uint32_t>(rest < region_bytes ? rest : region_bytes);
    lane.Begin();
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      CopyBlock(lane.Bulk(lane.rank()) + uint64_t{rank} * region_bytes, input + rank * bytes + at,
                segment);
    }
    hw::AliasFence();
    lane.Signal();
    lane.Await();
    hw::AliasFence();
    const uint64_t own = uint64_t{lane.rank()} * region_bytes;
    const Vector* staged = VectorsAt(lane.MulticastBulk() + own);
    // In place of what was staged, which nobody else reads.
    Vector* combined = VectorsAt(lane.Bulk(lane.rank()) + own);
    for (uint32_t i = hw::Thread(); i * sizeof(Vector) < segment; i += hw::Threads()) {
      combined[i] = hw::LoadReduce<Codec, Op>(staged + i);
    }
    hw::SyncBlock();
    CopyBlock(output + at, lane.Bulk(lane.rank()) + own, segment);
  }
  // A process that ends takes its memory from the switch, where others may still read it.
  lane.Begin();
  lane.Signal();
  lane.Await();
  lane.End();
}

JF_DEVICE void all_gather_multicast_body(const MoveArguments& a) {
  Lane lane(a.communicator, a.header);
  const auto* input = static_cast<const std::byte*>(a.input);
  auto* output = static_cast<std::byte*>(a.output);
  const bool aligned = Misalignment(input, input, 16) == 0;
  const Slice slice(a.bytes, hw::Block(), hw::Blocks(), kLineBytes);
  const uint32_t ranks = lane.ranks(), region_bytes = a.communicator.shape.bulk_bytes / ranks;
  for (uint64_t at = slice.begin; at < slice.end; at += region_bytes) {
    const uint64_t rest = slice.end - at;
    const auto segment = static_cast<uint32_t>(rest < region_bytes ? rest : region_bytes);
    lane.Begin();
    Vector* to = VectorsAt(lane.MulticastBulk() + uint64_t{lane.rank()} * region_bytes);
    for (uint32_t i = hw::Thread(); i * sizeof(Vector) < segment; i += hw::Threads()) {
      hw::MulticastStore(to + i, LoadVector(input + at, segment, i * sizeof(Vector), aligned));
    }
    hw::AliasFence();
    lane.Signal();
    CopyBlock(output + lane.rank() * a.bytes + at, input + at, segment);
    lane.Await();
    hw::AliasFence();
    for (uint32_t step = 1; step < ranks; ++step) {
      const uint32_t source = (lane.rank() + step) % ranks;
      CopyBlock(output + source * a.bytes + at,
                lane.Bulk(lane.rank()) + uint64_t{source} * region_bytes, segment);
    }
  }
  lane.End();
}

}  // namespace jaxfabric::device
