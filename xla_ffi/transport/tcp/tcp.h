// The transport between hosts: one-sided puts as frames on TCP connections.
//
// A pair of endpoints has several connections (lanes), opened by the first post of either. Large
// puts are striped over them in chunks; words, signals and small puts go on the first one, behind a
// fence where something before them went elsewhere. docs/wire_format.md has the frames.
//
// Data are received straight to their place and sent straight from the caller's memory. What the
// kernel does not take is queued: descriptors of large puts, and copies of small ones, up to
// TcpTransportOptions::max_queued_bytes per peer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "os/tcp_socket.h"
#include "transport/message.h"
#include "transport/transport.h"

namespace jaxfabric {

struct TcpTransportOptions {
  // Where an endpoint listens; also what it publishes, so not a wildcard.
  std::string ip = "127.0.0.1";
  PortRange ports;
  // What all processes of the job know and nobody else, at least kMinSecretBytes; and which start
  // of the job this is. Only who proves to know both is let in (os/handshake.h).
  std::string secret;
  uint64_t incarnation = 0;
  TcpOptions socket;
  // Connections per pair; the same in all processes.
  int lanes = 2;
  // Puts above stripe_above bytes are cut at multiples of chunk_bytes in the peer's region.
  size_t stripe_above = 64 * 1024;
  size_t chunk_bytes = 512 * 1024;
  // Copied bytes that wait to be sent to one peer: Put() and Signal() wait above half of it, posts
  // fail with kResourceExhausted above it.
  size_t max_queued_bytes = 16 << 20;
  // For opening the connections to one peer.
  Clock::duration connect_timeout = std::chrono::seconds(30);
};

// Without a secret it makes one: its endpoints then reach each other, and no other transport's.
std::unique_ptr<Transport> MakeTcpTransport(TcpTransportOptions options = {});

// What Bind() of that transport gives, for those who need messages.
Result<std::unique_ptr<MessageEndpoint>> BindTcp(const TcpTransportOptions& options, int self,
                                                 int max_peers, size_t window_bytes);

}  // namespace jaxfabric
