#include "transport/shm/shm.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "os/mapping.h"
#include "os/open_fds.h"

namespace jaxfabric {
namespace {

class ShmTest : public ::testing::Test {
 protected:
  void SetUp() override {
    before_ = OpenFds();
    a_ = Bind(0, 3);
    b_ = Bind(1, 3);
    ASSERT_TRUE(a_ != nullptr && b_ != nullptr);
  }
  void TearDown() override {
    a_.reset();
    b_.reset();
    EXPECT_EQ(OpenFds(), before_);
    EXPECT_EQ(SharedMappings(), 0);
  }

  std::unique_ptr<Endpoint> Bind(int self, int max_peers) {
    Result<std::unique_ptr<Endpoint>> endpoint = transport_->Bind(self, max_peers, 4096);
    EXPECT_TRUE(endpoint.ok()) << endpoint.status().ToString();
    return endpoint.ok() ? std::move(*endpoint) : nullptr;
  }

  // Connects a_ to `peer` with a copy of `fd` in place of the peer's.
  Status Connect(const Endpoint& peer, int fd) {
    std::vector<UniqueFd> fds;
    fds.emplace_back(::dup(fd));
    return a_->Connect(peer.address(), std::move(fds), Deadline::Never()).status();
  }

  std::unique_ptr<Transport> transport_ = MakeShmTransport();
  std::unique_ptr<Endpoint> a_;
  std::unique_ptr<Endpoint> b_;

 private:
  std::set<std::string> before_;
};

TEST_F(ShmTest, TakesThePublishedSegmentOnly) {
  EXPECT_TRUE(Connect(*b_, b_->address().fds[0]).ok());
  EXPECT_EQ(Connect(*b_, a_->address().fds[0]).code(), Code::kInvalidArgument);
  EXPECT_EQ(a_->Connect(b_->address(), {}, Deadline::Never()).status().code(),
            Code::kInvalidArgument);
}

TEST_F(ShmTest, RefusesMemoryThatCouldShrink) {
  const UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(unsealed.get(), 8192), 0);
  EXPECT_EQ(Connect(*b_, unsealed.get()).code(), Code::kInvalidArgument);
}

TEST_F(ShmTest, RefusesMemoryOfAnotherSize) {
  Result<UniqueFd> small = CreateSharedMemory("jaxfabric-test", 16);
  ASSERT_TRUE(small.ok());
  EXPECT_EQ(Connect(*b_, small->get()).code(), Code::kInvalidArgument);
}

TEST_F(ShmTest, RefusesPeersWithoutASignalLine) {
  const std::unique_ptr<Endpoint> beyond = Bind(5, 6);  // we have lines for 3 peers
  EXPECT_EQ(Connect(*beyond, beyond->address().fds[0]).code(), Code::kInvalidArgument);
  const std::unique_ptr<Endpoint> alone = Bind(0, 1);  // it has no line for us if we were 1
  std::vector<UniqueFd> fds;
  fds.emplace_back(::dup(alone->address().fds[0]));
  EXPECT_EQ(b_->Connect(alone->address(), std::move(fds), Deadline::Never()).status().code(),
            Code::kInvalidArgument);
}

TEST_F(ShmTest, ChannelOutlivesTheEndpoints) {
  std::vector<UniqueFd> fds;
  fds.emplace_back(::dup(b_->address().fds[0]));
  Result<std::unique_ptr<Channel>> channel =
      a_->Connect(b_->address(), std::move(fds), Deadline::Never());
  ASSERT_TRUE(channel.ok());
  a_.reset();
  b_.reset();
  const std::vector<std::byte> data(100, std::byte{1});
  EXPECT_TRUE((*channel)->Put(data, 10).ok());
  EXPECT_TRUE((*channel)->Signal().ok());
  EXPECT_EQ((*channel)->peer_window()[109], std::byte{1});
}

}  // namespace
}  // namespace jaxfabric
