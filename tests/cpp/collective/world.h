// Fabrics of several processes, played by threads of one or by forked children, and ranks that
// execute collectives on them without XLA.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "collective/fabric.h"
#include "collective/participant.h"
#include "collective/problem.h"

namespace jaxfabric::testing {

// Short limits: a test that would hang fails instead.
Options TestOptions();

struct Shape {
  int processes = 1;
  int ranks_each = 2;
  // Hosts that the processes are dealt out to, in turn: 0, 1, 0, 1.
  int hosts = 1;
  int size() const { return processes * ranks_each; }
  // Ids are not consecutive between processes, as JAX's are not.
  std::vector<int64_t> LocalIds(int process) const;
  std::vector<int64_t> Ids() const;
  std::string Host(int process) const;
  // By position; empty for one host.
  std::vector<int> HostOf() const;
};

// For the names of parametrised tests: "2x4" is two processes with four ranks each, "2x4_on_2" two
// that take each other for processes of another host.
std::string ShapeName(const ::testing::TestParamInfo<Shape>& info);

// A line that says what went wrong; nothing for OK.
std::string Text(const Status& status);

// The ranks of one process: a fabric, and per problem and local rank a participant.
class LocalRanks {
 public:
  LocalRanks(Fabric& fabric, Shape shape);
  ~LocalRanks();

  // Adds one call instance for each local rank. Sites are numbered in this order.
  size_t Add(const Problem& problem);
  // The same, of a program that names positions in a mesh instead of ranks.
  size_t AddByPosition(const Problem& problem);
  // The instance of another instruction with the same attributes as `call`.
  size_t AddDuplicate(size_t call, uint32_t duplicate);
  // Equal attributes on every rank, but buffers as problem(position) wants them.
  size_t AddUnequal(const Problem& attributes, const std::function<Problem(int)>& problem);
  void Drop(size_t call);

  struct Execution {
    Bytes input;
    Bytes output;
    Bytes initial;  // ragged
    Slices slices;
    std::future<Status> done;
    Op* op = nullptr;  // of EnterPartly
  };
  // Enters launch `launch` of a call on a local rank, as XLA's thread would, with the inputs of
  // `data`, by default the launch's.
  std::unique_ptr<Execution> Enter(size_t call, int local, int launch, int data = -1);
  // Enters it and goes as far as it can without the peers.
  std::unique_ptr<Execution> EnterPartly(size_t call, int local, int launch);
  // Gives such an execution up, as a rank that leaves does.
  void GiveUp(Execution& execution);
  // Waits for the end; OK when the bytes are right.
  Status Check(size_t call, int local, int data, Execution& execution);
  Status Run(size_t call, int local, int launch);

  Participant& participant(size_t call, int local) {
    return *calls_[call].participants[static_cast<size_t>(local)];
  }
  int position(int local) const { return fabric_.process() * shape_.ranks_each + local; }
  size_t calls() const { return calls_.size(); }
  Fabric& fabric() { return fabric_; }

 private:
  Op* Begin(size_t call, int local, int launch, int data, Execution& execution);
  size_t AddCall(const CallSpec& spec, uint32_t duplicate,
                 const std::function<Problem(int)>& problem);

  struct Call {
    CallSpec spec;
    std::vector<Problem> problems;  // by local rank
    std::vector<std::unique_ptr<Participant>> participants;
  };
  Fabric& fabric_;
  const Shape shape_;
  // Run ids start somewhere else in every process, as with a program from the compilation cache.
  const int64_t first_run_id_;
  std::shared_ptr<LaunchClock> clock_ = std::make_shared<LaunchClock>();
  std::vector<Call> calls_;
};

// All processes of a job inside this one.
class World {
 public:
  explicit World(Shape shape, Options options = TestOptions());
  ~World();

  const Shape& shape() const { return shape_; }
  Fabric& fabric(int process) { return *fabrics_[static_cast<size_t>(process)]; }
  LocalRanks& ranks(int process) { return *ranks_[static_cast<size_t>(process)]; }
  size_t Add(const Problem& problem);
  // Runs body(process, local) on one thread per rank and returns the failures, joined.
  std::string OnEveryRank(const std::function<std::string(LocalRanks&, int local)>& body);
  void Shutdown();

 private:
  const Shape shape_;
  std::vector<std::unique_ptr<Fabric>> fabrics_;
  std::vector<std::unique_ptr<LocalRanks>> ranks_;
};

// The same body in forked processes: body(ranks) returns what went wrong, "" if nothing did. The
// body runs in every child; its fabric is shut down afterwards.
std::string InForkedProcesses(Shape shape, Options options,
                              const std::function<std::string(LocalRanks&)>& body);
// With options that each child makes for itself, given its number.
std::string InForkedProcesses(Shape shape, const std::function<Options(int)>& options,
                              const std::function<std::string(LocalRanks&)>& body);

// One thread per local rank.
std::string OnThreads(int count, const std::function<std::string(int)>& body);

}  // namespace jaxfabric::testing
