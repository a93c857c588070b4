#include "collective/pattern/hierarchy.h"

#include <algorithm>
#include <unordered_map>

namespace jaxfabric {

Hierarchy::Hierarchy(std::span<const int32_t> host_of, int32_t lanes) {
  std::unordered_map<int32_t, int32_t> numbers;
  std::vector<int32_t> sizes;
  for (const int32_t host : host_of) {
    const auto [found, is_new] = numbers.try_emplace(host, static_cast<int32_t>(sizes.size()));
    if (is_new) sizes.push_back(0);
    host_of_.push_back(found->second);
    local_of_.push_back(sizes[Index(found->second)]++);
  }
  begin_.push_back(0);
  for (const int32_t size : sizes) begin_.push_back(begin_.back() + size);
  by_host_.resize(host_of_.size());
  for (int32_t position = 0; position < ranks(); ++position) {
    by_host_[Index(begin_[Index(HostOf(position))] + LocalOf(position))] = position;
  }
  const int32_t most = sizes.empty() ? 1 : *std::min_element(sizes.begin(), sizes.end());
  lanes_ = lanes <= 0 ? most : std::min(lanes, most);
}

std::vector<int32_t> Hierarchy::Carried(int32_t host, int32_t lane) const {
  std::vector<int32_t> positions;
  for (int32_t local = lane; local < RanksOf(host); local += lanes_) {
    positions.push_back(PositionOf(host, local));
  }
  return positions;
}

Stages StagesOf(OpKind op) {
  switch (op) {
    case OpKind::kAllReduce:
      return {.parts = Parts::kBytes, .reduces_inside = true, .all_read_all = true};
    case OpKind::kReduceScatter:
      return {.parts = Parts::kRanks, .reduces_inside = true};
    case OpKind::kAllGather:
      return {.parts = Parts::kRanks, .all_read_all = true};
    case OpKind::kAllToAll:
    case OpKind::kRaggedAllToAll:
      return {.parts = Parts::kPairs};
    case OpKind::kPermute:
      return {.parts = Parts::kPairs, .by_host = false};
    case OpKind::kBroadcast:
      return {.parts = Parts::kBytes, .all_read_all = true};
    case OpKind::kBarrier:
    case OpKind::kAllReduceRmsNorm:  // on GPUs only
      break;
  }
  return {};
}

}  // namespace jaxfabric
