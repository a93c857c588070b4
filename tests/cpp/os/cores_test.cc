#include "os/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <thread>

namespace jaxfabric {
namespace {

TEST(Cores, FollowTheAffinityMask) {
  const std::vector<int64_t> cores = UsableCores();
  ASSERT_FALSE(cores.empty());
  // On a thread of its own: the mask is the thread's.
  std::vector<int64_t> narrowed;
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<int>(cores.back()), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    narrowed = UsableCores();
    EXPECT_EQ(CurrentCore(), static_cast<uint64_t>(cores.back()));
  }).join();
  EXPECT_EQ(narrowed, std::vector<int64_t>{cores.back()});
}

TEST(Cores, QuotaOfTheControlGroup) {
  const std::filesystem::path root =
      std::filesystem::path(::testing::TempDir()) / "jaxfabric_cores_test";
  std::filesystem::create_directories(root);
  const auto quota = [&](const std::string& text) {
    std::ofstream(root / "cpu.max") << text;
    return CoreQuota(root.string());
  };
  EXPECT_EQ(quota("max 100000\n"), std::nullopt);
  EXPECT_EQ(quota("200000 100000\n"), 2);
  EXPECT_EQ(quota("150000 100000\n"), 2);
  EXPECT_EQ(quota("5000 100000\n"), 1);
  EXPECT_EQ(quota("nonsense"), std::nullopt);
  std::filesystem::remove_all(root);
  EXPECT_EQ(CoreQuota(root.string()), std::nullopt);
}

}  // namespace
}  // namespace jaxfabric
