#include "collective/simulate.h"

#include <algorithm>
#include <vector>

namespace jaxfabric {
namespace {

// What one member does in one round, in blocks.
struct Load {
  double sent = 0;
  double received = 0;
  double added = 0;
  double sent_up = 0;  // out of the leaf
  double received_down = 0;
  double messages = 0;
};

// What all members of the leaf do in one round.
struct Round {
  double most = 0;  // sent or received by one of them
  double added = 0;
  double messages = 0;
  double up = 0;  // by all of them together
  double down = 0;
  bool leaves = false;

  void Add(const Load& load) {
    most = std::max({most, load.sent, load.received});
    added = std::max(added, load.added);
    messages = std::max(messages, load.messages);
    up += load.sent_up;
    down += load.received_down;
    leaves |= load.sent_up + load.received_down > 0;
  }
};

Pattern Schedule(PatternKind kind, OpKind op, int32_t members, int32_t member) {
  if (op != OpKind::kPermute) return MakePattern(kind, op, members, member);
  std::vector<int64_t> pairs;  // from each member half around
  for (int64_t source = 0; source < members; ++source) {
    pairs.insert(pairs.end(), {source, (source + members / 2) % members});
  }
  return MakePermute(pairs, members, member);
}

// The round of a step, where the step before was in the round `before`.
size_t RoundOf(const Pattern& pattern, size_t step, size_t before, size_t most_steps) {
  const auto& steps = pattern.steps;
  const bool folds = pattern.kind == PatternKind::kRecursiveDoubling ||
                     pattern.kind == PatternKind::kHalvingDoubling;
  if (folds && steps.size() < most_steps) {
    // It handed its part over at first, and has the result at last; or it waits in both rounds.
    if (steps[0].from == kNobody) return step == 0 ? 0 : most_steps - 1;
    return step + 1;
  }
  if (step == 0) return 0;
  // Copies of a tree leave one after the other, each as soon as the one before.
  const bool next =
      pattern.kind == PatternKind::kTree || steps[step].needs != steps[step - 1].needs;
  return before + (next ? 1 : 0);
}

std::vector<Round> RoundsOfLeaf(PatternKind kind, OpKind op, int32_t members, int32_t in_leaf,
                                uint32_t& blocks) {
  std::vector<Round> rounds;
  size_t most_steps = 0;
  for (int32_t member = 0; member < in_leaf; ++member) {
    const Pattern pattern = Schedule(kind, op, members, member);
    if (member == 0) most_steps = pattern.steps.size();  // nobody has more
    blocks = std::max(1u, pattern.blocks);
    Load load;
    size_t round = 0;
    const auto add = [&] {
      if (rounds.size() <= round) rounds.resize(round + 1);
      rounds[round].Add(load);
      load = {};
    };
    for (size_t i = 0; i < pattern.steps.size(); ++i) {
      const Step& step = pattern.steps[i];
      const size_t next = RoundOf(pattern, i, round, most_steps);
      if (next != round && i > 0) add();
      round = next;
      // Signals count as a little, for they take a way too.
      const double sent = std::max(step.sent.count, pattern.blocks == 0 ? 1u : 0u);
      const double received = std::max(step.received.count, pattern.blocks == 0 ? 1u : 0u);
      load.messages += 1;
      load.sent += sent;
      load.received += received;
      if (step.arrival != Arrival::kStore) load.added += received;
      if (step.to >= in_leaf) load.sent_up += sent;
      if (step.from >= in_leaf) load.received_down += received;
    }
    if (!pattern.steps.empty()) add();
  }
  return rounds;
}

}  // namespace

double SimulateBetween(const Candidate& candidate, OpKind op, uint64_t bytes,
                       const GroupShape& shape, const CostModel& model, const FatTree& tree) {
  if (shape.hosts == 1) return 0;
  const int32_t in_leaf = std::min(shape.hosts, std::max(1, tree.hosts_per_leaf));
  uint32_t blocks = 1;
  const auto rounds = RoundsOfLeaf(candidate.kind, op, shape.hosts, in_leaf, blocks);
  const int32_t flows = op == OpKind::kPermute ? shape.ranks_per_host : candidate.lanes;
  const double block = LaneBytes(op, static_cast<double>(bytes), shape, candidate.lanes) / blocks;
  const double beta = std::max(model.between.beta, flows * model.host_beta);
  // Of the links upwards, for the bytes of all hosts of the leaf on one lane.
  const double up_beta = flows * model.host_beta * tree.oversubscription / in_leaf;
  double seconds = 0;
  for (const Round& round : rounds) {
    seconds += model.between.alpha + (round.leaves ? 2 * tree.hop : 0) +
               std::max(0.0, round.messages - 1) * model.between.overhead +
               round.messages * (flows - 1) * model.host_overhead +
               std::max(round.most * beta, std::max(round.up, round.down) * up_beta) * block +
               round.added * block * model.gamma;
  }
  return seconds;
}

}  // namespace jaxfabric
