#include "memory/copy.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/status.h"
#include "memory/cache_size.h"

namespace jaxfabric {
namespace {

TEST(Copy, EveryAlignmentAndEdgeSize) {
  constexpr size_t kPad = 64;
  for (Store store : {Store::kCached, Store::kNonTemporal}) {
    for (size_t bytes : {0, 1, 7, 63, 64, 65, 127, 128, 255, 256, 257, 1000, 4096, 70001}) {
      for (size_t to : {0, 1, 13, 63}) {
        for (size_t from : {0, 1, 32}) {
          std::vector<unsigned char> source(bytes + kPad);
          for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i * 7);
          std::vector<unsigned char> expected(bytes + 2 * kPad, 0xee);
          std::vector<unsigned char> actual = expected;
          for (size_t i = 0; i < bytes; ++i) expected[to + i] = source[from + i];
          Copy(actual.data() + to, source.data() + from, bytes, store);
          ASSERT_EQ(actual, expected) << bytes << " bytes from " << from << " to " << to;
        }
      }
    }
  }
}

TEST(Copy, NothingNeedsNoPointer) {
  Copy(nullptr, nullptr, 0);
  Copy(nullptr, nullptr, 0, Store::kNonTemporal);
}

TEST(NonTemporalThreshold, IsTheSizeOfACache) {
  EXPECT_GE(NonTemporalThreshold(), size_t{64} << 10);
  EXPECT_LE(NonTemporalThreshold(), size_t{4} << 30);
}

// A stand-in for /sys/devices/system/cpu.
class FakeSysfs : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/jaxfabric-sysfs-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void AddCache(int index, const std::string& level, const std::string& type,
                const std::string& size, const std::string& cpus) {
    const std::string path = StrCat(root_, "/cpu0/cache/index", index);
    std::filesystem::create_directories(path);
    std::ofstream(path + "/level") << level << "\n";
    std::ofstream(path + "/type") << type << "\n";
    std::ofstream(path + "/size") << size << "\n";
    std::ofstream(path + "/shared_cpu_list") << cpus << "\n";
  }

  std::string root_;
};

TEST_F(FakeSysfs, SharesTheLastLevel) {
  AddCache(0, "1", "Data", "32K", "0");
  AddCache(1, "1", "Instruction", "64K", "0");
  AddCache(2, "2", "Unified", "1024K", "0-1");
  AddCache(3, "3", "Unified", "32M", "0-3,8-11");
  EXPECT_EQ(LastLevelCacheShare(root_), size_t{4} << 20);
}

TEST_F(FakeSysfs, IgnoresWhatItCannotRead) {
  AddCache(0, "1", "Data", "32K", "0");
  AddCache(1, "2", "Unified", "big", "0");
  AddCache(2, "3", "Unified", "8M", "none");
  AddCache(3, "4", "Unified", "8M", "3-1");
  EXPECT_EQ(LastLevelCacheShare(root_), size_t{32} << 10);
}

TEST_F(FakeSysfs, NothingThere) { EXPECT_EQ(LastLevelCacheShare(root_), std::nullopt); }

}  // namespace
}  // namespace jaxfabric
