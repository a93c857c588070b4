#include "collective/launch.h"

#include <bit>
#include <cstring>
#include <iterator>

namespace jaxfabric {
namespace {

// Run ids of one executable stay within this distance of each other; those of two executables
// start from hashes of their programs.
constexpr int32_t kSameExecutable = 1 << 24;

int32_t Distance(int64_t run_id, int32_t base) {
  // Run ids wrap at 32 bits.
  return static_cast<int32_t>(static_cast<uint32_t>(run_id) - static_cast<uint32_t>(base));
}

uint64_t Load64(const char* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

uint64_t Mix(uint64_t u, uint64_t v, uint64_t multiplier) {
  uint64_t a = (u ^ v) * multiplier;
  a ^= a >> 47;
  uint64_t b = (v ^ a) * multiplier;
  b ^= b >> 47;
  return b * multiplier;
}

}  // namespace

// HashLen33to64 of farmhash's farmhashna: JAX's fingerprints of CPU executables are 39 digits.
std::optional<uint64_t> FarmFingerprint(std::string_view text) {
  if (text.size() < 33 || text.size() > 64) return std::nullopt;
  constexpr uint64_t kK2 = 0x9ae16a3b2f90404full;
  const char* s = text.data();
  const size_t n = text.size();
  const uint64_t multiplier = kK2 + n * 2;
  const uint64_t a = Load64(s) * kK2;
  const uint64_t b = Load64(s + 8);
  const uint64_t c = Load64(s + n - 8) * multiplier;
  const uint64_t d = Load64(s + n - 16) * kK2;
  const uint64_t y = std::rotr(a + b, 43) + std::rotr(c, 30) + d;
  const uint64_t z = Mix(y, a + std::rotr(b + kK2, 18) + c, multiplier);
  const uint64_t e = Load64(s + 16) * multiplier;
  const uint64_t f = Load64(s + 24);
  const uint64_t g = (y + Load64(s + n - 32)) * multiplier;
  const uint64_t h = (z + Load64(s + n - 24)) * multiplier;
  return Mix(std::rotr(e + f, 43) + std::rotr(g, 30) + h, e + std::rotr(f + a, 18) + g, multiplier);
}

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
  if (fabric_serial == 1) {
    if (const auto first = SiteRegistry::Get().FirstRunId(run_id)) {
      bases_.push_back({*first, now, true});
      return Distance(run_id, *first);
    }
  }
  bases_.push_back({static_cast<int32_t>(run_id), now + kSettle, false});
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
  first_run_ids_.insert(static_cast<uint32_t>(*hash));
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
