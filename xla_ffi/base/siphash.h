// SipHash-2-4 with a key of 128 bits and 128 bits of output (Aumasson and Bernstein, 2012): a keyed
// hash that nobody without the key can compute or tell from random, for messages of a few bytes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace jaxfabric {

using SipHashKey = std::array<std::byte, 16>;
using SipHashDigest = std::array<std::byte, 16>;

inline SipHashDigest SipHash128(const SipHashKey& key, std::span<const std::byte> message) {
  static_assert(std::endian::native == std::endian::little);
  uint64_t keys[2];
  std::memcpy(keys, key.data(), sizeof(keys));
  uint64_t v0 = keys[0] ^ 0x736f6d6570736575ull;
  uint64_t v1 = keys[1] ^ 0x646f72616e646f6dull ^ 0xee;  // 0xee: 128 bits of output
  uint64_t v2 = keys[0] ^ 0x6c7967656e657261ull;
  uint64_t v3 = keys[1] ^ 0x7465646279746573ull;
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1;
      v1 = std::rotl(v1, 13) ^ v0;
      v0 = std::rotl(v0, 32);
      v2 += v3;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1;
      v1 = std::rotl(v1, 17) ^ v2;
      v2 = std::rotl(v2, 32);
    }
  };
  const auto take = [&](uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  };
  uint64_t last = static_cast<uint64_t>(message.size()) << 56;
  for (; message.size() >= 8; message = message.subspan(8)) {
    uint64_t word;
    std::memcpy(&word, message.data(), sizeof(word));
    take(word);
  }
  for (size_t i = 0; i < message.size(); ++i) {
    last |= static_cast<uint64_t>(message[i]) << (8 * i);
  }
  take(last);
  uint64_t out[2];
  v2 ^= 0xee;
  rounds(4);
  out[0] = v0 ^ v1 ^ v2 ^ v3;
  v1 ^= 0xdd;
  rounds(4);
  out[1] = v0 ^ v1 ^ v2 ^ v3;
  SipHashDigest digest;
  std::memcpy(digest.data(), out, sizeof(out));
  return digest;
}

}  // namespace jaxfabric
