// The driver of this machine takes the images of this build, on each of its GPUs.
#include <gtest/gtest.h>

#include "device/image.h"
#include "drivers/cuda/api.h"
#include "drivers/cuda/handles.h"

namespace jaxfabric {
namespace {

TEST(ImageLoad, EveryGpuTakesEveryImage) {
  if (KernelImages().empty()) GTEST_SKIP() << KernelImageReason();
  const Result<const cuda::Api*> api = cuda::LoadApi();
  ASSERT_TRUE(api.ok()) << api.status().ToString();
  int count = 0;
  ASSERT_EQ((*api)->cuDeviceGetCount(&count), cuda::CUDA_SUCCESS);
  ASSERT_GT(count, 0);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    SCOPED_TRACE(ordinal);
    const auto primary = cuda::PrimaryContext::Retain(**api, ordinal);
    ASSERT_TRUE(primary.ok()) << primary.status().ToString();
    const cuda::ScopedContext current(**api, primary->context());
    ASSERT_TRUE(current.status().ok()) << current.status().ToString();
    for (const KernelImage& image : KernelImages()) {
      const auto module = cuda::Module::Load(**api, image.bytes.data());
      EXPECT_TRUE(module.ok()) << image.source << ": " << module.status().ToString();
    }
  }
}

}  // namespace
}  // namespace jaxfabric
