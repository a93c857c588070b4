// Multicast memory, as hardware.cuh has the rest: an address that stands for the same place in the
// memory of every rank. Only these functions may touch it. Needs a GPU of compute capability 9.0
// and a switch that adds; kernels on older ones trap.
//
// The switch adds in an order of its own, small floats in float32. It has no float32 and float64
// extremes, and those of small floats lose a NaN, so only integers have them here.
#pragma once

#include <bit>

#include "device/bytes.cuh"
#include "memory/combine.h"

#if !defined(__CUDACC__)
#include "drivers/cuda/fake/multicast.h"
#endif

namespace jaxfabric::device::hw {

#if defined(__CUDACC__)

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

#define JF_LOAD_REDUCE_V4(operation_and_type)                                       \
  asm volatile("multimem.ld_reduce.relaxed.sys.global." operation_and_type          \
               " {%0, %1, %2, %3}, [%4];"                                           \
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) \
               : "l"(address)                                                       \
               : "memory")

// One element of 4 or 8 bytes.
#define JF_LOAD_REDUCE(Type, constraint, operation_and_type)                              \
  static JF_DEVICE Type Load(const Type* address) {                                       \
    Type value;                                                                           \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." operation_and_type " %0, [%1];" \
                 : "=" constraint(value)                                                  \
                 : "l"(address)                                                           \
                 : "memory");                                                             \
    return value;                                                                         \
  }
template <class T, class Op>
struct ElementReduce;
template <>
struct ElementReduce<double, SumOp> {
  JF_LOAD_REDUCE(double, "d", "add.f64")
};
template <>
struct ElementReduce<uint32_t, SumOp> {
  JF_LOAD_REDUCE(uint32_t, "r", "add.u32")
};
template <>
struct ElementReduce<uint64_t, SumOp> {
  JF_LOAD_REDUCE(uint64_t, "l", "add.u64")
};
#define JF_ELEMENT_EXTREMES(Type, constraint, type) \
  template <>                                       \
  struct ElementReduce<Type, MaxOp> {               \
    JF_LOAD_REDUCE(Type, constraint, "max." type)   \
  };                                                \
  template <>                                       \
  struct ElementReduce<Type, MinOp> {               \
    JF_LOAD_REDUCE(Type, constraint, "min." type)   \
  };
JF_ELEMENT_EXTREMES(uint32_t, "r", "u32")
JF_ELEMENT_EXTREMES(int32_t, "r", "s32")
JF_ELEMENT_EXTREMES(uint64_t, "l", "u64")
JF_ELEMENT_EXTREMES(int64_t, "l", "s64")

// The combination of what all ranks have at the address.
template <class Codec, class Op>
JF_DEVICE Vector LoadReduce(const Vector* address) {
  Vector v;
  if constexpr (std::is_same_v<Codec, PlainCodec<float>>) {
    JF_LOAD_REDUCE_V4("add.v4.f32");
  } else if constexpr (std::is_same_v<Codec, Float16Codec>) {
    JF_LOAD_REDUCE_V4("add.acc::f32.v4.f16x2");
  } else if constexpr (std::is_same_v<Codec, Bfloat16Codec>) {
    JF_LOAD_REDUCE_V4("add.acc::f32.v4.bf16x2");
  } else {
    using T = typename Codec::Storage;
    struct Elements {
      T value[sizeof(Vector) / sizeof(T)];
    } elements;
    JF_UNROLL
    for (uint32_t i = 0; i < sizeof(Vector) / sizeof(T); ++i) {
      elements.value[i] = ElementReduce<T, Op>::Load(reinterpret_cast<const T*>(address) + i);
    }
    v = std::bit_cast<Vector>(elements);
  }
  return v;
}
// Writes to every rank. The type is that of any 16 bytes: a store changes none.
JF_DEVICE void MulticastStore(Vector* address, const Vector& v) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}
// Between accesses to memory by its own address and by the multicast address.
JF_DEVICE void AliasFence() { asm volatile("fence.proxy.alias;" ::: "memory"); }

#else

template <class Codec, class Op>
JF_DEVICE Vector LoadReduce(const Vector*) {
  Trap();
}
JF_DEVICE void MulticastStore(Vector*, const Vector&) { Trap(); }
JF_DEVICE void AliasFence() {}

#endif

#else

static_assert(emulation::kMaxMulticastMembers >= kMaxRanks);

template <class Codec, class Op>
Vector LoadReduce(const Vector* address) {
  using Storage = typename Codec::Storage;
  constexpr uint32_t kElements = sizeof(Vector) / sizeof(Storage);
  struct Elements {
    Storage value[kElements];
  };
  const emulation::MulticastTargets members = emulation::MulticastMembers(address);
  if (members.empty()) emulation::Trap("multimem: no memory at this address");
  typename Codec::Accumulator sum[kElements] = {};
  bool first = true;
  for (const std::byte* member : members) {
    const auto element = std::bit_cast<Elements>(*reinterpret_cast<const Vector*>(member));
    for (uint32_t k = 0; k < kElements; ++k) {
      const auto value = Codec::Load(element.value[k]);
      sum[k] = first ? value : Op::Apply(sum[k], value);
    }
    first = false;
    emulation::MaybeSwitch();
  }
  Elements result;
  for (uint32_t k = 0; k < kElements; ++k) result.value[k] = Codec::Store(sum[k]);
  return std::bit_cast<Vector>(result);
}
inline void MulticastStore(Vector* address, const Vector& v) {
  const emulation::MulticastTargets members = emulation::MulticastMembers(address);
  if (members.empty()) emulation::Trap("multimem: no memory at this address");
  for (std::byte* member : members) {
    *reinterpret_cast<Vector*>(member) = v;
    emulation::MaybeSwitch();
  }
}
inline void AliasFence() {}

#endif

}  // namespace jaxfabric::device::hw
