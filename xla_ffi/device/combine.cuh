// Combines what the ranks have contributed: in rank order, small floats in float32, with the same
// bits as the CPU's reductions, whose conversions and operations these are.
#pragma once

#include <bit>

#include "device/bytes.cuh"
#include "memory/combine.h"

namespace jaxfabric::device {

// Loads that are on their way at once: as many as the registers hold beside the sums.
template <class Storage>
inline constexpr uint32_t kLoads = sizeof(Storage) == 1 ? 4 : 8;

// A word or Vector as the elements that lie in it.
template <class Storage, class Raw>
struct ElementsOf {
  static constexpr uint32_t kCount = sizeof(Raw) / sizeof(Storage);
  Storage value[kCount];
};

// sum[k] = load(0) op load(1) op ... op load(ranks - 1), element by element. Raw is an unsigned
// word or a Vector of whole elements; complete(value, source) may wait for a value that is not
// there yet. kAtOnce values are on their way at once.
template <class Codec, class Op, class Raw, class Seen,
          uint32_t kAtOnce = kLoads<typename Codec::Storage>, class Load, class Complete>
JF_DEVICE void Accumulate(uint32_t ranks, Load load, Complete complete,
                          typename Codec::Accumulator* sum) {
  using Elements = ElementsOf<typename Codec::Storage, Raw>;
  for (uint32_t first = 0; first < ranks; first += kAtOnce) {
    Seen seen[kAtOnce];
    JF_UNROLL
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i < ranks) seen[i] = load(first + i);
    }
    JF_UNROLL
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i >= ranks) break;
      const auto element = std::bit_cast<Elements>(complete(seen[i], first + i));
      JF_UNROLL
      for (uint32_t k = 0; k < Elements::kCount; ++k) {
        const auto value = Codec::Load(element.value[k]);
        sum[k] = first + i == 0 ? value : Op::Apply(sum[k], value);
      }
    }
  }
}

template <class Codec, class Raw>
JF_DEVICE Raw StoreElements(const typename Codec::Accumulator* sum) {
  ElementsOf<typename Codec::Storage, Raw> result;
  JF_UNROLL
  for (uint32_t k = 0; k < result.kCount; ++k) result.value[k] = Codec::Store(sum[k]);
  return std::bit_cast<Raw>(result);
}

// The same, rounded to what is stored.
template <class Codec, class Op, class Raw, class Seen,
          uint32_t kAtOnce = kLoads<typename Codec::Storage>, class Load, class Complete>
JF_DEVICE Raw Combine(uint32_t ranks, Load load, Complete complete) {
  typename Codec::Accumulator sum[ElementsOf<typename Codec::Storage, Raw>::kCount] = {};
  Accumulate<Codec, Op, Raw, Seen, kAtOnce>(ranks, load, complete, sum);
  return StoreElements<Codec, Raw>(sum);
}

// to[0, bytes) = the combination of source(rank)[0, bytes) over the ranks; 16-byte aligned, and up
// to a multiple of 16 of all of them is touched.
template <class Codec, class Op, uint32_t kAtOnce = kLoads<typename Codec::Storage>, class Source>
JF_DEVICE void CombineBlock(std::byte* to, uint32_t ranks, Source source, uint64_t bytes) {
  for (uint64_t i = hw::Thread(); i * sizeof(Vector) < bytes; i += hw::Threads()) {
    reinterpret_cast<Vector*>(to)[i] = Combine<Codec, Op, Vector, Vector, kAtOnce>(
        ranks, [&](uint32_t rank) { return reinterpret_cast<const Vector*>(source(rank))[i]; },
        [](const Vector& value, uint32_t) { return value; });
  }
}

}  // namespace jaxfabric::device
