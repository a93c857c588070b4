// Members of a pattern played against each other, on arrays of symbols, by the rules of pattern.h.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "collective/pattern/pattern.h"

namespace jaxfabric {

// A block: its elements, each the expression of what was added up, or "" for nothing known.
using Block = std::vector<std::string>;

Block Sum(const Block& left, const Block& right);

class Played {
 public:
  // arrays[m]: what member m starts with. `separate`: what arrives goes to a result of its own,
  // which starts as a copy.
  Played(std::vector<Pattern> patterns, std::vector<std::vector<Block>> arrays,
         bool separate = false);

  // Until nobody has anything left to do, in an order that depends on the seed: 0 and 1 do all that
  // is possible for the first, or the last, member before they go on to another. "" or what went
  // wrong.
  std::string Run(uint32_t seed);

  const Block& At(int member, uint32_t block) const { return results_[Index(member)][block]; }
  // Members that this one has heard of, by any number of steps, as bits.
  uint64_t HeardOf(int member) const { return members_[Index(member)].heard; }

 private:
  struct Message {
    std::vector<Block> blocks;
    uint64_t heard = 0;
  };
  struct Member {
    std::vector<uint8_t> sent;
    std::vector<uint8_t> taken;
    std::vector<Message> kept;  // by step: what was collected
    size_t entered = 0;         // of so many of the first steps the arrivals are in the array
    size_t next = 0;            // where to look first
    uint64_t heard = 0;
  };

  static size_t Index(int64_t value) { return static_cast<size_t>(value); }
  std::deque<Message>& Channel(int64_t from, int64_t to) {
    return channels_[Index(from) * patterns_.size() + Index(to)];
  }
  bool Act(size_t member);
  bool TrySend(size_t member, size_t step);
  bool TryTake(size_t member, size_t step);
  void Enter(size_t member);
  void AddKept(size_t member);

  std::vector<Pattern> patterns_;
  std::vector<std::vector<Block>> arrays_;
  std::vector<std::vector<Block>> results_;
  bool separate_;
  std::vector<Member> members_;
  std::vector<std::deque<Message>> channels_;
  std::string problem_;
};

// All members' schedules.
std::vector<Pattern> MakeAll(PatternKind kind, OpKind op, int members, int root = 0);

}  // namespace jaxfabric
