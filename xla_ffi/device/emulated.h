// The kernels as functions of the host, for the fake driver. Only in builds with tests.
#pragma once

#include <cstddef>
#include <span>

namespace jaxfabric::device {

struct EmulatedKernel {
  const char* name;
  void (*body)(const void* arguments);
  size_t argument_bytes;
};

// One function per source.
std::span<const EmulatedKernel> AllGatherKernels();
std::span<const EmulatedKernel> AllReduceKernels();
std::span<const EmulatedKernel> AllReduceRmsNormKernels();
std::span<const EmulatedKernel> AllToAllKernels();
std::span<const EmulatedKernel> BarrierKernels();
std::span<const EmulatedKernel> BroadcastKernels();
std::span<const EmulatedKernel> MulticastKernels();
std::span<const EmulatedKernel> PermuteKernels();
std::span<const EmulatedKernel> RaggedAllToAllKernels();
std::span<const EmulatedKernel> ReduceScatterKernels();
std::span<const EmulatedKernel> WindowKernels();

}  // namespace jaxfabric::device
