#include "transport/tcp/frame.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

namespace jaxfabric::tcp {

const char* CheckHeader(const FrameHeader& header) {
  if (header.magic != kFrameMagic) return "does not begin a frame";
  if (header.version != kFrameVersion) return "has another version";
  const bool hello = header.type == FrameType::kHello;
  if (!hello && header.lane != 0) return "has a lane";
  switch (header.type) {
    case FrameType::kPut:
      if (header.value != 0) return "has a value";
      return header.length <= kMaxBodyBytes ? nullptr : "is too long";
    case FrameType::kFence:
      if (header.region != 0 || header.offset != 0 || header.value != 0) return "has a place";
      return header.length >= 8 && header.length % 8 == 0 && header.length <= 8 * kMaxLanes
                 ? nullptr
                 : "has no counts";
    case FrameType::kHello:
      if (header.region > kMaxLanes || header.lane >= header.region) return "has no such lane";
      break;
    case FrameType::kWord:
      if (header.offset % 8 != 0) return "is not aligned";
      break;
    case FrameType::kAccept:
    case FrameType::kFlush:
    case FrameType::kFlushed:
    case FrameType::kFarewell:
      if (header.region != 0 || header.offset != 0) return "has a place";
      break;
    case FrameType::kSignal:
    case FrameType::kAbort:
    case FrameType::kGoodbye:
      if (header.region != 0 || header.offset != 0 || header.value != 0) return "has a place";
      break;
    default:
      return "is of an unknown type";
  }
  return header.length == 0 ? nullptr : "has a body";
}

void StoreBody(std::span<std::byte> to, const std::byte* from) {
  const bool wordwise = to.size() <= kWordwisePutBytes && to.size() % 8 == 0 &&
                        reinterpret_cast<uintptr_t>(to.data()) % 8 == 0;
  if (!wordwise) {
    std::memcpy(to.data(), from, to.size());
    return;
  }
  for (size_t at = 0; at < to.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, from + at, sizeof(word));
    // relaxed: the word that follows orders it.
    std::atomic_ref(*reinterpret_cast<uint64_t*>(to.data() + at))
        .store(word, std::memory_order_relaxed);
  }
}

std::span<const iovec> FrameReader::Prepare() {
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (kBufferBytes - end_ < kHeaderBytes + kCopiedPutBytes) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, buffered());
    end_ = buffered();
    begin_ = 0;
  }
  if (body_left_ == 0) {
    places_[0] = {buffer_.get() + end_, kBufferBytes - end_};
    return std::span(places_).first(1);
  }
  const std::optional<std::span<std::byte>> place = sink_->Pin(body_);
  pinned_ = true;
  if (!place || place->data() == nullptr) {  // deregistered since its first bytes: dropped
    places_[0] = {buffer_.get(), std::min(body_left_, kBufferBytes)};
    return std::span(places_).first(1);
  }
  places_[0] = {place->data() + (body_.length - body_left_), body_left_};
  places_[1] = {buffer_.get(), kAfterBodyBytes};
  return places_;
}

void FrameReader::Received(size_t bytes) {
  if (body_left_ == 0) {
    end_ += bytes;
  } else {
    const size_t of_body = std::min(bytes, body_left_);
    body_left_ -= of_body;
    end_ = bytes - of_body;  // begin_ is 0 while a body goes to its place
    if (std::exchange(pinned_, false)) sink_->Unpin(body_);
    if (body_left_ == 0) sink_->OnPut();
  }
  Parse();
}

void FrameReader::Parse() {
  if (state_ == State::kMalformed) return;
  state_ = State::kReading;
  while (body_left_ == 0 && ParseOne()) {
  }
}

// True when a frame has been taken out of the buffer and there may be another.
bool FrameReader::ParseOne() {
  if (buffered() < kHeaderBytes) return false;
  FrameHeader header;
  std::memcpy(&header, buffer_.get() + begin_, sizeof(header));
  if (const char* wrong = CheckHeader(header)) {
    Fail(header, wrong);
    return false;
  }
  if (header.type == FrameType::kPut) return ParsePut(header);
  if (header.type == FrameType::kFence) return ParseFence(header);
  if (const char* wrong = sink_->OnFrame(header)) {
    Fail(header, wrong);
    return false;
  }
  begin_ += kHeaderBytes;
  return true;
}

bool FrameReader::ParsePut(const FrameHeader& header) {
  const size_t here = std::min<size_t>(buffered() - kHeaderBytes, header.length);
  const bool small = header.length <= kCopiedPutBytes;
  if (small && here < header.length) return false;  // stored whole
  const std::optional<std::span<std::byte>> place = sink_->Pin(header);
  if (place && place->data() != nullptr) {
    const std::byte* from = buffer_.get() + begin_ + kHeaderBytes;
    if (small) {
      StoreBody(*place, from);
    } else {
      std::memcpy(place->data(), from, here);
    }
  }
  if (!place) {
    Fail(header, "does not fit its region");
    return false;
  }
  sink_->Unpin(header);
  begin_ += kHeaderBytes + here;
  body_left_ = header.length - here;
  if (body_left_ == 0) {
    sink_->OnPut();
    return true;
  }
  body_ = header;
  begin_ = end_ = 0;  // nothing is behind a body that has not come yet
  return false;
}

bool FrameReader::ParseFence(const FrameHeader& header) {
  if (buffered() < kHeaderBytes + header.length) return false;
  std::memcpy(counts_.data(), buffer_.get() + begin_ + kHeaderBytes, header.length);
  if (!sink_->FenceReached({counts_.data(), header.length / 8})) {
    state_ = State::kAtFence;
    return false;
  }
  begin_ += kHeaderBytes + header.length;
  return true;
}

std::span<const uint64_t> FrameReader::fence() const {
  if (state_ != State::kAtFence) return {};
  FrameHeader header;
  std::memcpy(&header, buffer_.get() + begin_, sizeof(header));
  return {counts_.data(), header.length / 8};
}

void FrameReader::Fail(const FrameHeader& header, const char* what) {
  state_ = State::kMalformed;
  error_ = StrCat("a frame of type ", static_cast<int>(header.type), " with ", header.length,
                  " bytes at offset ", header.offset, " of region ", header.region, " ", what);
}

}  // namespace jaxfabric::tcp
