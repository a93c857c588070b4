#include "drivers/cuda/fake/multicast.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "base/status.h"

namespace jaxfabric::emulation {
namespace {

struct Range {
  size_t bytes;
  std::function<MulticastTargets(size_t)> find;
};
using Ranges = std::map<uintptr_t, Range>;

std::mutex mutex;
// Every table there ever was: a lookup may still be in an old one. Tests make few.
std::vector<std::unique_ptr<const Ranges>>& Tables() {
  static auto* tables = new std::vector<std::unique_ptr<const Ranges>>;
  return *tables;
}
// Release: a lookup that finds the table finds it filled.
std::atomic<const Ranges*> newest{nullptr};

void Change(const std::function<void(Ranges&)>& change) {
  const std::lock_guard lock(mutex);
  const Ranges* const old = newest.load(std::memory_order_relaxed);
  auto next = old == nullptr ? std::make_unique<Ranges>() : std::make_unique<Ranges>(*old);
  change(*next);
  newest.store(next.get(), std::memory_order_release);
  Tables().push_back(std::move(next));
}

}  // namespace

MulticastTargets MulticastMembers(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  // Acquire: pairs with the store of a filled table.
  const Ranges* const ranges = newest.load(std::memory_order_acquire);
  if (ranges == nullptr) return {};
  auto range = ranges->upper_bound(at);
  if (range == ranges->begin()) return {};
  --range;
  const size_t offset = at - range->first;
  if (offset >= range->second.bytes) return {};
  return range->second.find(offset);
}

void RegisterMulticast(const void* address, size_t bytes, std::vector<std::byte*> members) {
  JF_CHECK(members.size() <= kMaxMulticastMembers);
  RegisterMulticast(address, bytes, [members = std::move(members)](size_t offset) {
    MulticastTargets targets;
    for (std::byte* member : members) targets.push_back(member + offset);
    return targets;
  });
}

void RegisterMulticast(const void* address, size_t bytes,
                       std::function<MulticastTargets(size_t)> find) {
  Change([&](Ranges& ranges) {
    ranges[reinterpret_cast<uintptr_t>(address)] = {bytes, std::move(find)};
  });
}

void UnregisterMulticast(const void* address) {
  Change([&](Ranges& ranges) { ranges.erase(reinterpret_cast<uintptr_t>(address)); });
}

}  // namespace jaxfabric::emulation
