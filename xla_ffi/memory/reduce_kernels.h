// The one loop behind every reduction, and the functions that instantiate it.
//
// A kernel takes at most kFused sources in one pass. More sources go block by block through an
// accumulator that stays in the first-level cache, so the destination is written once whatever the
// number of sources. The order of operations of an element is that of the sources in both cases.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "memory/codec.h"
#include "memory/reduce.h"

// Compiles a function once per instruction set and picks at load time (an ifunc).
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(JAXFABRIC_NO_TARGET_CLONES)
#define JF_TARGET_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JF_TARGET_CLONES
#endif

namespace jaxfabric {

// `destination` and `sources` are the starts of the buffers; elements [begin, begin + count) are
// read, and written to destination[0, count).
using ReduceFunction = void (*)(ReduceOp op, void* destination, const void* const* sources,
                                size_t source_count, size_t begin, size_t count);

ReduceFunction IntegerReduction(DType dtype);
ReduceFunction FloatReduction(DType dtype);   // float32 and float64, also as halves of complex
ReduceFunction NarrowReduction(DType dtype);  // bfloat16 and float8
ReduceFunction Float16Reduction();            // the fastest for this CPU
void ReduceFloat16Portable(ReduceOp op, void* destination, const void* const* sources,
                           size_t source_count, size_t begin, size_t count);

namespace internal {

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
struct MaxOp {
  template <class T>
  static JF_ALWAYS_INLINE T Apply(T a, T b) {
    return Extreme<true>(a, b);
  }
};
struct MinOp {
  template <class T>
  static JF_ALWAYS_INLINE T Apply(T a, T b) {
    return Extreme<false>(a, b);
  }
};

// An element at any address, of any declared type.
template <class T>
struct __attribute__((packed, may_alias)) Unaligned {
  T value;
};

inline constexpr size_t kFused = 4;
inline constexpr size_t kBlockElements = 1024;

// out = [accumulator op] sources[0] op ... sources[kSources - 1]; out is the accumulator itself
// unless kLast.
template <class Codec, class Op, bool kFirst, bool kLast, size_t kSources>
JF_ALWAYS_INLINE void Pass(void* destination, typename Codec::Accumulator* __restrict accumulator,
                           const void* const* sources, size_t begin, size_t count) {
  using Element = Unaligned<typename Codec::Storage>;
  const Element* source[kFused];
  for (size_t k = 0; k < kFused; ++k) {
    source[k] = static_cast<const Element*>(sources[k < kSources ? k : 0]) + begin;
  }
  const Element* s0 = source[0];
  const Element* s1 = source[1];
  const Element* s2 = source[2];
  const Element* s3 = source[3];
  auto* out = static_cast<Element*>(destination);
  // A destination that is one of the sources is read and written at the same index only.
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    auto value = Codec::Load(s0[i].value);
    if constexpr (!kFirst) value = Op::Apply(accumulator[i], value);
    if constexpr (kSources > 1) value = Op::Apply(value, Codec::Load(s1[i].value));
    if constexpr (kSources > 2) value = Op::Apply(value, Codec::Load(s2[i].value));
    if constexpr (kSources > 3) value = Op::Apply(value, Codec::Load(s3[i].value));
    if constexpr (kLast) {
      out[i].value = Codec::Store(value);
    } else {
      accumulator[i] = value;
    }
  }
}

template <class Codec, class Op, bool kFirst>
JF_ALWAYS_INLINE void LastPass(void* destination, typename Codec::Accumulator* accumulator,
                               const void* const* sources, size_t source_count, size_t begin,
                               size_t count) {
  switch (source_count) {
    case 1:
      return Pass<Codec, Op, kFirst, true, 1>(destination, accumulator, sources, begin, count);
    case 2:
      return Pass<Codec, Op, kFirst, true, 2>(destination, accumulator, sources, begin, count);
    case 3:
      return Pass<Codec, Op, kFirst, true, 3>(destination, accumulator, sources, begin, count);
    default:
      return Pass<Codec, Op, kFirst, true, 4>(destination, accumulator, sources, begin, count);
  }
}

template <class Codec, class Op>
JF_ALWAYS_INLINE void ReduceWith(void* destination, const void* const* sources, size_t source_count,
                                 size_t begin, size_t count) {
  if (source_count <= kFused) {
    return LastPass<Codec, Op, true>(destination, nullptr, sources, source_count, begin, count);
  }
  alignas(64) typename Codec::Accumulator accumulator[kBlockElements];
  for (size_t done = 0; done < count; done += kBlockElements) {
    const size_t block = std::min(kBlockElements, count - done);
    const size_t at = begin + done;
    Pass<Codec, Op, true, false, kFused>(nullptr, accumulator, sources, at, block);
    size_t used = kFused;
    for (; source_count - used > kFused; used += kFused) {
      Pass<Codec, Op, false, false, kFused>(nullptr, accumulator, sources + used, at, block);
    }
    LastPass<Codec, Op, false>(
        static_cast<std::byte*>(destination) + done * sizeof(typename Codec::Storage), accumulator,
        sources + used, source_count - used, at, block);
  }
}

template <class Codec>
JF_ALWAYS_INLINE void ReduceAny(ReduceOp op, void* destination, const void* const* sources,
                                size_t source_count, size_t begin, size_t count) {
  switch (op) {
    case ReduceOp::kSum:
      return ReduceWith<Codec, SumOp>(destination, sources, source_count, begin, count);
    case ReduceOp::kMax:
      return ReduceWith<Codec, MaxOp>(destination, sources, source_count, begin, count);
    case ReduceOp::kMin:
      return ReduceWith<Codec, MinOp>(destination, sources, source_count, begin, count);
  }
}

// The same result as ReduceAny in more passes over a block in the first-level cache. For codecs
// whose conversions are long: one loop per conversion instead of one per fused combination compiles
// in a sixth of the time and memory.
template <class Codec>
JF_ALWAYS_INLINE void ReduceStepwise(ReduceOp op, void* destination, const void* const* sources,
                                     size_t source_count, size_t begin, size_t count) {
  using Element = Unaligned<typename Codec::Storage>;
  alignas(64) typename Codec::Accumulator accumulator[kBlockElements];
  alignas(64) typename Codec::Accumulator next[kBlockElements];
  for (size_t done = 0; done < count; done += kBlockElements) {
    const size_t block = std::min(kBlockElements, count - done);
    for (size_t k = 0; k < source_count; ++k) {
      const Element* source = static_cast<const Element*>(sources[k]) + begin + done;
      auto* decoded = k == 0 ? accumulator : next;
      for (size_t i = 0; i < block; ++i) decoded[i] = Codec::Load(source[i].value);
      if (k == 0) continue;
      switch (op) {
        case ReduceOp::kSum:
          for (size_t i = 0; i < block; ++i) accumulator[i] = SumOp::Apply(accumulator[i], next[i]);
          break;
        case ReduceOp::kMax:
          for (size_t i = 0; i < block; ++i) accumulator[i] = MaxOp::Apply(accumulator[i], next[i]);
          break;
        case ReduceOp::kMin:
          for (size_t i = 0; i < block; ++i) accumulator[i] = MinOp::Apply(accumulator[i], next[i]);
          break;
      }
    }
    Element* out = static_cast<Element*>(destination) + done;
    for (size_t i = 0; i < block; ++i) out[i].value = Codec::Store(accumulator[i]);
  }
}

}  // namespace internal
}  // namespace jaxfabric
