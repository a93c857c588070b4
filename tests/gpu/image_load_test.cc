// The driver of this machine takes the images of this build, on each of its GPUs.
#include <gtest/gtest.h>

#include "collective/gpu/gpu_ranks.h"
#include "device/image.h"
#include "drivers/cuda/api.h"
#include "drivers/cuda/handles.h"

namespace jaxfabric::testing {
namespace {

std::string LoadEverywhere() {
  const Result<const cuda::Api*> api = cuda::LoadApi();
  if (!api.ok()) return Text(api.status());
  int count = 0;
  std::string failed = Text(JF_CUDA_CALL(**api, cuDeviceGetCount, &count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const auto primary = cuda::PrimaryContext::Retain(**api, ordinal);
    if (!primary.ok()) return failed + Text(primary.status());
    const cuda::ScopedContext current(**api, primary->context());
    failed += Text(current.status());
    for (const KernelImage& image : KernelImages()) {
      const auto module = cuda::Module::Load(**api, image.bytes.data());
      if (!module.ok()) {
        failed += StrCat("GPU ", ordinal, ", ", image.source, ": ", Text(module.status()));
      }
    }
  }
  return failed;
}

TEST(ImageLoad, EveryGpuTakesEveryImage) {
  if (!Machine::OnHardware()) GTEST_SKIP() << "needs a GPU";
  EXPECT_EQ(InForkedProcesses({1, 1}, TestOptions(), [](LocalRanks&) { return LoadEverywhere(); }),
            "");
}

}  // namespace
}  // namespace jaxfabric::testing
