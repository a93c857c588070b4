// The memory of an endpoint that peers may put into, by number.
//
// Writers pin a region for as long as one non-blocking read takes, never while they wait, so that
// Remove() comes to an end. Any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>

namespace jaxfabric::tcp {

class Regions {
 public:
  struct Region {
    std::span<std::byte> memory;
    std::atomic<uint32_t> writers{0};
  };

  uint32_t Add(std::span<std::byte> memory);
  // Returns when nobody has it pinned.
  void Remove(uint32_t number);
  // Null for an unknown region. Unpin() must follow.
  Region* Pin(uint32_t number);
  static void Unpin(Region* region);

 private:
  std::mutex mutex_;
  std::unordered_map<uint32_t, std::unique_ptr<Region>> regions_;
  uint32_t next_ = 0;  // the first one is the window
};

}  // namespace jaxfabric::tcp
