// The schedule is a pure function: what ranks must agree on, for 1 to 17 of them.
#include "collective/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

#include "collective/problem.h"

namespace jaxfabric::testing {
namespace {

std::vector<int64_t> Ids(int size) {
  std::vector<int64_t> ids;
  for (int i = 0; i < size; ++i) ids.push_back(i);
  return ids;
}

std::vector<Plan> Plans(const Problem& problem, Topology topology) {
  const CallSpec spec = problem.Spec(Ids(problem.size), 1);
  Buffers sizes;
  sizes.input_bytes = problem.input_bytes();
  sizes.output_bytes = problem.output_bytes();
  sizes.dtype = problem.dtype;
  sizes.ragged_sizes = problem.Ragged();
  EXPECT_TRUE(CheckSizes(spec, problem.size, sizes).ok());
  std::vector<Plan> plans;
  for (int rank = 0; rank < problem.size; ++rank) {
    plans.emplace_back(spec, problem.size, rank, sizes, topology);
  }
  return plans;
}

void CheckPlans(const Problem& problem, Topology topology) {
  SCOPED_TRACE(problem.Describe());
  const std::vector<Plan> plans = Plans(problem, topology);
  const Plan& first = plans[0];
  size_t parts = 0;
  for (const Plan& plan : plans) {
    // What decides how bytes travel is the same everywhere.
    EXPECT_EQ(plan.algorithm, first.algorithm);
    EXPECT_EQ(plan.header, first.header);
    EXPECT_EQ(plan.stream, first.stream);
    EXPECT_EQ(plan.inlined, first.inlined);
    EXPECT_EQ(plan.part, first.part);
    EXPECT_EQ(plan.segment, first.segment);
    EXPECT_EQ(plan.ring, first.ring);

    // Who reads from whom is told the same by both.
    for (const Plan& peer : plans) {
      const bool reads = std::ranges::count(plan.sources, peer.position) > 0;
      const bool is_read = std::ranges::count(peer.readers, plan.position) > 0;
      EXPECT_EQ(reads, is_read) << plan.position << " from " << peer.position;
    }
    EXPECT_EQ(std::ranges::count(plan.sources, plan.position), 0);
    EXPECT_TRUE(std::ranges::is_sorted(plan.sources));
    EXPECT_TRUE(std::ranges::is_sorted(plan.readers));

    // Bytes are cut where elements and cache lines end.
    EXPECT_EQ(plan.segment % 64, 0u);
    EXPECT_EQ(plan.ring % 64, 0u);
    EXPECT_EQ(plan.segment % plan.element, 0u);
    EXPECT_EQ(plan.ring == 0, plan.stream == 0);
    EXPECT_GT(plan.segment, 0u);
    if (plan.part > 0) {
      EXPECT_EQ(plan.part_begin(plan.position), parts);
      parts += plan.part_bytes(plan.position);
      EXPECT_EQ(plan.part_bytes(plan.position) % plan.element, 0u);
    }
  }
  EXPECT_EQ(parts, first.part > 0 ? problem.input_bytes() : 0);
  EXPECT_EQ(first.algorithm == Algorithm::kLocal, problem.size == 1);
}

class PlanTest : public ::testing::TestWithParam<int> {};

TEST_P(PlanTest, RanksAgree) {
  const int size = GetParam();
  for (const Topology& topology :
       {Topology{false, false, {}}, Topology{false, true, {}}, Topology{true, false, {}}}) {
    for (size_t count :
         {size_t{0}, size_t{1}, size_t{3}, size_t{10}, size_t{11}, size_t{16}, size_t{1000},
          size_t{4097}, size_t{65536}, size_t{100003}, size_t{1} << 20, (size_t{1} << 24) + 1}) {
      for (const Problem& problem : EveryKind(size, count)) CheckPlans(problem, topology);
    }
    for (DType dtype : {DType::kInt8, DType::kBfloat16, DType::kComplex128}) {
      for (const Problem& problem : EveryKind(size, 12345, dtype)) CheckPlans(problem, topology);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, PlanTest, ::testing::Range(1, 18));

TEST(PlanHostsTest, RanksAgreeHoweverTheyAreDealtOut) {
  std::set<Algorithm> taken;
  for (const auto& [host_of, processes] : std::vector<std::pair<std::vector<int>, int>>{
           {{0, 0, 1, 1}, 4}, {{0, 0, 1, 1}, 2}, {{0, 1, 0, 1, 0}, 5}, {{0, 1, 2, 0, 0}, 4}}) {
    const Topology topology{false, false, host_of, processes, {}};
    const int size = static_cast<int>(host_of.size());
    for (size_t count : {1, 10, 11, 4096, 5000, 16384, 40000, 1 << 20}) {
      for (const Problem& problem : EveryKind(size, count)) {
        CheckPlans(problem, topology);
        taken.insert(Plans(problem, topology)[0].algorithm);
      }
    }
  }
  EXPECT_TRUE(taken.contains(Algorithm::kRelay) && taken.contains(Algorithm::kHosts));
}

// By parts a sum crosses the network twice, by relays once for each other host.
TEST(PlanHostsTest, LargeSumsOfManyHostsGoByParts) {
  for (const int hosts : {2, 5, 8}) {
    std::vector<int> host_of;
    for (int rank = 0; rank < 2 * hosts; ++rank) host_of.push_back(rank / 2);
    const Topology topology{false, false, host_of, 2 * hosts, {}};
    const Problem sum{OpKind::kAllReduce, DType::kFloat32, 4096, 2 * hosts, ReduceOp::kSum, {}, 0};
    EXPECT_EQ(Plans(sum, topology)[0].algorithm, hosts < 8 ? Algorithm::kRelay : Algorithm::kHosts);
  }
}

// Every execution has to get along with its share of memory, where no other is left.
TEST(PlanHostsTest, WhatNeedsManyRingsIsNotRelayed) {
  const std::vector<int> host_of = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  const Topology topology{false, false, host_of, 16, {}};
  for (const Problem& problem : EveryKind(16, 100)) {
    const bool relayed = Plans(problem, topology)[3].algorithm == Algorithm::kRelay;
    const bool few = problem.kind == OpKind::kAllReduce || problem.kind == OpKind::kAllGather ||
                     problem.kind == OpKind::kReduceScatter;
    EXPECT_EQ(relayed, few) << problem.Describe();
  }
}

TEST(PlanHeaderTest, DiffersWithEverythingThatMustBeEqual) {
  const Problem base{OpKind::kAllReduce, DType::kFloat32, 100, 2, ReduceOp::kSum, {}, 0};
  std::vector<uint32_t> headers = {Plans(base, {})[0].header};
  Problem other = base;
  other.count = 101;
  headers.push_back(Plans(other, {})[0].header);
  other = base;
  other.dtype = DType::kInt32;
  headers.push_back(Plans(other, {})[0].header);
  other = base;
  other.reduction = ReduceOp::kMax;
  headers.push_back(Plans(other, {})[0].header);
  other = base;
  other.kind = OpKind::kBarrier;
  headers.push_back(Plans(other, {})[0].header);
  std::ranges::sort(headers);
  EXPECT_EQ(std::ranges::adjacent_find(headers), headers.end());
}

TEST(CheckSizesTest, SaysWhatDoesNotFit) {
  const Problem problem{OpKind::kAllGather, DType::kFloat32, 10, 4, ReduceOp::kSum, {}, 0};
  Buffers sizes;
  sizes.input_bytes = 40;
  sizes.output_bytes = 120;
  sizes.dtype = DType::kFloat32;
  const Status status = CheckSizes(problem.Spec(Ids(4), 1), 4, sizes);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.ToString().find("120"), std::string::npos);
}

}  // namespace
}  // namespace jaxfabric::testing
