// The GPUs of a process, and the settings of a fabric for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jaxfabric {

namespace cuda {
struct Api;
}
namespace nccl {
struct Api;
}

struct LocalGpu {
  int64_t rank;
  int ordinal;  // of the CUDA driver in this process
};

struct GpuOptions {
  const cuda::Api* api = nullptr;   // null: the driver of this machine
  const nccl::Api* nccl = nullptr;  // null: the library that XLA has loaded
  std::vector<const void*> images;  // the kernels
  size_t pool_bytes = 48 << 20;     // of every GPU
  size_t arena_bytes = 12 << 20;    // of a communicator, while the pool has so much left
  unsigned block_threads = 512;     // fewer where threads are emulated
  double deadline = 300;            // seconds one call may wait for its peers
  bool multicast = true;            // where the GPUs have it
};

}  // namespace jaxfabric
