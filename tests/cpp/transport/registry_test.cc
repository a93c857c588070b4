#include "transport/registry.h"

#include <gtest/gtest.h>

namespace jaxfabric {
namespace {

TEST(Registry, ListsAndProbesEveryTransport) {
  const std::vector<TransportProbe> probes = ProbeTransports();
  ASSERT_EQ(probes.size(), 3u);
  EXPECT_EQ(probes[0].name, "inproc");
  EXPECT_EQ(probes[1].name, "shm");
  EXPECT_EQ(probes[2].name, "tcp");
  for (const TransportProbe& probe : probes) {
    EXPECT_TRUE(probe.status.ok()) << probe.name << ": " << probe.status.ToString();
  }
}

TEST(Registry, FindsByNameOrSaysWhatThereIs) {
  const Result<Transport*> shm = FindTransport("shm");
  ASSERT_TRUE(shm.ok());
  EXPECT_EQ((*shm)->name(), "shm");
  const Status status = FindTransport("pigeon").status();
  EXPECT_EQ(status.code(), Code::kNotFound);
  EXPECT_NE(status.message().find("inproc, shm, tcp"), std::string_view::npos);
}

}  // namespace
}  // namespace jaxfabric
