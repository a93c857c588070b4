#include "transport/tcp/send_queue.h"

#include <algorithm>
#include <utility>

namespace jaxfabric::tcp {

void SendQueue::Append(const FrameHeader& header, std::span<const std::byte> copied,
                       std::span<const std::byte> body, uint64_t ticket) {
  const size_t bytes = kHeaderBytes + copied.size();
  if (pieces_.empty() || pieces_.back().shown || pieces_.back().owned.empty() ||
      pieces_.back().owned.size() + bytes > kPackBytes) {
    pieces_.push_back({Spare(), {}, ticket, false});
  }
  std::vector<std::byte>& owned = pieces_.back().owned;
  const auto* raw = reinterpret_cast<const std::byte*>(&header);
  owned.insert(owned.end(), raw, raw + kHeaderBytes);
  owned.insert(owned.end(), copied.begin(), copied.end());
  copied_bytes_ += bytes;
  if (!body.empty()) {
    pieces_.push_back({{}, body, ticket, false});
    ++references_;
  }
}

size_t SendQueue::Gather(std::span<iovec> parts, size_t bytes) {
  size_t count = 0;
  size_t skip = sent_of_first_;
  for (Piece& piece : pieces_) {
    if (count == parts.size() || bytes == 0) break;
    std::span<const std::byte> rest = piece.bytes().subspan(skip);
    skip = 0;
    rest = rest.first(std::min(rest.size(), bytes));
    bytes -= rest.size();
    parts[count++] = {const_cast<std::byte*>(rest.data()), rest.size()};
    piece.shown = true;
  }
  return count;
}

void SendQueue::Consume(size_t bytes) {
  sent_of_first_ += bytes;
  while (!pieces_.empty() && sent_of_first_ >= pieces_.front().bytes().size()) {
    Piece& piece = pieces_.front();
    sent_of_first_ -= piece.bytes().size();
    if (piece.owned.empty()) {
      --references_;
    } else {
      copied_bytes_ -= piece.owned.size();
      piece.owned.clear();
      if (spare_.size() < 4) spare_.push_back(std::move(piece.owned));
    }
    pieces_.pop_front();
  }
}

void SendQueue::Clear() {
  pieces_.clear();
  sent_of_first_ = copied_bytes_ = references_ = 0;
}

std::vector<std::byte> SendQueue::Spare() {
  if (spare_.empty()) return {};
  std::vector<std::byte> owned = std::move(spare_.back());
  spare_.pop_back();
  return owned;
}

}  // namespace jaxfabric::tcp
