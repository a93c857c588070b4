// A 64-bit hash that is the same in every process and on every host: keys that cross processes are
// made with it, so it must never change without a new wire version.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace jaxfabric {

class Hasher {
 public:
  Hasher& Add(uint64_t value) {
    // splitmix64's finaliser: every input bit reaches every output bit.
    state_ += 0x9e3779b97f4a7c15ull + value;
    state_ = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9ull;
    state_ = (state_ ^ (state_ >> 27)) * 0x94d049bb133111ebull;
    state_ ^= state_ >> 31;
    return *this;
  }
  Hasher& Add(std::string_view text) {
    for (unsigned char c : text) Add(uint64_t{c});
    return Add(uint64_t{text.size()});
  }
  Hasher& Add(std::span<const int64_t> values) {
    for (int64_t value : values) Add(static_cast<uint64_t>(value));
    return Add(uint64_t{values.size()});
  }
  uint64_t Finish() const {
    return state_ == 0 ? 1 : state_;
  }  // 0 means "nothing" in shared memory

 private:
  uint64_t state_ = 0x6a617866616272ull;
};

}  // namespace jaxfabric
