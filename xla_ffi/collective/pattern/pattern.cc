#include "collective/pattern/pattern.h"

#include <algorithm>
#include <bit>

#include "base/status.h"

namespace jaxfabric {
namespace {

Blocks Range(uint32_t first, uint32_t count) { return {first, count, count, count}; }

// Blocks 0 to blocks - 1 whose number has the bit.
Blocks WithBit(uint32_t bit, uint32_t blocks) {
  const uint32_t whole = blocks / (2 * bit) * bit;
  const uint32_t rest = blocks % (2 * bit);
  return {bit, whole + (rest > bit ? rest - bit : 0), bit, 2 * bit};
}

// Adds the steps of one phase of a collective after another.
class Builder {
 public:
  explicit Builder(Pattern& pattern)
      : pattern_(pattern),
        n_(static_cast<uint32_t>(pattern.members)),
        me_(static_cast<uint32_t>(pattern.member)),
        power_(std::bit_floor(n_)),
        folded_(n_ - power_) {}

  void Direct(Arrival arrival);
  void Ring(Arrival arrival);
  void Double(bool moves);
  void HalveAndDouble();
  void Bruck();
  void Tree(uint32_t root);
  void Scatter(uint32_t root);
  void Disseminate();

 private:
  uint32_t Up(uint32_t distance) const { return (me_ + distance) % n_; }
  uint32_t Down(uint32_t distance) const { return (me_ + n_ - distance) % n_; }
  uint32_t done() const { return static_cast<uint32_t>(pattern_.steps.size()); }
  void Add(int64_t to, Blocks sent, int64_t from, Blocks received, Arrival arrival,
           uint32_t needs) {
    pattern_.steps.push_back(
        {static_cast<int32_t>(to), static_cast<int32_t>(from), needs, arrival, sent, received});
  }
  void Send(int64_t to, Blocks sent) { Add(to, sent, kNobody, Blocks{}, Arrival::kStore, done()); }
  void Receive(int64_t from, Blocks received, Arrival arrival) {
    Add(kNobody, Blocks{}, from, received, arrival, done());
  }
  // An exchange with one partner, which depends on all that was before.
  void Exchange(uint32_t with, Blocks sent, Blocks received, bool adds) {
    Arrival arrival = Arrival::kStore;
    if (adds) arrival = with < me_ ? Arrival::kAddBefore : Arrival::kAddBehind;
    Add(with, sent, with, received, arrival, done());
  }

  // Of the members 0 to 2 * folded - 1 the odd ones hand their part to the even ones; who is left
  // has the numbers 0 to power - 1.
  bool folded() const { return me_ < 2 * folded_ && me_ % 2 == 1; }
  bool has_folded() const { return me_ < 2 * folded_ && me_ % 2 == 0; }
  uint32_t number() const { return me_ < 2 * folded_ ? me_ / 2 : me_ - folded_; }
  uint32_t MemberOf(uint32_t number) const {
    return number < folded_ ? 2 * number : number + folded_;
  }
  // The blocks of such numbers: one each, or those of the members behind them.
  Blocks BlocksOf(uint32_t number, uint32_t count) const {
    if (pattern_.blocks <= power_) return Range(number, count);
    const auto begin = [this](uint32_t of) { return of + std::min(of, folded_); };
    return Range(begin(number), begin(number + count) - begin(number));
  }
  Blocks All() const { return Range(0, pattern_.blocks); }

  Pattern& pattern_;
  const uint32_t n_;
  const uint32_t me_;
  const uint32_t power_;   // the largest power of two up to n
  const uint32_t folded_;  // members beyond it
};

void Builder::Direct(Arrival arrival) {
  const uint32_t before = done();
  const bool to_all = pattern_.op == OpKind::kAllToAll || pattern_.op == OpKind::kRaggedAllToAll;
  for (uint32_t distance = 1; distance < n_; ++distance) {
    const uint32_t to = Up(distance);
    const uint32_t from = Down(distance);
    const uint32_t needs = pattern_.kind == PatternKind::kPairwise ? done() : before;
    if (to_all) {
      Add(to, Range(distance, 1), from, Range(distance, 1), arrival, needs);
    } else if (pattern_.blocks == 1) {
      Add(to, Range(0, 1), from, Range(0, 1), arrival, needs);
    } else if (arrival == Arrival::kCollect) {
      Add(to, Range(to, 1), from, Range(me_, 1), arrival, needs);
    } else {
      Add(to, Range(me_, 1), from, Range(from, 1), arrival, needs);
    }
  }
}

void Builder::Ring(Arrival arrival) {
  // A block is added up from the member after its owner on, all around to the owner.
  const uint32_t ahead = arrival == Arrival::kStore ? 0 : 1;
  for (uint32_t step = 0; step + 1 < n_; ++step) {
    Add(Up(1), Range(Down((step + ahead) % n_), 1), Down(1),
        Range(Down((step + ahead + 1) % n_), 1), arrival, done());
  }
}

// all_gather if it moves blocks; all_reduce of one block, or a barrier of none, otherwise.
void Builder::Double(bool moves) {
  const bool adds = pattern_.op == OpKind::kAllReduce;
  const Blocks own = moves ? Range(me_, 1) : All();
  if (folded()) {
    Send(me_ - 1, own);
    Receive(me_ - 1, moves ? Range(Up(1), n_ - 1) : All(), Arrival::kStore);
    return;
  }
  if (has_folded()) {
    Receive(me_ + 1, moves ? Range(me_ + 1, 1) : All(),
            adds ? Arrival::kAddBehind : Arrival::kStore);
  }
  const uint32_t own_number = number();
  for (uint32_t distance = 1; distance < power_; distance *= 2) {
    const uint32_t group = own_number & ~(distance - 1);
    Exchange(MemberOf(own_number ^ distance), moves ? BlocksOf(group, distance) : All(),
             moves ? BlocksOf(group ^ distance, distance) : All(), adds);
  }
  if (has_folded()) Send(me_ + 1, moves ? Range((me_ + 2) % n_, n_ - 1) : All());
}

void Builder::HalveAndDouble() {
  const bool scatters = pattern_.op == OpKind::kReduceScatter;
  if (folded()) {
    Send(me_ - 1, All());
    Receive(me_ - 1, scatters ? Range(me_, 1) : All(), Arrival::kStore);
    return;
  }
  if (has_folded()) Receive(me_ + 1, All(), Arrival::kAddBehind);
  const uint32_t own_number = number();
  for (uint32_t distance = power_ / 2; distance > 0; distance /= 2) {
    const uint32_t kept = own_number & ~(distance - 1);
    Exchange(MemberOf(own_number ^ distance), BlocksOf(kept ^ distance, distance),
             BlocksOf(kept, distance), true);
  }
  for (uint32_t distance = 1; !scatters && distance < power_; distance *= 2) {
    const uint32_t group = own_number & ~(distance - 1);
    Exchange(MemberOf(own_number ^ distance), BlocksOf(group, distance),
             BlocksOf(group ^ distance, distance), false);
  }
  if (has_folded()) Send(me_ + 1, scatters ? Range(me_ + 1, 1) : All());
}

void Builder::Bruck() {
  for (uint32_t distance = 1; distance < n_; distance *= 2) {
    if (pattern_.op == OpKind::kAllToAll) {
      const Blocks blocks = WithBit(distance, n_);
      Add(Up(distance), blocks, Down(distance), blocks, Arrival::kStore, done());
    } else {
      const uint32_t count = std::min(distance, n_ - distance);
      Add(Down(distance), Range(me_, count), Up(distance), Range(Up(distance), count),
          Arrival::kStore, done());
    }
  }
}

void Builder::Tree(uint32_t root) {
  const uint32_t relative = (me_ + n_ - root) % n_;
  const auto member = [&](uint32_t of) { return (of + root) % n_; };
  // The subtree of a member is the run of members behind it, as long as its lowest bit is.
  uint32_t below = std::bit_ceil(n_);
  if (relative > 0) {
    below = relative & (~relative + 1);
    Receive(member(relative - below), All(), Arrival::kStore);
  }
  const uint32_t needs = done();
  for (uint32_t distance = below / 2; distance > 0; distance /= 2) {
    if (relative + distance >= n_) continue;
    Add(member(relative + distance), All(), kNobody, Blocks{}, Arrival::kStore, needs);
  }
}

// A block to each member, which then sends it to all the others; the root does so with its own.
void Builder::Scatter(uint32_t root) {
  if (me_ == root) {
    for (uint32_t distance = 1; distance < n_; ++distance) {
      Add(Up(distance), Range(Up(distance), 1), kNobody, Blocks{}, Arrival::kStore, 0);
    }
    const uint32_t needs = done();
    for (uint32_t distance = 1; distance < n_; ++distance) {
      Add(Up(distance), Range(me_, 1), kNobody, Blocks{}, Arrival::kStore, needs);
    }
    return;
  }
  Receive(root, Range(me_, 1), Arrival::kStore);
  for (uint32_t distance = 1; distance < n_; ++distance) {
    const bool sends = Up(distance) != root;
    Add(sends ? int64_t{Up(distance)} : kNobody, sends ? Range(me_, 1) : Blocks{}, Down(distance),
        Range(Down(distance), 1), Arrival::kStore, 1);
  }
}

void Builder::Disseminate() {
  for (uint32_t distance = 1; distance < n_; distance *= 2) {
    Add(Up(distance), Blocks{}, Down(distance), Blocks{}, Arrival::kStore, done());
  }
}

}  // namespace

uint32_t BlockCount(PatternKind kind, OpKind op, uint32_t members) {
  switch (op) {
    case OpKind::kBarrier:
      return 0;
    case OpKind::kBroadcast:
      return kind == PatternKind::kDirect ? members : 1;
    case OpKind::kPermute:
      return 1;
    case OpKind::kAllReduce:
      if (kind == PatternKind::kHalvingDoubling) return std::bit_floor(members);
      return kind == PatternKind::kDirect || kind == PatternKind::kRing ? members : 1;
    default:
      return members;
  }
}

std::string_view PatternName(PatternKind kind) {
  switch (kind) {
    case PatternKind::kDirect:
      return "direct";
    case PatternKind::kOneShot:
      return "one-shot";
    case PatternKind::kRing:
      return "ring";
    case PatternKind::kRecursiveDoubling:
      return "recursive-doubling";
    case PatternKind::kHalvingDoubling:
      return "halving-doubling";
    case PatternKind::kBruck:
      return "bruck";
    case PatternKind::kTree:
      return "tree";
    case PatternKind::kDissemination:
      return "dissemination";
    case PatternKind::kPairwise:
      return "pairwise";
  }
  return "unknown";
}

bool HasPattern(PatternKind kind, OpKind op) {
  using enum PatternKind;
  switch (op) {
    case OpKind::kAllReduce:
      return kind == kDirect || kind == kOneShot || kind == kRing || kind == kRecursiveDoubling ||
             kind == kHalvingDoubling;
    case OpKind::kReduceScatter:
      return kind == kDirect || kind == kRing || kind == kHalvingDoubling;
    case OpKind::kAllGather:
      return kind == kDirect || kind == kRing || kind == kRecursiveDoubling || kind == kBruck;
    case OpKind::kAllToAll:
      return kind == kDirect || kind == kPairwise || kind == kBruck;
    case OpKind::kRaggedAllToAll:
      return kind == kDirect || kind == kPairwise;
    case OpKind::kPermute:
      return kind == kDirect;
    case OpKind::kBroadcast:
      return kind == kTree || kind == kDirect;
    case OpKind::kBarrier:
      return kind == kDissemination || kind == kRecursiveDoubling;
    case OpKind::kAllReduceRmsNorm:  // on GPUs only
      return false;
  }
  return false;
}

Pattern MakePattern(PatternKind kind, OpKind op, int32_t members, int32_t member, int32_t root) {
  JF_CHECK(HasPattern(kind, op) && op != OpKind::kPermute);
  JF_CHECK(0 <= member && member < members && 0 <= root && root < members);
  Pattern pattern{kind, op, members, member, BlockCount(kind, op, static_cast<uint32_t>(members)),
                  {}};
  Builder builder(pattern);
  const bool reduces = op == OpKind::kAllReduce || op == OpKind::kReduceScatter;
  const bool gathers = op == OpKind::kAllReduce || op == OpKind::kAllGather;
  switch (kind) {
    case PatternKind::kDirect:
    case PatternKind::kPairwise:
      if (op == OpKind::kBroadcast) {
        builder.Scatter(static_cast<uint32_t>(root));
        break;
      }
      if (reduces) builder.Direct(Arrival::kCollect);
      if (!reduces || gathers) builder.Direct(Arrival::kStore);
      break;
    case PatternKind::kOneShot:
      builder.Direct(Arrival::kCollect);
      break;
    case PatternKind::kRing:
      if (reduces) builder.Ring(Arrival::kAddBefore);
      if (gathers) builder.Ring(Arrival::kStore);
      break;
    case PatternKind::kRecursiveDoubling:
      builder.Double(op == OpKind::kAllGather);
      break;
    case PatternKind::kHalvingDoubling:
      builder.HalveAndDouble();
      break;
    case PatternKind::kBruck:
      builder.Bruck();
      break;
    case PatternKind::kTree:
      builder.Tree(static_cast<uint32_t>(root));
      break;
    case PatternKind::kDissemination:
      builder.Disseminate();
      break;
  }
  return pattern;
}

Pattern MakePermute(std::span<const int64_t> pairs, int32_t members, int32_t member) {
  Pattern pattern{PatternKind::kDirect, OpKind::kPermute, members, member, 1, {}};
  Step step;
  for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
    if (pairs[i] == pairs[i + 1]) continue;
    if (pairs[i] == member) step.to = static_cast<int32_t>(pairs[i + 1]);
    if (pairs[i + 1] == member) step.from = static_cast<int32_t>(pairs[i]);
  }
  if (step.to != kNobody) step.sent = Range(0, 1);
  if (step.from != kNobody) step.received = Range(0, 1);
  if (step.to != kNobody || step.from != kNobody) pattern.steps.push_back(step);
  return pattern;
}

}  // namespace jaxfabric
