// What a collective between hosts costs by each pattern, and which one is therefore taken.
//
// Pure functions. Ranks that choose for themselves choose the same if they have the same model,
// which is why a calibration is made once and handed to all. Bytes of a collective are those of the
// larger of one rank's operand and result.
//
// A member's time is rounds * alpha + messages * overhead + bytes sent * beta + bytes added *
// gamma, along the longest chain of steps that wait for each other.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "collective/pattern/pattern.h"

namespace jaxfabric {

struct PathCost {
  double alpha;     // seconds from the sending of a message until its receiver goes on
  double overhead;  // seconds of a member for each further message, which it need not wait for
  double beta;      // seconds per byte of one member
};

// The defaults are those of TCP over Ethernet, and of shared memory.
struct CostModel {
  PathCost inside{.alpha = 1e-6, .overhead = 0.2e-6, .beta = 1 / 5e9};
  PathCost between{.alpha = 30e-6, .overhead = 5e-6, .beta = 1 / 1.2e9};
  double host_overhead = 1e-6;   // seconds of a host for the same message on each further lane
  double host_beta = 1 / 1.2e9;  // seconds per byte of a host's network, which its lanes share
  double gamma = 1 / 5e9;        // seconds per byte to add
  int32_t most_peers = 1024;     // a member should not need connections to more
};

// Who takes part: as in Hierarchy, of which these are hosts(), the most RanksOf(), and lanes().
struct GroupShape {
  int32_t hosts = 1;
  int32_t ranks_per_host = 1;
  int32_t lanes = 1;  // at most
};

// What the longest chain through a pattern consists of. `sent` and `added` are in arrays of a
// member.
struct Effort {
  double rounds = 0;    // messages that are waited for
  double messages = 0;  // further messages of a member
  double sent = 0;
  double added = 0;
  int32_t peers = 0;  // members that the busiest one exchanges messages with
};

// Requires HasPattern(kind, op) and members >= 1.
Effort EffortOf(PatternKind kind, OpKind op, int32_t members);

// Bytes of the array that one lane works on; of permute: that one rank sends.
double LaneBytes(OpKind op, double bytes, const GroupShape& shape, int32_t lanes);

// Seconds inside the host, before and after what is between hosts.
double InsideSeconds(OpKind op, double bytes, const GroupShape& shape, int32_t lanes,
                     const CostModel& model);

struct Candidate {
  PatternKind kind = PatternKind::kDirect;
  int32_t lanes = 1;
  Effort effort;
  double inside = 0;   // seconds
  double between = 0;  // seconds
  bool allowed = true;
  double seconds() const { return inside + between; }
};

// All patterns with all numbers of lanes that are worth a look: one, and as many as there are. In
// order of preference where two cost the same. Those that need too many peers are not allowed,
// unless all do.
std::vector<Candidate> Candidates(OpKind op, uint64_t bytes, const GroupShape& shape,
                                  const CostModel& model);

// The number of the cheapest allowed one, of those whose kind is in `kinds` if that is not empty.
// If none of them is there: of all.
size_t Cheapest(std::span<const Candidate> candidates, std::span<const PatternKind> kinds = {});

// What decides over patterns; the same on all ranks of a job.
struct PatternChoice {
  CostModel model;                   // the defaults, or what was set
  std::optional<PathCost> measured;  // in this job, between hosts
  bool none = false;                 // no call is run by a pattern
  std::vector<PatternKind> wanted;   // for those ops that have them, whatever they cost

  // Of "", "none", or names as PatternName() has them, separated by commas.
  static Result<PatternChoice> Parse(std::string_view text);
  // The model's figures for messages between hosts, of "" (the defaults), or microseconds and GB/s
  // such as "30,1.2".
  Status SetCosts(std::string_view text);
  // What decides for an op. Measured figures differ from start to start, and patterns add in
  // different orders: sums keep to the others, so that a job has the same bits every time.
  CostModel ModelFor(OpKind op) const;
};

// A call that a pattern may run between its hosts, one rank of each being a member.
struct PatternCall {
  OpKind op = OpKind::kBarrier;
  uint64_t bytes = 0;
  int32_t hosts = 1;
  int32_t ranks_per_host = 1;    // the most
  int32_t remote_processes = 0;  // on other hosts than a rank's own
  bool one_shot = true;          // an all_reduce without a pattern sends whole arrays, not parts
};

// Seconds of what ranks do without a pattern: everybody sends to all who need it at once, and what
// is sent rides with what announces it.
double PlainSeconds(const PatternCall& call, const CostModel& model);

// The cheapest of the patterns that are wanted, or one that costs less than to do without.
std::optional<PatternKind> ChoosePattern(const PatternCall& call, const PatternChoice& choice);

// A line about each candidate, with the one that was taken marked.
std::string Explain(std::span<const Candidate> candidates, size_t taken);

}  // namespace jaxfabric
