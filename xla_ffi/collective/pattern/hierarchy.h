// Two levels: which rank of a host does which part of a collective between hosts.
//
// Inside a host ranks read each other's memory; between hosts messages cost. So the ranks of a host
// that are on a *lane* (its first ones, as many on every host) each exchange one part with the
// ranks on the same lane of all other hosts, by a pattern whose members are the hosts; every rank,
// on a lane or not, contributes to the parts of its host and reads what it needs of them. A
// collective is
//   1. inside:  lane i gathers part i from all ranks of its host; reductions add in ascending
//               order of positions
//   2. across:  the ranks on lane i of all hosts run the pattern, on part i
//   3. inside:  ranks read from the lanes what is theirs
// Sums are those of rank order inside a host, and of the pattern's order over hosts.
//
// Pure data, equal on all ranks, immutable once made; memory in proportion to the ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collective/call.h"

namespace jaxfabric {

class Hierarchy {
 public:
  // `host_of[p]`: the host of the rank at position p, by any numbers. Hosts are counted in the
  // order of their first positions. `lanes`: how many, 0 for as many as possible; the smallest
  // number of ranks on a host is the limit.
  explicit Hierarchy(std::span<const int32_t> host_of, int32_t lanes = 0);

  int32_t ranks() const { return static_cast<int32_t>(host_of_.size()); }
  int32_t hosts() const { return static_cast<int32_t>(begin_.size()) - 1; }
  int32_t lanes() const { return lanes_; }

  // Of the rank at a position: its host, and its number among the ranks of the host.
  int32_t HostOf(int32_t position) const { return host_of_[Index(position)]; }
  int32_t LocalOf(int32_t position) const { return local_of_[Index(position)]; }
  int32_t RanksOf(int32_t host) const { return begin_[Index(host) + 1] - begin_[Index(host)]; }
  // The inverse.
  int32_t PositionOf(int32_t host, int32_t local) const {
    return by_host_[Index(begin_[Index(host)] + local)];
  }

  // The rank runs patterns itself, on the lane LaneOf(position).
  bool OnLane(int32_t position) const { return LocalOf(position) < lanes_; }
  // The lane that carries what belongs to one rank: its block, or what is sent to it.
  int32_t LaneOf(int32_t position) const { return LocalOf(position) % lanes_; }
  // Whose things the lane carries on one host: positions, ascending; OnLane()'s rank first.
  std::vector<int32_t> Carried(int32_t host, int32_t lane) const;

 private:
  static size_t Index(int32_t value) { return static_cast<size_t>(value); }

  std::vector<int32_t> host_of_;   // by position
  std::vector<int32_t> local_of_;  // by position
  std::vector<int32_t> by_host_;   // positions, host by host, ascending within one
  std::vector<int32_t> begin_;     // by host, and the end: indices into by_host_
  int32_t lanes_ = 1;
};

// How a collective is cut into parts, one for each lane.
enum class Parts : uint8_t {
  kNone,   // nothing moves: lane 0 does it alone
  kBytes,  // every lane has an equal share of the array, in whole elements
  kRanks,  // blocks of whole ranks, those of Carried(); a host's block is all of its ranks'
  kPairs,  // what one rank sends to another, by LaneOf(receiver); a host's block for another is
           // all that the ranks of the one send to Carried(other, lane), receiver by receiver
};

struct Stages {
  Parts parts = Parts::kNone;
  // Members of the pattern are the hosts, on each lane. False: they are the ranks themselves, and
  // each sends to those of other hosts what is its own; there are no lanes.
  bool by_host = true;
  bool reduces_inside = false;  // step 1 adds; otherwise it collects
  // Step 3: every rank reads the parts of all lanes; otherwise only what belongs to it, from its
  // own lane.
  bool all_read_all = false;
};

// What the pattern between the hosts does is the op itself; broadcast's root is the host of the
// root, which has nothing to gather: its lanes send parts of what the root has shown.
Stages StagesOf(OpKind op);

}  // namespace jaxfabric
