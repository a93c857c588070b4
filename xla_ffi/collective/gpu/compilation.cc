#include "collective/gpu/compilation.h"

#include <algorithm>

namespace jaxfabric {

std::vector<int64_t> ExecutableDevices::Get() const {
  std::lock_guard lock(mutex_);
  return devices_;
}

GpuCompilations& GpuCompilations::Get() {
  static GpuCompilations compilations;
  return compilations;
}

void GpuCompilations::Begin() {
  std::lock_guard lock(mutex_);
  under_way_.push_back({std::this_thread::get_id(), std::make_shared<ExecutableDevices>()});
}

void GpuCompilations::End(std::span<const int64_t> devices) {
  std::lock_guard lock(mutex_);
  const auto innermost = std::find_if(under_way_.rbegin(), under_way_.rend(), [](const auto& each) {
    return each.thread == std::this_thread::get_id();
  });
  if (innermost == under_way_.rend()) return;
  {
    std::lock_guard devices_lock(innermost->devices->mutex_);
    innermost->devices->devices_.assign(devices.begin(), devices.end());
  }
  under_way_.erase(std::next(innermost).base());
}

std::shared_ptr<const ExecutableDevices> GpuCompilations::Current() const {
  std::lock_guard lock(mutex_);
  const auto innermost = std::find_if(under_way_.rbegin(), under_way_.rend(), [](const auto& each) {
    return each.thread == std::this_thread::get_id();
  });
  if (innermost != under_way_.rend()) return innermost->devices;
  return under_way_.size() == 1 ? under_way_[0].devices : nullptr;
}

}  // namespace jaxfabric
