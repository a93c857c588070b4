// A long sequence of calls of every kind in one communicator, each of which is checked: what a rank
// has is a function of the call, the rank and the place.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "device/cluster.h"

namespace jaxfabric::device {

struct MixedCall {
  static constexpr uint32_t kMostRanks = 8;
  std::string kernel;  // without "jaxfabric_"
  uint32_t ranks, blocks, threads;
  uint64_t bytes;
  uint32_t header;
  uint32_t root, shift, silent;  // permute: by `shift`, but `silent` sends nothing

  bool Is(std::string_view op) const { return kernel.starts_with(op); }
  // 4 bytes where the switch adds, which has no smaller integers.
  uint32_t ElementBytes() const { return kernel.ends_with("uint32") ? 4 : 1; }
  uint8_t Input(uint32_t rank, uint64_t i) const {
    const auto value = static_cast<uint8_t>((header * 2654435761u + rank * 40503u + i * 31u) >> 7);
    // So small that the sum of a byte is no concern of the next one.
    return ElementBytes() == 1 ? value : static_cast<uint8_t>(value / kMostRanks);
  }
  uint64_t InputBytes() const {
    return bytes * (Is("all_to_all") || Is("reduce_scatter") ? ranks : 1);
  }
  uint64_t OutputBytes() const {
    return bytes * (Is("all_to_all") || Is("all_gather") ? ranks : 1);
  }
  int32_t Target(uint32_t rank) const {
    return rank == silent ? -1 : static_cast<int32_t>((rank + shift) % ranks);
  }
  int32_t Source(uint32_t rank) const {
    const uint32_t source = (rank + ranks - shift % ranks) % ranks;
    return source == silent ? -1 : static_cast<int32_t>(source);
  }
  uint8_t Expected(uint32_t rank, uint64_t i) const {
    if (Is("all_gather")) return Input(static_cast<uint32_t>(i / bytes), i % bytes);
    if (Is("all_to_all")) {
      return Input(static_cast<uint32_t>(i / bytes), rank * bytes + i % bytes);
    }
    if (Is("broadcast")) return Input(root, i);
    if (Is("barrier")) return Input(rank, i);
    if (Is("permute")) {
      const int32_t source = Source(rank);
      return source < 0 ? uint8_t{0} : Input(static_cast<uint32_t>(source), i);
    }
    uint8_t sum = 0;
    for (uint32_t p = 0; p < ranks; ++p) {
      sum = static_cast<uint8_t>(sum + Input(p, Is("reduce_scatter") ? rank * bytes + i : i));
    }
    return sum;
  }
};

inline const std::vector<std::string>& MixedKernels() {
  static const std::vector<std::string> names = {
      "all_reduce_packets_sum_uint8",
      "all_reduce_two_shot_sum_uint8",
      "reduce_scatter_packets_sum_uint8",
      "reduce_scatter_pull_sum_uint8",
      "all_gather_packets",
      "all_gather_push",
      "all_reduce_multicast_sum_uint32",
      "reduce_scatter_multicast_sum_uint32",
      "all_gather_multicast",
      "all_to_all_packets",
      "all_to_all_push",
      "permute_packets",
      "permute_push",
      "broadcast_packets",
      "broadcast_push",
      "barrier",
  };
  return names;
}

// One that fits into the areas, of up to `segments` steps or so.
inline MixedCall RandomCall(std::mt19937_64& random, const ArenaShape& shape,
                            const std::string& kernel, uint32_t segments = 3) {
  MixedCall call{kernel, shape.ranks, 1, 1, 0, 0, 0, 0, 0};
  if (kernel != "barrier") call.blocks = static_cast<uint32_t>(1 + random() % shape.lanes);
  call.threads = static_cast<uint32_t>(1 + random() % 6);
  const uint64_t most = kernel.find("packets") != std::string::npos
                            ? shape.packet_bytes
                            : uint64_t{shape.bulk_bytes} / shape.ranks * segments;
  call.bytes = 1 + random() % (most * call.blocks);
  call.bytes += (call.ElementBytes() - call.bytes % call.ElementBytes()) % call.ElementBytes();
  call.header = static_cast<uint32_t>(random());
  call.root = static_cast<uint32_t>(random() % shape.ranks);
  call.shift = static_cast<uint32_t>(random() % shape.ranks);
  call.silent = static_cast<uint32_t>(random() % (shape.ranks + 1));
  return call;
}

// One rank's part in calls, with the arrays of the one that is running.
class MixedRank {
 public:
  MixedRank(Cluster& cluster, uint32_t rank) : cluster_(cluster), rank_(rank) {}

  uint64_t Start(const MixedCall& call, std::function<void(bool)> finished = nullptr) {
    call_ = call;
    const uint32_t offset = call.header % 16 / call.ElementBytes() * call.ElementBytes();
    input_ = Bytes(call.InputBytes(), offset);
    output_ = Bytes(call.OutputBytes());
    for (uint64_t i = 0; i < input_.size(); ++i) input_.data()[i] = std::byte{call.Input(rank_, i)};
    const std::string kernel = "jaxfabric_" + call.kernel;
    if (call.Is("all_reduce") || call.Is("reduce_scatter")) {
      const ReduceArguments a{cluster_.View(rank_), call.header, input_.data(), output_.data(),
                              call.bytes / call.ElementBytes()};
      return cluster_.Start(rank_, kernel, call.blocks, call.threads, a, std::move(finished));
    }
    const MoveArguments a{cluster_.View(rank_), call.header,   call.root,      call.Target(rank_),
                          call.Source(rank_),   input_.data(), output_.data(), call.bytes};
    return cluster_.Start(rank_, kernel, call.blocks, call.threads, a, std::move(finished));
  }
  testing::AssertionResult Check() {
    for (uint64_t i = 0; i < output_.size(); ++i) {
      if (output_.data()[i] == std::byte{call_.Expected(rank_, i)}) continue;
      return testing::AssertionFailure() << call_.kernel << ", rank " << rank_ << ", byte " << i
                                         << " of " << output_.size() << ", blocks " << call_.blocks;
    }
    if (!output_.GuardsIntact()) return testing::AssertionFailure() << call_.kernel << ": guards";
    return testing::AssertionSuccess();
  }

 private:
  Cluster& cluster_;
  uint32_t rank_;
  MixedCall call_{};
  Bytes input_{0}, output_{0};
};

// One for every rank. What is in flight in the end is dropped with the arrays.
class MixedRanks {
 public:
  explicit MixedRanks(Cluster& cluster) : cluster_(cluster) {
    cluster.EnableMulticast();
    for (uint32_t rank = 0; rank < cluster.ranks(); ++rank) all_.emplace_back(cluster, rank);
  }
  ~MixedRanks() { cluster_.KillAll(); }
  MixedRank& operator[](uint32_t rank) { return all_[rank]; }

 private:
  Cluster& cluster_;
  std::vector<MixedRank> all_;
};

// Does `count` calls, each rank as fast as it can; call(i) is asked for by every rank. Returns
// whether all gave what they should.
inline testing::AssertionResult RunCalls(Cluster& cluster, uint32_t count,
                                         const std::function<MixedCall(uint32_t)>& call) {
  MixedRanks ranks(cluster);
  std::vector<uint32_t> done(cluster.ranks());
  testing::AssertionResult result = testing::AssertionSuccess();
  std::function<void(uint32_t)> next = [&](uint32_t rank) {
    ranks[rank].Start(call(done[rank]), [&, rank](bool trapped) {
      if (trapped) {
        result = testing::AssertionFailure() << "rank " << rank << " trapped";
        return;
      }
      const testing::AssertionResult right = ranks[rank].Check();
      if (!right)
        result = testing::AssertionFailure() << "call " << done[rank] << ": " << right.message();
      if (++done[rank] < count && result) next(rank);
    });
  };
  for (uint32_t rank = 0; rank < cluster.ranks(); ++rank) next(rank);
  while (result && cluster.grid().Run(1 << 16)) {
  }
  return result;
}

}  // namespace jaxfabric::device
