// Conversions of small floating-point formats by searching a table of values: slow, and independent
// of the bit arithmetic it checks.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace jaxfabric {

struct SmallFormat {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // false: as float8_e4m3fn, whose only special value is all ones, NaN
};

inline constexpr SmallFormat kFloat16Format{5, 10, true};
inline constexpr SmallFormat kBfloat16Format{8, 7, true};
inline constexpr SmallFormat kFloat8E5M2Format{5, 2, true};
inline constexpr SmallFormat kFloat8E4M3FNFormat{4, 3, false};

// The value of a non-negative code, by the definition of the format.
inline float SlowMagnitude(const SmallFormat& format, uint32_t code) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t exponent = code >> format.mantissa_bits;
  const uint32_t mantissa = code & ((1u << format.mantissa_bits) - 1);
  const uint32_t top = (1u << format.exponent_bits) - 1;
  if (format.has_infinity && exponent == top) {
    return mantissa == 0 ? std::numeric_limits<float>::infinity()
                         : std::numeric_limits<float>::quiet_NaN();
  }
  if (!format.has_infinity && code == (top << format.mantissa_bits | 7u)) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  const double fraction = std::ldexp(static_cast<double>(mantissa), -format.mantissa_bits);
  const double value = exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                     : std::ldexp(1 + fraction, static_cast<int>(exponent) - bias);
  return static_cast<float>(value);
}

class SlowCodec {
 public:
  explicit SlowCodec(const SmallFormat& format) : format_(format) {
    const uint32_t codes = 1u << (format.exponent_bits + format.mantissa_bits);
    for (uint32_t code = 0; code < codes; ++code) {
      const float value = SlowMagnitude(format, code);
      if (!std::isfinite(value)) break;
      finite_.push_back(value);
    }
  }

  uint32_t sign_bit() const { return 1u << (format_.exponent_bits + format_.mantissa_bits); }
  // The finite non-negative values, in the order of their codes.
  const std::vector<double>& finite() const { return finite_; }

  float Load(uint32_t code) const {
    const float magnitude = SlowMagnitude(format_, code & (sign_bit() - 1));
    return (code & sign_bit()) != 0 ? -magnitude : magnitude;
  }

  bool IsNan(uint32_t code) const { return std::isnan(Load(code)); }

  // Round to nearest, ties to even; any NaN code for NaN.
  uint32_t Store(float value) const {
    const uint32_t sign = std::signbit(value) ? sign_bit() : 0;
    const uint32_t past_end = static_cast<uint32_t>(finite_.size());  // infinity, or the NaN
    if (std::isnan(value)) return sign | (sign_bit() - 1);
    const double magnitude = std::fabs(static_cast<double>(value));
    uint32_t low = 0;
    uint32_t high = past_end;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (finite_[middle] <= magnitude ? low : high) = middle;
    }
    if (finite_[low] == magnitude) return sign | low;
    // Beyond the largest value, round as if the format went on.
    const double next = high < past_end ? finite_[high] : 2 * finite_[low] - finite_[low - 1];
    const double middle = (finite_[low] + next) / 2;
    const bool up = magnitude > middle || (magnitude == middle && (low & 1) != 0);
    return sign | (up ? high : low);
  }

 private:
  SmallFormat format_;
  std::vector<double> finite_;
};

}  // namespace jaxfabric
