// The one loop behind every reduction, and the functions that instantiate it.
//
// A kernel takes a few sources in one pass. More sources go block by block through an
// accumulator that stays in the first-level cache, so the destination is written once whatever the
// number of sources. The order of operations of an element is that of the sources in both cases.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "memory/codec.h"
#include "memory/combine.h"
#include "memory/reduce.h"

// Compiles a function once per instruction set and picks at load time (an ifunc).
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(JAXFABRIC_NO_TARGET_CLONES)
#define JF_TARGET_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// For loops that AVX-512 has its own version of.
#define JF_TARGET_CLONES_TO_AVX2 __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define JF_TARGET_CLONES
#define JF_TARGET_CLONES_TO_AVX2
#endif

namespace jaxfabric {

// `destination` and `sources` are the starts of the buffers; elements [begin, begin + count) are
// read, and written to destination[0, count). At least 2 sources.
using ReduceFunction = void (*)(ReduceOp op, void* destination, const void* const* sources,
                                size_t source_count, size_t begin, size_t count);

ReduceFunction IntegerReduction(DType dtype);
ReduceFunction FloatReduction(DType dtype);  // float32 and float64, also as halves of complex
// float16, bfloat16 and the float8 types: the fastest for this CPU, and the one that needs nothing
// of it. Both give the same bits, NaN payloads aside.
ReduceFunction NarrowReduction(DType dtype);
ReduceFunction PortableNarrowReduction(DType dtype);

namespace internal {

// An element at any address, of any declared type.
template <class T>
struct __attribute__((packed, may_alias)) Unaligned {
  T value;
};

// Sources per pass: fewer where converting an element costs more than going through the
// accumulator, which keeps the code small.
template <class Codec>
inline constexpr size_t kFused =
    std::is_same_v<typename Codec::Storage, typename Codec::Accumulator> ? 4 : 2;
inline constexpr size_t kBlockElements = 1024;

// out = [accumulator op] sources[0] op ... sources[kSources - 1]; out is the accumulator itself
// unless kLast.
template <class Codec, class Op, bool kFirst, bool kLast, size_t kSources>
JF_ALWAYS_INLINE void Pass(void* destination, typename Codec::Accumulator* __restrict accumulator,
                           const void* const* sources, size_t begin, size_t count) {
  using Element = Unaligned<typename Codec::Storage>;
  const auto source = [sources, begin](size_t k) {
    return static_cast<const Element*>(sources[k < kSources ? k : 0]) + begin;
  };
  const Element* s0 = source(0);
  const Element* s1 = source(1);
  const Element* s2 = source(2);
  const Element* s3 = source(3);
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

// The pass for `source_count` sources, at least kSources and at most kFused.
template <class Codec, class Op, bool kFirst, size_t kSources>
JF_ALWAYS_INLINE void LastPass(void* destination, typename Codec::Accumulator* accumulator,
                               const void* const* sources, size_t source_count, size_t begin,
                               size_t count) {
  if constexpr (kSources < kFused<Codec>) {
    if (source_count > kSources) {
      return LastPass<Codec, Op, kFirst, kSources + 1>(destination, accumulator, sources,
                                                       source_count, begin, count);
    }
  }
  Pass<Codec, Op, kFirst, true, kSources>(destination, accumulator, sources, begin, count);
}

template <class Codec, class Op>
JF_ALWAYS_INLINE void ReduceWith(void* destination, const void* const* sources, size_t source_count,
                                 size_t begin, size_t count) {
  constexpr size_t kMost = kFused<Codec>;
  if (source_count <= kMost) {
    return LastPass<Codec, Op, true, 2>(destination, nullptr, sources, source_count, begin, count);
  }
  alignas(64) typename Codec::Accumulator accumulator[kBlockElements];
  for (size_t done = 0; done < count; done += kBlockElements) {
    const size_t block = std::min(kBlockElements, count - done);
    const size_t at = begin + done;
    Pass<Codec, Op, true, false, kMost>(nullptr, accumulator, sources, at, block);
    size_t used = kMost;
    for (; source_count - used > kMost; used += kMost) {
      Pass<Codec, Op, false, false, kMost>(nullptr, accumulator, sources + used, at, block);
    }
    LastPass<Codec, Op, false, 1>(
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

}  // namespace internal
}  // namespace jaxfabric
