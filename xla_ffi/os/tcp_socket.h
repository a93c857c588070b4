// TCP sockets between hosts: addresses as text, listening, accepting, and connecting by a deadline.
// Every socket is non-blocking and close-on-exec. No names are looked up: addresses are numbers.
// Functions, without state of their own; any thread.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/deadline.h"
#include "base/status.h"
#include "os/fd.h"

namespace jaxfabric {

// An IPv4 or IPv6 address with a port.
class TcpAddress {
 public:
  TcpAddress();  // 0.0.0.0:0
  // "10.0.0.1:4000" or "[fd00::1]:4000".
  static Result<TcpAddress> Parse(std::string_view text);
  // "10.0.0.1" or "fd00::1".
  static Result<TcpAddress> FromIp(const std::string& ip, uint16_t port);
  static Result<TcpAddress> FromSockaddr(const sockaddr* address, socklen_t size);

  bool is_v6() const { return storage_.any.sa_family == AF_INET6; }
  std::string ip() const;
  uint16_t port() const;
  void set_port(uint16_t port);
  // The bytes of the IP address in network order: 4 or 16.
  std::string ip_bytes() const;
  // As Parse() reads it.
  std::string ToString() const;

  const sockaddr* get() const { return &storage_.any; }
  socklen_t size() const { return is_v6() ? sizeof(sockaddr_in6) : sizeof(sockaddr_in); }
  bool operator==(const TcpAddress& other) const { return ToString() == other.ToString(); }

 private:
  union {
    sockaddr any;
    sockaddr_in v4;
    sockaddr_in6 v6;
  } storage_;
};

// Ports from `first` to `last`; 0 to 0 lets the kernel choose.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;
  // "40000-40100", "40000", or "" for any.
  static Result<PortRange> Parse(std::string_view text);
  std::string ToString() const;
};

struct TcpOptions {
  bool no_delay = true;  // small messages are not held back
  // Bytes of the kernel's buffers; 0 leaves the sizes to the kernel, which then adapts them.
  int send_buffer = 0;
  int receive_buffer = 0;
  // After so long without a sign of life of the other host's kernel the connection fails with
  // kDeadlineExceeded (rounded up to whole seconds while idle); zero: never. Only for a connection
  // whose receiver always makes room: a receive buffer that stays full for so long, because the
  // process is stopped, fails it too (TCP_USER_TIMEOUT), although the host is well.
  Clock::duration unreachable_after{};
  // See SetCongestionControl().
  std::string congestion_control = "auto";
};

// Which algorithm says how much may be under way: one that the kernel has, "system" for what it
// would take anyway, or "auto": that, unless it is BBR, which sends no faster than its model of
// earlier, smaller bursts says, with pauses in between; then cubic, or reno where a process without
// privileges may not ask for more (net.ipv4.tcp_allowed_congestion_control).
Status SetCongestionControl(int socket, const std::string& name);

// Applies the options; buffer sizes count only before listening or connecting.
Status SetTcpOptions(int socket, const TcpOptions& options);

// Listens at the IP of `address` on a free port of the range, and puts the port into `address`.
// kResourceExhausted, with the range and the setting, if none is free.
Result<UniqueFd> ListenTcp(TcpAddress* address, PortRange ports, const TcpOptions& options = {});
// An empty optional when no connection is pending; kResourceExhausted when there are no descriptors
// or no memory for one: it stays pending. `peer` becomes the caller's address. The options of the
// listener are inherited.
Result<std::optional<UniqueFd>> TryAcceptTcp(int listener, TcpAddress* peer);

// Begins to connect. When the socket is writable, FinishConnectTcp tells how it went.
Result<UniqueFd> StartConnectTcp(const TcpAddress& address, const TcpOptions& options);
// OK once connected; kUnavailable when refused, and so on. Only after the socket was writable.
Status FinishConnectTcp(int socket, const TcpAddress& address);
// Both, waiting until the deadline.
Result<UniqueFd> ConnectTcp(const TcpAddress& address, const TcpOptions& options,
                            Deadline deadline);

// The own end's address.
Result<TcpAddress> LocalTcpAddress(int socket);

}  // namespace jaxfabric
