// The GPU kernels of this build, as the driver loads them.
//
// One image per source xla_ffi/device/<source>.cu, each a fatbinary with machine code for every
// architecture of the build and PTX for the GPUs that come after the newest; a kernel is in the
// image of its source, under its own name. Where the build had no nvcc there are no images, and
// KernelImageReason says why. All of it is constant data of the process: any thread, any time.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace jaxfabric {

struct KernelImage {
  std::string_view source;           // "all_reduce" for all_reduce.cu
  std::span<const std::byte> bytes;  // what cuModuleLoadData takes; says itself how long it is
};

std::span<const KernelImage> KernelImages();

// Why there are no images; empty where nvcc was there.
std::string_view KernelImageReason();

// "sm_80 sm_90 compute_90": machine code, then PTX; empty without nvcc.
std::string_view KernelArchitectures();

// "nvcc 13.0.88"; empty without nvcc.
std::string_view KernelCompiler();

}  // namespace jaxfabric
