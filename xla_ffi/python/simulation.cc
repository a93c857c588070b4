#include "python/simulation.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "collective/cost.h"
#include "collective/simulate.h"

namespace nb = nanobind;

namespace jaxfabric {
namespace {

std::optional<OpKind> FindOp(const std::string& name) {
  for (const OpKind op :
       {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kReduceScatter, OpKind::kAllToAll,
        OpKind::kPermute, OpKind::kBroadcast, OpKind::kBarrier, OpKind::kRaggedAllToAll}) {
    if (OpKindName(op) == name) return op;
  }
  return std::nullopt;
}

// By the names that Python uses, and the figures behind them.
struct Settings {
  CostModel model;
  FatTree tree;
  std::map<std::string, double*> reals{
      {"alpha", &model.between.alpha},
      {"overhead", &model.between.overhead},
      {"beta", &model.between.beta},
      {"host_beta", &model.host_beta},
      {"gamma", &model.gamma},
      {"host_overhead", &model.host_overhead},
      {"inside_alpha", &model.inside.alpha},
      {"inside_beta", &model.inside.beta},
      {"inside_overhead", &model.inside.overhead},
      {"hop", &tree.hop},
      {"oversubscription", &tree.oversubscription},
  };
  std::map<std::string, int32_t*> counts{
      {"most_peers", &model.most_peers},
      {"hosts_per_leaf", &tree.hosts_per_leaf},
  };

  Settings() = default;
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;

  std::map<std::string, double> All() const {
    std::map<std::string, double> values;
    for (const auto& [name, value] : reals) values[name] = *value;
    for (const auto& [name, value] : counts) values[name] = *value;
    return values;
  }
  void Set(const std::string& name, double value) {
    if (const auto real = reals.find(name); real != reals.end()) {
      *real->second = value;
    } else if (const auto count = counts.find(name); count != counts.end()) {
      *count->second = static_cast<int32_t>(value);
    } else {
      throw nb::key_error(("unknown figure of the cost model: " + name).c_str());
    }
  }
};

// Seconds of cores that all ranks take together: a message keeps its ends busy for as long as it
// takes, and what is inside hosts each of their ranks.
double WorkOfAll(const Candidate& candidate, OpKind op, uint64_t bytes, const GroupShape& shape,
                 const CostModel& model) {
  const Effort& effort = candidate.effort;
  const double array = LaneBytes(op, static_cast<double>(bytes), shape, candidate.lanes);
  const double member = (effort.rounds + effort.messages) * model.between.alpha +
                        effort.sent * array * model.between.beta +
                        effort.added * array * model.gamma;
  return shape.hosts * (candidate.lanes * member + shape.ranks_per_host * candidate.inside);
}

nb::list Simulate(const std::string& op_name, uint64_t bytes, int32_t hosts, int32_t ranks_per_host,
                  const std::map<std::string, double>& figures) {
  const auto op = FindOp(op_name);
  if (!op || hosts < 1 || ranks_per_host < 1) {
    throw std::invalid_argument("no such collective: " + op_name + " on " + std::to_string(hosts) +
                                " hosts of " + std::to_string(ranks_per_host) + " ranks");
  }
  Settings settings;
  for (const auto& [name, value] : figures) settings.Set(name, value);
  const GroupShape shape{hosts, ranks_per_host, ranks_per_host};
  const auto candidates = Candidates(*op, bytes, shape, settings.model);
  const size_t chosen = Cheapest(candidates);
  nb::list rows;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& candidate = candidates[i];
    const double between =
        SimulateBetween(candidate, *op, bytes, shape, settings.model, settings.tree);
    nb::dict row;
    row["pattern"] = std::string(PatternName(candidate.kind));
    row["lanes"] = candidate.lanes;
    row["inside"] = candidate.inside;
    row["between"] = between;
    row["work"] = WorkOfAll(candidate, *op, bytes, shape, settings.model);
    row["model"] = candidate.seconds();
    row["rounds"] = candidate.effort.rounds;
    row["peers"] = candidate.effort.peers;
    row["allowed"] = candidate.allowed;
    row["chosen"] = i == chosen;
    rows.append(row);
  }
  return rows;
}

}  // namespace

void BindSimulation(nb::module_& module) {
  module.def(
      "cost_model", [] { return Settings().All(); },
      "The default figures of the cost model and of the network, in seconds and numbers.");
  module.def("simulate", &Simulate, nb::arg("op"), nb::arg("bytes"), nb::arg("hosts"),
             nb::arg("ranks_per_host"), nb::arg("figures"),
             "Each candidate for a collective: its parts in seconds, and whether it is chosen.");
}

}  // namespace jaxfabric
