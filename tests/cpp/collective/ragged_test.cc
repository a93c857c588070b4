// ragged_all_to_all beyond what every op is tested for: lengths that differ wildly between ranks,
// tables longer than their rings, and offsets and sizes that make no sense.
#include <gtest/gtest.h>

#include "collective/world.h"

namespace jaxfabric::testing {
namespace {

Problem Ragged(int size, size_t count, size_t row_elements = 1, size_t slices_each = 1) {
  Problem problem;
  problem.kind = OpKind::kRaggedAllToAll;
  problem.count = count;
  problem.size = size;
  problem.row_elements = row_elements;
  problem.slices_each = slices_each;
  return problem;
}

// Every rank sends all its rows to one rank, to another one in every launch.
Problem AllToOne(int size, size_t count) {
  Problem problem = Ragged(size, count);
  problem.slices = [size, count](int position, int launch) {
    const int target = launch % size;
    Slices slices;
    for (int peer = 0; peer < size; ++peer) {
      const auto rows = static_cast<int64_t>(count);
      slices.input_offsets.push_back(peer * rows);
      slices.send_sizes.push_back(peer == target ? rows : 0);
      slices.output_offsets.push_back(position * rows);
      slices.recv_sizes.push_back(position == target ? rows : 0);
    }
    return slices;
  };
  return problem;
}

std::string RunAll(LocalRanks& ranks, int local, size_t calls, int launches) {
  std::string failures;
  for (int launch = 0; launch < launches; ++launch) {
    for (size_t call = 0; call < calls; ++call) failures += Text(ranks.Run(call, local, launch));
  }
  return failures;
}

std::vector<Problem> Rows(int size) {
  std::vector<Problem> problems;
  for (size_t row : {1, 3, 16}) {
    for (size_t slices : {1, 2, 7, 600}) {
      for (size_t rows : {0, 1, 50, 4000})
        problems.push_back(Ragged(size, rows * row, row, slices));
    }
  }
  return problems;
}

class RaggedTest : public ::testing::TestWithParam<Shape> {};

TEST_P(RaggedTest, RowsAndSlices) {
  World world(GetParam());
  size_t calls = 0;
  for (const Problem& problem : Rows(GetParam().size())) calls = world.Add(problem) + 1;
  EXPECT_EQ(world.OnEveryRank(
                [&](LocalRanks& ranks, int local) { return RunAll(ranks, local, calls, 4); }),
            "");
}

// Rings of as little as 64 bytes, which the tables go round many times.
TEST_P(RaggedTest, ScarceStaging) {
  Options options = TestOptions();
  options.segment_bytes = 64 * 1024;
  World world(GetParam(), options);
  const int size = GetParam().size();
  size_t calls = 0;
  for (size_t count : {1, 500, 30000}) {
    for (size_t slices : {1, 300}) calls = world.Add(Ragged(size, count, 1, slices)) + 1;
  }
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
    std::string failures;
    for (int launch = 0; launch < 3; ++launch) {
      std::vector<std::unique_ptr<LocalRanks::Execution>> all;
      for (size_t call = 0; call < calls; ++call) all.push_back(ranks.Enter(call, local, launch));
      for (size_t call = 0; call < calls; ++call) {
        failures += Text(ranks.Check(call, local, launch, *all[call]));
      }
    }
    return failures;
  }),
            "");
}

TEST_P(RaggedTest, EverythingToOneRank) {
  World world(GetParam());
  const int size = GetParam().size();
  size_t calls = 0;
  for (size_t count : {100, 700000}) calls = world.Add(AllToOne(size, count)) + 1;
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
    return RunAll(ranks, local, calls, size + 1);
  }),
            "");
}

TEST_P(RaggedTest, OffsetsOfNoRowsMayBeAnything) {
  World world(GetParam());
  const int size = GetParam().size();
  for (size_t count : {5, 3000}) {
    Problem problem = Ragged(size, count);
    problem.slices = [size](int, int) {
      const auto all = static_cast<size_t>(size);
      return Slices{std::vector<int64_t>(all, -9), std::vector<int64_t>(all, 0),
                    std::vector<int64_t>(all, int64_t{1} << 60), std::vector<int64_t>(all, 0)};
    };
    world.Add(problem);
  }
  EXPECT_EQ(
      world.OnEveryRank([&](LocalRanks& ranks, int local) { return RunAll(ranks, local, 2, 2); }),
      "");
}

// One rank is told nonsense about one slice.
struct Mistake {
  const char* name;
  std::vector<int64_t> Slices::* array;
  int64_t value;
  Code code;
  const char* text;  // "#" stands for the slice on the rank that is wrong
};

constexpr int64_t kHuge = int64_t{1} << 62;
constexpr int64_t kLastRow = -1000;  // the offset of the last row, though two rows follow
const Mistake kMistakes[] = {
    {"input before", &Slices::input_offsets, -1, Code::kInvalidArgument, "input_offsets[#] is -1"},
    {"input behind", &Slices::input_offsets, kHuge, Code::kInvalidArgument,
     "input_offsets[#] is 4611686018427387904 and send_sizes[#] is 2, but its operand has"},
    {"input one too far", &Slices::input_offsets, kLastRow, Code::kInvalidArgument,
     " and send_sizes[#] is 2, but its operand has"},
    {"output one too far", &Slices::output_offsets, kLastRow, Code::kInvalidArgument,
     " and send_sizes[#] is 2, but the output of rank"},
    {"negative size", &Slices::send_sizes, -2, Code::kInvalidArgument, "send_sizes[#] is -2"},
    {"more than there is", &Slices::send_sizes, kHuge, Code::kInvalidArgument,
     "send_sizes[#] is 4611686018427387904, but its operand has"},
    {"more than expected", &Slices::send_sizes, 3, Code::kFailedPrecondition, "send_sizes[#] is 3"},
    {"less than expected", &Slices::send_sizes, 0, Code::kFailedPrecondition, "send_sizes[#] is 0"},
    {"expects too much", &Slices::recv_sizes, 5, Code::kFailedPrecondition, "recv_sizes[#] is 5"},
    {"expects a negative size", &Slices::recv_sizes, -2, Code::kFailedPrecondition,
     "recv_sizes[#] is -2"},
    {"output before", &Slices::output_offsets, -1, Code::kInvalidArgument,
     "output_offsets[#] is -1 and send_sizes[#] is 2"},
    {"output behind", &Slices::output_offsets, kHuge, Code::kInvalidArgument,
     "output_offsets[#] is 4611686018427387904 and send_sizes[#] is 2, but the output of rank"},
};

// Every rank sends two rows to every rank, each time; the last one makes the mistake with what it
// exchanges with the first, or with itself.
Problem Mistaken(int size, size_t count, const Mistake& mistake, bool with_itself,
                 int from_launch) {
  Problem problem = Ragged(size, count);
  problem.slices = [=](int position, int launch) {
    Slices slices;
    for (int peer = 0; peer < size; ++peer) {
      const auto rows = static_cast<int64_t>(count);
      slices.input_offsets.push_back(peer * rows);
      slices.send_sizes.push_back(2);
      // The last row of what there is, so that one more would be out of bounds.
      slices.output_offsets.push_back((position + 1) * rows - 2);
      slices.recv_sizes.push_back(2);
    }
    if (position == size - 1 && launch >= from_launch) {
      const auto last = static_cast<int64_t>(count) * size - 1;
      (slices.*mistake.array)[with_itself ? static_cast<size_t>(size) - 1 : 0] =
          mistake.value == kLastRow ? last : mistake.value;
    }
    return slices;
  };
  return problem;
}

std::string Replaced(std::string text, const std::string& by) {
  for (size_t at = text.find('#'); at != std::string::npos; at = text.find('#')) {
    text.replace(at, 1, by);
  }
  return text;
}

// What is wrong with the error; nothing if it says who, what, where, and the value.
std::string Explains(const Status& status, const Mistake& mistake, Shape shape, bool with_itself) {
  const std::string text = status.ToString();
  const std::string slice = std::to_string(with_itself ? shape.size() - 1 : 0);
  std::string failures;
  if (status.code() != mistake.code) failures += "another code; ";
  for (const std::string& part :
       {"rank " + std::to_string(shape.Ids().back()) + " (process", Replaced(mistake.text, slice),
        std::string("ragged_all_to_all float32["), std::string(" at ")}) {
    if (text.find(part) == std::string::npos) failures += "no '" + part + "'; ";
  }
  return failures.empty() ? "" : std::string(mistake.name) + ": " + failures + text + "\n";
}

std::string MistakesAreErrors(LocalRanks& ranks, int local, Shape shape, size_t count,
                              const Mistake& mistake, bool with_itself) {
  std::string failures = Text(ranks.Run(0, local, 0));
  // XLA goes on with other collectives, which fail for the same reason.
  for (int launch = 1; launch < 3; ++launch) {
    failures += Explains(ranks.Run(0, local, launch), mistake, shape, with_itself);
  }
  return failures.empty() ? "" : StrCat(count, " elements: ", failures);
}

TEST_P(RaggedTest, AMistakeOnOneRankIsAnErrorOnEveryRank) {
  const Shape shape = GetParam();
  for (const Mistake& mistake : kMistakes) {
    for (bool with_itself : {false, true}) {
      for (size_t count : {8, 5000}) {
        World world(shape);
        world.Add(Mistaken(shape.size(), count, mistake, with_itself, 1));
        EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
          return MistakesAreErrors(ranks, local, shape, count, mistake, with_itself);
        }),
                  "");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, RaggedTest,
                         ::testing::Values(Shape{1, 1}, Shape{1, 2}, Shape{1, 4}, Shape{2, 1},
                                           Shape{2, 2}, Shape{3, 1}, Shape{2, 2, 2},
                                           Shape{3, 2, 2}),
                         ShapeName);

TEST(RaggedForkedTest, RowsAndSlicesAndEverythingToOneRank) {
  for (Shape shape : {Shape{2, 1}, Shape{2, 2}, Shape{3, 1}}) {
    std::vector<Problem> problems = Rows(shape.size());
    problems.push_back(AllToOne(shape.size(), 700000));
    EXPECT_EQ(InForkedProcesses(shape, TestOptions(),
                                [&](LocalRanks& ranks) {
                                  for (const Problem& problem : problems) ranks.Add(problem);
                                  return OnThreads(shape.ranks_each, [&](int local) {
                                    return RunAll(ranks, local, problems.size(), 3);
                                  });
                                }),
              "");
  }
}

TEST(RaggedForkedTest, AMistakeIsAnErrorInEveryProcess) {
  for (Shape shape : {Shape{2, 1}, Shape{2, 2}, Shape{3, 1}}) {
    for (const Mistake& mistake : kMistakes) {
      EXPECT_EQ(InForkedProcesses(shape, TestOptions(),
                                  [&](LocalRanks& ranks) {
                                    ranks.Add(Mistaken(shape.size(), 3000, mistake, false, 1));
                                    return OnThreads(shape.ranks_each, [&](int local) {
                                      return MistakesAreErrors(ranks, local, shape, 3000, mistake,
                                                               false);
                                    });
                                  }),
                "");
    }
  }
}

}  // namespace
}  // namespace jaxfabric::testing
