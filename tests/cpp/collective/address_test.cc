#include "collective/address.h"

#include <gtest/gtest.h>

#include <string>

namespace jaxfabric {
namespace {

ProcessAddress Example() {
  ProcessAddress address;
  address.process = 3;
  address.pid = 42;
  address.name = "jaxfabric-0011";
  address.host = "hostb";
  address.host_id = "a boot";
  address.ranks = {6, 7};
  address.tcp_address = "10.0.0.2:40000";
  address.network = "eth0, 10.0.0.2: in the subnet of the coordinator, 10.0.0.1";
  return address;
}

TEST(AddressTest, GoesBothWays) {
  const ProcessAddress address = Example();
  const auto decoded = ProcessAddress::Decode(address.Encode());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded->process, 3);
  EXPECT_EQ(decoded->pid, 42);
  EXPECT_EQ(decoded->name, address.name);
  EXPECT_EQ(decoded->host, "hostb");
  EXPECT_EQ(decoded->host_id, "a boot");
  EXPECT_EQ(decoded->ranks, address.ranks);
  EXPECT_EQ(decoded->tcp_address, address.tcp_address);
  EXPECT_EQ(decoded->network, address.network);
}

TEST(AddressTest, WhatIsNotOneIsRefused) {
  const std::string whole = Example().Encode();
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto decoded = ProcessAddress::Decode(whole.substr(0, size));
    ASSERT_FALSE(decoded.ok()) << size;
    EXPECT_EQ(decoded.status().code(), Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace jaxfabric
