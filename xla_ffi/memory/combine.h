// How two elements become one: the operations of a reduction, with the same bits on every
// processor.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "memory/codec.h"

namespace jaxfabric {

struct SumOp {
  template <class T>
  static JF_ALWAYS_INLINE T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;  // wraps instead of overflowing
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};

namespace internal {

// A NaN on either side wins; of +0 and -0, and of two NaNs, the earlier or later by the comparison
// as written here, the same on every CPU.
template <bool kGreater, class T>
JF_ALWAYS_INLINE T Extreme(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return (kGreater ? a > b : a < b) ? a : b;
  } else {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    const bool take_a = (kGreater ? a > b : a < b) | (a != a);
    return std::bit_cast<T>(Select(take_a, std::bit_cast<Bits>(a), std::bit_cast<Bits>(b)));
  }
}

}  // namespace internal

struct MaxOp {
  template <class T>
  static JF_ALWAYS_INLINE T Apply(T a, T b) {
    return internal::Extreme<true>(a, b);
  }
};

struct MinOp {
  template <class T>
  static JF_ALWAYS_INLINE T Apply(T a, T b) {
    return internal::Extreme<false>(a, b);
  }
};

}  // namespace jaxfabric
