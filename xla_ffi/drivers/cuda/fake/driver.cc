#include "drivers/cuda/fake/driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <string>

#include "drivers/cuda/fake/state.h"

namespace jaxfabric::cuda {
namespace {

using fake::Calls;
using fake::Function;

constexpr std::string_view kNames[] = {
#define JF_CUDA_FUNCTION(kind, name, symbol, parameters) #name,
#include "drivers/cuda/functions.inc"
#undef JF_CUDA_FUNCTION
};

// Release and acquire: whoever finds a fake finds it made.
std::atomic<FakeDriver::State*> current{nullptr};
// Relaxed: only has to differ.
std::atomic<uint64_t> next_id{1};

// kCount stands for all of them.
Function FunctionOf(std::string_view name) {
  if (name.empty()) return Function::kCount;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<Function>(i);
  }
  std::fprintf(stderr, "%.*s\n", static_cast<int>(name.size()), name.data());
  JF_CHECK(!"a function of the driver API");
  return Function::kCount;
}

// Counts a call, and says whether it is to fail.
CUresult BeforeCall(Function function) {
  FakeDriver::State* const state = fake::Current();
  if (state == nullptr) return CUDA_ERROR_DEINITIALIZED;
  const std::lock_guard lock(state->mutex);
  ++state->calls[static_cast<size_t>(function)];
  CUresult code = CUDA_SUCCESS;
  std::erase_if(state->failures, [&](FakeDriver::State::Failure& failure) {
    const bool counts = failure.function == function || failure.function == Function::kCount;
    if (!counts || --failure.nth > 0) return false;
    code = failure.code;
    return true;
  });
  return code;
}

template <Function kFunction, auto kCall>
struct Entry;
template <Function kFunction, class... Arguments, CUresult (*kCall)(Arguments...)>
struct Entry<kFunction, kCall> {
  static CUresult Call(Arguments... arguments) {
    const CUresult injected = BeforeCall(kFunction);
    return injected != CUDA_SUCCESS ? injected : kCall(arguments...);
  }
};

}  // namespace

FakeDriver::State* fake::Current() {
  FakeDriver::State* const state = current.load(std::memory_order_acquire);
  return state != nullptr && state->pid == ::getpid() ? state : nullptr;
}

FakeDriver::State::State(FakeConfig wanted)
    : config(std::move(wanted)), id(next_id++), pid(::getpid()), grid(config.seed) {
  for (size_t i = 0; i < config.gpus.size(); ++i) {
    Device& device = devices.emplace_back();
    device.gpu = config.gpus[i];
    device.context.device = static_cast<int>(i);
    device.legacy.device = static_cast<int>(i);
  }
}

FakeDriver::State::~State() {
  const auto at = [](CUdeviceptr address) {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(address));
  };
  for (const auto& [address, region] : regions) {
    if (region.kind == fake::Region::Kind::kMulticast) {
      emulation::UnregisterMulticast(at(address));
    } else if (region.kind == fake::Region::Kind::kMapped) {
      fake::ForgetMapping(region.allocation->inode(), static_cast<std::byte*>(at(address)));
    } else if (region.kind != fake::Region::Kind::kRegistered) {
      ::munmap(at(address), region.bytes);
    }
  }
  for (const auto& [address, bytes] : reservations) ::munmap(at(address), bytes);
}

FakeDriver::FakeDriver(FakeConfig config) {
  JF_CHECK(fake::Current() == nullptr);
  JF_CHECK(config.granularity % 4096 == 0 && !config.gpus.empty() && config.gpus.size() <= 64);
  state_ = std::make_unique<State>(std::move(config));
#define JF_CUDA_FUNCTION(kind, name, symbol, parameters) \
  api_.name = &Entry<Function::name, &Calls::name>::Call;
#include "drivers/cuda/functions.inc"
#undef JF_CUDA_FUNCTION
  if (!state_->config.multicast_functions) {
    api_.cuMulticastCreate = nullptr;
    api_.cuMulticastAddDevice = nullptr;
    api_.cuMulticastBindMem = nullptr;
    api_.cuMulticastUnbind = nullptr;
    api_.cuMulticastGetGranularity = nullptr;
  }
  state_->thread = std::make_unique<std::thread>([state = state_.get()] { state->Main(); });
  current.store(state_.get(), std::memory_order_release);
}

FakeDriver::~FakeDriver() {
  if (state_->pid != ::getpid()) {
    // A forked child's copy: its thread and perhaps its locks are the parent's.
    (void)state_.release();
    return;
  }
  current.store(nullptr, std::memory_order_release);
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->device_news.notify_all();
  }
  state_->thread->join();
}

void FakeDriver::AddKernel(std::string name, emulation::Kernel kernel, size_t argument_bytes) {
  const std::lock_guard lock(state_->mutex);
  state_->kernels[std::move(name)] = {kernel, argument_bytes};
}

void FakeDriver::FailCall(std::string_view function, int nth, CUresult code) {
  const std::lock_guard lock(state_->mutex);
  state_->failures.push_back({FunctionOf(function), nth, code});
}

uint64_t FakeDriver::Calls(std::string_view function) const {
  const std::lock_guard lock(state_->mutex);
  if (function.empty()) return std::accumulate(state_->calls.begin(), state_->calls.end(), 0UL);
  return state_->calls[static_cast<size_t>(FunctionOf(function))];
}

void FakeDriver::Hold(int ordinal, bool held) {
  const std::lock_guard lock(state_->mutex);
  state_->devices[static_cast<size_t>(ordinal)].held = held;
  state_->news = true;
  state_->device_news.notify_all();
}

void FakeDriver::Stop(int ordinal) {
  const std::lock_guard lock(state_->mutex);
  state_->devices[static_cast<size_t>(ordinal)].stopped = true;
  state_->news = true;
  state_->device_news.notify_all();
}

void FakeDriver::AdvanceClock(uint64_t nanoseconds) {
  const std::lock_guard lock(state_->mutex);
  state_->clock_advance += nanoseconds;
  state_->news = true;
  state_->device_news.notify_all();
}

std::string FakeDriver::TrapReason() const {
  const std::lock_guard lock(state_->mutex);
  return state_->trap_reason;
}

std::string FakeDriver::Leaks() const {
  const std::lock_guard lock(state_->mutex);
  std::string text;
  const auto count = [&](std::string_view what, size_t left) {
    if (left > 0) text += StrCat(left, " ", what, "\n");
  };
  count("allocation handles", state_->handles.size());
  count("address reservations", state_->reservations.size());
  for (const auto& [address, region] : state_->regions) {
    static constexpr std::string_view kKinds[] = {"mapped", "multicast", "allocated", "pinned",
                                                  "registered"};
    text +=
        StrCat(kKinds[static_cast<size_t>(region.kind)], " memory of ", region.bytes, " bytes\n");
  }
  count("modules", state_->modules.size());
  count("events", state_->events.size());
  count("streams", state_->streams.size());
  count("graphs", state_->graphs.size());
  count("executable graphs", state_->executables.size());
  for (const auto& device : state_->devices) {
    count("references to a primary context", static_cast<size_t>(device.retained));
  }
  return text;
}

}  // namespace jaxfabric::cuda
