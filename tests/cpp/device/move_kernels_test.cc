// Kernels that move bytes, executed for 1 to 8 ranks with random schedules.
#include <numeric>

#include "device/cluster.h"

namespace jaxfabric::device {
namespace {

class MoveKernels : public testing::TestWithParam<std::string> {};

// What every rank sends, whom permute's ranks send to, and what all must have in the end.
struct Case {
  uint32_t ranks, root;
  uint64_t bytes;
  std::vector<int32_t> target, source;
  std::vector<std::vector<std::byte>> inputs;

  std::vector<std::byte> Expected(const std::string& op, uint32_t rank) const {
    std::vector<std::byte> result;
    const auto append = [&](uint32_t from, uint64_t at) {
      const auto begin = inputs[from].begin() + static_cast<std::ptrdiff_t>(at);
      result.insert(result.end(), begin, begin + static_cast<std::ptrdiff_t>(bytes));
    };
    if (op == "barrier") append(rank, 0);
    if (op == "broadcast") append(root, 0);
    if (op == "permute") {
      if (source[rank] < 0) return std::vector<std::byte>(bytes);
      append(static_cast<uint32_t>(source[rank]), 0);
    }
    for (uint32_t from = 0; from < ranks; ++from) {
      if (op == "all_gather") append(from, 0);
      if (op == "all_to_all") append(from, rank * bytes);
    }
    return result;
  }
};

Case MakeCase(std::mt19937_64& random, const std::string& op, uint32_t ranks, uint64_t bytes) {
  Case c{ranks, static_cast<uint32_t>(random() % ranks), bytes, {}, {}, {}};
  c.target.assign(ranks, -1);
  c.source.assign(ranks, -1);
  std::vector<int32_t> order(ranks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (random() % 4 == 0) continue;
    c.target[rank] = order[rank];
    c.source[static_cast<size_t>(order[rank])] = static_cast<int32_t>(rank);
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    c.inputs.emplace_back(bytes * (op == "all_to_all" ? ranks : 1));
    for (std::byte& byte : c.inputs.back()) byte = static_cast<std::byte>(random());
  }
  return c;
}

TEST_P(MoveKernels, MoveEveryByte) {
  const std::string op = GetParam().substr(0, GetParam().rfind('_'));
  const bool packets = GetParam().ends_with("packets");
  const std::string kernel = op == "barrier" ? "jaxfabric_barrier" : "jaxfabric_" + GetParam();
  std::mt19937_64 random(std::hash<std::string>()(kernel));
  for (int round = 0; round < Rounds(80); ++round) {
    const uint32_t ranks = 1 + static_cast<uint32_t>(round) % 8;
    Cluster cluster({ranks, 3, 128, kLineBytes * ranks}, random());
    if (GetParam().ends_with("multicast")) cluster.EnableMulticast();
    const auto blocks = static_cast<uint32_t>(1 + random() % 3);
    const auto threads = static_cast<uint32_t>(1 + random() % 24);
    const bool in_place = random() % 2 == 0;
    const uint64_t bytes = random() % (packets ? 128 * blocks + 1 : 1500 * blocks);
    for (int launch = 0; launch < 2; ++launch) {
      const Case c = MakeCase(random, op, ranks, bytes);
      std::vector<Bytes> outputs, inputs;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        inputs.emplace_back(c.inputs[rank].size(), static_cast<uint32_t>(random() % 16));
        std::memcpy(inputs[rank].data(), c.inputs[rank].data(), c.inputs[rank].size());
        outputs.emplace_back(c.Expected(op, rank).size(), static_cast<uint32_t>(random() % 16));
        std::byte* input = inputs[rank].data();
        std::byte* output = outputs[rank].data();
        if (in_place) {
          // all_gather's input is its own row of the output.
          if (op == "all_gather") {
            std::memcpy(output + rank * bytes, input, bytes);
            input = output + rank * bytes;
          } else {
            output = input;
          }
        }
        MoveArguments arguments{cluster.View(rank), 5,     c.root, c.target[rank],
                                c.source[rank],     input, output, bytes};
        cluster.Start(rank, kernel, blocks, threads, arguments);
      }
      cluster.RunAll();
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        ASSERT_FALSE(cluster.trapped[rank]);
        Bytes& output = in_place && op != "all_gather" ? inputs[rank] : outputs[rank];
        ASSERT_EQ(output.Copy(), c.Expected(op, rank))
            << kernel << " rank " << rank << " of " << ranks << ", bytes " << bytes << ", blocks "
            << blocks << ", threads " << threads << (in_place ? ", in place" : "");
        EXPECT_TRUE(inputs[rank].GuardsIntact());
        EXPECT_TRUE(outputs[rank].GuardsIntact());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MoveKernels,
                         testing::Values("all_gather_packets", "all_gather_push",
                                         "all_gather_multicast", "all_to_all_packets",
                                         "all_to_all_push", "permute_packets", "permute_push",
                                         "broadcast_packets", "broadcast_push", "barrier_push"),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace jaxfabric::device
