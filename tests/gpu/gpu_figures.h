// What gpu_timings.cc measures: as a table, as JSON, and beside the times that are aimed at.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxfabric::testing {

// Times in microseconds.
struct Row {
  std::string op, kernel;
  int ranks = 0, gpus = 0;
  uint64_t bytes = 0;    // of the larger array of a rank
  uint64_t traffic = 0;  // of both arrays: what a rank cannot but read and write
  double time = 0;
  double nccl = 0;  // the same by NCCL, or 0
};

struct Figures {
  bool fake = false;
  std::string gpu;
  double memory_bandwidth = 0;  // bytes in a microsecond, read and written, of a large copy
  double launch_floor = 0;      // of an empty kernel in a graph
  double host_empty = 0;        // to queue an empty kernel
  double host_call = 0;         // to queue a call
  double replay_alone = 0;      // of a call of one rank in a graph
  double setup = 0;             // of a communicator: the longest
  std::string nccl = "not timed: fewer than two GPUs";
  std::vector<Row> rows;

  // The least a call can take whose ranks share a GPU: a launch, and its arrays through memory. 0
  // where they do not, since links are not measured.
  double Bound(const Row& row) const;
  // The same with all that the two-shot all-reduce loads and stores: three times its arrays.
  double TwoShotBound(const Row& row) const;
};

struct Target {
  std::string what;
  double limit = 0;
  double measured = 0;    // 0: not run
  bool at_least = false;  // the limit is the least, not the most
  std::string unit = "us";
  bool met() const { return at_least ? measured >= limit : measured <= limit; }
};
std::vector<Target> Targets(const Figures& figures);

void Print(const Figures& figures);
std::string ToJson(const Figures& figures);

}  // namespace jaxfabric::testing
