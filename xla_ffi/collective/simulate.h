// How long patterns take on a network that the cost model does not know: a fat tree of two levels.
//
// Rounds of a pattern are played one after the other, with the real schedules of the members under
// one leaf switch, which stand for those under the others. In a round every message crosses one
// switch, or three between leaves, and the slowest of these counts: a member's own link, and the
// links of the leaf upwards, which its members share.
#pragma once

#include <cstdint>

#include "collective/cost.h"

namespace jaxfabric {

struct FatTree {
  int32_t hosts_per_leaf = 32;
  double oversubscription = 1;  // bandwidth of a leaf's hosts over that of its links upwards
  double hop = 0.5e-6;          // seconds of a switch, beyond the one that alpha includes
};

// Seconds between hosts, of one candidate.
double SimulateBetween(const Candidate& candidate, OpKind op, uint64_t bytes,
                       const GroupShape& shape, const CostModel& model, const FatTree& tree);

}  // namespace jaxfabric
