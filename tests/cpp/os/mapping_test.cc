#include "os/mapping.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "os/open_fds.h"

namespace jaxfabric {
namespace {

constexpr size_t kBytes = 10000;  // not a multiple of a page

TEST(SharedMemory, IsZeroedSharedAndClosedOnExec) {
  Result<UniqueFd> fd = CreateSharedMemory("jaxfabric-test", kBytes);
  ASSERT_TRUE(fd.ok()) << fd.status().ToString();
  EXPECT_NE(::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
  Result<Mapping> first = Mapping::MapShared(fd->get(), kBytes);
  Result<Mapping> second = Mapping::MapShared(fd->get(), kBytes);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->bytes().size(), kBytes);
  EXPECT_TRUE(std::ranges::all_of(first->bytes(), [](std::byte b) { return b == std::byte{0}; }));
  first->bytes()[kBytes - 1] = std::byte{42};
  EXPECT_EQ(second->bytes()[kBytes - 1], std::byte{42});
}

TEST(SharedMemory, SizeIsSealed) {
  Result<UniqueFd> fd = CreateSharedMemory("jaxfabric-test", kBytes);
  ASSERT_TRUE(fd.ok());
  EXPECT_NE(::ftruncate(fd->get(), 0), 0);
  EXPECT_NE(::ftruncate(fd->get(), 2 * kBytes), 0);
  EXPECT_NE(::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_WRITE), 0) << "seals must be final";
  const Result<size_t> size = SealedSize(fd->get());
  ASSERT_TRUE(size.ok());
  EXPECT_EQ(*size, kBytes);
}

TEST(SharedMemory, ZeroBytesAreRefused) {
  EXPECT_EQ(CreateSharedMemory("jaxfabric-test", 0).status().code(), Code::kInvalidArgument);
}

TEST(SealedSize, RefusesWhatCanShrink) {
  const UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_TRUE(unsealed.valid());
  EXPECT_EQ(SealedSize(unsealed.get()).status().code(), Code::kInvalidArgument);
  const UniqueFd file(::open("/proc/self/status", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(SealedSize(file.get()).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(SealedSize(-1).status().code(), Code::kInvalidArgument);
}

TEST(Mapping, MovesWithItsMemory) {
  const int mappings = SharedMappings();
  {
    Result<UniqueFd> fd = CreateSharedMemory("jaxfabric-test", kBytes);
    ASSERT_TRUE(fd.ok());
    Result<Mapping> made = Mapping::MapShared(fd->get(), kBytes);
    ASSERT_TRUE(made.ok());
    const std::byte* const address = made->bytes().data();
    Mapping moved = std::move(*made);
    EXPECT_EQ(moved.bytes().data(), address);
    EXPECT_TRUE(made->bytes().empty());  // NOLINT: what a moved-from mapping is
    Mapping assigned;
    assigned = std::move(moved);
    EXPECT_EQ(assigned.bytes().data(), address);
    EXPECT_EQ(SharedMappings(), mappings + 1);
  }
  EXPECT_EQ(SharedMappings(), mappings);
}

TEST(Mapping, ErrorsAreValues) {
  EXPECT_FALSE(Mapping::MapShared(-1, kBytes).ok());
  EXPECT_EQ(Mapping::MapShared(0, 0).status().code(), Code::kInvalidArgument);
}

TEST(UniqueFd, ClosesOnceAndMoves) {
  const auto before = OpenFds();
  {
    UniqueFd a(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    ASSERT_TRUE(a.valid());
    UniqueFd b = std::move(a);
    EXPECT_FALSE(a.valid());  // NOLINT: what a moved-from descriptor is
    a = UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    a = std::move(b);
    const int raw = a.Release();
    EXPECT_FALSE(a.valid());
    ::close(raw);
  }
  EXPECT_EQ(OpenFds(), before);
}

}  // namespace
}  // namespace jaxfabric
