#include "os/interfaces.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace jaxfabric {
namespace {

Interface Make(const std::string& name, const std::string& ip, int prefix, bool up = true) {
  return {name, *TcpAddress::FromIp(ip, 0), prefix, up, name == "lo"};
}

std::optional<TcpAddress> At(const std::string& ip) { return *TcpAddress::FromIp(ip, 9000); }

// A machine with everything that can stand in the way.
std::vector<Interface> Machine() {
  return {Make("lo", "127.0.0.1", 8),
          Make("docker0", "172.17.0.1", 16),
          Make("eth9", "10.9.0.1", 16, false),
          Make("veth12", "10.1.0.9", 32),
          Make("eth0", "192.168.1.5", 24),
          Make("ib0", "10.0.3.4", 20),
          Make("lo", "::1", 128),
          Make("eth0", "fe80::1", 64),
          Make("eth0", "fd00::5", 64),
          Make("eth1", "169.254.1.1", 16)};
}

std::string Choose(const std::string& setting, std::optional<TcpAddress> coordinator = {},
                   const std::vector<Interface>& interfaces = Machine()) {
  const auto choice = ChooseInterface(interfaces, setting, coordinator);
  if (!choice.ok()) return choice.status().ToString();
  EXPECT_NE(choice->why.find(choice->chosen.name), std::string::npos) << choice->why;
  EXPECT_NE(choice->why.find(choice->chosen.address.ip()), std::string::npos) << choice->why;
  return choice->chosen.address.ip();
}

TEST(InterfacesTest, TheCoordinatorsSubnetComesFirst) {
  EXPECT_EQ(Choose("", At("192.168.1.77")), "192.168.1.5");
  EXPECT_EQ(Choose("", At("10.0.15.1")), "10.0.3.4");
  EXPECT_EQ(Choose("", At("fd00::77")), "fd00::5");
  // The launcher of one host listens there.
  EXPECT_EQ(Choose("", At("127.0.0.1")), "127.0.0.1");
  EXPECT_EQ(Choose("", At("::1")), "::1");
  // A container's host: the user has said so.
  EXPECT_EQ(Choose("", At("172.17.0.9")), "172.17.0.1");
}

TEST(InterfacesTest, OtherwiseTheFirstThatReachesOthers) {
  EXPECT_EQ(Choose(""), "192.168.1.5");
  EXPECT_EQ(Choose("", At("8.8.8.8")), "192.168.1.5");
  EXPECT_EQ(Choose("", At("10.0.16.1")), "192.168.1.5");  // just outside of ib0's 20 bits
  EXPECT_EQ(Choose("", At("2001:db8::1")), "fd00::5");
  EXPECT_EQ(Choose("", At("2001:db8::1"), {Make("eth0", "10.0.0.1", 8)}), "10.0.0.1");
  EXPECT_EQ(Choose("", At("10.9.0.2")), "192.168.1.5");  // whose interface is down
}

TEST(InterfacesTest, TheSettingWins) {
  EXPECT_EQ(Choose("ib0", At("192.168.1.77")), "10.0.3.4");
  EXPECT_EQ(Choose("eth7, ib0,eth0"), "10.0.3.4");
  EXPECT_EQ(Choose("10.0.0.0/8"), "10.1.0.9");  // even one that is skipped otherwise
  EXPECT_EQ(Choose("10.0.0.0/16"), "10.0.3.4");
  EXPECT_EQ(Choose("fd00::/8"), "fd00::5");
  EXPECT_EQ(Choose("192.168.1.5"), "192.168.1.5");
  EXPECT_EQ(Choose("docker0"), "172.17.0.1");
  EXPECT_EQ(Choose("0.0.0.0/0"), "127.0.0.1");
}

TEST(InterfacesTest, WhatDoesNotFitIsExplained) {
  for (const char* setting : {"eth7", "10.200.0.0/16", "eth9"}) {
    const std::string text = Choose(setting);
    EXPECT_NE(text.find(setting), std::string::npos) << text;
    EXPECT_NE(text.find("192.168.1.5"), std::string::npos) << text;
    EXPECT_NE(text.find("JAXFABRIC_NET_INTERFACE"), std::string::npos) << text;
  }
  for (const char* setting : {"10.0.0.0/33", "10.0.0.0/", "10.0.0.0/x", "eth0/24", "fd00::/129"}) {
    const auto choice = ChooseInterface(Machine(), setting, {});
    EXPECT_EQ(choice.status().code(), Code::kInvalidArgument) << setting;
    EXPECT_NE(choice.status().ToString().find(setting), std::string::npos);
  }
  const std::string text =
      Choose("", {}, {Make("lo", "127.0.0.1", 8), Make("br-1", "10.0.0.1", 8)});
  EXPECT_NE(text.find("lo, 127.0.0.1 (loopback)"), std::string::npos) << text;
  EXPECT_NE(text.find("br-1, 10.0.0.1 (of containers"), std::string::npos) << text;
  EXPECT_NE(Choose("", {}, {}).find("none"), std::string::npos);
}

TEST(InterfacesTest, ThisMachineHasALoopback) {
  const auto interfaces = ListInterfaces();
  ASSERT_TRUE(interfaces.ok()) << interfaces.status().ToString();
  const auto choice = ChooseInterface(*interfaces, "", At("127.0.0.1"));
  ASSERT_TRUE(choice.ok()) << choice.status().ToString();
  EXPECT_TRUE(choice->chosen.loopback);
  EXPECT_EQ(choice->chosen.prefix, 8);
}

}  // namespace
}  // namespace jaxfabric
