#include "collective/fingerprint.h"

#include <array>
#include <bit>
#include <cstring>
#include <string>

namespace jaxfabric {
namespace {

uint64_t Load64(const char* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

uint64_t Mix(uint64_t u, uint64_t v, uint64_t multiplier) {
  uint64_t a = (u ^ v) * multiplier;
  a ^= a >> 47;
  uint64_t b = (v ^ a) * multiplier;
  b ^= b >> 47;
  return b * multiplier;
}

// HighwayHash (Alakuijala, Cox, Wassenberg: Fast keyed hash/pseudo-random function using SIMD
// multiply and permute, 2016), one lane at a time: the lists are short.
class HighwayHasher {
 public:
  using Lanes = std::array<uint64_t, 4>;

  explicit HighwayHasher(const Lanes& key) {
    for (size_t i = 0; i < 4; ++i) {
      v0_[i] = mul0_[i] ^ key[i];
      v1_[i] = mul1_[i] ^ std::rotr(key[i], 32);
    }
  }

  uint64_t Hash(std::string_view text) {
    for (; text.size() >= 32; text.remove_prefix(32)) Update(text.data());
    if (!text.empty()) UpdateRemainder(text);
    for (int round = 0; round < 4; ++round) {
      Update(Lanes{std::rotr(v0_[2], 32), std::rotr(v0_[3], 32), std::rotr(v0_[0], 32),
                   std::rotr(v0_[1], 32)});
    }
    return v0_[0] + v1_[0] + mul0_[0] + mul1_[0];
  }

 private:
  // Adds the bytes of (high, low), in the order that mixes them best, to a pair of lanes.
  static void ZipperMergeAdd(uint64_t high, uint64_t low, uint64_t& add_high, uint64_t& add_low) {
    add_low += (((low & 0xff000000) | (high & 0xff00000000)) >> 24) |
               (((low & 0xff0000000000) | (high & 0xff000000000000)) >> 16) | (low & 0xff0000) |
               ((low & 0xff00) << 32) | ((high & 0xff00000000000000) >> 8) | (low << 56);
    add_high += (((high & 0xff000000) | (low & 0xff00000000)) >> 24) | (high & 0xff0000) |
                ((high & 0xff0000000000) >> 16) | ((high & 0xff00) << 24) |
                ((low & 0xff000000000000) >> 8) | ((high & 0xff) << 48) |
                (low & 0xff00000000000000);
  }

  void Update(const Lanes& packet) {
    for (size_t i = 0; i < 4; ++i) {
      v1_[i] += mul0_[i] + packet[i];
      mul0_[i] ^= (v1_[i] & 0xffffffff) * (v0_[i] >> 32);
      v0_[i] += mul1_[i];
      mul1_[i] ^= (v0_[i] & 0xffffffff) * (v1_[i] >> 32);
    }
    ZipperMergeAdd(v1_[1], v1_[0], v0_[1], v0_[0]);
    ZipperMergeAdd(v1_[3], v1_[2], v0_[3], v0_[2]);
    ZipperMergeAdd(v0_[1], v0_[0], v1_[1], v1_[0]);
    ZipperMergeAdd(v0_[3], v0_[2], v1_[3], v1_[2]);
  }
  void Update(const char* bytes) {
    Update(Lanes{Load64(bytes), Load64(bytes + 8), Load64(bytes + 16), Load64(bytes + 24)});
  }

  // 1 to 31 bytes.
  void UpdateRemainder(std::string_view text) {
    const size_t size = text.size();
    const size_t whole = size & ~size_t{3};
    const size_t rest = size & 3;
    for (size_t i = 0; i < 4; ++i) {
      v0_[i] += (uint64_t{size} << 32) + size;
      const auto low = std::rotl(static_cast<uint32_t>(v1_[i]), static_cast<int>(size));
      const auto high = std::rotl(static_cast<uint32_t>(v1_[i] >> 32), static_cast<int>(size));
      v1_[i] = uint64_t{high} << 32 | low;
    }
    char packet[32] = {};
    std::memcpy(packet, text.data(), whole);
    if (size & 16) {
      std::memcpy(packet + 28, text.data() + size - 4, 4);
    } else if (rest > 0) {
      packet[16] = text[whole];
      packet[17] = text[whole + (rest >> 1)];
      packet[18] = text[whole + rest - 1];
    }
    Update(packet);
  }

  Lanes mul0_ = {0xdbe6d5d5fe4cce2f, 0xa4093822299f31d0, 0x13198a2e03707344, 0x243f6a8885a308d3};
  Lanes mul1_ = {0x3bd39e10cb0ef593, 0xc0acf169b5f18a8c, 0xbe5466cf34e90c6c, 0x452821e638d01377};
  Lanes v0_;
  Lanes v1_;
};

}  // namespace

// HashLen33to64 of farmhash's farmhashna.
std::optional<uint64_t> FarmFingerprint(std::string_view text) {
  constexpr uint64_t kK2 = 0x9ae16a3b2f90404full;
  if (text.empty()) return kK2;
  if (text.size() < 33 || text.size() > 64) return std::nullopt;
  const char* s = text.data();
  const size_t n = text.size();
  const uint64_t multiplier = kK2 + n * 2;
  const uint64_t a = Load64(s) * kK2;
  const uint64_t b = Load64(s + 8);
  const uint64_t c = Load64(s + n - 8) * multiplier;
  const uint64_t d = Load64(s + n - 16) * kK2;
  const uint64_t y = std::rotr(a + b, 43) + std::rotr(c, 30) + d;
  const uint64_t z = Mix(y, a + std::rotr(b + kK2, 18) + c, multiplier);
  const uint64_t e = Load64(s + 16) * multiplier;
  const uint64_t f = Load64(s + 24);
  const uint64_t g = (y + Load64(s + n - 32)) * multiplier;
  const uint64_t h = (z + Load64(s + n - 24)) * multiplier;
  return Mix(std::rotr(e + f, 43) + std::rotr(g, 30) + h, e + std::rotr(f + a, 18) + g, multiplier);
}

uint64_t DeviceListFingerprint(std::span<const int64_t> devices) {
  constexpr HighwayHasher::Lanes kKey = {0x4ea9929a25d561c6, 0x98470d187b523e8f, 0x592040a2da3c4b53,
                                         0xbff8b246e3c587a2};
  std::string digits;
  for (int64_t device : devices) digits += std::to_string(device);
  return HighwayHasher(kKey).Hash(digits);
}

}  // namespace jaxfabric
