// A stranger at either end of the handshake, and one between two honest ends.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "os/handshake.h"

namespace jaxfabric {
namespace {

using Step = Handshake::Step;

JobIdentity Identity(uint32_t process) {
  return {"0123456789abcdef0123456789abcdef", 1, process, 2};
}

// Gives all of the bytes, as far as they are wanted, to one end alone.
void Feed(Handshake end, std::span<const std::byte> bytes) {
  while (end.step() == Step::kSend || (end.step() == Step::kReceive && !bytes.empty())) {
    if (end.step() == Step::kSend) {
      end.Sent(std::max<size_t>(1, end.outgoing().size() / 2));
      continue;
    }
    const size_t size = std::min(bytes.size(), end.incoming().size());
    JF_CHECK(size > 0);
    std::copy_n(bytes.begin(), size, end.incoming().begin());
    end.Received(size);
    bytes = bytes.subspan(size);
  }
  JF_CHECK(end.step() != Step::kDone);
}

// The conversation of two honest ends, to each byte of which one of `changes` is added.
void ComeBetween(std::span<const std::byte> changes) {
  Handshake caller = Handshake::Call(Identity(1), 0, Purpose::kData, 0);
  Handshake called = Handshake::Answer(Identity(0), Purpose::kData);
  bool changed = false;
  for (int frame = 0; frame < 3; ++frame) {
    Handshake& from = frame == 1 ? called : caller;
    Handshake& to = frame == 1 ? caller : called;
    while (from.step() == Step::kSend && to.step() == Step::kReceive) {
      std::byte byte = from.outgoing().front();
      from.Sent(1);
      if (!changes.empty()) {
        byte ^= changes.front();
        changed |= changes.front() != std::byte{};
        changes = changes.subspan(1);
      }
      to.incoming().front() = byte;
      to.Received(1);
    }
  }
  JF_CHECK((called.step() == Step::kDone) == !changed);
}

}  // namespace
}  // namespace jaxfabric

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jaxfabric;
  const auto bytes = std::as_bytes(std::span(data, size));
  Feed(Handshake::Call(Identity(1), 0, Purpose::kData, 0), bytes);
  Feed(Handshake::Answer(Identity(0), Purpose::kData), bytes);
  // With a call that is well-formed.
  std::vector<std::byte> call;
  Handshake honest = Handshake::Call(Identity(1), 0, Purpose::kData, 0);
  call.assign(honest.outgoing().begin(), honest.outgoing().end());
  call.insert(call.end(), bytes.begin(), bytes.end());
  Feed(Handshake::Answer(Identity(0), Purpose::kData), call);
  ComeBetween(bytes);
  return 0;
}
