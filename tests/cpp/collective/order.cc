#include "collective/order.h"

#include <algorithm>
#include <bit>

#include "memory/reduce.h"

namespace jaxfabric::testing {
namespace {

struct Adder {
  DType dtype;
  ReduceOp reduction;

  Bytes operator()(const std::vector<Bytes>& parts) const {
    std::vector<const void*> sources;
    for (const Bytes& part : parts) sources.push_back(part.data());
    Bytes sum(parts[0].size());
    Reduce(dtype, reduction, sum.data(), sources, sum.size() / DTypeSize(dtype));
    return sum;
  }
};

Bytes Cut(const Bytes& bytes, size_t begin, size_t end) {
  return Bytes(bytes.begin() + static_cast<ptrdiff_t>(begin),
               bytes.begin() + static_cast<ptrdiff_t>(end));
}

// From the member behind the owner around to the owner, each hop rounded.
Bytes Around(const Adder& add, const std::vector<Bytes>& parts, size_t owner) {
  const size_t n = parts.size();
  Bytes sum = parts[(owner + 1) % n];
  for (size_t hop = 2; hop <= n; ++hop) sum = add({sum, parts[(owner + hop) % n]});
  return sum;
}

Bytes Tree(const Adder& add, const std::vector<Bytes>& parts, bool distant_first) {
  const size_t power = std::bit_floor(parts.size());
  const size_t folded = parts.size() - power;
  std::vector<Bytes> leaves;
  for (size_t i = 0; i < folded; ++i) leaves.push_back(add({parts[2 * i], parts[2 * i + 1]}));
  leaves.insert(leaves.end(), parts.begin() + static_cast<ptrdiff_t>(2 * folded), parts.end());
  while (leaves.size() > 1) {
    const size_t half = leaves.size() / 2;
    std::vector<Bytes> sums;
    for (size_t i = 0; i < half; ++i) {
      const size_t left = distant_first ? i : 2 * i;
      sums.push_back(add({leaves[left], leaves[distant_first ? i + half : left + 1]}));
    }
    leaves = std::move(sums);
  }
  return leaves[0];
}

}  // namespace

Bytes SumInOrder(PatternKind kind, int owner, DType dtype, ReduceOp reduction, size_t count,
                 const std::vector<Bytes>& parts) {
  const Adder add{dtype, reduction};
  const size_t bytes = count * DTypeSize(dtype);
  if (kind == PatternKind::kDirect || kind == PatternKind::kOneShot) return add(parts);
  if (kind == PatternKind::kRecursiveDoubling) return Tree(add, parts, /*distant_first=*/false);
  if (kind == PatternKind::kHalvingDoubling) return Tree(add, parts, /*distant_first=*/true);
  if (owner >= 0) return Around(add, parts, static_cast<size_t>(owner));
  // As many blocks as members, which begin on cache lines.
  const size_t n = parts.size();
  const size_t share = ((bytes + n - 1) / n + 63) / 64 * 64;
  Bytes all;
  for (size_t block = 0; block < n; ++block) {
    const size_t begin = std::min(block * share, bytes), end = std::min(begin + share, bytes);
    if (begin == end) continue;
    std::vector<Bytes> cut;
    for (const Bytes& part : parts) cut.push_back(Cut(part, begin, end));
    const Bytes sum = Around(add, cut, block);
    all.insert(all.end(), sum.begin(), sum.end());
  }
  return all;
}

}  // namespace jaxfabric::testing
