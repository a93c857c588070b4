#include "drivers/cuda/api.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

namespace jaxfabric::cuda {
namespace {

TEST(CudaApi, SaysThatTheDriverIsMissing) {
  if (void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY)) {
    ::dlclose(driver);
    GTEST_SKIP() << "there is one";
  }
  const Result<const Api*> api = LoadApi();
  ASSERT_FALSE(api.ok());
  EXPECT_EQ(api.status().code(), Code::kUnavailable);
  EXPECT_NE(api.status().message().find("libcuda.so.1 not found"), std::string::npos)
      << api.status().ToString();
  EXPECT_EQ(LoadApi().status().ToString(), api.status().ToString());
}

TEST(CudaApi, SaysWhatAnOldDriverLacks) {
  Api api;
  const Status status = internal::FillApi("libc.so.6", &api);  // as old as a driver can be
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.message().find("too old: libc.so.6 has no cuInit"), std::string::npos)
      << status.ToString();
}

CUresult ErrorName(CUresult error, const char** name) {
  if (error != CUDA_ERROR_OUT_OF_MEMORY) return CUDA_ERROR_INVALID_VALUE;
  *name = "CUDA_ERROR_OUT_OF_MEMORY";
  return CUDA_SUCCESS;
}
CUresult ErrorText(CUresult error, const char** text) {
  if (error != CUDA_ERROR_OUT_OF_MEMORY) return CUDA_ERROR_INVALID_VALUE;
  *text = "out of memory";
  return CUDA_SUCCESS;
}

TEST(CudaApi, ErrorsAreInTheDriversWords) {
  Api api;
  api.cuGetErrorName = &ErrorName;
  api.cuGetErrorString = &ErrorText;
  EXPECT_TRUE(ToStatus(api, CUDA_SUCCESS, "cuInit").ok());
  EXPECT_EQ(ToStatus(api, CUDA_ERROR_OUT_OF_MEMORY, "cuMemCreate").ToString(),
            "RESOURCE_EXHAUSTED: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  EXPECT_EQ(ToStatus(api, static_cast<CUresult>(12345), "cuInit").ToString(),
            "INTERNAL: cuInit: CUDA error 12345");
}

}  // namespace
}  // namespace jaxfabric::cuda
