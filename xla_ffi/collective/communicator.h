// An ordered list of ranks that do collectives together, and its health.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"

namespace jaxfabric {

class Communicator {
 public:
  Communicator(std::vector<int64_t> ranks, bool one_process)
      : ranks_(std::move(ranks)), one_process_(one_process) {}

  const std::vector<int64_t>& ranks() const { return ranks_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  // Every rank lives in this process.
  bool one_process() const { return one_process_; }

  // The first failure wins and stays: every later execution ends with it.
  void Poison(const Status& status) {
    std::lock_guard lock(mutex_);
    if (poisoned_.load(std::memory_order_relaxed)) return;
    failure_ = status;
    // Release: who sees the flag sees failure_.
    poisoned_.store(true, std::memory_order_release);
  }
  // Acquire: pairs with Poison.
  bool poisoned() const { return poisoned_.load(std::memory_order_acquire); }
  // OK while healthy.
  Status failure() const { return poisoned() ? failure_ : Status(); }

 private:
  const std::vector<int64_t> ranks_;
  const bool one_process_;
  std::mutex mutex_;
  std::atomic<bool> poisoned_{false};
  Status failure_;
};

}  // namespace jaxfabric
