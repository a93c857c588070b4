// A communicator that spans hosts: who acts for whom, and where what arrives lies.
//
// Every rank owns one part of an array. On each other host one rank, its *handler* there, stands in
// for the owner: it sums up what the ranks of its host contribute to the part, sends one partial
// sum, and takes the result in for all of them. So each byte crosses the network once per host.
// Hosts may have different numbers of ranks. Pure functions, equal on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/call.h"
#include "collective/pattern/hierarchy.h"

namespace jaxfabric {

class Hosts {
 public:
  // `host_of`: a number of the host of each position; hosts are numbered anew by first position.
  explicit Hosts(const std::vector<int>& host_of = {}) : ranks_(host_of) {}

  int size() const { return ranks_.ranks(); }
  int count() const { return ranks_.hosts(); }
  int of(int position) const { return ranks_.HostOf(position); }
  // Ascending.
  std::vector<int> members(int host) const;
  // Some host has more than one rank.
  bool shared() const { return count() < size(); }
  // The rank of `host` that acts for the owner of `part`; there is one on the owner's host, itself.
  int Handler(int host, int part) const {
    return ranks_.PositionOf(host, ranks_.LocalOf(part) % ranks_.RanksOf(host));
  }
  // The parts of other hosts that `position` handles, ascending.
  std::vector<int> HandledBy(int position) const;
  // The most parts that one rank handles.
  int MostHandled() const;
  // The ranks of other hosts that `position` exchanges something with, ascending.
  std::vector<int> PartnersOf(int position) const;

 private:
  Hierarchy ranks_;
};

// Offsets in the memory that a rank stages and receives in, with rings of `ring` bytes. Counters
// that its partners write come first.
struct HostsLayout {
  HostsLayout() = default;
  HostsLayout(const Hosts& all, int position);
  HostsLayout With(size_t ring_bytes) const {
    HostsLayout layout = *this;
    layout.ring = ring_bytes;
    return layout;
  }

  // Bytes that have arrived: of the partial sums of a host, of the results of a handled part.
  size_t PartialCount(int host) const { return static_cast<size_t>(host) * sizeof(uint64_t); }
  size_t ResultCount(size_t handled_index) const {
    return (hosts + handled_index) * sizeof(uint64_t);
  }
  // What this rank contributes to a part, for the other ranks of its host.
  size_t Contribution(int part) const { return Ring(static_cast<size_t>(part)); }
  size_t OwnPartial() const { return Ring(parts); }
  size_t OwnResult() const { return Ring(parts + 1); }
  size_t Partial(int host) const { return Ring(parts + 2 + static_cast<size_t>(host)); }
  size_t SentPartial(size_t handled_index) const { return Ring(parts + 2 + hosts + handled_index); }
  size_t Result(size_t handled_index) const {
    return Ring(parts + 2 + hosts + handled + handled_index);
  }
  size_t rings() const { return parts + 2 + hosts + 2 * handled; }
  size_t counters() const { return hosts + handled; }
  size_t counter_bytes() const { return (counters() * sizeof(uint64_t) + 63) / 64 * 64; }
  size_t bytes() const { return Ring(rings()); }

  size_t hosts = 0;
  size_t handled = 0;  // parts
  size_t parts = 0;    // that are staged; none where the rank is alone on its host
  size_t ring = 0;

 private:
  size_t Ring(size_t index) const { return counter_bytes() + index * ring; }
};

// Which of a rank's rings holds what it sends to other hosts in Algorithm::kRelay.
class RelayRings {
 public:
  RelayRings() = default;
  RelayRings(OpKind kind, const Hosts& hosts, int position)
      : kind_(kind),
        handled_(hosts.HandledBy(position).size()),
        members_(hosts.members(hosts.of(position)).size()) {}

  // To the owner of a handled part, from the member of this host with that index.
  size_t Of(size_t handled_index, size_t member_index) const {
    switch (kind_) {
      case OpKind::kReduceScatter:
        return handled_index;
      case OpKind::kAllGather:
        return member_index;
      case OpKind::kAllToAll:
        return handled_index * members_ + member_index;
      default:
        return 0;
    }
  }
  // The sum of this host that the rank needs itself.
  size_t OwnPartial() const { return kind_ == OpKind::kReduceScatter ? handled_ : 0; }
  size_t count() const {
    switch (kind_) {
      case OpKind::kReduceScatter:
        return handled_ + 1;
      case OpKind::kAllGather:
        return members_;
      case OpKind::kAllToAll:
        return handled_ * members_;
      default:
        return 1;
    }
  }

 private:
  OpKind kind_ = OpKind::kAllReduce;
  size_t handled_ = 0;
  size_t members_ = 1;
};

// All that one rank does for the communicator. Positions, and indices in the lists of handled
// parts.
struct HostRoles {
  HostRoles() = default;
  HostRoles(const Hosts& hosts, int position);

  struct Handled {  // a part of another host
    int owner;
    size_t index;
    HostsLayout layout;  // the owner's
  };
  struct Relay {  // who takes the own result in on another host
    int host;
    int position;
    size_t index;  // of the own part there
    HostsLayout layout;
  };
  struct Result {  // a part that is not the own one, and where it is on this host
    int part;
    int holder;    // the owner, or who handles the part
    size_t index;  // there, if `relayed`
    bool relayed;
    HostsLayout layout;
  };
  int host = 0;
  HostsLayout layout;        // the own one
  std::vector<int> members;  // of the own host, this rank included
  std::vector<int> locals;   // the others of them
  std::vector<Handled> handled;
  std::vector<Relay> relays;  // one for each other host
  std::vector<Result> results;
};

}  // namespace jaxfabric
