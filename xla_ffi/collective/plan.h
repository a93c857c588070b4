// The schedule of one call on one rank: a pure function of the call, the communicator's shape and
// the buffer sizes, equal on all ranks wherever it must be.
//
// Contributions travel as streams. A plain stream is the rank's whole input; a scattered one is cut
// into one sub-stream per destination, all of the same length but for ragged_all_to_all's. Progress
// is counted in bytes of one sub-stream, so that ranks may use rings of different sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collective/call.h"
#include "collective/cost.h"
#include "collective/hosts.h"
#include "collective/layout.h"

namespace jaxfabric {

// Staging of an execution that is larger, found by measurement.
inline constexpr size_t kRingBytes = 1024 * 1024;

enum class Algorithm : uint8_t {
  kLocal,    // a communicator of one rank: copy
  kOneShot,  // every rank reads what it needs from its sources' staged contributions
  kTwoShot,  // all-reduce: each rank reduces one part, then reads the other parts
  kRagged,   // one-shot, with sub-streams whose lengths only their sender knows
  kPull,     // ranks read each other's own buffers: same process, or process_vm_readv
  kHosts,    // each byte crosses the network once per host
  kRelay,    // each rank sends one message to each other host: what its whole host has to say
  kPattern,  // between hosts, the steps of a pattern
};

std::string_view AlgorithmName(Algorithm algorithm);

// What the selection may use; the same on every rank of the communicator.
struct Topology {
  bool one_process = false;    // every rank of the communicator lives in this process
  bool process_reads = false;  // process_vm_readv is allowed between all processes
  std::vector<int> host_of{};  // by position; empty: all on one host
  int processes = 0;           // with ranks of the communicator
  PatternChoice patterns{};
};

struct Plan {
  Plan(const CallSpec& spec, int size, int position, const Buffers& buffers, Topology topology);

  OpKind kind;
  ReduceOp reduction;
  DType dtype;
  Algorithm algorithm = Algorithm::kOneShot;
  int size;
  int position;
  bool reduces = false;    // contributions are combined, not copied
  bool scattered = false;  // contributions are cut by destination
  bool inlined = false;    // the contribution fits the publish line
  bool places = false;     // what is for a rank of another host is put into its output
  size_t element = 1;      // bytes that must not be split
  size_t input_bytes = 0;
  size_t output_bytes = 0;
  size_t stream = 0;         // bytes of one sub-stream; ragged: at most
  size_t part = 0;           // two-shot and direct all-reduce: bytes of one rank's part
  size_t segment = 0;        // bytes of a sub-stream staged between two signals
  size_t ring = 0;           // bytes of one sub-stream's ring
  bool nontemporal = false;  // the output does not fit the cache
  std::vector<int> sources;  // positions this rank reads from, itself excluded, ascending
  std::vector<int> readers;  // positions that read from this rank, itself excluded
  int64_t root = 0;          // broadcast
  bool from_self = false;    // the own contribution is part of the own result
  RaggedSizes ragged;
  Hosts hosts;  // kHosts, kRelay
  // kPattern: who runs it, and who is here on the same host and does not: the others that a member
  // acts for, or the one member that acts for this rank.
  PatternKind pattern = PatternKind::kDirect;
  std::vector<int> members;
  std::vector<int> locals;
  int member = -1;      // this rank's number among the members
  uint32_t header = 0;  // compared on every execution

  // The algorithm's, or the pattern's.
  std::string_view name() const;
  // The array that a pattern works on.
  size_t array_bytes() const {
    return kind == OpKind::kBarrier ? 0 : std::max(input_bytes, output_bytes);
  }
  // kHosts: every rank gets the parts of the others.
  bool collects() const { return kind != OpKind::kReduceScatter; }
  int sub_streams() const { return scattered || algorithm == Algorithm::kTwoShot ? size : 1; }
  // Ragged: slices that each rank gets of each, and the bytes that tell of them.
  size_t slices_each() const { return ragged.slices / static_cast<size_t>(size); }
  size_t table_bytes() const { return slices_each() * sizeof(RaggedSlice); }
  size_t part_begin(int rank) const {
    return std::min(part * static_cast<size_t>(rank), input_bytes);
  }
  size_t part_bytes(int rank) const {
    return std::min(part * (static_cast<size_t>(rank) + 1), input_bytes) - part_begin(rank);
  }

 private:
  bool TryRelay(const Topology& topology, const Hosts& all);
  void ChooseHosts(Hosts all);
  void ExchangeWithPartners(Hosts all);
  void ChoosePatternOf(const Topology& topology);
};

// The input size that the op requires for the output size, checked before anything is sent.
Status CheckSizes(const CallSpec& spec, int size, const Buffers& buffers);

}  // namespace jaxfabric
