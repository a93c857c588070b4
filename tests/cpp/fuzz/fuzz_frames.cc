// A peer of the tcp transport that sends anything: as it is, and with headers that begin well.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/status.h"
#include "transport/tcp/frame.h"

namespace jaxfabric::tcp {
namespace {

// Regions of the exact size, so that a sanitizer sees the first byte outside.
class Sink : public FrameSink {
 public:
  std::optional<std::span<std::byte>> Pin(const FrameHeader& header) override {
    JF_CHECK(!pinned_);
    pinned_ = true;
    if (header.region >= regions_.size()) return std::span<std::byte>();
    std::vector<std::byte>& memory = regions_[header.region];
    pinned_ = header.offset <= memory.size() && header.length <= memory.size() - header.offset;
    if (!pinned_) return {};
    return std::span(memory).subspan(header.offset, header.length);
  }
  void Unpin(const FrameHeader&) override {
    JF_CHECK(pinned_);
    pinned_ = false;
  }
  void OnPut() override { JF_CHECK(!pinned_); }
  const char* OnFrame(const FrameHeader& header) override {
    JF_CHECK(header.length == 0 && header.type != FrameType::kPut);
    return nullptr;
  }
  bool FenceReached(std::span<const uint64_t> counts) override {
    JF_CHECK(!counts.empty() && counts.size() <= kMaxLanes);
    return counts[0] % 2 == 0 || ++asked_ % 3 == 0;
  }

 private:
  std::array<std::vector<std::byte>, 3> regions_ = {
      std::vector<std::byte>(1024), std::vector<std::byte>(10000), {}};
  bool pinned_ = false;
  int asked_ = 0;
};

void Read(std::span<const std::byte> bytes, size_t step) {
  Sink sink;
  FrameReader reader(&sink);
  while (reader.state() != FrameReader::State::kMalformed) {
    if (reader.state() == FrameReader::State::kAtFence) {
      JF_CHECK(!reader.fence().empty());
      reader.Resume();
      continue;
    }
    if (bytes.empty()) return;
    size_t given = 0;
    for (const iovec& place : reader.Prepare()) {
      const size_t size = std::min({place.iov_len, bytes.size(), step - given});
      std::memcpy(place.iov_base, bytes.data(), size);
      bytes = bytes.subspan(size);
      given += size;
    }
    JF_CHECK(given > 0);
    reader.Received(given);
  }
  JF_CHECK(!reader.error().empty());
}

// The same bytes, with what every header begins with put where headers are.
std::vector<std::byte> WithHeaders(std::span<const std::byte> bytes) {
  std::vector<std::byte> stream(bytes.begin(), bytes.end());
  for (size_t at = 0; at + kHeaderBytes <= stream.size();) {
    FrameHeader header;
    std::memcpy(&header, stream.data() + at, sizeof(header));
    header.magic = kFrameMagic;
    header.version = kFrameVersion;
    header.type = static_cast<FrameType>(static_cast<int>(header.type) % 12);
    if (header.type != FrameType::kHello) header.lane = 0;
    header.region %= 4;
    header.length %= 8192;
    header.offset %= 12000;
    if (header.type == FrameType::kPut) header.value = 0;
    std::memcpy(stream.data() + at, &header, sizeof(header));
    at += kHeaderBytes + header.length;
  }
  return stream;
}

}  // namespace
}  // namespace jaxfabric::tcp

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jaxfabric::tcp;
  if (size == 0) return 0;
  const size_t step = data[0] == 0 ? SIZE_MAX : data[0];
  const auto bytes = std::as_bytes(std::span(data + 1, size - 1));
  Read(bytes, step);
  Read(WithHeaders(bytes), step);
  return 0;
}
