// The reader of frames alone: every way in which bytes can come, and every way to be malformed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/frame.h"

namespace jaxfabric::tcp {
namespace {

using Bytes = std::vector<std::byte>;

// Two regions, and a record of what came.
class TestSink : public FrameSink {
 public:
  std::optional<std::span<std::byte>> Pin(const FrameHeader& header) override {
    const auto found = regions.find(header.region);
    if (found == regions.end()) {
      ++pins;
      return std::span<std::byte>();
    }
    Bytes& memory = found->second;
    if (header.offset > memory.size() || header.length > memory.size() - header.offset) return {};
    ++pins;
    return std::span(memory).subspan(header.offset, header.length);
  }
  void Unpin(const FrameHeader&) override { --pins; }
  void OnPut() override { events.emplace_back("put"); }
  const char* OnFrame(const FrameHeader& header) override {
    events.push_back(StrCat(static_cast<int>(header.type), ":", header.value));
    return header.value == 666 ? "is refused" : nullptr;
  }
  bool FenceReached(std::span<const uint64_t> counts) override {
    if (fence_open) events.push_back(StrCat("fence of ", counts.size()));
    return fence_open;
  }

  std::map<uint32_t, Bytes> regions = {{0, Bytes(14000)}, {7, Bytes(5000)}};
  std::vector<std::string> events;
  int pins = 0;
  bool fence_open = true;
};

Bytes Pattern(size_t size, int seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>((i * 31 + static_cast<size_t>(seed)) >> (i % 3));
  }
  return bytes;
}

FrameHeader Header(FrameType type, uint64_t value = 0) {
  FrameHeader header{.type = type};
  header.value = value;
  return header;
}

void Add(Bytes& stream, const FrameHeader& header, std::span<const std::byte> body = {}) {
  const auto* raw = reinterpret_cast<const std::byte*>(&header);
  stream.insert(stream.end(), raw, raw + kHeaderBytes);
  stream.insert(stream.end(), body.begin(), body.end());
}

void AddPut(Bytes& stream, uint32_t region, uint64_t offset, const Bytes& body) {
  FrameHeader header{.type = FrameType::kPut};
  header.region = region;
  header.offset = offset;
  header.length = static_cast<uint32_t>(body.size());
  Add(stream, header, body);
}

void AddFence(Bytes& stream, size_t lanes) {
  const Bytes counts(8 * lanes);
  FrameHeader header{.type = FrameType::kFence};
  header.length = static_cast<uint32_t>(counts.size());
  Add(stream, header, counts);
}

Bytes EveryKind() {
  Bytes stream;
  AddPut(stream, 0, 8, Pattern(24, 1));
  AddPut(stream, 0, 101, Pattern(13, 2));
  AddPut(stream, 7, 0, {});
  AddFence(stream, 4);
  Add(stream, Header(FrameType::kSignal));
  AddPut(stream, 7, 3, Pattern(4321, 3));
  Add(stream, Header(FrameType::kFlush, 9));
  AddPut(stream, 99, 5, Pattern(5000, 4));  // nobody has this region
  AddPut(stream, 0, 1000, Pattern(4096, 5));
  AddPut(stream, 0, 9000, Pattern(4097, 6));
  Add(stream, Header(FrameType::kFlushed, 9));
  return stream;
}

// Gives the reader `bytes` in as many pieces as it asks for, each of at most `step`.
void Feed(FrameReader& reader, std::span<const std::byte> bytes, size_t step = SIZE_MAX) {
  while (!bytes.empty() && reader.state() == FrameReader::State::kReading) {
    size_t given = 0;
    for (const iovec& place : reader.Prepare()) {
      const size_t size = std::min({place.iov_len, bytes.size(), step - given});
      std::memcpy(place.iov_base, bytes.data(), size);
      bytes = bytes.subspan(size);
      given += size;
    }
    ASSERT_NE(given, 0u);
    reader.Received(given);
  }
}

void ExpectEveryKind(const FrameReader& reader, const TestSink& sink) {
  static const TestSink whole = [] {
    TestSink fed;
    FrameReader other(&fed);
    Feed(other, EveryKind());
    return fed;
  }();
  ASSERT_EQ(reader.state(), FrameReader::State::kReading) << reader.error();
  EXPECT_TRUE(reader.at_boundary());
  EXPECT_EQ(sink.events, whole.events);
  EXPECT_EQ(sink.regions, whole.regions);
  EXPECT_EQ(sink.pins, 0);
}

TEST(TcpFrames, StoresWhatIsPut) {
  TestSink sink;
  FrameReader reader(&sink);
  Feed(reader, EveryKind());
  EXPECT_EQ(sink.events, (std::vector<std::string>{"put", "put", "put", "fence of 4", "5:0", "put",
                                                   "7:9", "put", "put", "put", "8:9"}));
  const auto at = [&](uint32_t region, size_t offset, const Bytes& bytes) {
    return std::memcmp(sink.regions[region].data() + offset, bytes.data(), bytes.size()) == 0;
  };
  EXPECT_TRUE(at(0, 8, Pattern(24, 1)));
  EXPECT_TRUE(at(0, 101, Pattern(13, 2)));
  EXPECT_TRUE(at(7, 3, Pattern(4321, 3)));
  EXPECT_TRUE(at(0, 1000, Pattern(4096, 5)));
  EXPECT_TRUE(at(0, 9000, Pattern(4097, 6)));
}

TEST(TcpFrames, CutAtEveryByte) {
  const Bytes stream = EveryKind();
  for (size_t cut = 0; cut <= stream.size(); ++cut) {
    TestSink sink;
    FrameReader reader(&sink);
    Feed(reader, std::span(stream).first(cut));
    Feed(reader, std::span(stream).subspan(cut));
    ExpectEveryKind(reader, sink);
    if (HasFailure()) FAIL() << "cut at " << cut;
  }
}

TEST(TcpFrames, InPiecesOfEverySize) {
  const Bytes stream = EveryKind();
  for (size_t step : {1, 2, 3, 7, 31, 32, 33, 63, 1024, 4095, 4096, 4129, 40000}) {
    TestSink sink;
    FrameReader reader(&sink);
    Feed(reader, stream, step);
    ExpectEveryKind(reader, sink);
  }
}

TEST(TcpFrames, ManyInOnePiece) {
  Bytes stream;
  for (int i = 0; i < 1700; ++i) AddPut(stream, 0, static_cast<uint64_t>(8 * i), Pattern(8, i));
  TestSink sink;
  FrameReader reader(&sink);
  Feed(reader, stream);
  EXPECT_EQ(sink.events.size(), 1700u);
  EXPECT_EQ(std::memcmp(sink.regions[0].data() + 8 * 1699, Pattern(8, 1699).data(), 8), 0);
}

TEST(TcpFrames, WhatIsBehindAFenceWaits) {
  Bytes stream;
  AddFence(stream, 2);
  AddPut(stream, 0, 0, Pattern(8, 1));
  TestSink sink;
  sink.fence_open = false;
  FrameReader reader(&sink);
  Feed(reader, stream);
  EXPECT_EQ(reader.state(), FrameReader::State::kAtFence);
  EXPECT_EQ(reader.fence().size(), 2u);
  reader.Resume();
  EXPECT_EQ(reader.state(), FrameReader::State::kAtFence);
  EXPECT_TRUE(sink.events.empty());
  sink.fence_open = true;
  reader.Resume();
  EXPECT_EQ(reader.state(), FrameReader::State::kReading);
  EXPECT_EQ(sink.events, (std::vector<std::string>{"fence of 2", "put"}));
}

TEST(TcpFrames, TheRestOfABodyIsDroppedWhenItsRegionGoes) {
  Bytes stream;
  AddPut(stream, 7, 0, Pattern(5000, 1));
  Add(stream, Header(FrameType::kSignal));
  TestSink sink;
  FrameReader reader(&sink);
  Feed(reader, std::span(stream).first(4500), 100);
  sink.regions.erase(7);
  Feed(reader, std::span(stream).subspan(4500), 300);
  EXPECT_EQ(sink.events, (std::vector<std::string>{"put", "5:0"}));
  EXPECT_TRUE(reader.at_boundary());
}

TEST(TcpFrames, RefusesWhatMakesNoSense) {
  const auto put = [](uint64_t offset, uint32_t length) {
    FrameHeader header{.type = FrameType::kPut};
    header.offset = offset;
    header.length = length;
    return header;
  };
  const auto with = [](FrameHeader header, const std::function<void(FrameHeader&)>& change) {
    change(header);
    return header;
  };
  const FrameHeader signal = Header(FrameType::kSignal);
  std::vector<FrameHeader> headers = {
      with(signal, [](auto& h) { h.magic ^= 1; }),
      with(signal, [](auto& h) { h.version = 2; }),
      with(signal, [](auto& h) { h.type = FrameType(0); }),
      with(signal, [](auto& h) { h.type = FrameType(12); }),
      with(signal, [](auto& h) { h.type = FrameType(255); }),
      with(signal, [](auto& h) { h.lane = 1; }),
      with(signal, [](auto& h) { h.region = 1; }),
      with(signal, [](auto& h) { h.offset = 8; }),
      with(signal, [](auto& h) { h.length = 1; }),
      with(signal, [](auto& h) { h.value = 1; }),
      put(0, kMaxBodyBytes + 1),
      put(0, ~0u),
      put(14000, 1),
      put(14001, 0),
      put(13999, 2),
      put(~uint64_t{0}, 2),
      put(~uint64_t{0} - 7, 8),
      put(0, 14001),  // begins well: refused before any of it is stored
      with(put(0, 8), [](auto& h) { h.value = 1; }),
      with(Header(FrameType::kWord), [](auto& h) { h.offset = 4; }),
      with(Header(FrameType::kWord), [](auto& h) { h.length = 8; }),
      with(Header(FrameType::kHello), [](auto& h) { h.lane = 2, h.region = 2; }),
      with(Header(FrameType::kHello), [](auto& h) { h.region = kMaxLanes + 1; }),
      with(Header(FrameType::kFence), [](auto& h) { h.length = 0; }),
      with(Header(FrameType::kFence), [](auto& h) { h.length = 12; }),
      with(Header(FrameType::kFence), [](auto& h) { h.length = 8 * kMaxLanes + 8; }),
      with(Header(FrameType::kFence), [](auto& h) { h.length = 8, h.offset = 1; }),
      with(Header(FrameType::kFlush), [](auto& h) { h.region = 1; }),
      with(Header(FrameType::kFarewell), [](auto& h) { h.offset = 1; }),
      Header(FrameType::kFlush, 666),  // the sink says so
  };
  for (const FrameHeader& header : headers) {
    Bytes stream;
    AddPut(stream, 0, 0, Pattern(16, 1));
    Add(stream, header, Pattern(50000, 2));
    TestSink sink;
    FrameReader reader(&sink);
    Feed(reader, stream);
    EXPECT_EQ(reader.state(), FrameReader::State::kMalformed)
        << "type " << static_cast<int>(header.type) << " length " << header.length;
    EXPECT_NE(reader.error().find("type"), std::string::npos);
    EXPECT_EQ(sink.events.front(), "put") << "what came before counts";
    EXPECT_EQ(sink.regions[0][16], std::byte{0}) << "nothing of it is stored";
    EXPECT_EQ(sink.pins, 0);
    reader.Resume();
    EXPECT_EQ(reader.state(), FrameReader::State::kMalformed) << "for good";
  }
}

TEST(TcpFrames, SurvivesFlippedBits) {
  const Bytes stream = EveryKind();
  // All bits of the first frames, where most of what is not a body is.
  for (size_t bit = 0; bit < 8 * 300; ++bit) {
    Bytes damaged = stream;
    damaged[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    TestSink sink;
    FrameReader reader(&sink);
    Feed(reader, damaged);
    EXPECT_LE(sink.events.size(), 1000u);
  }
}

}  // namespace
}  // namespace jaxfabric::tcp
