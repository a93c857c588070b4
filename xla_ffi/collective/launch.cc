#include "collective/launch.h"

#include <iterator>

#include "collective/fingerprint.h"

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

std::optional<uint32_t> LaunchClock::FirstRunId(int64_t run_id, uint64_t fabric_serial) {
  if (fabric_serial != 1) return std::nullopt;
  const auto first = SiteRegistry::Get().FirstRunId(run_id);
  if (!first) return std::nullopt;
  return static_cast<uint32_t>(*first);
}

std::optional<int32_t> LaunchClock::Launch(int64_t run_id, uint64_t group, uint64_t fabric_serial) {
  std::lock_guard lock(mutex_);
  // An execution of a fabric that is being shut down: it ends with that.
  if (fabric_serial < fabric_serial_) return std::nullopt;
  if (fabric_serial > fabric_serial_) bases_.clear();
  fabric_serial_ = fabric_serial;
  const auto now = Clock::now();
  for (Base& base : bases_) {
    const int32_t distance = Distance(run_id, base.smallest);
    if (base.group != group) continue;
    if (distance > kSameExecutable || distance < -kSameExecutable) continue;
    if (!base.settled && now >= base.settled_at) base.settled = true;
    if (base.settled) return distance;
    if (distance < 0) {
      base.smallest = static_cast<int32_t>(run_id);
      base.settled_at = now + kSettle;
    }
    return std::nullopt;
  }
  bases_.push_back({group, static_cast<int32_t>(run_id), now + kSettle, false});
  return std::nullopt;
}

std::optional<uint32_t> OccurrenceCounter::Count(int64_t run_id) {
  Launch& last = launches_[last_];
  if (last.run_id == run_id && last.count > 0) return last.count++;
  const bool newest = last.count == 0 || Distance(run_id, static_cast<int32_t>(newest_)) > 0;
  if (newest) {
    newest_ = run_id;
  } else {
    for (size_t back = 1; back < launches_.size(); ++back) {
      Launch& launch = launches_[(last_ + launches_.size() - back) % launches_.size()];
      if (launch.run_id == run_id && launch.count > 0) return launch.count++;
    }
    if (newest_forgotten_ && Distance(run_id, static_cast<int32_t>(*newest_forgotten_)) <= 0) {
      return std::nullopt;
    }
    if (launches_.size() < kOverlapping) {
      // Launches overlap. Behind the last one, so that the ring stays in order.
      launches_.insert(launches_.begin() + static_cast<std::ptrdiff_t>(last_) + 1,
                       kOverlapping - launches_.size(), Launch());
    }
  }
  last_ = (last_ + 1) % launches_.size();
  Launch& next = launches_[last_];
  if (next.count > 0 &&
      (!newest_forgotten_ || Distance(next.run_id, static_cast<int32_t>(*newest_forgotten_)) > 0)) {
    newest_forgotten_ = next.run_id;
  }
  next = {run_id, 1};
  return 0;
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

void SiteRegistry::AddFingerprint(std::string_view fingerprint) {
  const auto hash = FarmFingerprint(fingerprint);
  if (!hash) return;
  std::lock_guard lock(mutex_);
  executables_.insert(static_cast<uint32_t>(*hash));
  first_run_ids_.insert(static_cast<uint32_t>(*hash));
  for (uint32_t devices : device_lists_) {
    first_run_ids_.insert(static_cast<uint32_t>(*hash) + devices);
  }
}

void SiteRegistry::AddDeviceList(std::span<const int64_t> devices) {
  const auto hash = static_cast<uint32_t>(DeviceListFingerprint(devices));
  std::lock_guard lock(mutex_);
  if (!device_lists_.insert(hash).second) return;
  for (uint32_t executable : executables_) first_run_ids_.insert(executable + hash);
}

std::optional<int32_t> SiteRegistry::FirstRunId(int64_t run_id) {
  std::lock_guard lock(mutex_);
  if (first_run_ids_.empty()) return std::nullopt;
  // The nearest below, round the 32 bits.
  auto next = first_run_ids_.upper_bound(static_cast<uint32_t>(run_id));
  if (next == first_run_ids_.begin()) next = first_run_ids_.end();
  const uint32_t first = *std::prev(next);
  // An executable whose fingerprint is not known is somewhere else: hashes are far apart.
  constexpr uint32_t kNear = 4096;
  if (static_cast<uint32_t>(run_id) - first >= kNear) return std::nullopt;
  return static_cast<int32_t>(first);
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
