#include "collective/launch.h"

#include <cstdlib>

namespace jaxfabric {
namespace {

// Run ids of one executable stay within this distance of each other; those of two executables
// start from hashes of their programs.
constexpr int32_t kSameExecutable = 1 << 24;

int32_t Distance(int64_t run_id, int32_t base) {
  // Run ids wrap at 32 bits.
  return static_cast<int32_t>(static_cast<uint32_t>(run_id) - static_cast<uint32_t>(base));
}

}  // namespace

std::optional<int32_t> LaunchClock::Launch(int64_t run_id, uint64_t fabric_serial) {
  std::lock_guard lock(mutex_);
  // An execution of a fabric that is being shut down: it ends with that.
  if (fabric_serial < fabric_serial_) return std::nullopt;
  if (fabric_serial > fabric_serial_) bases_.clear();
  fabric_serial_ = fabric_serial;
  const auto now = Clock::now();
  for (Base& base : bases_) {
    const int32_t distance = Distance(run_id, base.smallest);
    if (distance > kSameExecutable || distance < -kSameExecutable) continue;
    if (!base.settled && now >= base.settled_at) base.settled = true;
    if (base.settled) return distance;
    if (distance < 0) {
      base.smallest = static_cast<int32_t>(run_id);
      base.settled_at = now + kSettle;
    }
    return std::nullopt;
  }
  bases_.push_back({static_cast<int32_t>(run_id), now + kSettle, false});
  return std::nullopt;
}

SiteRegistry& SiteRegistry::Get() {
  static SiteRegistry registry;
  return registry;
}

SiteRegistry::Instance SiteRegistry::Add(uint64_t attributes_hash) {
  std::lock_guard lock(mutex_);
  if (!open_) open_ = std::make_shared<LaunchClock>();
  return {counts_[attributes_hash]++, open_};
}

void SiteRegistry::CloseExecutable() {
  std::lock_guard lock(mutex_);
  open_.reset();
}

void SiteRegistry::CloseExecutable(const LaunchClock* clock) {
  std::lock_guard lock(mutex_);
  if (open_.get() == clock) open_.reset();
}

void SiteRegistry::SetSource(uint64_t site, std::string source) {
  std::lock_guard lock(mutex_);
  sources_[site] = std::move(source);
}

std::string SiteRegistry::Source(uint64_t site) {
  std::lock_guard lock(mutex_);
  const auto found = sources_.find(site);
  return found == sources_.end() ? "unknown line" : found->second;
}

}  // namespace jaxfabric
