#include "os/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <memory>

namespace jaxfabric {
namespace {

constexpr std::string_view kVirtual[] = {"docker", "br-", "veth", "virbr", "cni"};
constexpr const char* kRemedy =
    "set net_interface (JAXFABRIC_NET_INTERFACE) to the name of an interface or to a subnet such "
    "as "
    "10.0.0.0/8";

// Whether the first `bits` of both addresses are equal.
bool InSubnet(const TcpAddress& a, const TcpAddress& b, int bits) {
  const std::string left = a.ip_bytes(), right = b.ip_bytes();
  if (left.size() != right.size()) return false;
  for (size_t i = 0; i < left.size() && bits > 0; ++i, bits -= 8) {
    const int mask = bits >= 8 ? 0xff : 0xff << (8 - bits);
    if (((left[i] ^ right[i]) & mask & 0xff) != 0) return false;
  }
  return true;
}

bool IsLinkLocal(const TcpAddress& address) {
  return InSubnet(address, *TcpAddress::FromIp(address.is_v6() ? "fe80::" : "169.254.0.0", 0),
                  address.is_v6() ? 10 : 16);
}

int PrefixOf(const sockaddr* mask) {
  const auto address = TcpAddress::FromSockaddr(
      mask, mask->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
  int bits = 0;
  if (!address.ok()) return bits;
  for (const char byte : address->ip_bytes()) bits += __builtin_popcount(byte & 0xff);
  return bits;
}

std::string Describe(const Interface& interface) {
  return StrCat(interface.name, ", ", interface.address.ip());
}

// Why an interface is not taken of its own accord; empty if it may be.
std::string_view Objection(const Interface& interface) {
  if (!interface.up) return "down";
  if (interface.loopback) return "loopback";
  if (IsLinkLocal(interface.address)) return "link-local";
  for (std::string_view prefix : kVirtual) {
    if (interface.name.starts_with(prefix)) return "of containers or virtual machines";
  }
  return {};
}

Status NotFound(std::string_view what, const std::vector<Interface>& interfaces) {
  std::string seen;
  for (const Interface& interface : interfaces) {
    const std::string_view objection = Objection(interface);
    seen += StrCat(seen.empty() ? "" : "; ", Describe(interface), objection.empty() ? "" : " (",
                   objection, objection.empty() ? "" : ")");
  }
  return Status(Code::kNotFound,
                StrCat(what, "; there are: ", seen.empty() ? "none" : seen, "; ", kRemedy));
}

// "10.0.0.0/8", or an address alone; empty if the text is neither, and so a name.
Result<std::optional<std::pair<TcpAddress, int>>> ParseSubnet(std::string_view text) {
  const size_t slash = text.find('/');
  auto address = TcpAddress::FromIp(std::string(text.substr(0, slash)), 0);
  if (!address.ok() && slash == std::string_view::npos) {
    return std::optional<std::pair<TcpAddress, int>>();
  }
  const int most = address.ok() && address->is_v6() ? 128 : 32;
  int bits = most;
  if (slash != std::string_view::npos) {
    const char* end = text.data() + text.size();
    const auto [parsed, error] = std::from_chars(text.data() + slash + 1, end, bits);
    if (error != std::errc() || parsed != end) bits = -1;
  }
  if (!address.ok() || bits < 0 || bits > most) {
    return Status(Code::kInvalidArgument, StrCat("net_interface has \"", std::string(text),
                                                 "\", which is no subnet: ", kRemedy));
  }
  return std::optional(std::pair(*address, bits));
}

Result<InterfaceChoice> ChooseBySetting(const std::vector<Interface>& interfaces,
                                        std::string_view setting) {
  for (std::string_view rest = setting; !rest.empty();) {
    const size_t comma = rest.find(',');
    std::string_view entry = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    while (entry.starts_with(' ')) entry.remove_prefix(1);
    while (entry.ends_with(' ')) entry.remove_suffix(1);
    if (entry.empty()) continue;
    JF_ASSIGN_OR_RETURN(const auto subnet, ParseSubnet(entry));
    for (const Interface& interface : interfaces) {
      const bool fits = subnet ? InSubnet(interface.address, subnet->first, subnet->second)
                               : interface.name == entry && !IsLinkLocal(interface.address);
      if (!fits || !interface.up) continue;
      return InterfaceChoice{
          interface, StrCat(Describe(interface), ": net_interface has ", std::string(entry))};
    }
  }
  return NotFound(
      StrCat("no network interface that is up fits net_interface ", std::string(setting)),
      interfaces);
}

}  // namespace

Result<std::vector<Interface>> ListInterfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return ErrnoStatus("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, &::freeifaddrs);
  std::vector<Interface> interfaces;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    JF_ASSIGN_OR_RETURN(
        const TcpAddress address,
        TcpAddress::FromSockaddr(entry->ifa_addr,
                                 family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6)));
    interfaces.push_back({entry->ifa_name, address,
                          entry->ifa_netmask == nullptr ? 0 : PrefixOf(entry->ifa_netmask),
                          (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & IFF_RUNNING) != 0,
                          (entry->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return interfaces;
}

Result<InterfaceChoice> ChooseInterface(const std::vector<Interface>& interfaces,
                                        std::string_view setting,
                                        const std::optional<TcpAddress>& coordinator) {
  if (!setting.empty()) return ChooseBySetting(interfaces, setting);
  if (coordinator) {
    for (const Interface& interface : interfaces) {
      if (!interface.up || IsLinkLocal(interface.address) ||
          !InSubnet(interface.address, *coordinator, interface.prefix)) {
        continue;
      }
      return InterfaceChoice{
          interface,
          StrCat(Describe(interface), ": in the subnet of the coordinator, ", coordinator->ip())};
    }
  }
  const bool v6_first = coordinator && coordinator->is_v6();
  for (const bool v6 : {v6_first, !v6_first}) {
    for (const Interface& interface : interfaces) {
      if (interface.address.is_v6() != v6 || !Objection(interface).empty()) continue;
      return InterfaceChoice{interface, StrCat(Describe(interface), ": the first that is up")};
    }
  }
  return NotFound("no network interface reaches other hosts", interfaces);
}

}  // namespace jaxfabric
