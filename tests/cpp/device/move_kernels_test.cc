// Kernels that move bytes, executed for 1 to 8 ranks with random schedules.
#include "device/cluster.h"
#include "device/move_case.h"

namespace jaxfabric::device {
namespace {

class MoveKernels : public testing::TestWithParam<std::string> {};

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
