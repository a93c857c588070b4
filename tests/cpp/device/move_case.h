// A call that moves bytes, by the name of its op.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace jaxfabric::device {

// What every rank sends, whom permute's ranks send to, and what all must have in the end.
struct Case {
  uint32_t ranks, root;
  uint64_t bytes;
  std::vector<int32_t> target, source;
  std::vector<std::vector<std::byte>> inputs;

  std::vector<std::byte> Expected(const std::string& op, uint32_t rank) const {
    std::vector<std::byte> result;
    const auto append = [&](uint32_t from, uint64_t at) {
      const auto begin = inputs[from].begin() + static_cast<std::ptrdiff_t>(at);
      result.insert(result.end(), begin, begin + static_cast<std::ptrdiff_t>(bytes));
    };
    if (op == "barrier") append(rank, 0);
    if (op == "broadcast") append(root, 0);
    if (op == "permute") {
      if (source[rank] < 0) return std::vector<std::byte>(bytes);
      append(static_cast<uint32_t>(source[rank]), 0);
    }
    for (uint32_t from = 0; from < ranks; ++from) {
      if (op == "all_gather") append(from, 0);
      if (op == "all_to_all") append(from, rank * bytes);
    }
    return result;
  }
};

inline Case MakeCase(std::mt19937_64& random, const std::string& op, uint32_t ranks,
                     uint64_t bytes) {
  Case c{ranks, static_cast<uint32_t>(random() % ranks), bytes, {}, {}, {}};
  c.target.assign(ranks, -1);
  c.source.assign(ranks, -1);
  std::vector<int32_t> order(ranks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (random() % 4 == 0) continue;
    c.target[rank] = order[rank];
    c.source[static_cast<size_t>(order[rank])] = static_cast<int32_t>(rank);
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    c.inputs.emplace_back(bytes * (op == "all_to_all" ? ranks : 1));
    for (std::byte& byte : c.inputs.back()) byte = static_cast<std::byte>(random());
  }
  return c;
}

}  // namespace jaxfabric::device
