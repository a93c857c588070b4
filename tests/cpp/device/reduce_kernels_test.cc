// Kernels that combine, executed for 1 to 8 ranks with random schedules, against the CPU's
// reductions.
#include <tuple>

#include "device/cluster.h"
#include "device/reduction_values.h"
#include "memory/reduce_reference.h"

namespace jaxfabric::device {
namespace {

using Parameter = std::tuple<std::string, ReduceOp, DType>;

std::vector<Parameter> Parameters() {
  std::vector<Parameter> all;
  for (const char* family :
       {"all_reduce_packets", "all_reduce_two_shot", "all_reduce_multicast",
        "reduce_scatter_packets", "reduce_scatter_pull", "reduce_scatter_multicast"}) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      for (DType dtype : AllDTypes()) {
        if (!CheckReducible(dtype, op).ok()) continue;
        if (std::string(family).ends_with("multicast") && !MulticastCombines(dtype, op)) continue;
        all.emplace_back(family, op, dtype);
      }
    }
  }
  return all;
}

class ReduceKernels : public testing::TestWithParam<Parameter> {};

std::string SuffixOf(ReduceOp op, DType dtype) {
  return StrCat("_", ReduceOpName(op), "_", DTypeName(KernelElement(dtype, op).dtype));
}

TEST_P(ReduceKernels, GiveTheBitsOfTheCpu) {
  const auto& [family, op, dtype] = GetParam();
  const bool scatters = family.starts_with("reduce_scatter");
  const bool packets = family.ends_with("packets");
  const std::string kernel = StrCat("jaxfabric_", family, SuffixOf(op, dtype));
  std::mt19937_64 random(std::hash<std::string>()(kernel));
  for (int round = 0; round < 2 + Rounds(10); ++round) {
    const auto ranks = static_cast<uint32_t>(round == 0 ? 2 : 1 + random() % 8);
    const ArenaShape shape{ranks, 3, 128, kLineBytes * ranks};
    Cluster cluster(shape, random());
    if (family.ends_with("multicast")) cluster.EnableMulticast();
    const auto blocks = static_cast<uint32_t>(1 + random() % 3);
    const auto threads = static_cast<uint32_t>(1 + random() % 24);
    const bool in_place = random() % 2 == 0;
    // Packets: what the areas hold. Bulk: several segments for each lane.
    const uint64_t most = packets ? uint64_t{128} * blocks : uint64_t{1500} * blocks;
    const uint64_t count = random() % (most / DTypeSize(dtype) + 1);
    const uint64_t bytes = count * DTypeSize(dtype);
    const uint64_t input_bytes = bytes * (scatters ? ranks : 1);

    std::vector<Bytes> inputs, outputs;
    std::vector<std::vector<std::byte>> values;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      // XLA aligns arrays, but a slice of one may begin at any element.
      inputs.emplace_back(input_bytes, (random() % 16) / PartBytes(dtype) * PartBytes(dtype));
      outputs.emplace_back(bytes, (random() % 16) / PartBytes(dtype) * PartBytes(dtype));
      Fill(random, dtype, inputs[rank].data(), input_bytes);
      values.push_back(inputs[rank].Copy());
    }
    // Twice in one communicator: areas are used again, with the other parity.
    for (int launch = 0; launch < 2; ++launch) {
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        std::memcpy(inputs[rank].data(), values[rank].data(), input_bytes);
        ReduceArguments arguments{cluster.View(rank), 77, inputs[rank].data(),
                                  in_place ? inputs[rank].data() : outputs[rank].data(),
                                  count * KernelElement(dtype, op).factor};
        // The memory of a rank that has ended may leave the switch.
        const auto leave = [&, rank](bool) {
          if (!family.ends_with("multicast") || launch == 0) return;
          const uint64_t bulk = shape.BulkOffset(0, 0);
          std::memset(cluster.arena(rank) + bulk, 0x5A, shape.Bytes() - bulk);
        };
        cluster.Start(rank, kernel, blocks, threads, arguments, leave);
      }
      cluster.RunAll();
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        ASSERT_FALSE(cluster.trapped[rank]);
        Bytes& output = in_place ? inputs[rank] : outputs[rank];
        std::vector<std::vector<std::byte>> sources;
        for (const auto& value : values) {
          sources.push_back(scatters ? Part(value, rank * bytes, bytes) : value);
        }
        ASSERT_EQ(Part(output.Copy(), 0, bytes), Reference(dtype, op, sources))
            << kernel << " rank " << rank << " of " << ranks << ", count " << count << ", blocks "
            << blocks << ", threads " << threads << (in_place ? ", in place" : "");
        EXPECT_TRUE(inputs[rank].GuardsIntact());
        EXPECT_TRUE(outputs[rank].GuardsIntact());
        if (!in_place) {
          EXPECT_EQ(inputs[rank].Copy(), values[rank]);
        }
      }
    }
  }
}

std::string NameOf(const testing::TestParamInfo<Parameter>& tested) {
  const auto& [family, op, dtype] = tested.param;
  return StrCat(family, SuffixOf(op, dtype), "_of_", DTypeName(dtype));
}

INSTANTIATE_TEST_SUITE_P(All, ReduceKernels, testing::ValuesIn(Parameters()), NameOf);

}  // namespace
}  // namespace jaxfabric::device
