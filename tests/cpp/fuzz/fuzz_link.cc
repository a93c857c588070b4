// What another host's process may send on a control connection, in pieces.
#include <sys/socket.h>

#include <cstdint>
#include <span>

#include "base/status.h"
#include "control/link.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jaxfabric;
  int ends[2];
  JF_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd peer(ends[0]);
  TcpLink link{UniqueFd(ends[1])};
  // Something that can be told to be consumed.
  const std::byte sent[100] = {};
  JF_CHECK(link.TrySend(sent, {}).ok());
  size_t received = 0;
  for (size_t at = 0; at < size;) {
    const size_t piece = std::min<size_t>(size - at, 1 + data[at] % 64);
    if (::send(peer.get(), data + at, piece, MSG_NOSIGNAL) != static_cast<ssize_t>(piece)) break;
    at += piece;
    for (;;) {
      const auto message = link.TryReceive();
      if (!message.ok()) {
        JF_CHECK(link.end() == LinkEnd::kGarbled);
        return 0;
      }
      if (!message.value()) break;
      JF_CHECK(!message.value()->bytes.empty());
      received += message.value()->bytes.size();
    }
  }
  JF_CHECK(received <= size);
  return 0;
}
