#include "os/pages.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "collective/world.h"
#include "os/mapping.h"

namespace jaxfabric::testing {
namespace {

// Whether huge pages are asked for where `address` is.
bool PrefersHugePages(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    const char* stop = line.data() + line.size();
    const auto first = std::from_chars(line.data(), stop, begin, 16);
    if (first.ec == std::errc() && first.ptr < stop && *first.ptr == '-' &&
        std::from_chars(first.ptr + 1, stop, end, 16).ec == std::errc()) {
      here = begin <= wanted && wanted < end;
    } else if (here && line.starts_with("VmFlags:")) {
      return line.find(" hg") != std::string::npos;
    }
  }
  return false;
}

TEST(PagesTest, HugePagesAreAskedForInsideTheMemory) {
  constexpr size_t kBytes = 8 << 20;
  auto mapping = Mapping::MapPrivate(3 * kBytes);
  ASSERT_TRUE(mapping.ok()) << mapping.status().ToString();
  const std::span<std::byte> middle = mapping->bytes().subspan(kBytes + 5, kBytes - 10);
  TryPreferHugePages(middle);
  EXPECT_TRUE(PrefersHugePages(middle.data() + kBytes / 2));
  EXPECT_FALSE(PrefersHugePages(mapping->bytes().data()));
  EXPECT_FALSE(PrefersHugePages(mapping->bytes().data() + mapping->bytes().size() - 1));
  // Too little for a page.
  TryPreferHugePages(mapping->bytes().subspan(100, 1000));
  TryPreferHugePages({});
  EXPECT_FALSE(PrefersHugePages(mapping->bytes().data()));
}

TEST(PagesTest, LargeResultsGetThem) {
  World world({2, 1});
  const size_t count = kHugeArrayBytes / sizeof(float);
  const size_t large = world.Add({OpKind::kAllReduce, DType::kFloat32, count, 2});
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
    const auto execution = ranks.Enter(large, local, 0);
    std::string failures = Text(ranks.Check(large, local, 0, *execution));
    if (!PrefersHugePages(execution->output.data() + execution->output.size() / 2)) {
      failures += "small pages";
    }
    return failures;
  }),
            "");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // have a malloc of their own
TEST(PagesTest, FreedMemoryIsKept) {
  KeepFreedMemory();
  const auto faults = [] {
    rusage usage;
    ::getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_minflt;
  };
  constexpr size_t kBytes = 1 << 20;
  int64_t last = 0;
  for (int round = 0; round < 3; ++round) {
    last = faults();
    void* volatile blocks[4];
    for (auto& block : blocks) {
      block = std::malloc(kBytes);
      std::memset(block, round, kBytes);
    }
    for (auto& block : blocks) std::free(block);
    last = faults() - last;
  }
  EXPECT_LT(last, 64);  // they have 1024 pages
}
#endif

}  // namespace
}  // namespace jaxfabric::testing
