// The first bytes of every TCP connection: both ends prove that they know the secret of the job
// before anything else is read. Three frames of fixed size:
//
//   call       caller -> called   who calls whom, what for, which incarnation, a nonce
//   challenge  called -> caller   a nonce, and a MAC over the call and that nonce
//   proof      caller -> called   another MAC over the same
//
// The two MACs have keys of their own, so that nothing sent by one end can be sent back to it. What
// follows the proof belongs to the connection, and is neither encrypted nor signed.
//
// One thread at a time. See os/acceptor.h for the called end of many.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/deadline.h"
#include "base/siphash.h"
#include "base/status.h"
#include "os/fd.h"
#include "os/tcp_socket.h"

namespace jaxfabric {

inline constexpr uint32_t kHandshakeMagic = 0x6a616668;  // "jafh"
inline constexpr uint32_t kHandshakeVersion = 1;
inline constexpr uint32_t kMaxStripes = 64;
inline constexpr size_t kMinSecretBytes = 16;

// One process's place in one incarnation of a job.
struct JobIdentity {
  std::string secret;  // the same in all processes; at least kMinSecretBytes, random
  uint64_t incarnation = 0;
  uint32_t process = 0;
  uint32_t process_count = 1;
};

enum class Purpose : uint32_t {
  kControl = 1,
  kData = 2,  // several between the same two processes: stripes
};

// Why a connection was not taken.
enum class Refusal : uint32_t {
  kNone,
  kMalformed,    // not our protocol, or another version of it
  kMisdirected,  // no such process, another process, or another purpose
  kIncarnation,  // of an earlier or later start of the job
  kSecret,       // does not know the secret
  kLeft,         // closed its end first
  kTooSlow,      // the deadline
  kTooMany,      // made room for later ones
  kLast = kTooMany,
};

// One end of one handshake, without a socket: says what it wants to receive and send.
class Handshake {
 public:
  // The calling end.
  static Handshake Call(const JobIdentity& own, uint32_t called, Purpose purpose, uint32_t stripe);
  // The called end, which learns from the caller who it is.
  static Handshake Answer(const JobIdentity& own, Purpose purpose);

  enum class Step { kReceive, kSend, kDone, kRefused };
  Step step() const { return step_; }
  // kSend: what is to be sent; Sent() tells how much of it was.
  std::span<const std::byte> outgoing();
  void Sent(size_t bytes);
  // kReceive: where the next bytes belong, never empty; Received() tells how many came. Not a byte
  // more than the handshake is asked for.
  std::span<std::byte> incoming();
  void Received(size_t bytes);

  // Does what the socket allows now, without waiting, and returns the step that it waits in.
  Step Advance(int socket);

  Refusal refusal() const { return refusal_; }
  // Of the other end; proven once the step is kDone.
  uint32_t peer() const { return calling_ ? called_ : caller_; }
  Purpose purpose() const { return purpose_; }
  uint32_t stripe() const { return stripe_; }

 private:
  enum class Frame { kCall, kChallenge, kProof };

  Handshake(const JobIdentity& own, bool calling, Purpose purpose);
  SipHashDigest Mac(const SipHashKey& key) const;
  std::span<std::byte> frame();
  void Begin(Frame frame, Step step);
  void OnCall();
  void OnChallenge();
  void OnProof();
  void Refuse(Refusal refusal);

  SipHashKey caller_key_, called_key_;
  uint64_t incarnation_;
  uint32_t own_;
  uint32_t count_;
  bool calling_;
  Purpose purpose_;
  uint32_t caller_ = 0;
  uint32_t called_ = 0;
  uint32_t stripe_ = 0;
  Step step_ = Step::kReceive;
  Refusal refusal_ = Refusal::kNone;
  Frame frame_ = Frame::kCall;
  size_t done_ = 0;                        // bytes of the frame that are sent or received
  std::array<std::byte, 48> call_{};       // kept: the MACs cover it
  std::array<std::byte, 40> challenge_{};  // kept: its nonce
  std::array<std::byte, 24> proof_{};
};

// kInvalidArgument without a secret that can be used.
Status CheckSecret(const JobIdentity& identity);

// "does not know the secret of the job" and so on.
std::string_view RefusalText(Refusal refusal);

// The error of a call that was refused: kUnavailable if the other end closed it, kUnauthenticated
// otherwise.
Status RefusedCall(const Handshake& handshake, const TcpAddress& address);

// Calls `address`, which has to be process `called`, and proves both ends to each other. Waits.
// Errors as of RefusedCall() and ConnectTcp().
Result<UniqueFd> CallProcess(const TcpAddress& address, const TcpOptions& options,
                             const JobIdentity& own, uint32_t called, Purpose purpose,
                             uint32_t stripe, Deadline deadline);

}  // namespace jaxfabric
