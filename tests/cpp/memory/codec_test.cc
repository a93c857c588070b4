#include "memory/codec.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "memory/slow_float.h"

namespace jaxfabric {
namespace {

template <class C, const SmallFormat& kFormat>
struct Case {
  using Codec = C;
  static const SmallFormat& format() { return kFormat; }
};

template <class T>
class CodecTest : public ::testing::Test {
 protected:
  using Codec = typename T::Codec;
  using Storage = typename Codec::Storage;

  void ExpectStores(float value) {
    const uint32_t expected = slow_.Store(value);
    const uint32_t actual = Codec::Store(value);
    if (std::isnan(value) || slow_.IsNan(expected)) {
      ASSERT_TRUE(slow_.IsNan(actual)) << value << " gives " << actual;
      ASSERT_EQ(actual & slow_.sign_bit(), expected & slow_.sign_bit());
    } else {
      ASSERT_EQ(actual, expected) << std::hexfloat << value;
    }
  }

  // The value and the two floats beside it, of both signs.
  void ExpectStoresAround(float value) {
    for (float v : {value, std::nextafter(value, 0.0f), std::nextafter(value, INFINITY)}) {
      ExpectStores(v);
      ExpectStores(-v);
    }
  }

  SlowCodec slow_{T::format()};
};

using Cases =
    ::testing::Types<Case<Float16Codec, kFloat16Format>, Case<Bfloat16Codec, kBfloat16Format>,
                     Case<Float8E5M2Codec, kFloat8E5M2Format>,
                     Case<Float8E4M3FNCodec, kFloat8E4M3FNFormat>>;
TYPED_TEST_SUITE(CodecTest, Cases);

TYPED_TEST(CodecTest, LoadsEveryCode) {
  using Tested = typename TypeParam::Codec;
  for (uint32_t code = 0; code < 2 * this->slow_.sign_bit(); ++code) {
    const float expected = this->slow_.Load(code);
    const float actual = Tested::Load(static_cast<typename Tested::Storage>(code));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual)) << code;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(actual), std::bit_cast<uint32_t>(expected)) << code;
    }
  }
}

TYPED_TEST(CodecTest, LoadThenStoreGivesTheCodeBack) {
  using Tested = typename TypeParam::Codec;
  for (uint32_t code = 0; code < 2 * this->slow_.sign_bit(); ++code) {
    const auto stored = static_cast<uint32_t>(
        Tested::Store(Tested::Load(static_cast<typename Tested::Storage>(code))));
    if (this->slow_.IsNan(code)) {
      ASSERT_TRUE(this->slow_.IsNan(stored));
    } else {
      ASSERT_EQ(stored, code);
    }
  }
}

// Rounding is monotone, so it is right everywhere when it is right at every value, at every
// midpoint and at the floats beside them.
TYPED_TEST(CodecTest, RoundsRightAtEveryBoundary) {
  const auto& finite = this->slow_.finite();
  for (size_t i = 0; i < finite.size(); ++i) {
    this->ExpectStoresAround(static_cast<float>(finite[i]));
    const double next = i + 1 < finite.size() ? finite[i + 1] : 2 * finite[i] - finite[i - 1];
    this->ExpectStoresAround(static_cast<float>(finite[i] + (next - finite[i]) / 2));
    if (this->HasFatalFailure()) return;
  }
}

TYPED_TEST(CodecTest, StoresSpecialValuesAndASampleOfAllFloats) {
  using Limits = std::numeric_limits<float>;
  for (float value : {0.0f, Limits::infinity(), Limits::max(), Limits::min(), Limits::denorm_min(),
                      Limits::quiet_NaN(), Limits::signaling_NaN()}) {
    this->ExpectStores(value);
    this->ExpectStores(-value);
  }
  constexpr uint32_t kStride = 4099;  // prime: every low-order pattern comes up
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += kStride) {
    this->ExpectStores(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    if (this->HasFatalFailure()) return;
  }
}

// ml_dtypes: overflow is infinity where there is one, NaN where there is none.
TEST(Codec, OverflowFollowsTheFormat) {
  EXPECT_EQ(Float8E4M3FNCodec::Store(448.0f), 0x7e);
  EXPECT_EQ(Float8E4M3FNCodec::Store(464.0f), 0x7e);  // a tie, to even
  EXPECT_EQ(Float8E4M3FNCodec::Store(465.0f), 0x7f);
  EXPECT_EQ(Float8E4M3FNCodec::Store(-INFINITY), 0xff);
  EXPECT_EQ(Float8E5M2Codec::Store(57344.0f), 0x7b);
  EXPECT_EQ(Float8E5M2Codec::Store(61439.0f), 0x7b);
  EXPECT_EQ(Float8E5M2Codec::Store(61440.0f), 0x7c);  // a tie, to infinity
  EXPECT_EQ(Float8E5M2Codec::Store(-1e30f), 0xfc);
  EXPECT_EQ(Float16Codec::Store(65520.0f), 0x7c00);
  EXPECT_EQ(Bfloat16Codec::Store(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(Codec, NanStaysQuiet) {
  EXPECT_EQ(Bfloat16Codec::Store(std::bit_cast<float>(0x7f800001u)), 0x7fc0);
  EXPECT_EQ(Bfloat16Codec::Store(std::bit_cast<float>(0xffffffffu)), 0xffff);
  EXPECT_EQ(Float16Codec::Store(std::bit_cast<float>(0x7f800001u)), 0x7e00);
  EXPECT_EQ(std::bit_cast<uint32_t>(Float16Codec::Load(0x7c01)), 0x7fc02000u);
}

}  // namespace
}  // namespace jaxfabric
