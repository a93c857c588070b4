// Kernels that read and write peers' own arrays, executed for 1 to 8 ranks with random schedules.
#include "device/cluster.h"
#include "device/mixed_calls.h"
#include "device/move_case.h"
#include "device/reduction_values.h"

namespace jaxfabric::device {
namespace {

// The arrays of the ranks of one call, each rank's in a window that begins somewhere before it.
class Windowed {
 public:
  Windowed(Cluster& cluster, std::mt19937_64& random) : cluster_(cluster), random_(random) {}

  // `unit`: of the arrays' addresses.
  void Add(const std::vector<std::byte>& input, uint64_t output_bytes, bool in_place,
           uint32_t unit) {
    const auto rank = static_cast<uint32_t>(inputs.size());
    const auto offset = [&] { return static_cast<uint32_t>(random_() % 16 / unit * unit); };
    inputs.emplace_back(input.size(), offset());
    outputs.emplace_back(output_bytes, offset());
    std::memcpy(inputs[rank].data(), input.data(), input.size());
    std::memset(outputs[rank].data(), 0xD7, output_bytes);
    in_place_.push_back(in_place);
  }
  std::byte* input(uint32_t rank) { return inputs[rank].data(); }
  std::byte* output(uint32_t rank) { return in_place_[rank] ? input(rank) : outputs[rank].data(); }

  // Has the table of every rank written, but for those that have none.
  void WriteTables(std::vector<WindowTable>& tables, const std::vector<bool>& without) {
    struct Place {
      uint64_t input, output;
    };
    std::vector<Place> places;
    for (uint32_t rank = 0; rank < cluster_.ranks(); ++rank) {
      places.push_back({random_() % 1000, random_() % 1000});
    }
    for (uint32_t rank = 0; rank < cluster_.ranks(); ++rank) {
      WriteTableArguments arguments{};
      WindowTable& table = arguments.table;
      arguments.to = &tables[rank];
      if (!without[rank]) {
        table.input = input(rank);
        table.output = output(rank);
        table.input_offset = places[rank].input;
        table.output_offset = places[rank].output;
        for (uint32_t peer = 0; peer < cluster_.ranks(); ++peer) {
          table.base[peer] = {input(peer) - places[peer].input, output(peer) - places[peer].output};
        }
      }
      cluster_.Start(rank, "jaxfabric_write_window_table", 1, 7, arguments);
    }
    cluster_.RunAll();
  }

  std::vector<Bytes> inputs, outputs;

 private:
  Cluster& cluster_;
  std::mt19937_64& random_;
  std::vector<bool> in_place_;
};

// Whether data went through the areas of the arenas, which are zero before; makes them so again.
bool AreasWereUsed(Cluster& cluster) {
  bool used = false;
  const ArenaShape& shape = cluster.shape();
  for (uint32_t rank = 0; rank < cluster.ranks(); ++rank) {
    for (uint32_t area = 0; area < 2 * shape.lanes; ++area) {
      std::byte* bulk = cluster.arena(rank) + shape.BulkOffset(area / 2, area % 2);
      for (uint64_t i = sizeof(WindowPlace) * cluster.ranks(); i < shape.bulk_bytes; ++i) {
        used |= bulk[i] != std::byte{0};
      }
      std::memset(bulk, 0, shape.bulk_bytes);
    }
  }
  return used;
}

// Some ranks without windows, in every third launch or so.
std::vector<bool> Without(std::mt19937_64& random, uint32_t ranks) {
  std::vector<bool> without(ranks);
  if (random() % 3 == 0) without[random() % ranks] = true;
  return without;
}
bool Any(const std::vector<bool>& values) {
  return std::find(values.begin(), values.end(), true) != values.end();
}

class WindowMoves : public testing::TestWithParam<std::string> {};

TEST_P(WindowMoves, MoveEveryByteInOnePiece) {
  const std::string& op = GetParam();
  const std::string kernel = StrCat("jaxfabric_", op, "_window");
  std::mt19937_64 random(std::hash<std::string>()(kernel));
  for (int round = 0; round < Rounds(80); ++round) {
    const uint32_t ranks = 1 + static_cast<uint32_t>(round) % 8;
    Cluster cluster({ranks, 3, 128, kLineBytes * ranks}, random());
    std::vector<WindowTable> tables(ranks);
    const auto blocks = static_cast<uint32_t>(1 + random() % 3);
    const auto threads = static_cast<uint32_t>(1 + random() % 24);
    const uint64_t bytes = random() % (1500 * blocks);
    // Arrays move between launches in one communicator.
    for (int launch = 0; launch < 3; ++launch) {
      const Case c = MakeCase(random, op, ranks, bytes);
      const std::vector<bool> without = Without(random, ranks);
      Windowed arrays(cluster, random);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        arrays.Add(c.inputs[rank], c.Expected(op, rank).size(), false, 1);
      }
      arrays.WriteTables(tables, without);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const MoveArguments call{
            cluster.View(rank),  5,    c.root, c.target[rank], c.source[rank], arrays.input(rank),
            arrays.output(rank), bytes};
        const WindowTable* table = without[rank] && random() % 2 == 0 ? nullptr : &tables[rank];
        cluster.Start(rank, kernel, blocks, threads, WindowMoveArguments{call, table});
      }
      cluster.RunAll();
      const bool copied = AreasWereUsed(cluster);
      EXPECT_TRUE(Any(without) || !copied);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        ASSERT_FALSE(cluster.trapped[rank]);
        ASSERT_EQ(arrays.outputs[rank].Copy(), c.Expected(op, rank))
            << kernel << " rank " << rank << " of " << ranks << ", bytes " << bytes << ", blocks "
            << blocks << ", threads " << threads << (Any(without) ? ", without windows" : "");
        EXPECT_EQ(arrays.inputs[rank].Copy(), c.inputs[rank]);
        EXPECT_TRUE(arrays.inputs[rank].GuardsIntact());
        EXPECT_TRUE(arrays.outputs[rank].GuardsIntact());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, WindowMoves,
                         testing::Values("all_gather", "all_to_all", "permute", "broadcast"),
                         [](const auto& tested) { return tested.param; });

class WindowReductions : public testing::TestWithParam<std::tuple<std::string, DType>> {};

TEST_P(WindowReductions, GiveTheBitsOfTheCpu) {
  const auto& [family, dtype] = GetParam();
  const bool scatters = family == "reduce_scatter";
  const std::string kernel = StrCat("jaxfabric_", family, "_window_sum_", DTypeName(dtype));
  std::mt19937_64 random(std::hash<std::string>()(kernel));
  for (int round = 0; round < Rounds(80); ++round) {
    const uint32_t ranks = 1 + static_cast<uint32_t>(round) % 8;
    Cluster cluster({ranks, 3, 128, kLineBytes * ranks}, random());
    std::vector<WindowTable> tables(ranks);
    const auto blocks = static_cast<uint32_t>(1 + random() % 3);
    const auto threads = static_cast<uint32_t>(1 + random() % 24);
    const uint64_t bytes = random() % (100 * blocks) * 16;
    for (int launch = 0; launch < 3; ++launch) {
      // Some ranks write their results where their operands are, others do not.
      const std::vector<bool> without = Without(random, ranks);
      Windowed arrays(cluster, random);
      std::vector<std::vector<std::byte>> values;
      std::vector<bool> in_place;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        in_place.push_back(!scatters && random() % 2 == 0);
        values.emplace_back(bytes * (scatters ? ranks : 1));
        Fill(random, dtype, values[rank].data(), values[rank].size());
        arrays.Add(values[rank], bytes, in_place[rank], 16);
      }
      arrays.WriteTables(tables, without);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const ReduceArguments call{cluster.View(rank), 77, arrays.input(rank), arrays.output(rank),
                                   bytes / DTypeSize(dtype)};
        const WindowTable* table = without[rank] && random() % 2 == 0 ? nullptr : &tables[rank];
        cluster.Start(rank, kernel, blocks, threads, WindowReduceArguments{call, table});
      }
      cluster.RunAll();
      const bool copied = AreasWereUsed(cluster);
      EXPECT_TRUE(Any(without) || !copied);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        ASSERT_FALSE(cluster.trapped[rank]);
        std::vector<std::vector<std::byte>> sources;
        for (const auto& value : values) {
          sources.push_back(scatters ? Part(value, rank * bytes, bytes) : value);
        }
        const std::vector<std::byte> result(arrays.output(rank), arrays.output(rank) + bytes);
        ASSERT_EQ(result, Reference(dtype, ReduceOp::kSum, sources))
            << kernel << " rank " << rank << " of " << ranks << ", bytes " << bytes << ", blocks "
            << blocks << ", threads " << threads << (Any(without) ? ", without windows" : "");
        if (!in_place[rank]) {
          EXPECT_EQ(arrays.inputs[rank].Copy(), values[rank]);
        }
        EXPECT_TRUE(arrays.inputs[rank].GuardsIntact());
        EXPECT_TRUE(arrays.outputs[rank].GuardsIntact());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, WindowReductions,
                         testing::Combine(testing::Values("all_reduce", "reduce_scatter"),
                                          testing::Values(DType::kFloat32, DType::kFloat16,
                                                          DType::kBfloat16)),
                         [](const auto& tested) {
                           return StrCat(std::get<0>(tested.param), "_",
                                         DTypeName(std::get<1>(tested.param)));
                         });

// Calls one after the other, each rank as fast as it can: when its kernel ends its result is whole,
// and its arrays are its own again.
TEST(WindowCalls, LeaveArraysWhenTheirKernelEnds) {
  std::vector<std::string> kernels;
  for (const std::string& kernel : MixedKernels()) {
    if (kernel.find("window") != std::string::npos) kernels.push_back(kernel);
  }
  for (int round = 0; round < Rounds(20); ++round) {
    const uint32_t ranks = 2 + static_cast<uint32_t>(round) % 4;
    const ArenaShape shape{ranks, 2, 128, MixedBulkBytes(ranks)};
    Cluster cluster(shape, static_cast<uint64_t>(round));
    std::mt19937_64 random(static_cast<uint64_t>(round));
    std::vector<MixedCall> calls;
    for (int i = 0; i < 60; ++i) {
      calls.push_back(RandomCall(random, shape, kernels[random() % kernels.size()], 2));
    }
    ASSERT_TRUE(RunCalls(cluster, 60, [&](uint32_t i) { return calls[i]; })) << "round " << round;
  }
}

// A kernel that was captured with arguments of then finds in the table where arrays are now.
TEST(WindowTables, ArrayThatIsNotTheTablesIsInNoWindow) {
  std::mt19937_64 random(3);
  Cluster cluster({2, 1, 128, kLineBytes * 2}, 4);
  std::vector<WindowTable> tables(2);
  Windowed arrays(cluster, random), others(cluster, random);
  const std::vector<std::byte> values(400, std::byte{7});
  for (int rank = 0; rank < 2; ++rank) {
    arrays.Add(values, 800, false, 1);
    others.Add(std::vector<std::byte>(400, std::byte{9}), 800, false, 1);
  }
  arrays.WriteTables(tables, {false, false});
  for (uint32_t rank = 0; rank < 2; ++rank) {
    // One of the two has other arrays than its table is about.
    Windowed& own = rank == 0 ? arrays : others;
    const MoveArguments call{cluster.View(rank), 5,  0, 0, 0, own.input(rank),
                             own.output(rank),   400};
    cluster.Start(rank, "jaxfabric_all_gather_window", 1, 8,
                  WindowMoveArguments{call, &tables[rank]});
  }
  cluster.RunAll();
  EXPECT_TRUE(AreasWereUsed(cluster));
  std::vector<std::byte> expected(800, std::byte{7});
  std::fill(expected.begin() + 400, expected.end(), std::byte{9});
  EXPECT_EQ(arrays.outputs[0].Copy(), expected);
  EXPECT_EQ(others.outputs[1].Copy(), expected);
  EXPECT_EQ(arrays.outputs[1].Copy(), std::vector<std::byte>(800, std::byte{0xD7}));
}

}  // namespace
}  // namespace jaxfabric::device
