// Runs the tests of tests/cpp/collective/gpu, and those here, on the GPUs of this computer; with
// --fake as the first argument on emulated ones, which shows that the tests are right.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <string_view>

#include "collective/gpu/gpu_ranks.h"
#include "device/image.h"

namespace {

constexpr int kSkipped = 77;

// Asked in a child, since CUDA does not outlive a fork and the tests fork.
bool HasGpu() {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto api = jaxfabric::cuda::LoadApi();
    if (!api.ok()) std::cout << "SKIPPED: " << api.status().ToString() << std::endl;
    ::_exit(api.ok() ? 0 : 1);
  }
  int status = 1;
  ::waitpid(child, &status, 0);
  return status == 0;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const bool fake = argc > 1 && std::string_view(argv[1]) == "--fake";
  if (fake || ::testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  if (jaxfabric::KernelImages().empty()) {
    std::cout << "SKIPPED: " << jaxfabric::KernelImageReason() << std::endl;
    return kSkipped;
  }
  if (!HasGpu()) return kSkipped;
  // Ranks that are streams of one context must not wait for each other in the driver: neither for
  // code that is loaded late, nor in a queue that two streams share.
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  jaxfabric::testing::Machine::UseHardware();
  return RUN_ALL_TESTS();
}
