// What is to be sent on one connection: frames that were copied, packed together, and the memory of
// callers between them. The lock of the channel guards it; only the bytes that Gather() has shown
// are read without, and they stay until Consume().
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "transport/tcp/frame.h"

namespace jaxfabric::tcp {

class SendQueue {
 public:
  // `copied` goes behind the header at once, `body` is only referred to; one of them is empty.
  void Append(const FrameHeader& header, std::span<const std::byte> copied,
              std::span<const std::byte> body, uint64_t ticket);

  bool empty() const { return pieces_.empty(); }
  // The bytes that are copied here, and whether there is memory of callers.
  size_t copied_bytes() const { return copied_bytes_; }
  bool refers() const { return references_ != 0; }
  // The first post that is not sent whole; only of one that is not empty.
  uint64_t first_ticket() const { return pieces_.front().first_ticket; }

  // Fills `parts` with what comes first, at most `bytes`, and returns how many parts there are.
  size_t Gather(std::span<iovec> parts, size_t bytes);
  // The first `bytes` are sent.
  void Consume(size_t bytes);
  void Clear();

 private:
  // Packed frames grow up to this.
  static constexpr size_t kPackBytes = 64 * 1024;

  struct Piece {
    std::vector<std::byte> owned;
    std::span<const std::byte> body;  // where nothing is owned
    uint64_t first_ticket;
    bool shown;  // by Gather(): its bytes must stay where they are

    std::span<const std::byte> bytes() const { return owned.empty() ? body : owned; }
  };
  std::vector<std::byte> Spare();

  std::deque<Piece> pieces_;
  size_t sent_of_first_ = 0;
  size_t copied_bytes_ = 0;
  size_t references_ = 0;
  std::vector<std::vector<std::byte>> spare_;  // emptied, so that a steady state allocates nothing
};

}  // namespace jaxfabric::tcp
