// Unix seqpacket sockets in the abstract namespace: connections between the processes of one user
// on one host that carry whole messages and descriptors. Nothing appears in a file system.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "os/fd.h"

namespace jaxfabric {

struct PeerCredentials {
  pid_t pid;
  uid_t uid;
};

struct SocketMessage {
  std::vector<std::byte> bytes;
  std::vector<UniqueFd> fds;
};

inline constexpr size_t kMaxSocketMessageBytes = 64 * 1024;
inline constexpr size_t kMaxSocketMessageFds = 16;

// Listens on a fresh abstract name and returns it in `name` (without the leading zero byte).
Result<UniqueFd> ListenUnixSocket(std::string* name);
// Non-blocking; an empty optional when no connection is pending. The accepted socket is
// non-blocking and close-on-exec.
Result<std::optional<UniqueFd>> TryAcceptUnixSocket(int listener);
// The returned socket is non-blocking and close-on-exec.
Result<UniqueFd> ConnectUnixSocket(const std::string& name, Deadline deadline);
// kPermissionDenied when the other end belongs to another user.
Result<PeerCredentials> CheckPeerCredentials(int socket);

// Sends one message, waiting for room until the deadline. kUnavailable when the peer is gone.
Status SendMessage(int socket, std::span<const std::byte> bytes, std::span<const int> fds,
                   Deadline deadline);
// Receives one message if one is there; an empty optional when none is. kUnavailable when the peer
// has closed its end.
Result<std::optional<SocketMessage>> TryReceiveMessage(int socket);

}  // namespace jaxfabric
