#include "collective/pattern/messages.h"

#include <bit>
#include <map>

namespace jaxfabric {
namespace {

constexpr size_t kLine = 64;

size_t RoundUp(size_t value) { return (value + kLine - 1) / kLine * kLine; }

bool WorksBeside(PatternKind kind, OpKind op) {
  return (op == OpKind::kReduceScatter && kind != PatternKind::kDirect) ||
         (op == OpKind::kAllToAll && kind == PatternKind::kBruck);
}

}  // namespace

bool Collects(PatternKind kind, OpKind op) {
  const bool reduces = op == OpKind::kAllReduce || op == OpKind::kReduceScatter;
  return reduces && (kind == PatternKind::kDirect || kind == PatternKind::kOneShot);
}

namespace {

// Places of what one member receives, by step. Returns the bytes up to their end.
size_t PlaceReceived(const Pattern& pattern, const BlockCut& cut,
                     std::vector<PatternMessages::Place>& places) {
  size_t counters = 0;
  for (const Step& step : pattern.steps) counters += step.from != kNobody;
  size_t counter = 0;
  size_t end = RoundUp(counters * sizeof(uint64_t));
  for (const Step& step : pattern.steps) {
    PatternMessages::Place& place = places.emplace_back();
    if (step.from == kNobody) continue;
    place = {counter, end};
    counter += sizeof(uint64_t);
    end += RoundUp(cut.Bytes(step.received));
  }
  return end;
}

// Blocks that a member receives, at most.
size_t MostReceived(PatternKind kind, OpKind op, int32_t members) {
  const auto n = static_cast<size_t>(members);
  const size_t log = std::bit_width(n - 1);
  switch (kind) {
    case PatternKind::kDirect:
    case PatternKind::kRing:
      return op == OpKind::kAllReduce ? 2 * (n - 1) : n;
    case PatternKind::kOneShot:
    case PatternKind::kPairwise:
      return n - 1;
    case PatternKind::kRecursiveDoubling:
      return op == OpKind::kAllReduce ? log + 1 : n;
    case PatternKind::kHalvingDoubling:
      return op == OpKind::kAllReduce ? 3 * std::bit_floor(n) : 2 * n;
    case PatternKind::kBruck:
      return op == OpKind::kAllToAll ? (n + 1) / 2 * log : n;
    case PatternKind::kTree:
      return 1;
    case PatternKind::kDissemination:
      return 0;
  }
  return 0;
}

size_t MostMessages(PatternKind kind, OpKind op, int32_t members) {
  const bool of_one_block = kind == PatternKind::kDirect || kind == PatternKind::kRing ||
                            kind == PatternKind::kOneShot || kind == PatternKind::kPairwise;
  if (of_one_block) return MostReceived(kind, op, members);
  return 2 * static_cast<size_t>(std::bit_width(static_cast<size_t>(members))) + 2;
}

}  // namespace

BlockCut::BlockCut(uint32_t block_count, size_t array_bytes, bool rows)
    : blocks(block_count), bytes(array_bytes) {
  if (blocks == 0) return;
  share = (bytes + blocks - 1) / blocks;
  if (!rows && blocks > 1) share = RoundUp(share);
}

size_t BlockCut::Bytes(const Blocks& some) const {
  size_t sum = 0;
  for (uint32_t i = 0; i < some.count; ++i) sum += Bytes(some.At(i, blocks));
  return sum;
}

BlockCut CutFor(PatternKind kind, OpKind op, int32_t members, size_t array_bytes) {
  const bool rows = op != OpKind::kAllReduce && op != OpKind::kBroadcast;
  return {BlockCount(kind, op, static_cast<uint32_t>(members)), array_bytes, rows};
}

size_t MostMessageBytes(PatternKind kind, OpKind op, int32_t members, size_t array_bytes) {
  if (members < 2) return 0;
  const BlockCut cut = CutFor(kind, op, members, array_bytes);
  const size_t messages = MostMessages(kind, op, members);
  // Each message and all counters end with a cache line.
  return RoundUp(messages * sizeof(uint64_t)) + MostReceived(kind, op, members) * cut.share +
         messages * kLine + (WorksBeside(kind, op) ? RoundUp(array_bytes) : 0);
}

PatternMessages::PatternMessages(PatternKind kind, OpKind op, int32_t members, int32_t member,
                                 int32_t root, size_t array_bytes)
    : pattern(MakePattern(kind, op, members, member, root)),
      cut(CutFor(kind, op, members, array_bytes)),
      works_beside(WorksBeside(kind, op)) {
  const bool reduces = op == OpKind::kAllReduce || op == OpKind::kReduceScatter;
  bytes = PlaceReceived(pattern, cut, received);
  for (const Step& step : pattern.steps) {
    collecting += step.arrival == Arrival::kCollect;
    counter_bytes += step.from != kNobody ? sizeof(uint64_t) : 0;
  }
  changes_sent = works_beside || (reduces && collecting == 0);
  if (works_beside) {
    work = bytes;
    bytes += RoundUp(array_bytes);
  }
  // Of the messages of this member, the receiver takes the first one first, and so on.
  struct Partner {
    std::vector<Place> places;
    size_t next = 0;
  };
  std::map<int32_t, Partner> partners;
  for (const Step& step : pattern.steps) {
    Place& place = sent.emplace_back();
    if (step.to == kNobody) continue;
    const auto [entry, is_new] = partners.try_emplace(step.to);
    Partner& partner = entry->second;
    if (is_new) {
      const Pattern theirs = MakePattern(kind, op, members, step.to, root);
      std::vector<Place> all;
      PlaceReceived(theirs, cut, all);
      for (size_t i = 0; i < all.size(); ++i) {
        if (theirs.steps[i].from == member) partner.places.push_back(all[i]);
      }
    }
    place = partner.places.at(partner.next++);
  }
}

}  // namespace jaxfabric
