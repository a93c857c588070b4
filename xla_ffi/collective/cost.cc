#include "collective/cost.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "base/status.h"
#include "collective/pattern/messages.h"

namespace jaxfabric {
namespace {

// Blocks that the first of `power` members exchanges while groups grow from one to all of them,
// where the first `folded` have two blocks each.
double DoubledBlocks(uint32_t power, uint32_t folded) {
  double blocks = 0;
  for (uint32_t group = 1; group < power; group *= 2) blocks += group + std::min(group, folded);
  return blocks;
}

double BruckBlocks(uint32_t n) {
  double blocks = 0;
  for (uint32_t bit = 1; bit < n; bit *= 2) {
    const uint32_t rest = n % (2 * bit);
    blocks += n / (2 * bit) * bit + (rest > bit ? rest - bit : 0);
  }
  return blocks;
}

// Members at the distances 1, 2, 4, ... to both sides, of which some may meet.
int32_t BothWays(uint32_t n) {
  const int bits = std::popcount(n);
  return 2 * std::bit_width(n - 1) - (bits <= 2 ? bits : 0);
}

}  // namespace

Effort EffortOf(PatternKind kind, OpKind op, int32_t members) {
  JF_CHECK(HasPattern(kind, op) && members >= 1);
  if (members == 1) return {};
  const auto count = static_cast<uint32_t>(members);
  const double n = count;
  const double share = (n - 1) / n;
  const int log = std::bit_width(count - 1);  // of n, rounded up
  const uint32_t power = std::bit_floor(count);
  const uint32_t folded = count - power;
  const int halvings = std::bit_width(power) - 1;
  const int fold = folded > 0 ? 1 : 0;
  const bool reduces = op == OpKind::kAllReduce || op == OpKind::kReduceScatter;
  const double phases = op == OpKind::kAllReduce || op == OpKind::kBroadcast ? 2 : 1;
  switch (kind) {
    case PatternKind::kDirect:
      if (op == OpKind::kPermute)
        return {.rounds = 1, .sent = 1, .peers = std::min(2, members - 1)};
      return {phases, phases * (n - 2), phases * share, reduces ? share : 0, members - 1};
    case PatternKind::kPairwise:
      return {.rounds = n - 1, .sent = share, .peers = members - 1};
    case PatternKind::kOneShot:
      return {1, n - 2, n - 1, n - 1, members - 1};
    case PatternKind::kRing:
      return {phases * (n - 1), 0, phases * share, reduces ? share : 0, std::min(2, members - 1)};
    case PatternKind::kRecursiveDoubling: {
      Effort effort{.rounds = static_cast<double>(halvings + 2 * fold), .peers = halvings + fold};
      if (op == OpKind::kAllReduce) {
        effort.sent = effort.rounds;
        effort.added = halvings + fold;
      } else if (op == OpKind::kAllGather) {
        effort.sent = (DoubledBlocks(power, folded) + fold * n) / n;
      }
      return effort;
    }
    case PatternKind::kHalvingDoubling: {
      const double halved =
          op == OpKind::kAllReduce ? (power - 1.0) / power : DoubledBlocks(power, folded) / n;
      return {phases * halvings + 2 * fold, 0,
              phases * halved + fold * (op == OpKind::kAllReduce ? 2 : 1 + 1 / n), halved + fold,
              halvings + fold};
    }
    case PatternKind::kBruck: {
      const bool forwards = op == OpKind::kAllToAll;
      return {.rounds = static_cast<double>(log),
              .sent = forwards ? BruckBlocks(count) / n : share,
              .peers = BothWays(count)};
    }
    case PatternKind::kTree:
      return {.rounds = static_cast<double>(log), .sent = static_cast<double>(log), .peers = log};
    case PatternKind::kDissemination:
      return {.rounds = static_cast<double>(log), .peers = BothWays(count)};
  }
  return {};
}

double LaneBytes(OpKind op, double bytes, const GroupShape& shape, int32_t lanes) {
  switch (op) {
    case OpKind::kBarrier:
      return 0;
    case OpKind::kPermute:
      return bytes;
    case OpKind::kAllToAll:
    case OpKind::kRaggedAllToAll:
      return bytes * shape.ranks_per_host / lanes;
    default:
      return bytes / lanes;
  }
}

double InsideSeconds(OpKind op, double bytes, const GroupShape& shape, int32_t lanes,
                     const CostModel& model) {
  const double ranks = shape.ranks_per_host;
  if (ranks <= 1) return 0;
  const PathCost& path = model.inside;
  const double all = ranks * shape.hosts;
  switch (op) {
    case OpKind::kBarrier:
    case OpKind::kAllReduceRmsNorm:  // on GPUs only
      return 2 * path.alpha;
    case OpKind::kAllReduce:  // shown by each, added by the lanes, read by each
      return 2 * path.alpha + 2 * bytes * path.beta + ranks * bytes / lanes * model.gamma;
    case OpKind::kReduceScatter:
      return 2 * path.alpha + (bytes + bytes / all) * path.beta +
             ranks * bytes / lanes * model.gamma;
    case OpKind::kAllGather:
      return 2 * path.alpha + (bytes + bytes / all) * path.beta;
    case OpKind::kAllToAll:
    case OpKind::kRaggedAllToAll:
      return 2 * path.alpha + 2 * bytes * path.beta;
    case OpKind::kPermute:
      return path.alpha + bytes * path.beta;
    case OpKind::kBroadcast:
      return 2 * path.alpha + 2 * bytes * path.beta;
  }
  return 0;
}

std::vector<Candidate> Candidates(OpKind op, uint64_t bytes, const GroupShape& shape,
                                  const CostModel& model) {
  std::vector<int32_t> lane_counts{1};
  const bool has_lanes = op != OpKind::kBarrier && op != OpKind::kPermute;
  if (has_lanes && shape.lanes > 1) lane_counts.push_back(shape.lanes);
  std::vector<Candidate> candidates;
  for (const int32_t lanes : lane_counts) {
    // Senders on a host at the same time.
    const int32_t flows = op == OpKind::kPermute ? shape.ranks_per_host : lanes;
    const double beta = std::max(model.between.beta, flows * model.host_beta);
    for (const PatternKind kind : kPatternKinds) {
      if (!HasPattern(kind, op)) continue;
      Candidate candidate{.kind = kind, .lanes = lanes, .effort = EffortOf(kind, op, shape.hosts)};
      const Effort& effort = candidate.effort;
      const double array = LaneBytes(op, static_cast<double>(bytes), shape, lanes);
      candidate.inside = InsideSeconds(op, static_cast<double>(bytes), shape, lanes, model);
      candidate.between = effort.rounds * model.between.alpha +
                          effort.messages * model.between.overhead +
                          (effort.rounds + effort.messages) * (flows - 1) * model.host_overhead +
                          effort.sent * array * beta + effort.added * array * model.gamma;
      candidate.allowed = effort.peers <= model.most_peers;
      candidates.push_back(candidate);
    }
  }
  const auto is_allowed = [](const Candidate& candidate) { return candidate.allowed; };
  if (std::none_of(candidates.begin(), candidates.end(), is_allowed)) {
    for (Candidate& candidate : candidates) candidate.allowed = true;
  }
  return candidates;
}

size_t Cheapest(std::span<const Candidate> candidates, std::span<const PatternKind> kinds) {
  size_t best = candidates.size();
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& candidate = candidates[i];
    if (!kinds.empty() && std::find(kinds.begin(), kinds.end(), candidate.kind) == kinds.end()) {
      continue;
    }
    // What was asked for by name is not refused for its peers.
    if (kinds.empty() && !candidate.allowed) continue;
    if (best == candidates.size() || candidate.seconds() < candidates[best].seconds()) best = i;
  }
  if (best == candidates.size() && !kinds.empty()) return Cheapest(candidates);
  return best;
}

Result<PatternChoice> PatternChoice::Parse(std::string_view text) {
  PatternChoice choice;
  choice.none = text == "none";
  while (!text.empty() && !choice.none) {
    const std::string_view name = text.substr(0, text.find(','));
    const auto* kind = std::find_if(std::begin(kPatternKinds), std::end(kPatternKinds),
                                    [name](PatternKind k) { return PatternName(k) == name; });
    if (kind == std::end(kPatternKinds)) {
      std::string names;
      for (const PatternKind known : kPatternKinds) names += StrCat(", ", PatternName(known));
      return Status(Code::kInvalidArgument,
                    StrCat("pattern has ", name, "; there are none", names));
    }
    choice.wanted.push_back(*kind);
    text.remove_prefix(std::min(text.size(), name.size() + 1));
  }
  return choice;
}

Status PatternChoice::SetCosts(std::string_view text) {
  if (text.empty()) return OkStatus();
  const std::string copy(text);
  char* end = nullptr;
  const double microseconds = std::strtod(copy.c_str(), &end);
  const bool two = *end == ',';
  const double gigabytes = two ? std::strtod(end + 1, &end) : 0;
  if (!two || *end != 0 || !(microseconds > 0 && gigabytes > 0)) {
    return Status(Code::kInvalidArgument,
                  StrCat("network_cost is ", text, ": use microseconds and GB/s, such as 30,1.2"));
  }
  model.between.alpha = microseconds * 1e-6;
  model.between.overhead = std::min(model.between.overhead, model.between.alpha);
  model.between.beta = model.host_beta = 1e-9 / gigabytes;
  return OkStatus();
}

CostModel PatternChoice::ModelFor(OpKind op) const {
  CostModel figures = model;
  if (measured && op != OpKind::kAllReduce && op != OpKind::kReduceScatter) {
    figures.between = *measured;
    figures.host_beta = measured->beta;
  }
  return figures;
}

double PlainSeconds(const PatternCall& call, const CostModel& model) {
  const double n = call.hosts;
  const double peers = call.remote_processes;
  const auto array = static_cast<double>(call.bytes);
  // What all wait for, in arrays.
  Effort effort{.rounds = 1, .messages = peers - 1, .sent = (n - 1) / n};
  if (call.op == OpKind::kBarrier) effort.sent = 0;
  if (call.op == OpKind::kBroadcast) effort.sent = peers;
  if (call.op == OpKind::kReduceScatter) effort.added = (n - 1) / n;
  if (call.op == OpKind::kAllReduce && call.one_shot) effort.sent = effort.added = peers;
  if (call.op == OpKind::kAllReduce && !call.one_shot) {
    effort = EffortOf(PatternKind::kDirect, call.op, call.hosts);
  }
  const double flows = call.ranks_per_host;
  return effort.rounds * model.between.alpha + effort.messages * model.between.overhead +
         (effort.rounds + effort.messages) * (flows - 1) * model.host_overhead +
         effort.sent * array * std::max(model.between.beta, flows * model.host_beta) +
         effort.added * array * model.gamma;
}

std::optional<PatternKind> ChoosePattern(const PatternCall& call, const PatternChoice& choice) {
  const OpKind op = call.op;
  const bool shared = call.ranks_per_host > 1;
  const bool runs = shared ? (op == OpKind::kAllReduce && call.bytes <= kMostSharedBytes) ||
                                 op == OpKind::kBarrier
                           : op != OpKind::kPermute && op != OpKind::kRaggedAllToAll;
  if (!runs || call.hosts < 2 || choice.none) return std::nullopt;
  const GroupShape shape{call.hosts, call.ranks_per_host, 1};
  const CostModel model = choice.ModelFor(op);
  std::vector<Candidate> candidates = Candidates(op, call.bytes, shape, model);
  std::erase_if(candidates, [&](const Candidate& candidate) {
    // Of hosts with several ranks the sum of a host is in the result, not in an operand.
    if (shared && Collects(candidate.kind, op)) return true;
    return MostMessageBytes(candidate.kind, op, call.hosts, call.bytes) > kMostMessageBytes;
  });
  if (candidates.empty()) return std::nullopt;
  const auto is_wanted = [&choice](PatternKind kind) {
    return std::find(choice.wanted.begin(), choice.wanted.end(), kind) != choice.wanted.end();
  };
  const Candidate& wanted = candidates[Cheapest(candidates, choice.wanted)];
  if (is_wanted(wanted.kind)) return wanted.kind;
  const Candidate& best = candidates[Cheapest(candidates)];
  // Messages follow the receiver's word of where they go.
  const double seconds = best.seconds() + model.between.alpha;
  const bool too_many = call.remote_processes > model.most_peers && best.allowed;
  if (!too_many && seconds >= PlainSeconds(call, model)) return std::nullopt;
  return best.kind;
}

std::string Explain(std::span<const Candidate> candidates, size_t taken) {
  std::string text;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& candidate = candidates[i];
    const Effort& effort = candidate.effort;
    text += StrCat(i == taken ? "* " : "  ", PatternName(candidate.kind), ", ", candidate.lanes,
                   candidate.lanes == 1 ? " lane: " : " lanes: ", candidate.seconds() * 1e6,
                   " us = ", candidate.inside * 1e6, " inside hosts + ", candidate.between * 1e6,
                   " between (", effort.rounds, " rounds, ", effort.messages, " more messages, ",
                   effort.sent, " arrays sent, ", effort.added, " added, ", effort.peers, " peers)",
                   candidate.allowed ? "" : ": too many peers", "\n");
  }
  return text;
}

}  // namespace jaxfabric
