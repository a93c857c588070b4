// x[rows, hidden], residual[rows, hidden], weight[hidden] -> y, new_residual: what follows an
// all_reduce in a transformer's layer, in the same kernel:
//
//   new_residual = all_reduce(x) + residual
//   y = new_residual / sqrt(mean(new_residual ** 2) + epsilon) * weight, row by row
//
// The new residual has the bits of the two operations one by one: the sum of the ranks is rounded
// as all_reduce rounds it, and every rank adds its own residual to it. y is made of that in float32
// and rounded once. Where the ranks' residuals are equal they get the same bits.
//
// packets: every rank gets all of x and does all rows: one trip. two_shot: each rank sums some of
// every segment and sends it to the others; a segment may end within a row.
#pragma once

#include <cmath>

#include "device/combine.cuh"
#include "device/lane.cuh"

namespace jaxfabric::device {

template <class Codec>
class RmsNorm {
 public:
  using Storage = typename Codec::Storage;
  static constexpr uint32_t kGroups = 32;
  struct Partial {
    float thread[kBlockThreads], group[kGroups];
  };

  JF_DEVICE RmsNorm(const RmsNormArguments& a, Partial& partial) : a_(a), partial_(partial) {}

  JF_DEVICE uint64_t RowBytes() const { return uint64_t{a_.hidden} * sizeof(Storage); }

  // Elements of the new residual from those of the sum and of the residual.
  static JF_DEVICE uint64_t AddResidual(uint64_t sum, uint64_t residual) {
    const auto one = std::bit_cast<Elements>(sum), other = std::bit_cast<Elements>(residual);
    float values[Elements::kCount];
    JF_UNROLL
    for (uint32_t k = 0; k < Elements::kCount; ++k) {
      values[k] = Codec::Load(one.value[k]) + Codec::Load(other.value[k]);
    }
    return StoreElements<Codec, uint64_t>(values);
  }

  // Makes y of a row of the new residual, which the block has written.
  JF_DEVICE void Normalise(uint64_t row) {
    const uint64_t bytes = RowBytes(), at = row * bytes;
    const Words residual(static_cast<const std::byte*>(a_.new_residual) + at, bytes);
    const Words output(static_cast<const std::byte*>(a_.output) + at, bytes);
    const Words weight(a_.weight, bytes);
    hw::SyncBlock();
    float squares = 0;
    for (uint32_t i = hw::Thread(); i < bytes / 8; i += hw::Threads()) {
      const auto element = std::bit_cast<Elements>(residual.Load(i));
      JF_UNROLL
      for (uint32_t k = 0; k < Elements::kCount; ++k) {
        const float value = Codec::Load(element.value[k]);
        squares = squares + value * value;
      }
    }
    const float mean = SumOfBlock(squares) / static_cast<float>(a_.hidden);
    const float scale = 1.0f / sqrtf(mean + a_.epsilon);
    for (uint32_t i = hw::Thread(); i < bytes / 8; i += hw::Threads()) {
      const auto element = std::bit_cast<Elements>(residual.Load(i));
      const auto factor = std::bit_cast<Elements>(weight.Load(i));
      float result[Elements::kCount];
      JF_UNROLL
      for (uint32_t k = 0; k < Elements::kCount; ++k) {
        result[k] = Codec::Load(element.value[k]) * scale * Codec::Load(factor.value[k]);
      }
      output.Store(i, StoreElements<Codec, uint64_t>(result));
    }
  }

 private:
  using Elements = ElementsOf<Storage, uint64_t>;

  // In an order that depends on the number of threads only.
  JF_DEVICE float SumOfBlock(float value) {
    partial_.thread[hw::Thread()] = value;
    hw::SyncBlock();
    const uint32_t each = (hw::Threads() + kGroups - 1) / kGroups;
    for (uint32_t group = hw::Thread(); group < kGroups; group += hw::Threads()) {
      float sum = 0;
      for (uint32_t i = group * each; i < (group + 1) * each && i < hw::Threads(); ++i) {
        sum = sum + partial_.thread[i];
      }
      partial_.group[group] = sum;
    }
    hw::SyncBlock();
    float sum = 0;
    JF_UNROLL
    for (uint32_t group = 0; group < kGroups; ++group) sum = sum + partial_.group[group];
    return sum;
  }

  const RmsNormArguments& a_;
  Partial& partial_;
};

template <class Codec>
JF_DEVICE void all_reduce_rms_norm_packets_body(const RmsNormArguments& a) {
  Lane lane(a.communicator, a.header);
  JF_SHARED(typename RmsNorm<Codec>::Partial, partial);
  RmsNorm<Codec> norm(a, partial);
  const Slice rows(a.rows, hw::Block(), hw::Blocks(), 1);
  const uint64_t begin = rows.begin * norm.RowBytes(), bytes = rows.size() * norm.RowBytes();
  const auto words = static_cast<uint32_t>(bytes / 8);
  const Words input(static_cast<const std::byte*>(a.input) + begin, bytes);
  const Words residual(static_cast<const std::byte*>(a.residual) + begin, bytes);
  const Words sum(static_cast<const std::byte*>(a.new_residual) + begin, bytes);
  lane.Begin();
  lane.Signal();
  for (uint32_t i = hw::Thread(); i < words; i += hw::Threads()) {
    const Packet packet = MakePacket(input.Load(i), lane.flag());
    for (uint32_t step = 1; step < lane.ranks(); ++step) {
      const uint32_t peer = (lane.rank() + step) % lane.ranks();
      hw::StorePacket(lane.Packets(peer, lane.rank()) + i, packet);
    }
  }
  lane.AwaitWithoutSync();
  for (uint32_t i = hw::Thread(); i < words; i += hw::Threads()) {
    const uint64_t total = Combine<Codec, SumOp, uint64_t, Packet>(
        lane.ranks(),
        [&](uint32_t source) {
          return source == lane.rank() ? MakePacket(input.Load(i), lane.flag())
                                       : hw::LoadPacket(lane.Packets(lane.rank(), source) + i);
        },
        [&](const Packet& seen, uint32_t source) {
          return PacketData(lane.AwaitPacket(lane.Packets(lane.rank(), source) + i, source, seen));
        });
    sum.Store(i, norm.AddResidual(total, residual.Load(i)));
  }
  for (uint64_t row = rows.begin; row < rows.end; ++row) norm.Normalise(row);
  lane.End();
}

template <class Codec>
JF_DEVICE void all_reduce_rms_norm_two_shot_body(const RmsNormArguments& a) {
  Lane lane(a.communicator, a.header);
  JF_SHARED(typename RmsNorm<Codec>::Partial, partial);
  RmsNorm<Codec> norm(a, partial);
  const Slice rows(a.rows, hw::Block(), hw::Blocks(), 1);
  const uint64_t row_bytes = norm.RowBytes(), end = rows.end * row_bytes;
  const uint32_t ranks = lane.ranks(), bulk_bytes = a.communicator.shape.bulk_bytes;
  uint64_t row = rows.begin;  // the first whose y is still to be made
  for (uint64_t at = rows.begin * row_bytes; at < end; at += bulk_bytes) {
    const auto segment = static_cast<uint32_t>(end - at < bulk_bytes ? end - at : bulk_bytes);
    lane.Begin();
    CopyBlock(lane.Bulk(lane.rank()), static_cast<const std::byte*>(a.input) + at, segment);
    lane.Signal();
    lane.Await();
    const Slice part(segment, lane.rank(), ranks, sizeof(Vector));
    const auto own = static_cast<uint32_t>(part.begin), bytes = static_cast<uint32_t>(part.size());
    const uint32_t staged = lane.parity();
    lane.Begin();
    std::byte* combined = lane.Bulk(lane.rank()) + own;
    CombineBlock<Codec, SumOp>(
        combined, ranks, [&](uint32_t rank) { return lane.Bulk(rank, staged) + own; }, bytes);
    // Whole vectors: each is sent by the thread that has made it.
    for (uint32_t step = 1; step < ranks; ++step) {
      CopyBlock(lane.Bulk((lane.rank() + step) % ranks) + own, combined, bytes);
    }
    lane.Signal();
    lane.Await();
    const Words total(lane.Bulk(lane.rank()), segment);
    const Words residual(static_cast<const std::byte*>(a.residual) + at, segment);
    const Words sum(static_cast<const std::byte*>(a.new_residual) + at, segment);
    for (uint32_t i = hw::Thread(); i < segment / 8; i += hw::Threads()) {
      sum.Store(i, norm.AddResidual(total.Load(i), residual.Load(i)));
    }
    for (; (row + 1) * row_bytes <= at + segment; ++row) norm.Normalise(row);
  }
  lane.End();
}

}  // namespace jaxfabric::device
