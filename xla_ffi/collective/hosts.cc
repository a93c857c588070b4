#include "collective/hosts.h"

#include <algorithm>
#include <map>

namespace jaxfabric {

Hosts::Hosts(const std::vector<int>& host_of) {
  std::map<int, int> numbers;
  for (size_t position = 0; position < host_of.size(); ++position) {
    const auto [found, added] =
        numbers.emplace(host_of[position], static_cast<int>(numbers.size()));
    if (added) members_.emplace_back();
    auto& members = members_[static_cast<size_t>(found->second)];
    of_.push_back(found->second);
    index_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(position));
  }
}

int Hosts::Handler(int host, int part) const {
  const std::vector<int>& ranks = members(host);
  return ranks[static_cast<size_t>(index_[static_cast<size_t>(part)]) % ranks.size()];
}

std::vector<int> Hosts::HandledBy(int position) const {
  std::vector<int> parts;
  for (int part = 0; part < static_cast<int>(of_.size()); ++part) {
    if (of(part) != of(position) && Handler(of(position), part) == position) parts.push_back(part);
  }
  return parts;
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
