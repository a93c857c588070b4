// Every type and reduction, odd sizes and addresses, on ranks that are streams of one process.
#include <gtest/gtest.h>

#include <algorithm>

#include "collective/gpu/gpu_ranks.h"
#include "memory/reduce.h"

namespace jaxfabric::testing {
namespace {

constexpr DType kTypes[] = {
    DType::kBool,       DType::kInt8,        DType::kInt16,   DType::kInt32,     DType::kInt64,
    DType::kUint8,      DType::kUint16,      DType::kUint32,  DType::kUint64,    DType::kFloat16,
    DType::kBfloat16,   DType::kFloat32,     DType::kFloat64, DType::kComplex64, DType::kComplex128,
    DType::kFloat8E5M2, DType::kFloat8E4M3FN};

// A call, and where its arrays lie.
struct Case {
  Problem problem;
  size_t offset = 0;
  bool in_place = false;
};

class GpuValues : public ::testing::TestWithParam<Shape> {
 protected:
  // Code and memory are there on all ranks before the first kernel waits for another.
  void Run(const std::vector<Case>& cases) {
    const Shape shape = GetParam();
    EXPECT_EQ(OnGpus(shape,
                     [&](GpuProcess& process) {
                       std::vector<CallPointer> calls;
                       for (size_t i = 0; i < cases.size(); ++i) {
                         calls.push_back(MakeCall(cases[i].problem, shape.Ids(), 100 + i));
                       }
                       return process.OnEveryGpu([&](GpuRank& rank, int position) {
                         std::string failed;
                         std::vector<GpuRank::Execution> executions;
                         for (size_t i = 0; i < cases.size(); ++i) {
                           const auto& [problem, offset, in_place] = cases[i];
                           executions.push_back(rank.Make(problem, position, 3, offset, in_place));
                           failed += Text(calls[i]->Prepare(rank.ordinal(), executions[i].buffers));
                         }
                         process.together->arrive_and_wait();
                         for (size_t i = 0; i < cases.size(); ++i) {
                           failed += Text(calls[i]->Launch(rank.ordinal(), rank.stream(),
                                                           executions[i].buffers));
                         }
                         failed += rank.Synchronize();
                         for (size_t i = 0; i < cases.size() && failed.empty(); ++i) {
                           failed += rank.Check(executions[i], cases[i].problem, position, 3);
                           if (!failed.empty()) {
                             failed += StrCat(", offset ", cases[i].offset,
                                              cases[i].in_place ? ", in place" : "");
                           }
                         }
                         return failed;
                       });
                     }),
              "");
  }
};

TEST_P(GpuValues, EveryTypeAndReduction) {
  std::vector<size_t> counts = {37};
  // As emulated kernels the long ways are tested for every type in tests/cpp/device.
  if (Machine::OnHardware()) counts.insert(counts.end(), {4099, 250007});
  for (const size_t count : counts) {
    std::vector<Case> cases;
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter}) {
      for (const DType dtype : kTypes) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
          if (!CheckReducible(dtype, op).ok()) continue;
          // What all types of a call have together must fit into a rank's memory.
          const size_t fitting = std::min(count, (size_t{200} << 10) / DTypeSize(dtype));
          Problem problem{kind, dtype, fitting, GetParam().size(), op, {}, 0};
          if (kind == OpKind::kReduceScatter) {
            problem.count = (fitting + problem.size - 1) / problem.size;
          }
          cases.push_back({problem});
        }
      }
    }
    Run(cases);
  }
}

TEST_P(GpuValues, OddSizesAndAddresses) {
  std::vector<Case> cases;
  for (const size_t count : {1, 3, 7, 13, 129, 1001}) {
    for (const Problem& problem : EveryKind(GetParam().size(), count, DType::kUint8)) {
      for (const size_t offset : {0, 1, 4, 11}) cases.push_back({problem, offset});
    }
  }
  // Long ones go other ways.
  for (const Problem& problem : EveryKind(GetParam().size(), 100003, DType::kUint8)) {
    cases.push_back({problem, 5});
  }
  Run(cases);
}

TEST_P(GpuValues, RmsNorm) {
  std::vector<Case> cases;
  for (const Problem& problem : NormProblems(GetParam().size())) {
    cases.push_back({problem});
    cases.push_back({problem, 4, true});
  }
  Run(cases);
}

TEST_P(GpuValues, InPlace) {
  std::vector<Case> cases;
  for (const size_t count : {5, 30000}) {
    for (const Problem& problem : EveryKind(GetParam().size(), count)) {
      if (problem.input_bytes() != problem.output_bytes()) continue;
      if (problem.kind == OpKind::kRaggedAllToAll) continue;
      cases.push_back({problem, 0, true});
    }
  }
  Run(cases);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuValues,
                         ::testing::Values(Shape{1, 2}, Shape{1, 4}, Shape{1, 8}), ShapeName);

}  // namespace
}  // namespace jaxfabric::testing
