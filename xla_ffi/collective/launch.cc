#include "collective/launch.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "collective/fingerprint.h"

namespace jaxfabric {
namespace {

// Run ids of one executable stay within this distance of each other; those of two executables
// start from hashes of their programs.
constexpr uint32_t kSameExecutable = 1 << 24;

int32_t Distance(int64_t run_id, int32_t base) {
  // Run ids wrap at 32 bits.
  return static_cast<int32_t>(static_cast<uint32_t>(run_id) - static_cast<uint32_t>(base));
}

uint64_t NextNumber() {
  // Relaxed: only the numbers matter. 0 is none.
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

LaunchClock::LaunchClock() : number_(NextNumber()) {}

void LaunchClock::AddExecutable(const Executable& executable) {
  executables_.push_back(std::make_unique<Executable>(executable));
  // Relaxed: only this thread writes it.
  executables_.back()->next = first_.load(std::memory_order_relaxed);
  // Release: who finds it reads it.
  first_.store(executables_.back().get(), std::memory_order_release);
}

bool LaunchClock::HasExecutable(uint32_t hash) const {
  const Executable* executable = first_.load(std::memory_order_acquire);
  while (executable && executable->hash != hash) executable = executable->next;
  return executable != nullptr;
}

const LaunchClock::Executable* LaunchClock::ExecutableOf(int64_t run_id) const {
  const Executable* nearest = nullptr;
  uint32_t least = kSameExecutable;
  const Executable* executable = first_.load(std::memory_order_acquire);
  for (; executable; executable = executable->next) {
    const uint32_t launches = static_cast<uint32_t>(run_id) - executable->hash;
    if (launches > least) continue;
    least = launches;
    nearest = executable;
  }
  return nearest;
}

std::optional<uint32_t> LaunchClock::FirstRunId(int64_t run_id, uint64_t fabric_serial) const {
  const Executable* executable = ExecutableOf(run_id);
  if (fabric_serial != 1 || !executable) return std::nullopt;
  return executable->hash + executable->before;
}

std::optional<uint32_t> LaunchClock::DevicesOf(int64_t run_id) const {
  const Executable* executable = ExecutableOf(run_id);
  if (!executable) return std::nullopt;
  return executable->devices;
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
    if (std::cmp_greater(std::abs(int64_t{distance}), kSameExecutable)) continue;
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

void LaunchClock::Enter(int64_t run_id, uint64_t fabric_serial) {
  const Executable* executable = ExecutableOf(run_id);
  if (!executable) return;
  const uint64_t entered = static_cast<uint32_t>(run_id) | kEntered;
  uint64_t newest = executable->newest->load(std::memory_order_relaxed);
  // Sequentially consistent with SiteRegistry::EndCompilation, which sets `shares` and then looks
  // for the newest: either it sees this one, or this one sees the flag and claims.
  while ((newest == 0 || Distance(run_id, static_cast<int32_t>(newest)) > 0) &&
         !executable->newest->compare_exchange_weak(newest, entered, std::memory_order_seq_cst)) {
  }
  SiteRegistry& registry = SiteRegistry::Get();
  if (registry.shares()) registry.Claim(*executable, run_id, fabric_serial);
}

std::optional<int64_t> LaunchClock::OwnRunId(int64_t run_id) const {
  const SiteRegistry& registry = SiteRegistry::Get();
  const Executable* executable = registry.shares() ? ExecutableOf(run_id) : nullptr;
  return executable ? registry.OwnRunId(executable->hash, run_id) : run_id;
}

SharedRunIds::SharedRunIds(uint32_t base, uint32_t next, uint64_t second)
    : base_(base), first_(next - base), second_(second), next_(first_) {}

void SharedRunIds::Claim(uint32_t run_id, uint64_t executable, uint32_t before,
                         uint64_t fabric_serial) {
  const uint32_t index = run_id - base_;
  if (index < next_) return;
  // The only one so far goes on where it was.
  ahead_.emplace(index, Launch{executable, executable < second_ ? first_ : before});
  const bool anew = fabric_serial_ != 0 && fabric_serial > fabric_serial_;
  fabric_serial_ = std::max(fabric_serial, fabric_serial_);
  while (!ahead_.empty() && (ahead_.begin()->first == next_ || (anew && next_ < index))) {
    CountNext();
  }
}

void SharedRunIds::CountNext() {
  const auto first = ahead_.begin();
  next_ = first->first + 1;
  const auto& [executable, before] = first->second;
  own_.emplace(first->first, counts_.try_emplace(executable, before).first->second++);
  ahead_.erase(first);
  if (own_.size() > kRemembered) own_.erase(own_.begin());
}

std::optional<uint32_t> SharedRunIds::Own(uint32_t run_id) const {
  const uint32_t index = run_id - base_;
  if (index < first_) return run_id;
  const auto found = own_.find(index);
  if (found == own_.end()) return std::nullopt;
  return base_ + found->second;
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
  if (!open_) {
    open_ = std::make_shared<LaunchClock>();
    std::erase_if(clocks_, [](const auto& clock) { return clock.expired(); });
    clocks_.push_back(open_);
  }
  return {counts_[attributes_hash]++, open_};
}

uint64_t SiteRegistry::BeginCompilation() {
  std::lock_guard lock(mutex_);
  // What is open otherwise is of executables that nobody told of.
  if (compilations_++ == 0) open_.reset();
  return open_ ? open_->number_ : LaunchClock().number_;
}

void SiteRegistry::EndCompilation(uint64_t begun, std::optional<std::string_view> fingerprint,
                                  std::span<const int64_t> devices) {
  const auto alone = fingerprint ? FarmFingerprint(*fingerprint) : std::nullopt;
  std::lock_guard lock(mutex_);
  --compilations_;
  open_.reset();
  if (!alone) return;
  const uint32_t list = devices.empty() ? 0 : static_cast<uint32_t>(DeviceListFingerprint(devices));
  const uint32_t hash = static_cast<uint32_t>(*alone) + list;
  std::vector<std::shared_ptr<LaunchClock>> clocks;  // that may be its
  bool equal = false;                                // to one that lives
  for (const auto& weak : clocks_) {
    auto clock = weak.lock();
    if (!clock) continue;
    equal |= clock->HasExecutable(hash);
    if (clock->number_ >= begun) clocks.push_back(std::move(clock));
  }
  if (clocks.empty()) return;
  LaunchClock::Executable executable{hash, 0, list, NextNumber(), &newest_[hash]};
  // Programs without arguments all have the empty one, compiled or cached: they are not equal, and
  // most have no collective.
  if (!fingerprint->empty()) {
    // Before the look at the newest: see LaunchClock::Enter.
    if (equal) shares_.store(true, std::memory_order_seq_cst);
    const uint64_t newest = executable.newest->load(std::memory_order_seq_cst);
    if (newest != 0) executable.before = static_cast<uint32_t>(newest) + 1 - hash;
    if (!equal) {
      shared_.erase(hash);
    } else {
      shared_.try_emplace(hash, hash, hash + executable.before, executable.number);
    }
  }
  for (const auto& clock : clocks) clock->AddExecutable(executable);
}

void SiteRegistry::CloseExecutable(const LaunchClock* clock) {
  std::lock_guard lock(mutex_);
  if (open_.get() == clock) open_.reset();
}

void SiteRegistry::Claim(const LaunchClock::Executable& executable, int64_t run_id,
                         uint64_t fabric_serial) {
  std::lock_guard lock(mutex_);
  const auto found = shared_.find(executable.hash);
  if (found == shared_.end()) return;
  found->second.Claim(static_cast<uint32_t>(run_id), executable.number, executable.before,
                      fabric_serial);
}

std::optional<int64_t> SiteRegistry::OwnRunId(uint32_t hash, int64_t run_id) const {
  std::lock_guard lock(mutex_);
  const auto found = shared_.find(hash);
  if (found == shared_.end()) return run_id;
  const auto own = found->second.Own(static_cast<uint32_t>(run_id));
  if (!own) return std::nullopt;
  return static_cast<int32_t>(*own);
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
