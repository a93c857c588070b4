// The schedule of a collective over a network, for one of its members: a list of steps that say
// what goes to whom, what comes from whom, and what becomes of it.
//
// A pure function of (kind, op, members, member, root) that takes time and memory in proportion to
// the member's own steps. It knows neither bytes nor transports. A member is whatever takes part: a
// rank, or the ranks of several hosts that share a lane (hierarchy.h).
//
// The array. A member works on an array of `blocks` blocks, which need not be of equal size:
//   all_reduce      starts as the member's contribution and ends as the result
//   reduce_scatter  starts as the contribution; block `member` ends as the member's result
//   all_gather      block `member` starts as the contribution; the array ends as the result
//   all_to_all      block j starts as what goes to member + j (modulo members), and ends as what
//                   came from member - j. Blocks by distance, so that block 0 stays where it is.
//                   But for kBruck no block is sent on: what is sent may be the operand itself, and
//                   what arrives goes into the result. The same for ragged_all_to_all.
//   broadcast       starts as the root's, and ends so everywhere
//   permute         one block, sent and then replaced
//   barrier         no blocks
//
// Rules for who runs it, which together keep it free of deadlock and its results right:
//   1. A step sends once the arrivals of the first `needs` steps have entered the array, and its
//      own arrival enters no earlier. Steps with equal `needs` do not depend on each other: they
//      may be sent, and enter, in any order and at once.
//   2. What arrives in a step enters the array only when what that step sends has been taken from
//      it.
//   3. Messages from one member to another are sent in the order of the sender's steps, and taken
//      in the order of the receiver's. Sending waits for room only, never for the receiver to take
//      this very message; room for one message from each peer is enough.
//
// The same bits for all: every block is reduced in one place and copied from there, or, by kOneShot
// and kRecursiveDoubling, by all members in the same order with the same left and right operands.
// That order is said at each kind, for members x0 x1 x2 ...
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "collective/call.h"

namespace jaxfabric {

enum class PatternKind : uint8_t {
  // Every pair at once. Reductions: the owner of a block gets all contributions to it and adds them
  // in ascending order, ((x0 + x1) + x2) + ...; all_reduce then sends the sums to all. broadcast:
  // the root sends a block to each, who sends it to all.
  kDirect,
  // all_reduce of little: everybody sends everything to everybody, and adds in ascending order.
  kOneShot,
  // Neighbours only. Block b: (((x[b+1] + x[b+2]) + ...) + x[b-1]) + x[b], modulo members.
  kRing,
  // Distances 1, 2, 4, ... all_reduce: the balanced tree in ascending order, ((x0 + x1) + (x2 +
  // x3)) + ... Of members beyond the largest power of two, p, each hands its part to a neighbour
  // before, and gets the result after: with r of them the leaves of the tree over p are x0 + x1,
  // x2 + x3, ..., x[2r-2] + x[2r-1], x[2r], ..., x[n-1].
  kRecursiveDoubling,
  // Reductions: halves at distance p/2, quarters at p/4, ...; all_reduce then doubles them again.
  // The tree pairs distant leaves first: for four, (x0 + x2) + (x1 + x3). Leaves as above.
  kHalvingDoubling,
  // Distances 1, 2, 4, ... for any number of members; all_to_all sends every block on, half of the
  // array in each step.
  kBruck,
  kTree,           // broadcast: binomial, the largest subtree first
  kDissemination,  // barrier: signals at distances 1, 2, 4, ...
  kPairwise,       // all_to_all: kDirect, with one partner at a time
};

inline constexpr PatternKind kPatternKinds[] = {
    PatternKind::kDirect,
    PatternKind::kOneShot,
    PatternKind::kRing,
    PatternKind::kRecursiveDoubling,
    PatternKind::kHalvingDoubling,
    PatternKind::kBruck,
    PatternKind::kTree,
    PatternKind::kDissemination,
    PatternKind::kPairwise,
};

std::string_view PatternName(PatternKind kind);

// Blocks of an array, counted modulo its length: runs of `run` neighbours whose beginnings are
// `stride` apart, `count` blocks in all (the last run may be shorter). Only kBruck's all_to_all
// sends more than one run.
struct Blocks {
  uint32_t first = 0;
  uint32_t count = 0;
  uint32_t run = 0;
  uint32_t stride = 0;

  friend bool operator==(const Blocks&, const Blocks&) = default;
  // The number of the i-th of them, in an array of so many.
  uint32_t At(uint32_t i, uint32_t blocks) const {
    return (first + i / run * stride + i % run) % blocks;
  }
};

inline constexpr int32_t kNobody = -1;

// What becomes of what arrives.
enum class Arrival : uint8_t {
  kStore,      // it replaces the blocks
  kAddBehind,  // block = block + arrived
  kAddBefore,  // block = arrived + block
  kCollect,    // it is kept beside; once all steps that collect have sent and received, block =
               // the sum of all that was kept and the own one, in ascending order of members
};

struct Step {
  int32_t to = kNobody;
  int32_t from = kNobody;
  uint32_t needs = 0;  // arrivals of so many of the first steps; never more than come before
  Arrival arrival = Arrival::kStore;
  Blocks sent;
  Blocks received;
};

struct Pattern {
  PatternKind kind = PatternKind::kDirect;
  OpKind op = OpKind::kBarrier;
  int32_t members = 1;
  int32_t member = 0;
  uint32_t blocks = 0;
  std::vector<Step> steps;
};

// Whether the kind has a schedule for the op.
bool HasPattern(PatternKind kind, OpKind op);

// Blocks of its array; what Pattern::blocks says.
uint32_t BlockCount(PatternKind kind, OpKind op, uint32_t members);

// The schedule of one member. Requires HasPattern(kind, op), 0 <= member < members, 0 <= root <
// members; op is not kPermute. `root`: broadcast's.
Pattern MakePattern(PatternKind kind, OpKind op, int32_t members, int32_t member, int32_t root = 0);

// The schedule of a permute, kDirect. `pairs`: source, destination, source, destination, ...; no
// member is twice a source or twice a destination. A pair of equal members is no step.
Pattern MakePermute(std::span<const int64_t> pairs, int32_t members, int32_t member);

}  // namespace jaxfabric
