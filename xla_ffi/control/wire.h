// Messages between processes: fixed-width little-endian fields, length-prefixed bytes, a magic and
// a version in front. A reader never reads past the end: after the first bad field it is not ok()
// and every further value is zero or empty.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace jaxfabric {

inline constexpr uint32_t kWireMagic = 0x6a616662;  // "jafb"
inline constexpr uint32_t kWireVersion = 4;

enum class MessageType : uint32_t {
  kHello = 1,     // first on every connection: who, and the endpoint's address with its descriptors
  kReady = 2,     // connected to everybody; the machine as this process sees it
  kInstance = 3,  // a rank takes part in a call instance, with its cell
  kRetire = 4,    // a rank has dropped a call instance
  kStuck = 5,     // a rank has been waiting for the receiver for a while
  kFailure = 6,   // the sender's communicators are poisoned, and why
  kGoodbye = 7,   // a clean exit
  kGpuArena = 8,  // where a rank's arena of a communicator is in its pool
  kGpuAsk = 9,    // what is a rank of the receiver doing?
  kGpuTell = 10,  // the answer
  kGpuSetup = 11,  // one of the steps in which processes share the memory of their GPUs
  kCosts = 12,     // what a message between hosts costs; process 0's counts
};

class WireWriter {
 public:
  explicit WireWriter(MessageType type) {
    Add(kWireMagic);
    Add(kWireVersion);
    Add(static_cast<uint32_t>(type));
  }
  template <class T>
    requires(std::is_integral_v<T>)
  WireWriter& Add(T value) {
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
    return *this;
  }
  WireWriter& Add(std::string_view text) {
    Add(static_cast<uint32_t>(text.size()));
    const auto* begin = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), begin, begin + text.size());
    return *this;
  }
  WireWriter& Add(std::span<const int64_t> values) {
    Add(static_cast<uint32_t>(values.size()));
    for (int64_t value : values) Add(value);
    return *this;
  }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

class WireReader {
 public:
  // Not ok() unless the bytes start with our magic and version.
  explicit WireReader(std::span<const std::byte> bytes) : rest_(bytes) {
    if (Get<uint32_t>() != kWireMagic || Get<uint32_t>() != kWireVersion) ok_ = false;
    type_ = static_cast<MessageType>(Get<uint32_t>());
  }
  template <class T>
    requires(std::is_integral_v<T>)
  T Get() {
    T value{};
    if (!ok_ || rest_.size() < sizeof(T)) {
      ok_ = false;
      return T{};
    }
    std::memcpy(&value, rest_.data(), sizeof(T));
    rest_ = rest_.subspan(sizeof(T));
    return value;
  }
  std::string GetString() {
    const auto size = Get<uint32_t>();
    if (!ok_ || rest_.size() < size) {
      ok_ = false;
      return {};
    }
    std::string text(reinterpret_cast<const char*>(rest_.data()), size);
    rest_ = rest_.subspan(size);
    return text;
  }
  std::vector<int64_t> GetInts() {
    const auto size = Get<uint32_t>();
    if (!ok_ || rest_.size() / sizeof(int64_t) < size) {
      ok_ = false;
      return {};
    }
    std::vector<int64_t> values;
    values.reserve(size);
    for (uint32_t i = 0; i < size; ++i) values.push_back(Get<int64_t>());
    return values;
  }
  bool ok() const { return ok_; }
  MessageType type() const { return type_; }

 private:
  std::span<const std::byte> rest_;
  bool ok_ = true;
  MessageType type_{};
};

}  // namespace jaxfabric
