// Where the messages of a pattern lie: each has a place of its own in the memory of its receiver,
// and a counter that says that it is there. So a sender that knows this memory needs no leave, and
// nobody has to make room.
//
// Pure functions. Both ends work the places out for themselves, from the receiver's schedule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/pattern/pattern.h"

namespace jaxfabric {

// How the bytes of an array are cut into the blocks of a pattern.
struct BlockCut {
  BlockCut() = default;
  // `bytes`: of the array. `rows`: every block is a row, that of one member; otherwise blocks begin
  // on cache lines.
  BlockCut(uint32_t block_count, size_t array_bytes, bool rows);

  size_t Begin(uint32_t block) const { return std::min(block * share, bytes); }
  size_t Bytes(uint32_t block) const { return Begin(block + 1) - Begin(block); }
  size_t Bytes(const Blocks& some) const;

  uint32_t blocks = 0;
  size_t share = 0;  // bytes of a block; the last ones may have less
  size_t bytes = 0;
};

BlockCut CutFor(PatternKind kind, OpKind op, int32_t members, size_t array_bytes);

// What an execution may receive; larger calls go other ways.
inline constexpr size_t kMostMessageBytes = 1 << 20;

// Where a member stands for several ranks of its host, which show it their operands in memory that
// every execution has (Cell::reserve).
inline constexpr size_t kMostSharedBytes = 256;

// The pattern keeps contributions beside, to add them all at once.
bool Collects(PatternKind kind, OpKind op);

// At least what any member needs for what it receives, and for its work: equal on all of them,
// which their own needs are not.
size_t MostMessageBytes(PatternKind kind, OpKind op, int32_t members, size_t array_bytes);

// All that one member has to know.
struct PatternMessages {
  struct Place {
    size_t counter = 0;
    size_t bytes_at = 0;
  };

  PatternMessages() = default;
  // Requires what MakePattern() requires.
  PatternMessages(PatternKind kind, OpKind op, int32_t members, int32_t member, int32_t root,
                  size_t array_bytes);

  Pattern pattern;
  BlockCut cut;
  size_t collecting = 0;        // so many of the first steps collect
  std::vector<Place> sent;      // by step: in the memory of the receiver
  std::vector<Place> received;  // by step: in the own memory
  size_t counter_bytes = 0;     // they come first in it
  // What arrives changes blocks that were sent on from where they are.
  bool changes_sent = false;
  // The array is neither the operand nor the result, but here.
  bool works_beside = false;
  size_t work = 0;
  size_t bytes = 0;  // of the own memory
};

}  // namespace jaxfabric
