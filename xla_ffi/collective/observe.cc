// What a fabric tells about itself.
#include "collective/fabric.h"
#include "collective/launch.h"

namespace jaxfabric {

std::map<std::string, uint64_t> Fabric::Counters() const {
  std::map<std::string, uint64_t> counters;
  counters["handed_off"] = handed_off_.load(std::memory_order_relaxed);
  counters["unknown_launch_bases"] = SiteRegistry::Get().unknown_bases();
  counters["sleeps"] = sleeps_.load(std::memory_order_relaxed);
  counters["staging_allocations"] = staging_allocations_.load(std::memory_order_relaxed);
  counters["staging_free_bytes"] = staging_->free_bytes();
  counters["window_bytes"] = window_.size();
  counters["dropped_messages"] = mesh_->dropped_messages();
  counters["refused_connections"] = mesh_->refused_connections();
  if (messages_) {
    const MessageCounters messages = messages_->counters();
    counters["refused_connections"] += messages.refused;
    counters["malformed_connections"] = messages.malformed;
  }
  counters["message_block_bytes"] = blocks_.bytes();
  if (messages_) {
    const PathCost cost = patterns_.measured.value_or(patterns_.model.between);
    counters["network_cost_measured"] = patterns_.measured ? 1 : 0;
    counters["network_message_ns"] = static_cast<uint64_t>(cost.alpha * 1e9);
    counters["network_further_message_ns"] = static_cast<uint64_t>(cost.overhead * 1e9);
    counters["network_mib_us"] = static_cast<uint64_t>(cost.beta * 1e6 * (1 << 20));
  }
  counters["process_reads"] = process_reads_ ? 1 : 0;
  if (gpus_) counters.merge(gpus_->Counters());
  std::lock_guard lock(mutex_);
  counters["communicators"] = communicators_.size();
  counters["instances"] = participants_.size();
  for (const auto& [name, count] : run_by_) counters[StrCat("run_by_", name)] = count;
  return counters;
}

void Fabric::CountRunBy(std::string_view name) {
  std::lock_guard lock(mutex_);
  ++run_by_[name];
}

void Fabric::EnableTrace(size_t capacity) {
  std::lock_guard lock(mutex_);
  if (trace_ring_) return;
  trace_ring_ = std::make_unique<TraceRing>(capacity);
  // Release: the ring is complete.
  trace_.store(trace_ring_.get(), std::memory_order_release);
}

std::vector<TraceRing::Entry> Fabric::Trace() const {
  const TraceRing* ring = trace();
  return ring == nullptr ? std::vector<TraceRing::Entry>() : ring->Entries();
}

}  // namespace jaxfabric
