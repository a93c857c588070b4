// How each element type is read into the type it is accumulated in, and rounded back.
//
// Every conversion is integer arithmetic and selects on 32-bit lanes, without a branch or a table,
// so that the loops around it vectorise for any instruction set with the same bits. Narrowing
// rounds to nearest, ties to even. NaN stays NaN and becomes quiet. Overflow follows ml_dtypes:
// infinity, except for float8_e4m3fn, which has none and gives NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace jaxfabric {

#if defined(__CUDACC__)
#define JF_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define JF_ALWAYS_INLINE inline __attribute__((always_inline))
#endif

// `a` where the condition holds, else `b`, on the bits: a branch or a conditional expression around
// floating point keeps gcc from vectorising unless trapping math is off.
template <class U>
JF_ALWAYS_INLINE U Select(bool condition, U a, U b) {
  const U mask = static_cast<U>(-static_cast<U>(condition));
  return static_cast<U>((a & mask) | (b & ~mask));
}

// Integers, float and double: accumulated as they are.
template <class T>
struct PlainCodec {
  using Storage = T;
  using Accumulator = T;
  static JF_ALWAYS_INLINE T Load(T value) { return value; }
  static JF_ALWAYS_INLINE T Store(T value) { return value; }
};

struct Bfloat16Codec {
  using Storage = uint16_t;
  using Accumulator = float;
  static JF_ALWAYS_INLINE float Load(uint16_t value) {
    return std::bit_cast<float>(uint32_t{value} << 16);
  }
  static JF_ALWAYS_INLINE uint16_t Store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>(Select((bits & 0x7fffffffu) > 0x7f800000u, quiet, rounded));
  }
};

// A format of 1 sign, kExponentBits and kMantissaBits with IEEE's infinities and NaNs.
template <class T, int kExponentBits, int kMantissaBits>
struct IeeeCodec {
  using Storage = T;
  using Accumulator = float;
  static constexpr int kBits = 1 + kExponentBits + kMantissaBits;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kBias = (1u << (kExponentBits - 1)) - 1;
  static constexpr uint32_t kRebias = (127u - kBias) << 23;
  static constexpr uint32_t kInfinity = ((1u << kExponentBits) - 1) << kMantissaBits;
  static constexpr uint32_t kMinNormal = 1u << kMantissaBits;
  // The smallest subnormal, and the float whose unit in the last place it is: adding that float
  // rounds any smaller one to a whole number of subnormal steps.
  static constexpr float kStep = std::bit_cast<float>((127u - kBias + 1 - kMantissaBits) << 23);
  static constexpr uint32_t kMagicBits = (127u - kBias + 1 - kMantissaBits + 23) << 23;

  static JF_ALWAYS_INLINE float Load(T value) {
    const uint32_t magnitude = value & ((1u << (kBits - 1)) - 1);
    const uint32_t sign = uint32_t(value >> (kBits - 1)) << 31;
    const uint32_t normal = (magnitude << kShift) + kRebias;
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * kStep);
    uint32_t bits = Select(magnitude < kMinNormal, subnormal, normal);
    bits = Select(magnitude >= kInfinity, normal + kRebias, bits);
    bits |= Select(magnitude > kInfinity, 0x400000u, 0u);
    return std::bit_cast<float>(bits | sign);
  }

  static JF_ALWAYS_INLINE T Store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 31) << (kBits - 1);
    const uint32_t rounded =
        ((magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1u)) >> kShift) -
        (kRebias >> kShift);
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) +
                                                       std::bit_cast<float>(kMagicBits)) -
                               kMagicBits;
    constexpr uint32_t kQuiet = kInfinity | (1u << (kMantissaBits - 1));
    uint32_t result = Select(rounded < kInfinity, rounded, kInfinity);
    result = Select(magnitude < kRebias + (1u << 23), subnormal, result);
    result = Select(magnitude > 0x7f800000u, kQuiet | ((magnitude & 0x7fffffu) >> kShift), result);
    return static_cast<T>(result | sign);
  }
};

using Float16Codec = IeeeCodec<uint16_t, 5, 10>;
using Float8E5M2Codec = IeeeCodec<uint8_t, 5, 2>;

// No infinities; one NaN of each sign, all bits set; finite to 448.
struct Float8E4M3FNCodec {
  using Storage = uint8_t;
  using Accumulator = float;
  static constexpr uint32_t kRebias = 120u << 23;
  static constexpr uint32_t kNan = 0x7f;
  static constexpr uint32_t kMagicBits = 0x46800000u;  // 2^14, whose last place is 2^-9

  static JF_ALWAYS_INLINE float Load(uint8_t value) {
    const uint32_t magnitude = value & 0x7fu;
    const uint32_t sign = uint32_t{value & 0x80u} << 24;
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
    uint32_t bits = Select(magnitude < 8, subnormal, (magnitude << 20) + kRebias);
    bits = Select(magnitude == kNan, 0x7fc00000u, bits);
    return std::bit_cast<float>(bits | sign);
  }

  static JF_ALWAYS_INLINE uint8_t Store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 24) & 0x80u;
    const uint32_t rounded =
        ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (kRebias >> 20);
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) +
                                                       std::bit_cast<float>(kMagicBits)) -
                               kMagicBits;
    uint32_t result = Select(rounded < kNan, rounded, kNan);
    result = Select(magnitude < kRebias + (1u << 23), subnormal, result);
    return static_cast<uint8_t>(result | sign);
  }
};

}  // namespace jaxfabric
