#include "os/handshake.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "os/poll.h"

namespace jaxfabric {
namespace {

constexpr size_t kNonceBytes = 16;
// Where things are in the frames, each of which begins with magic and version.
constexpr size_t kCallNonce = 32;
constexpr size_t kChallengeNonce = 8;
constexpr size_t kChallengeMac = kChallengeNonce + kNonceBytes;
constexpr size_t kProofMac = 8;

template <class T>
void Put(std::span<std::byte> frame, size_t at, T value) {
  std::memcpy(frame.data() + at, &value, sizeof(value));
}

template <class T>
T Get(std::span<const std::byte> frame, size_t at) {
  T value;
  std::memcpy(&value, frame.data() + at, sizeof(value));
  return value;
}

// A key of each role, from all of the secret.
SipHashKey RoleKey(const std::string& secret, std::string_view role) {
  SipHashKey key{};
  std::memcpy(key.data(), secret.data(), std::min(secret.size(), key.size()));
  const std::string message =
      StrCat(std::string(role), secret.substr(std::min(secret.size(), key.size())));
  return SipHash128(key, std::as_bytes(std::span(message.data(), message.size())));
}

// In a time that does not tell how many bytes are equal.
bool SameDigest(std::span<const std::byte> a, const SipHashDigest& b) {
  std::byte difference{};
  for (size_t i = 0; i < b.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{};
}

bool HasMagic(std::span<const std::byte> frame) {
  return Get<uint32_t>(frame, 0) == kHandshakeMagic && Get<uint32_t>(frame, 4) == kHandshakeVersion;
}

}  // namespace

std::string_view RefusalText(Refusal refusal) {
  static constexpr std::string_view kTexts[] = {
      "was not refused",
      "does not speak this version of jaxfabric's protocol",
      "asks for another process or another use",
      "belongs to another start of the job",
      "does not know the secret of the job",
      "closed its end",
      "was too slow",
      "had to make room for others",
  };
  return kTexts[static_cast<size_t>(refusal)];
}

Handshake::Handshake(const JobIdentity& own, bool calling, Purpose purpose)
    : caller_key_(RoleKey(own.secret, "caller")),
      called_key_(RoleKey(own.secret, "called")),
      incarnation_(own.incarnation),
      own_(own.process),
      count_(own.process_count),
      calling_(calling),
      purpose_(purpose) {}

Handshake Handshake::Call(const JobIdentity& own, uint32_t called, Purpose purpose,
                          uint32_t stripe) {
  Handshake handshake(own, /*calling=*/true, purpose);
  handshake.caller_ = own.process;
  handshake.called_ = called;
  handshake.stripe_ = stripe;
  std::span<std::byte> frame = handshake.call_;
  Put(frame, 0, kHandshakeMagic);
  Put(frame, 4, kHandshakeVersion);
  Put(frame, 8, own.process);
  Put(frame, 12, called);
  Put(frame, 16, static_cast<uint32_t>(purpose));
  Put(frame, 20, stripe);
  Put(frame, 24, own.incarnation);
  handshake.Begin(Frame::kCall, Step::kSend);
  if (own.secret.size() < kMinSecretBytes ||
      ::getrandom(frame.data() + kCallNonce, kNonceBytes, 0) != ssize_t{kNonceBytes}) {
    handshake.Refuse(Refusal::kSecret);
  }
  return handshake;
}

Handshake Handshake::Answer(const JobIdentity& own, Purpose purpose) {
  Handshake handshake(own, /*calling=*/false, purpose);
  handshake.called_ = own.process;
  handshake.Begin(Frame::kCall, Step::kReceive);
  if (own.secret.size() < kMinSecretBytes) handshake.Refuse(Refusal::kSecret);
  return handshake;
}

SipHashDigest Handshake::Mac(const SipHashKey& key) const {
  std::array<std::byte, sizeof(call_) + kNonceBytes> message;
  std::memcpy(message.data(), call_.data(), sizeof(call_));
  std::memcpy(message.data() + sizeof(call_), challenge_.data() + kChallengeNonce, kNonceBytes);
  return SipHash128(key, message);
}

std::span<std::byte> Handshake::frame() {
  switch (frame_) {
    case Frame::kCall:
      return call_;
    case Frame::kChallenge:
      return challenge_;
    default:
      return proof_;
  }
}

void Handshake::Begin(Frame frame, Step step) {
  frame_ = frame;
  step_ = step;
  done_ = 0;
}

void Handshake::Refuse(Refusal refusal) {
  step_ = Step::kRefused;
  refusal_ = refusal;
}

std::span<const std::byte> Handshake::outgoing() { return frame().subspan(done_); }

void Handshake::Sent(size_t bytes) {
  done_ += bytes;
  if (done_ < frame().size()) return;
  switch (frame_) {
    case Frame::kCall:
      return Begin(Frame::kChallenge, Step::kReceive);
    case Frame::kChallenge:
      return Begin(Frame::kProof, Step::kReceive);
    case Frame::kProof:
      step_ = Step::kDone;
  }
}

std::span<std::byte> Handshake::incoming() { return frame().subspan(done_); }

void Handshake::Received(size_t bytes) {
  done_ += bytes;
  if (done_ < frame().size()) return;
  if (!HasMagic(frame())) return Refuse(Refusal::kMalformed);
  switch (frame_) {
    case Frame::kCall:
      return OnCall();
    case Frame::kChallenge:
      return OnChallenge();
    case Frame::kProof:
      return OnProof();
  }
}

void Handshake::OnCall() {
  const std::span<const std::byte> frame = call_;
  caller_ = Get<uint32_t>(frame, 8);
  stripe_ = Get<uint32_t>(frame, 20);
  if (Get<uint64_t>(frame, 24) != incarnation_) return Refuse(Refusal::kIncarnation);
  const uint32_t stripes = purpose_ == Purpose::kControl ? 1 : kMaxStripes;
  if (caller_ >= count_ || caller_ == own_ || Get<uint32_t>(frame, 12) != own_ ||
      Get<uint32_t>(frame, 16) != static_cast<uint32_t>(purpose_) || stripe_ >= stripes) {
    return Refuse(Refusal::kMisdirected);
  }
  const std::span<std::byte> answer = challenge_;
  Put(answer, 0, kHandshakeMagic);
  Put(answer, 4, kHandshakeVersion);
  if (::getrandom(answer.data() + kChallengeNonce, kNonceBytes, 0) != ssize_t{kNonceBytes}) {
    return Refuse(Refusal::kSecret);
  }
  Put(answer, kChallengeMac, Mac(called_key_));
  Begin(Frame::kChallenge, Step::kSend);
}

void Handshake::OnChallenge() {
  const std::span<const std::byte> frame = challenge_;
  if (!SameDigest(frame.subspan(kChallengeMac), Mac(called_key_))) {
    return Refuse(Refusal::kSecret);
  }
  const std::span<std::byte> answer = proof_;
  Put(answer, 0, kHandshakeMagic);
  Put(answer, 4, kHandshakeVersion);
  Put(answer, kProofMac, Mac(caller_key_));
  Begin(Frame::kProof, Step::kSend);
}

void Handshake::OnProof() {
  const std::span<const std::byte> frame = proof_;
  if (!SameDigest(frame.subspan(kProofMac), Mac(caller_key_))) return Refuse(Refusal::kSecret);
  step_ = Step::kDone;
}

Handshake::Step Handshake::Advance(int socket) {
  while (step_ == Step::kSend || step_ == Step::kReceive) {
    ssize_t moved;
    if (step_ == Step::kSend) {
      const auto bytes = outgoing();
      moved = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    } else {
      const auto bytes = incoming();
      moved = ::recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
    }
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (moved <= 0) {
      Refuse(Refusal::kLeft);
    } else if (step_ == Step::kSend) {
      Sent(static_cast<size_t>(moved));
    } else {
      Received(static_cast<size_t>(moved));
    }
  }
  return step_;
}

Status CheckSecret(const JobIdentity& identity) {
  if (identity.secret.size() >= kMinSecretBytes) return OkStatus();
  return Status(
      Code::kInvalidArgument,
      StrCat("the job's secret has ", identity.secret.size(),
             " bytes; processes of several hosts need one of at least ", kMinSecretBytes));
}

Result<UniqueFd> CallProcess(const TcpAddress& address, const TcpOptions& options,
                             const JobIdentity& own, uint32_t called, Purpose purpose,
                             uint32_t stripe, Deadline deadline) {
  JF_RETURN_IF_ERROR(CheckSecret(own));
  JF_ASSIGN_OR_RETURN(UniqueFd socket, ConnectTcp(address, options, deadline));
  Handshake handshake = Handshake::Call(own, called, purpose, stripe);
  for (;;) {
    switch (handshake.Advance(socket.get())) {
      case Handshake::Step::kDone:
        return socket;
      case Handshake::Step::kRefused:
        return RefusedCall(handshake, address);
      default:
        break;
    }
    const short events = handshake.step() == Handshake::Step::kSend ? POLLOUT : POLLIN;
    if (!WaitForSocket(socket.get(), events, deadline)) {
      return Status(
          Code::kDeadlineExceeded,
          StrCat(address.ToString(), ", which should be process ", called, ", did not answer"));
    }
  }
}

Status RefusedCall(const Handshake& handshake, const TcpAddress& address) {
  return Status(handshake.refusal() == Refusal::kLeft ? Code::kUnavailable : Code::kUnauthenticated,
                StrCat(address.ToString(), ", which should be process ", handshake.peer(), ", ",
                       std::string(RefusalText(handshake.refusal()))));
}

}  // namespace jaxfabric
