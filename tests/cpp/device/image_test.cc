#include "device/image.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

namespace jaxfabric {
namespace {

// What every fatbinary begins with.
struct Header {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t content_bytes;
};

TEST(KernelImage, IsAFatbinaryOfItsSizeOrThereIsAReason) {
  EXPECT_EQ(KernelArchitectures().empty(), !KernelImageReason().empty());
  EXPECT_EQ(KernelCompiler().empty(), !KernelImageReason().empty());
  for (const KernelImage& image : KernelImages()) {
    SCOPED_TRACE(image.source);
    EXPECT_TRUE(KernelImageReason().empty());
    ASSERT_GT(image.bytes.size(), sizeof(Header));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(image.bytes.data()) % 8, 0u);
    Header header;
    std::memcpy(&header, image.bytes.data(), sizeof header);
    EXPECT_EQ(header.magic, 0xba55ed50u);
    EXPECT_EQ(header.header_bytes + header.content_bytes, image.bytes.size());
  }
}

}  // namespace
}  // namespace jaxfabric
