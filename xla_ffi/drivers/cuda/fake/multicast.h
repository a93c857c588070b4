// Which memory a multicast address stands for: what the emulated multimem instructions ask.
//
// Lookups may be made by any thread and fibre, without a lock; what is registered changes under
// one.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <vector>

namespace jaxfabric::emulation {

// One NVLink domain: 72 GPUs in the largest that is sold.
inline constexpr size_t kMaxMulticastMembers = 72;

// The places that one multicast address stands for, one for each device of the team. By value: a
// fibre may be switched away while it goes through them.
class MulticastTargets {
 public:
  void push_back(std::byte* target) { targets_[count_++] = target; }
  std::byte* const* begin() const { return targets_.data(); }
  std::byte* const* end() const { return targets_.data() + count_; }
  std::byte* operator[](size_t index) const { return targets_[index]; }
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }

 private:
  std::array<std::byte*, kMaxMulticastMembers> targets_;
  size_t count_ = 0;
};

// Empty for an address that is in no multicast range, or that not all members have bound memory to.
MulticastTargets MulticastMembers(const void* address);

// Makes [address, address + bytes) stand for the same range of each member.
void RegisterMulticast(const void* address, size_t bytes, std::vector<std::byte*> members);
// The same, where members come later: `find(offset)` is asked at each lookup.
void RegisterMulticast(const void* address, size_t bytes,
                       std::function<MulticastTargets(size_t offset)> find);
void UnregisterMulticast(const void* address);

}  // namespace jaxfabric::emulation
