#include "collective/pattern/played.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace jaxfabric {

Block Sum(const Block& left, const Block& right) {
  Block sum;
  for (size_t i = 0; i < std::max(left.size(), right.size()); ++i) {
    const std::string a = i < left.size() ? left[i] : "";
    const std::string b = i < right.size() ? right[i] : "";
    sum.push_back("(" + a + "+" + b + ")");
  }
  return sum;
}

std::vector<Pattern> MakeAll(PatternKind kind, OpKind op, int members, int root) {
  std::vector<Pattern> patterns;
  for (int member = 0; member < members; ++member) {
    patterns.push_back(MakePattern(kind, op, members, member, root));
  }
  return patterns;
}

Played::Played(std::vector<Pattern> patterns, std::vector<std::vector<Block>> arrays, bool separate)
    : patterns_(std::move(patterns)),
      arrays_(std::move(arrays)),
      results_(arrays_),
      separate_(separate),
      members_(patterns_.size()),
      channels_(patterns_.size() * patterns_.size()) {
  for (size_t i = 0; i < members_.size(); ++i) {
    const size_t steps = patterns_[i].steps.size();
    members_[i] = {.sent = std::vector<uint8_t>(steps),
                   .taken = std::vector<uint8_t>(steps),
                   .kept = std::vector<Message>(steps),
                   .heard = uint64_t{1} << i};
  }
}

std::string Played::Run(uint32_t seed) {
  std::vector<size_t> order(members_.size());
  std::iota(order.begin(), order.end(), 0);
  if (seed == 1) std::reverse(order.begin(), order.end());
  std::mt19937 random(seed);
  for (bool any = true; any && problem_.empty();) {
    any = false;
    if (seed > 1) std::shuffle(order.begin(), order.end(), random);
    for (const size_t member : order) {
      if (seed > 1) {
        members_[member].next = random();
        any |= Act(member);
      } else {
        while (Act(member)) any = true;
      }
    }
  }
  for (size_t i = 0; i < members_.size() && problem_.empty(); ++i) {
    for (size_t step = 0; step < patterns_[i].steps.size(); ++step) {
      const bool to = patterns_[i].steps[step].to != kNobody && !members_[i].sent[step];
      const bool from = patterns_[i].steps[step].from != kNobody && !members_[i].taken[step];
      if (to || from) problem_ = StrCat("member ", i, " is stuck at step ", step);
    }
  }
  for (const auto& channel : channels_) {
    if (!channel.empty() && problem_.empty()) problem_ = "a message that nobody takes";
  }
  return problem_;
}

bool Played::Act(size_t member) {
  const size_t steps = patterns_[member].steps.size();
  for (size_t i = 0; i < steps; ++i) {
    const size_t step = (members_[member].next + i) % steps;
    if (TrySend(member, step) || TryTake(member, step)) return true;
  }
  return false;
}

bool Played::TrySend(size_t member, size_t number) {
  Member& me = members_[member];
  const auto& steps = patterns_[member].steps;
  const Step& step = steps[number];
  if (me.sent[number] || step.to == kNobody || me.entered < step.needs) return false;
  for (size_t i = 0; i < number; ++i) {
    if (steps[i].to == step.to && !me.sent[i]) return false;
  }
  auto& channel = Channel(static_cast<int64_t>(member), step.to);
  if (!channel.empty()) return false;  // room for one
  Message message{{}, me.heard};
  for (uint32_t i = 0; i < step.sent.count; ++i) {
    message.blocks.push_back(arrays_[member][step.sent.At(i, patterns_[member].blocks)]);
    if (message.blocks.back().empty()) problem_ = "a block is sent before it is there";
  }
  channel.push_back(std::move(message));
  me.sent[number] = 1;
  Enter(member);
  return true;
}

bool Played::TryTake(size_t member, size_t number) {
  Member& me = members_[member];
  const auto& steps = patterns_[member].steps;
  const Step& step = steps[number];
  if (me.taken[number] || step.from == kNobody || me.entered < step.needs) return false;
  if (step.to != kNobody && !me.sent[number]) return false;
  for (size_t i = 0; i < number; ++i) {
    if (steps[i].from == step.from && !me.taken[i]) return false;
  }
  auto& channel = Channel(step.from, static_cast<int64_t>(member));
  if (channel.empty()) return false;
  Message message = std::move(channel.front());
  channel.pop_front();
  if (message.blocks.size() != step.received.count) problem_ = "lengths differ";
  for (uint32_t i = 0; i < step.received.count && problem_.empty(); ++i) {
    const uint32_t block = step.received.At(i, patterns_[member].blocks);
    Block& target = results_[member][block];
    if (step.arrival == Arrival::kStore) target = message.blocks[i];
    if (step.arrival == Arrival::kAddBehind) target = Sum(target, message.blocks[i]);
    if (step.arrival == Arrival::kAddBefore) target = Sum(message.blocks[i], target);
    if (!separate_) arrays_[member][block] = target;
  }
  if (step.arrival == Arrival::kCollect) me.kept[number] = message;
  me.heard |= message.heard;
  me.taken[number] = 1;
  Enter(member);
  return true;
}

// Moves `entered` on; what is to be collected enters together.
void Played::Enter(size_t member) {
  Member& me = members_[member];
  const auto& steps = patterns_[member].steps;
  while (me.entered < steps.size()) {
    if (steps[me.entered].arrival == Arrival::kCollect) {
      for (size_t i = 0; i < steps.size(); ++i) {
        if (steps[i].arrival == Arrival::kCollect && !(me.sent[i] && me.taken[i])) return;
      }
      if (!me.kept.empty()) AddKept(member);
      me.kept.clear();
    } else if (steps[me.entered].from != kNobody && !me.taken[me.entered]) {
      return;
    }
    ++me.entered;
  }
}

void Played::AddKept(size_t member) {
  std::vector<std::pair<int64_t, Block>> contributions;
  uint32_t block = 0;
  for (size_t i = 0; i < patterns_[member].steps.size(); ++i) {
    const Step& step = patterns_[member].steps[i];
    if (step.arrival != Arrival::kCollect) continue;
    block = step.received.first;
    contributions.emplace_back(step.from, members_[member].kept[i].blocks.at(0));
  }
  contributions.emplace_back(static_cast<int64_t>(member), arrays_[member][block]);
  std::sort(contributions.begin(), contributions.end());
  Block sum = contributions[0].second;
  for (size_t i = 1; i < contributions.size(); ++i) sum = Sum(sum, contributions[i].second);
  arrays_[member][block] = results_[member][block] = sum;
}

}  // namespace jaxfabric
