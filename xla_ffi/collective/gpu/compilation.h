// Which devices an executable for GPUs runs on. Its calls are made before that is known here, and
// need it where they name positions in a mesh.
//
// XLA makes the states of an executable's calls on the thread that compiles it, or loads it from
// the compilation cache. So a thread's calls are those of its innermost compilation, however many
// other threads compile. A call that is made on a thread that compiles nothing belongs to the only
// compilation under way, if there is one only. Threads: all functions from any.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace jaxfabric {

// The ids of an executable's devices in order; empty until it has been compiled.
class ExecutableDevices {
 public:
  std::vector<int64_t> Get() const;

 private:
  friend class GpuCompilations;
  mutable std::mutex mutex_;
  std::vector<int64_t> devices_;
};

class GpuCompilations {
 public:
  static GpuCompilations& Get();

  // This thread compiles an executable, or loads it from the cache, until End().
  void Begin();
  void End(std::span<const int64_t> devices);
  // Of the executable whose call is made now; null if it is not known which one that is.
  std::shared_ptr<const ExecutableDevices> Current() const;

 private:
  struct Compilation {
    std::thread::id thread;
    std::shared_ptr<ExecutableDevices> devices;
  };
  mutable std::mutex mutex_;
  std::vector<Compilation> under_way_;
};

}  // namespace jaxfabric
