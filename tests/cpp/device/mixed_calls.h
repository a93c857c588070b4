// A long sequence of calls of every kind in one communicator, each of which is checked.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "device/mixed_arrays.h"

namespace jaxfabric::device {

// One rank's part in calls, with the arrays of the one that is running.
class MixedRank {
 public:
  MixedRank(Cluster& cluster, uint32_t rank, MixedWindows& windows)
      : cluster_(cluster), rank_(rank), windows_(windows) {}

  uint64_t Start(const MixedCall& call, std::function<void(bool)> finished = nullptr) {
    call_ = call;
    arrays_ = MakeArrays(call, rank_, windows_);
    return arrays_->Start(cluster_, std::move(finished));
  }
  testing::AssertionResult Check() {
    const testing::AssertionResult right = arrays_->Check();
    if (right) return right;
    return testing::AssertionFailure()
           << call_.kernel << ", rank " << rank_ << ", bytes " << call_.bytes << ", blocks "
           << call_.blocks << ", threads " << call_.threads << ": " << right.message();
  }

 private:
  Cluster& cluster_;
  uint32_t rank_;
  MixedWindows& windows_;
  MixedCall call_{};
  std::unique_ptr<MixedArrays> arrays_;
};

// One for every rank. What is in flight in the end is dropped with the arrays.
class MixedRanks {
 public:
  explicit MixedRanks(Cluster& cluster) : cluster_(cluster), windows_(cluster.shape()) {
    cluster.EnableMulticast();
    for (uint32_t rank = 0; rank < cluster.ranks(); ++rank) {
      all_.emplace_back(cluster, rank, windows_);
    }
  }
  ~MixedRanks() { cluster_.KillAll(); }
  MixedRank& operator[](uint32_t rank) { return all_[rank]; }

 private:
  Cluster& cluster_;
  MixedWindows windows_;
  std::vector<MixedRank> all_;
};

// Does `count` calls, each rank as fast as it can, but for some before which it is late; call(i) is
// asked for by every rank. Returns whether all gave what they should.
inline testing::AssertionResult RunCalls(Cluster& cluster, uint32_t count,
                                         const std::function<MixedCall(uint32_t)>& call) {
  MixedRanks ranks(cluster);
  std::mt19937_64 random(count);
  std::vector<uint32_t> done(cluster.ranks()), late;
  testing::AssertionResult result = testing::AssertionSuccess();
  std::function<void(uint32_t)> next = [&](uint32_t rank) {
    const MixedCall now = call(done[rank]);
    ranks[rank].Start(now, [&, rank, kernel = now.kernel](bool trapped) {
      const testing::AssertionResult right =
          trapped ? testing::AssertionFailure() << kernel << ", rank " << rank << " trapped, fault "
                                                << static_cast<uint32_t>(cluster.Fault(rank))
                  : ranks[rank].Check();
      if (!right && result) {
        result = testing::AssertionFailure() << "call " << done[rank] << ": " << right.message();
      }
      if (++done[rank] == count || !result) return;
      if (random() % 8 == 0) {
        late.push_back(rank);
      } else {
        next(rank);
      }
    });
  };
  for (uint32_t rank = 0; rank < cluster.ranks(); ++rank) next(rank);
  while (result && (cluster.grid().Run(random() % 3000) || !late.empty())) {
    for (uint32_t rank : std::exchange(late, {})) next(rank);
  }
  if (result && done != std::vector<uint32_t>(cluster.ranks(), count)) {
    return testing::AssertionFailure() << "not all calls were made";
  }
  return result;
}

}  // namespace jaxfabric::device
