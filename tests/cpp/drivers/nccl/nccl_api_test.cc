#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "drivers/nccl/api.h"
#include "drivers/nccl/fake/fake_nccl.h"

namespace jaxfabric::nccl {
namespace {

TEST(NcclApi, LoadsNothing) {
  if (::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD) != nullptr) GTEST_SKIP() << "it is loaded";
  const Result<const Api*> api = LoadedApi();
  ASSERT_FALSE(api.ok());
  EXPECT_EQ(api.status().code(), Code::kUnavailable);
  EXPECT_EQ(api.status().message(), "no libnccl.so is loaded in this process");
  EXPECT_EQ(::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD), nullptr);
}

TEST(NcclApi, SaysWhatAnOldLibraryLacks) {
  Api api;
  const Status status = internal::FillApi("libc.so", &api);
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.message().find("NCCL is too old: "), std::string::npos) << status.ToString();
  EXPECT_TRUE(status.message().ends_with("libc.so.6 has no ncclGetErrorString"))
      << status.ToString();
}

TEST(NcclApi, DoesNotChooseBetweenTwoLibraries) {
  Api api;
  const Status status = internal::FillApi("lib", &api);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_TRUE(status.message().starts_with("two libraries are loaded")) << status.ToString();
}

TEST(NcclApi, ErrorsAreInItsOwnWords) {
  FakeNccl nccl;
  int rank = 0;
  EXPECT_TRUE(JF_NCCL_CALL(nccl.api(), ncclCommUserRank, nccl.MakeCommunicator(2, 3), &rank).ok());
  EXPECT_EQ(rank, 2);
  void* address = nullptr;
  const Window window = nccl.MakeWindow(nccl.MakeCommunicator(0, 1), {nullptr});
  EXPECT_EQ(JF_NCCL_CALL(nccl.api(), ncclGetPeerDevicePointer, window, 0, 1, &address).message(),
            "ncclGetPeerDevicePointer: invalid argument");
}

}  // namespace
}  // namespace jaxfabric::nccl
