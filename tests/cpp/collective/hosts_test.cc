// Who acts for whom between hosts, on every way to deal up to 9 ranks out to up to 4 hosts.
#include "collective/hosts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

namespace jaxfabric {
namespace {

void ForEachDeal(const std::function<void(const std::vector<int>&)>& body) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (int hosts = 1; hosts <= std::min(ranks, 4); ++hosts) {
      std::vector<int> host_of(static_cast<size_t>(ranks), 0);
      // All of them for few ranks, else some.
      int count = 1;
      for (int i = 0; i < ranks; ++i) count *= hosts;
      for (int deal = 0; deal < count; deal += ranks > 5 ? 101 : 1) {
        for (int i = 0, rest = deal; i < ranks; ++i, rest /= hosts) {
          host_of[static_cast<size_t>(i)] = 10 * (rest % hosts);
        }
        body(host_of);
      }
    }
  }
}

TEST(HostsTest, EveryPartHasOneHandlerOnEachHostWhoIsItsOwnerAtHome) {
  ForEachDeal([](const std::vector<int>& host_of) {
    const Hosts hosts(host_of);
    ASSERT_EQ(hosts.size(), static_cast<int>(host_of.size()));
    for (int part = 0; part < hosts.size(); ++part) {
      EXPECT_EQ(hosts.Handler(hosts.of(part), part), part);
      for (int host = 0; host < hosts.count(); ++host) {
        const int handler = hosts.Handler(host, part);
        EXPECT_EQ(hosts.of(handler), host);
        const std::vector<int> handled = hosts.HandledBy(handler);
        const bool there = std::find(handled.begin(), handled.end(), part) != handled.end();
        EXPECT_EQ(there, host != hosts.of(part));
      }
    }
  });
}

TEST(HostsTest, HandlersShareTheWorkOfTheirHost) {
  ForEachDeal([](const std::vector<int>& host_of) {
    const Hosts hosts(host_of);
    for (int host = 0; host < hosts.count(); ++host) {
      size_t most = 0, parts = 0;
      for (int member : hosts.members(host)) {
        most = std::max(most, hosts.HandledBy(member).size());
        parts += hosts.HandledBy(member).size();
      }
      EXPECT_EQ(parts, host_of.size() - hosts.members(host).size());
      const auto others = static_cast<size_t>(hosts.count() - 1);
      // Each other host's ranks are dealt out evenly.
      EXPECT_LE(most, parts / hosts.members(host).size() + others);
    }
  });
}

TEST(HostsTest, PartnersAreEachOthers) {
  ForEachDeal([](const std::vector<int>& host_of) {
    const Hosts hosts(host_of);
    for (int a = 0; a < hosts.size(); ++a) {
      for (int b : hosts.PartnersOf(a)) {
        EXPECT_NE(hosts.of(a), hosts.of(b));
        const std::vector<int> back = hosts.PartnersOf(b);
        EXPECT_TRUE(std::binary_search(back.begin(), back.end(), a));
      }
    }
  });
}

TEST(HostsTest, NobodyHandlesMoreThanItIsSaid) {
  ForEachDeal([](const std::vector<int>& host_of) {
    const Hosts hosts(host_of);
    size_t most = 0;
    for (int rank = 0; rank < hosts.size(); ++rank) {
      most = std::max(most, hosts.HandledBy(rank).size());
    }
    EXPECT_EQ(static_cast<size_t>(hosts.MostHandled()), most);
  });
}

TEST(HostsTest, RolesNameTheSameMemoryOnBothSides) {
  ForEachDeal([](const std::vector<int>& host_of) {
    const Hosts hosts(host_of);
    for (int position = 0; position < hosts.size(); ++position) {
      const HostRoles roles(hosts, position);
      EXPECT_EQ(roles.relays.size(), static_cast<size_t>(hosts.count() - 1));
      for (const auto& relay : roles.relays) {
        EXPECT_EQ(hosts.HandledBy(relay.position).at(relay.index), position);
      }
      std::set<int> parts;
      for (const auto& result : roles.results) {
        parts.insert(result.part);
        EXPECT_EQ(hosts.of(result.holder), roles.host);
        if (result.relayed) {
          EXPECT_EQ(hosts.HandledBy(result.holder).at(result.index), result.part);
        } else {
          EXPECT_EQ(result.holder, result.part);
        }
      }
      EXPECT_EQ(parts.size(), static_cast<size_t>(hosts.size() - 1));
      EXPECT_FALSE(parts.contains(position));
    }
  });
}

TEST(HostsTest, RingsDoNotOverlap) {
  ForEachDeal([](const std::vector<int>& host_of) {
    const Hosts hosts(host_of);
    for (int position = 0; position < hosts.size(); ++position) {
      const HostsLayout layout = HostsLayout(hosts, position).With(128);
      std::set<size_t> rings = {layout.OwnPartial(), layout.OwnResult()};
      for (size_t part = 0; part < layout.parts; ++part) {
        rings.insert(layout.Contribution(static_cast<int>(part)));
      }
      for (int host = 0; host < hosts.count(); ++host) rings.insert(layout.Partial(host));
      for (size_t i = 0; i < layout.handled; ++i) {
        rings.insert(layout.SentPartial(i));
        rings.insert(layout.Result(i));
      }
      EXPECT_EQ(rings.size(), layout.rings());
      EXPECT_GE(*rings.begin(), layout.counters() * sizeof(uint64_t));
      EXPECT_EQ(*rings.rbegin() + layout.ring, layout.bytes());
    }
  });
}

}  // namespace
}  // namespace jaxfabric
