#include "os/tcp_socket.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fstream>

#include "os/poll.h"

namespace jaxfabric {
namespace {

std::optional<uint16_t> ParsePort(std::string_view text) {
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return {};
  return port;
}

Result<UniqueFd> NewSocket(const TcpAddress& address, const TcpOptions& options) {
  UniqueFd socket(
      ::socket(address.get()->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (!socket.valid()) return ErrnoStatus("creating a TCP socket", errno);
  JF_RETURN_IF_ERROR(SetTcpOptions(socket.get(), options));
  return socket;
}

Status SetInt(int socket, int level, int option, int value, const char* name) {
  if (::setsockopt(socket, level, option, &value, sizeof(value)) != 0) {
    return ErrnoStatus(StrCat("setsockopt ", name), errno);
  }
  return OkStatus();
}

int TrySetCongestionControl(int socket, const std::string& name) {
  return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.c_str(),
                      static_cast<socklen_t>(name.size()));
}

}  // namespace

TcpAddress::TcpAddress() : storage_{} { storage_.any.sa_family = AF_INET; }

Result<TcpAddress> TcpAddress::FromIp(const std::string& ip, uint16_t port) {
  TcpAddress address;
  address.storage_ = {};
  if (::inet_pton(AF_INET, ip.c_str(), &address.storage_.v4.sin_addr) == 1) {
    address.storage_.v4.sin_family = AF_INET;
  } else if (::inet_pton(AF_INET6, ip.c_str(), &address.storage_.v6.sin6_addr) == 1) {
    address.storage_.v6.sin6_family = AF_INET6;
  } else {
    return Status(Code::kInvalidArgument, StrCat("\"", ip, "\" is not an IPv4 or IPv6 address"));
  }
  address.set_port(port);
  return address;
}

Result<TcpAddress> TcpAddress::Parse(std::string_view text) {
  const Status bad(Code::kInvalidArgument, StrCat("\"", std::string(text),
                                                  "\" is not an address such as 10.0.0.1:4000 or "
                                                  "[fd00::1]:4000"));
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return bad;
  std::string_view ip = text.substr(0, colon);
  const auto port = ParsePort(text.substr(colon + 1));
  const bool brackets = ip.size() > 2 && ip.front() == '[' && ip.back() == ']';
  if (brackets) ip = ip.substr(1, ip.size() - 2);
  // Without brackets the end of an IPv6 address could be a port.
  if (!port || brackets != (ip.find(':') != std::string_view::npos)) return bad;
  auto address = FromIp(std::string(ip), *port);
  return address.ok() ? address : Result<TcpAddress>(bad);
}

Result<TcpAddress> TcpAddress::FromSockaddr(const sockaddr* address, socklen_t size) {
  TcpAddress result;
  const bool v4 = address->sa_family == AF_INET && size >= sizeof(sockaddr_in);
  const bool v6 = address->sa_family == AF_INET6 && size >= sizeof(sockaddr_in6);
  if (!v4 && !v6) return Status(Code::kInvalidArgument, "the address of a socket is not IP");
  std::memcpy(&result.storage_, address, v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
  return result;
}

std::string TcpAddress::ip() const {
  char text[INET6_ADDRSTRLEN] = "";
  const void* bytes = is_v6() ? static_cast<const void*>(&storage_.v6.sin6_addr)
                              : static_cast<const void*>(&storage_.v4.sin_addr);
  ::inet_ntop(storage_.any.sa_family, bytes, text, sizeof(text));
  return text;
}

std::string TcpAddress::ip_bytes() const {
  if (!is_v6()) return std::string(reinterpret_cast<const char*>(&storage_.v4.sin_addr), 4);
  return std::string(reinterpret_cast<const char*>(&storage_.v6.sin6_addr), 16);
}

uint16_t TcpAddress::port() const {
  return ntohs(is_v6() ? storage_.v6.sin6_port : storage_.v4.sin_port);
}

void TcpAddress::set_port(uint16_t port) {
  (is_v6() ? storage_.v6.sin6_port : storage_.v4.sin_port) = htons(port);
}

std::string TcpAddress::ToString() const {
  return is_v6() ? StrCat("[", ip(), "]:", port()) : StrCat(ip(), ":", port());
}

Result<PortRange> PortRange::Parse(std::string_view text) {
  if (text.empty()) return PortRange{};
  const size_t dash = text.find('-');
  const auto first = ParsePort(text.substr(0, dash));
  const auto last = dash == std::string_view::npos ? first : ParsePort(text.substr(dash + 1));
  if (!first || !last || *first == 0 || *last < *first) {
    return Status(Code::kInvalidArgument, StrCat("net_port_range \"", std::string(text),
                                                 "\" is not a range such as 40000-40100"));
  }
  return PortRange{*first, *last};
}

std::string PortRange::ToString() const {
  if (first == 0) return "any";
  return first == last ? StrCat(first) : StrCat(first, "-", last);
}

Status SetCongestionControl(int socket, const std::string& name) {
  if (name == "system") return OkStatus();
  if (name != "auto") {
    if (TrySetCongestionControl(socket, name) == 0) return OkStatus();
    const int error = errno;
    std::string allowed;
    std::getline(std::ifstream("/proc/sys/net/ipv4/tcp_allowed_congestion_control"), allowed);
    return ErrnoStatus(StrCat("tcp_congestion_control \"", name,
                              "\" (allowed to every process are ", allowed, ")"),
                       error);
  }
  char current[16] = "";  // TCP_CA_NAME_MAX
  socklen_t size = sizeof(current);
  if (::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, current, &size) != 0 ||
      !std::string_view(current, ::strnlen(current, size)).starts_with("bbr")) {
    return OkStatus();
  }
  for (const char* better : {"cubic", "reno"}) {
    if (TrySetCongestionControl(socket, better) == 0) break;
  }
  return OkStatus();
}

Status SetTcpOptions(int socket, const TcpOptions& options) {
  if (options.no_delay) {
    JF_RETURN_IF_ERROR(SetInt(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY"));
  }
  if (options.send_buffer > 0) {
    JF_RETURN_IF_ERROR(SetInt(socket, SOL_SOCKET, SO_SNDBUF, options.send_buffer, "SO_SNDBUF"));
  }
  if (options.receive_buffer > 0) {
    JF_RETURN_IF_ERROR(SetInt(socket, SOL_SOCKET, SO_RCVBUF, options.receive_buffer, "SO_RCVBUF"));
  }
  JF_RETURN_IF_ERROR(SetCongestionControl(socket, options.congestion_control));
  if (options.unreachable_after <= Clock::duration::zero()) return OkStatus();
  constexpr std::chrono::milliseconds kLongest{24 * 3600 * 1000};
  const auto after =
      std::clamp(std::chrono::ceil<std::chrono::milliseconds>(options.unreachable_after),
                 std::chrono::milliseconds(1), kLongest);
  // While something is under way the first counts; on an idle connection probes of the others.
  const int milliseconds = static_cast<int>(after.count());
  JF_RETURN_IF_ERROR(
      SetInt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, milliseconds, "TCP_USER_TIMEOUT"));
  const int interval = std::clamp(milliseconds / 4000, 1, 30);
  const int probes = std::clamp(milliseconds / 1000 / interval - 1, 1, 127);
  JF_RETURN_IF_ERROR(SetInt(socket, IPPROTO_TCP, TCP_KEEPIDLE, interval, "TCP_KEEPIDLE"));
  JF_RETURN_IF_ERROR(SetInt(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval, "TCP_KEEPINTVL"));
  JF_RETURN_IF_ERROR(SetInt(socket, IPPROTO_TCP, TCP_KEEPCNT, probes, "TCP_KEEPCNT"));
  return SetInt(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
}

Result<UniqueFd> ListenTcp(TcpAddress* address, PortRange ports, const TcpOptions& options) {
  for (uint32_t port = ports.first; port <= ports.last; ++port) {
    JF_ASSIGN_OR_RETURN(UniqueFd socket, NewSocket(*address, options));
    // A port that connections of an earlier process have just left can be taken again.
    JF_RETURN_IF_ERROR(SetInt(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR"));
    if (address->is_v6()) {
      JF_RETURN_IF_ERROR(SetInt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1, "IPV6_V6ONLY"));
    }
    TcpAddress candidate = *address;
    candidate.set_port(static_cast<uint16_t>(port));
    // Another socket can have been bound to the same port, and listen first.
    if (::bind(socket.get(), candidate.get(), candidate.size()) != 0 ||
        ::listen(socket.get(), SOMAXCONN) != 0) {
      if (errno == EADDRINUSE && ports.first != 0) continue;
      return ErrnoStatus(StrCat("listening on ", candidate.ToString()), errno);
    }
    JF_ASSIGN_OR_RETURN(*address, LocalTcpAddress(socket.get()));
    return socket;
  }
  return Status(Code::kResourceExhausted,
                StrCat("port range exhausted: none of ports ", ports.ToString(), " is free on ",
                       address->ip(),
                       "; widen net_port_range (JAXFABRIC_NET_PORT_RANGE): every "
                       "process needs two"));
}

Result<std::optional<UniqueFd>> TryAcceptTcp(int listener, TcpAddress* peer) {
  for (;;) {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    UniqueFd socket(::accept4(listener, reinterpret_cast<sockaddr*>(&address), &size,
                              SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      JF_ASSIGN_OR_RETURN(*peer,
                          TcpAddress::FromSockaddr(reinterpret_cast<sockaddr*>(&address), size));
      return std::optional<UniqueFd>(std::move(socket));
    }
    switch (errno) {
      case EINTR:
      case ECONNABORTED:  // the one that connected has gone again
      case EPROTO:
      case ENETDOWN:
      case ENETUNREACH:
      case EHOSTUNREACH:
      case EHOSTDOWN:
      case ENONET:
      case ENOPROTOOPT:
        continue;  // errors of that one connection: there may be others
      case EAGAIN:
        return std::optional<UniqueFd>();
      default:
        return ErrnoStatus("accepting a TCP connection", errno);
    }
  }
}

Result<UniqueFd> StartConnectTcp(const TcpAddress& address, const TcpOptions& options) {
  JF_ASSIGN_OR_RETURN(UniqueFd socket, NewSocket(address, options));
  // An interrupted one goes on in the background as well.
  if (::connect(socket.get(), address.get(), address.size()) != 0 && errno != EINPROGRESS &&
      errno != EINTR) {
    return ErrnoStatus(StrCat("connecting to ", address.ToString()), errno);
  }
  return socket;
}

Status FinishConnectTcp(int socket, const TcpAddress& address) {
  int error = 0;
  socklen_t size = sizeof(error);
  if (::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error == 0) return OkStatus();
  return ErrnoStatus(StrCat("connecting to ", address.ToString()), error);
}

Result<UniqueFd> ConnectTcp(const TcpAddress& address, const TcpOptions& options,
                            Deadline deadline) {
  JF_ASSIGN_OR_RETURN(UniqueFd socket, StartConnectTcp(address, options));
  if (!WaitForSocket(socket.get(), POLLOUT, deadline)) {
    return Status(Code::kDeadlineExceeded,
                  StrCat("connecting to ", address.ToString(), ": no answer before the deadline"));
  }
  JF_RETURN_IF_ERROR(FinishConnectTcp(socket.get(), address));
  return socket;
}

Result<TcpAddress> LocalTcpAddress(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return ErrnoStatus("getsockname", errno);
  }
  return TcpAddress::FromSockaddr(reinterpret_cast<sockaddr*>(&address), size);
}

}  // namespace jaxfabric
