#include "transport/inproc/inproc.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

namespace jaxfabric {
namespace {

TEST(Inproc, GivesThePeersWindowItself) {
  const std::unique_ptr<Transport> transport = MakeInprocTransport();
  Result<std::unique_ptr<Endpoint>> a = transport->Bind(0, 2, 4096);
  Result<std::unique_ptr<Endpoint>> b = transport->Bind(1, 2, 4096);
  ASSERT_TRUE(a.ok() && b.ok());
  Result<std::unique_ptr<Channel>> channel = (*a)->Connect((*b)->address(), {}, Deadline::Never());
  ASSERT_TRUE(channel.ok());
  EXPECT_EQ((*channel)->peer_window().data(), (*b)->window().data());
}

TEST(Inproc, AddressDiesWithItsEndpoint) {
  const std::unique_ptr<Transport> transport = MakeInprocTransport();
  Result<std::unique_ptr<Endpoint>> a = transport->Bind(0, 2, 4096);
  Result<std::unique_ptr<Endpoint>> b = transport->Bind(1, 2, 4096);
  ASSERT_TRUE(a.ok() && b.ok());
  const EndpointAddress address = (*b)->address();
  b->reset();
  EXPECT_EQ((*a)->Connect(address, {}, Deadline::Never()).status().code(), Code::kUnavailable);
}

// A forked child has a copy of the memory: it must learn that it is not the same.
TEST(Inproc, AddressIsOfOneProcess) {
  const std::unique_ptr<Transport> transport = MakeInprocTransport();
  Result<std::unique_ptr<Endpoint>> a = transport->Bind(0, 2, 4096);
  ASSERT_TRUE(a.ok());
  const pid_t child = ::fork();
  if (child == 0) {
    Result<std::unique_ptr<Endpoint>> b = transport->Bind(1, 2, 4096);
    const bool refused =
        b.ok() &&
        (*b)->Connect((*a)->address(), {}, Deadline::Never()).status().code() == Code::kUnavailable;
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace jaxfabric
