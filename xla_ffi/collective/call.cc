#include "collective/call.h"

#include <algorithm>
#include <bit>

#include "base/hash.h"

namespace jaxfabric {

std::string_view OpKindName(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kPermute:
      return "permute";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kRaggedAllToAll:
      return "ragged_all_to_all";
    case OpKind::kAllReduceRmsNorm:
      return "all_reduce_rms_norm";
  }
  return "unknown";
}

uint64_t CallSpec::Hash() const {
  Hasher hasher;
  hasher.Add(static_cast<uint64_t>(kind))
      .Add(static_cast<uint64_t>(reduction))
      .Add(site)
      .Add(label);
  for (const auto& group : groups) hasher.Add(std::span<const int64_t>(group));
  hasher.Add(uint64_t{by_position}).Add(std::span<const int64_t>(pairs));
  hasher.Add(std::span<const int64_t>(positions)).Add(static_cast<uint64_t>(root));
  return hasher.Add(uint64_t{std::bit_cast<uint32_t>(epsilon)}).Finish();
}

Status CallSpec::Validate() const {
  const auto bad = [this](const std::string& what) {
    return Status(Code::kInvalidArgument, StrCat(label, ": ", what));
  };
  std::vector<int64_t> all;
  for (const auto& group : groups) {
    if (group.empty()) return bad("an empty group");
    all.insert(all.end(), group.begin(), group.end());
  }
  std::sort(all.begin(), all.end());
  if (all.empty()) return bad("no groups");
  if (std::adjacent_find(all.begin(), all.end()) != all.end()) {
    return bad("a member appears twice in the groups");
  }
  if (!positions.empty() && positions.size() != all.size()) {
    return bad(StrCat(positions.size(), " positions for ", all.size(), " members"));
  }
  if (pairs.size() % 2 != 0) return bad("an odd number of values in pairs");
  for (const auto& group : groups) {
    const auto size = static_cast<int64_t>(group.size());
    if (kind == OpKind::kBroadcast && (root < 0 || root >= size)) {
      return bad(StrCat("root ", root, " is outside of a group of ", size));
    }
    for (int64_t position : pairs) {
      if (position < 0 || position >= size) {
        return bad(StrCat("pair member ", position, " is outside of a group of ", size));
      }
    }
  }
  for (size_t i = 0; i < pairs.size(); i += 2) {
    for (size_t j = i + 2; j < pairs.size(); j += 2) {
      if (pairs[i] == pairs[j]) return bad(StrCat("source ", pairs[i], " appears twice"));
      if (pairs[i + 1] == pairs[j + 1]) {
        return bad(StrCat("destination ", pairs[i + 1], " appears twice"));
      }
    }
  }
  return OkStatus();
}

}  // namespace jaxfabric
