#include "collective/hosts.h"

#include <algorithm>

namespace jaxfabric {

std::vector<int> Hosts::members(int host) const {
  std::vector<int> members;
  for (int local = 0; local < ranks_.RanksOf(host); ++local) {
    members.push_back(ranks_.PositionOf(host, local));
  }
  return members;
}

std::vector<int> Hosts::HandledBy(int position) const {
  std::vector<int> parts;
  for (int part = 0; part < size(); ++part) {
    if (of(part) != of(position) && Handler(of(position), part) == position) parts.push_back(part);
  }
  return parts;
}

int Hosts::MostHandled() const {
  int most = 0;
  for (int host = 0; host < count(); ++host) {
    int handled = 0;  // by its first rank, which has as many as any
    for (int other = 0; other < count(); ++other) {
      const int own = ranks_.RanksOf(host);
      if (other != host) handled += (ranks_.RanksOf(other) + own - 1) / own;
    }
    most = std::max(most, handled);
  }
  return most;
}

std::vector<int> Hosts::PartnersOf(int position) const {
  std::vector<int> partners = HandledBy(position);
  for (int host = 0; host < count(); ++host) {
    if (host != of(position)) partners.push_back(Handler(host, position));
  }
  std::sort(partners.begin(), partners.end());
  partners.erase(std::unique(partners.begin(), partners.end()), partners.end());
  return partners;
}

HostsLayout::HostsLayout(const Hosts& all, int position)
    : hosts(static_cast<size_t>(all.count())), handled(all.HandledBy(position).size()) {
  if (all.members(all.of(position)).size() > 1) parts = static_cast<size_t>(all.size());
}

HostRoles::HostRoles(const Hosts& hosts, int position)
    : host(hosts.of(position)), layout(hosts, position), members(hosts.members(host)) {
  const auto index_at = [&hosts](int holder, int part) {
    const std::vector<int> parts = hosts.HandledBy(holder);
    return static_cast<size_t>(std::find(parts.begin(), parts.end(), part) - parts.begin());
  };
  std::copy_if(members.begin(), members.end(), std::back_inserter(locals),
               [position](int member) { return member != position; });
  for (int part : hosts.HandledBy(position)) {
    handled.push_back({part, handled.size(), HostsLayout(hosts, part)});
  }
  for (int other = 0; other < hosts.count(); ++other) {
    if (other == host) continue;
    const int relay = hosts.Handler(other, position);
    relays.push_back({other, relay, index_at(relay, position), HostsLayout(hosts, relay)});
  }
  for (int part = 0; part < hosts.size(); ++part) {
    if (part == position) continue;
    const bool relayed = hosts.of(part) != host;
    const int holder = relayed ? hosts.Handler(host, part) : part;
    results.push_back(
        {part, holder, relayed ? index_at(holder, part) : 0, relayed, HostsLayout(hosts, holder)});
  }
}

}  // namespace jaxfabric
