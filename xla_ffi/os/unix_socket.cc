#include "os/unix_socket.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "os/poll.h"

namespace jaxfabric {
namespace {

constexpr int kSocketFlags = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;

// The abstract address of `name`, and its length, which ends with the name: trailing zero bytes
// would be part of it.
Result<socklen_t> MakeAddress(const std::string& name, sockaddr_un* address) {
  if (name.empty() || name.size() >= sizeof(address->sun_path)) {
    return Status(Code::kInvalidArgument, "the name of a unix socket is empty or too long");
  }
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// A name nobody can have taken on purpose before us.
Result<std::string> RandomName() {
  unsigned char random[16];
  if (::getrandom(random, sizeof(random), 0) != sizeof(random)) {
    return ErrnoStatus("getrandom", errno);
  }
  std::string name = "jaxfabric-";
  for (unsigned char byte : random) {
    name.push_back("0123456789abcdef"[byte >> 4]);
    name.push_back("0123456789abcdef"[byte & 15]);
  }
  return name;
}

Status SetSendTimeout(int socket, Deadline deadline) {
  timeval timeout{};  // zero means for ever
  if (deadline.at() != Clock::time_point::max()) {
    const auto left = std::max(std::chrono::ceil<std::chrono::microseconds>(deadline.remaining()),
                               std::chrono::microseconds(1));
    timeout.tv_sec = static_cast<time_t>(left.count() / 1000000);
    timeout.tv_usec = static_cast<suseconds_t>(left.count() % 1000000);
  }
  if (::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0) {
    return ErrnoStatus("setsockopt SO_SNDTIMEO", errno);
  }
  return OkStatus();
}

// Takes every descriptor out of a received message, so that none leaks whatever else is wrong.
std::vector<UniqueFd> TakeFds(msghdr* message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

Result<UniqueFd> ListenUnixSocket(std::string* name) {
  JF_ASSIGN_OR_RETURN(std::string random_name, RandomName());
  sockaddr_un address;
  JF_ASSIGN_OR_RETURN(const socklen_t length, MakeAddress(random_name, &address));
  UniqueFd socket(::socket(AF_UNIX, kSocketFlags, 0));
  if (!socket.valid()) return ErrnoStatus("creating a unix socket", errno);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    return ErrnoStatus("binding a unix socket", errno);
  }
  if (::listen(socket.get(), SOMAXCONN) != 0) return ErrnoStatus("listening", errno);
  *name = std::move(random_name);
  return socket;
}

Result<std::optional<UniqueFd>> TryAcceptUnixSocket(int listener) {
  for (;;) {
    UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) return std::optional<UniqueFd>(std::move(socket));
    // ECONNABORTED: the one that connected has gone again; there may be others.
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<UniqueFd>();
    return ErrnoStatus("accepting on a unix socket", errno);
  }
}

Result<UniqueFd> ConnectUnixSocket(const std::string& name, Deadline deadline) {
  sockaddr_un address;
  JF_ASSIGN_OR_RETURN(const socklen_t length, MakeAddress(name, &address));
  // Blocking with a time limit while it connects: a full backlog is waited for in the kernel, which
  // a non-blocking unix socket cannot poll for.
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoStatus("creating a unix socket", errno);
  for (;;) {
    JF_RETURN_IF_ERROR(SetSendTimeout(socket.get(), deadline));
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) break;
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return Status(Code::kDeadlineExceeded, StrCat("connecting to unix socket ", name,
                                                    ": not accepted before the deadline"));
    }
    return ErrnoStatus(StrCat("connecting to unix socket ", name), errno);
  }
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    return ErrnoStatus("fcntl O_NONBLOCK", errno);
  }
  return socket;
}

Result<PeerCredentials> CheckPeerCredentials(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return ErrnoStatus("getsockopt SO_PEERCRED", errno);
  }
  if (credentials.uid != ::geteuid()) {
    return Status(Code::kPermissionDenied, StrCat("the peer belongs to user ", credentials.uid,
                                                  ", this process to user ", ::geteuid()));
  }
  return PeerCredentials{credentials.pid, credentials.uid};
}

Status SendMessage(int socket, std::span<const std::byte> bytes, std::span<const int> fds,
                   Deadline deadline) {
  // An empty packet would look like the end of the connection.
  if (bytes.empty() || bytes.size() > kMaxSocketMessageBytes || fds.size() > kMaxSocketMessageFds) {
    return Status(Code::kInvalidArgument,
                  StrCat("a socket message of ", bytes.size(), " bytes and ", fds.size(),
                         " descriptors is empty or too large"));
  }
  iovec data{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxSocketMessageFds * sizeof(int))] = {};
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(part), fds.data(), fds.size_bytes());
  }
  for (;;) {
    if (::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return OkStatus();
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      return ErrnoStatus("sending on a unix socket", errno);
    }
    if (!WaitForSocket(socket, POLLOUT, deadline)) {
      return Status(Code::kDeadlineExceeded, "the peer of a unix socket does not read");
    }
  }
}

Result<std::optional<SocketMessage>> TryReceiveMessage(int socket) {
  std::byte buffer[kMaxSocketMessageBytes];
  iovec data{buffer, sizeof(buffer)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxSocketMessageFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received;
  do {
    received = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    // A peer that closed its end before it had read everything: said once, before what it sent.
  } while (received < 0 && (errno == EINTR || errno == ECONNRESET));
  if (received < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<SocketMessage>();
    return ErrnoStatus("receiving on a unix socket", errno);
  }
  SocketMessage result;
  result.fds = TakeFds(&message);
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return Status(Code::kInvalidArgument, "the peer of a unix socket sent too large a message");
  }
  if (received == 0) {
    return Status(Code::kUnavailable, "the peer of a unix socket closed its end");
  }
  result.bytes.assign(buffer, buffer + received);
  return std::optional<SocketMessage>(std::move(result));
}

}  // namespace jaxfabric
