// The order in which executions entered, for tests and for debugging: a ring that is off unless
// somebody asks for it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace jaxfabric {

class TraceRing {
 public:
  struct Entry {
    int64_t rank;
    uint64_t key;  // of the call instance, the same on every rank
    int64_t run_id;
  };

  explicit TraceRing(size_t capacity)
      : capacity_(capacity), slots_(std::make_unique<Slot[]>(capacity)) {}

  // Any thread. Relaxed throughout: an entry that is being written may be read half-done, which
  // Entries() is documented to allow for.
  void Record(const Entry& entry) {
    Slot& slot = slots_[next_.fetch_add(1, std::memory_order_relaxed) % capacity_];
    slot.rank.store(entry.rank, std::memory_order_relaxed);
    slot.key.store(entry.key, std::memory_order_relaxed);
    slot.run_id.store(entry.run_id, std::memory_order_relaxed);
  }
  // The last entries, oldest first. Exact only while nothing executes.
  std::vector<Entry> Entries() const {
    const uint64_t end = next_.load(std::memory_order_relaxed);
    const uint64_t begin = end > capacity_ ? end - capacity_ : 0;
    std::vector<Entry> entries;
    entries.reserve(end - begin);
    for (uint64_t i = begin; i < end; ++i) {
      const Slot& slot = slots_[i % capacity_];
      entries.push_back({slot.rank.load(std::memory_order_relaxed),
                         slot.key.load(std::memory_order_relaxed),
                         slot.run_id.load(std::memory_order_relaxed)});
    }
    return entries;
  }

 private:
  struct Slot {
    std::atomic<int64_t> rank;
    std::atomic<uint64_t> key;
    std::atomic<int64_t> run_id;
  };
  const size_t capacity_;
  const std::unique_ptr<Slot[]> slots_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace jaxfabric
