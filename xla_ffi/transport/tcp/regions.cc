#include "transport/tcp/regions.h"

#include <sched.h>

#include <utility>

namespace jaxfabric::tcp {

uint32_t Regions::Add(std::span<std::byte> memory) {
  auto region = std::make_unique<Region>();
  region->memory = memory;
  const std::lock_guard lock(mutex_);
  regions_.emplace(next_, std::move(region));
  return next_++;
}

void Regions::Remove(uint32_t number) {
  std::unique_ptr<Region> region;
  {
    const std::lock_guard lock(mutex_);
    const auto found = regions_.find(number);
    if (found == regions_.end()) return;
    region = std::move(found->second);
    regions_.erase(found);
  }
  // acquire: the stores of those who had it pinned come before the caller's next use.
  while (region->writers.load(std::memory_order_acquire) != 0) ::sched_yield();
}

Regions::Region* Regions::Pin(uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(number);
  if (found == regions_.end()) return nullptr;
  // relaxed: the mutex orders it before Remove().
  found->second->writers.fetch_add(1, std::memory_order_relaxed);
  return found->second.get();
}

void Regions::Unpin(Region* region) {
  // release: as in Remove().
  region->writers.fetch_sub(1, std::memory_order_release);
}

}  // namespace jaxfabric::tcp
