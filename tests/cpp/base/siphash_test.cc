#include "base/siphash.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

namespace jaxfabric {
namespace {

std::string Hex(const SipHashDigest& digest) {
  std::string text;
  for (std::byte byte : digest) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned>(byte));
    text += digits;
  }
  return text;
}

// Of the authors' vectors.h, vectors_sip128: key 00 01 ... 0f, message 00 01 ... of each length.
TEST(SipHashTest, GivesTheAuthorsVectors) {
  SipHashKey key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  const std::vector<std::pair<size_t, std::string>> vectors = {
      {0, "a3817f04ba25a8e66df67214c7550293"},  {1, "da87c1d86b99af44347659119b22fc45"},
      {2, "8177228da4a45dc7fca38bdef60affe4"},  {3, "9c70b60c5267a94e5f33b6b02985ed51"},
      {4, "f88164c12d9c8faf7d0f6e7c7bcd5579"},  {5, "1368875980776f8854527a07690e9627"},
      {6, "14eeca338b208613485ea0308fd7a15e"},  {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
      {15, "5493e99933b0a8117e08ec0f97cfc3d9"},
  };
  for (const auto& [size, expected] : vectors) {
    std::vector<std::byte> message(size);
    for (size_t i = 0; i < size; ++i) message[i] = static_cast<std::byte>(i);
    EXPECT_EQ(Hex(SipHash128(key, message)), expected) << size;
  }
}

}  // namespace
}  // namespace jaxfabric
