// The kernels that a source defines, for nvcc and for the fake driver alike.
//
// A family is one body for every type and operation that has code of its own: sums of signed and
// unsigned integers are the same, bool is uint8, a complex number two floats. KernelName in
// launch.h says which one a call uses.
#pragma once

#include "device/combine.cuh"
#include "device/lane.cuh"
#if !defined(__CUDACC__)
#include "device/emulated.h"
#endif

// X(family, operation, type, Codec, Op)
#define JF_FOR_EACH_SUM(X, family)                    \
  X(family, sum, uint8, PlainCodec<uint8_t>, SumOp)   \
  X(family, sum, uint16, PlainCodec<uint16_t>, SumOp) \
  X(family, sum, uint32, PlainCodec<uint32_t>, SumOp) \
  X(family, sum, uint64, PlainCodec<uint64_t>, SumOp) \
  X(family, sum, float16, Float16Codec, SumOp)        \
  X(family, sum, bfloat16, Bfloat16Codec, SumOp)      \
  X(family, sum, float32, PlainCodec<float>, SumOp)   \
  X(family, sum, float64, PlainCodec<double>, SumOp)  \
  X(family, sum, float8_e5m2, Float8E5M2Codec, SumOp) \
  X(family, sum, float8_e4m3fn, Float8E4M3FNCodec, SumOp)
#define JF_FOR_EACH_EXTREME(X, family, operation, Op)    \
  X(family, operation, uint8, PlainCodec<uint8_t>, Op)   \
  X(family, operation, uint16, PlainCodec<uint16_t>, Op) \
  X(family, operation, uint32, PlainCodec<uint32_t>, Op) \
  X(family, operation, uint64, PlainCodec<uint64_t>, Op) \
  X(family, operation, int8, PlainCodec<int8_t>, Op)     \
  X(family, operation, int16, PlainCodec<int16_t>, Op)   \
  X(family, operation, int32, PlainCodec<int32_t>, Op)   \
  X(family, operation, int64, PlainCodec<int64_t>, Op)   \
  X(family, operation, float16, Float16Codec, Op)        \
  X(family, operation, bfloat16, Bfloat16Codec, Op)      \
  X(family, operation, float32, PlainCodec<float>, Op)   \
  X(family, operation, float64, PlainCodec<double>, Op)  \
  X(family, operation, float8_e5m2, Float8E5M2Codec, Op) \
  X(family, operation, float8_e4m3fn, Float8E4M3FNCodec, Op)
#define JF_FOR_EACH_REDUCTION(X, family)     \
  JF_FOR_EACH_SUM(X, family)                 \
  JF_FOR_EACH_EXTREME(X, family, max, MaxOp) \
  JF_FOR_EACH_EXTREME(X, family, min, MinOp)

// What the switch can do (multimem.cuh).
#define JF_FOR_EACH_MULTICAST_EXTREME(X, family, operation, Op) \
  X(family, operation, uint32, PlainCodec<uint32_t>, Op)        \
  X(family, operation, uint64, PlainCodec<uint64_t>, Op)        \
  X(family, operation, int32, PlainCodec<int32_t>, Op)          \
  X(family, operation, int64, PlainCodec<int64_t>, Op)
#define JF_FOR_EACH_MULTICAST_REDUCTION(X, family)     \
  X(family, sum, uint32, PlainCodec<uint32_t>, SumOp)  \
  X(family, sum, uint64, PlainCodec<uint64_t>, SumOp)  \
  X(family, sum, float16, Float16Codec, SumOp)         \
  X(family, sum, bfloat16, Bfloat16Codec, SumOp)       \
  X(family, sum, float32, PlainCodec<float>, SumOp)    \
  X(family, sum, float64, PlainCodec<double>, SumOp)   \
  JF_FOR_EACH_MULTICAST_EXTREME(X, family, max, MaxOp) \
  JF_FOR_EACH_MULTICAST_EXTREME(X, family, min, MinOp)

// Defines jaxfabric_<family>_<operation>_<type>, which calls the function template Family##Body.
#define JF_REDUCTION_KERNEL(family, operation, type, Codec, Op)           \
  JF_KERNEL(jaxfabric_##family##_##operation##_##type, ReduceArguments) { \
    family##_body<Codec, Op>(arguments);                                  \
  }

#if defined(__CUDACC__)
#define JF_KERNEL_TABLE(function, ...)
#else
#define JF_TABLE_ENTRY(name, Arguments)                                                 \
  EmulatedKernel{#name, [](const void* a) { name(*static_cast<const Arguments*>(a)); }, \
                 sizeof(Arguments)},
#define JF_REDUCTION_ENTRY(family, operation, type, Codec, Op) \
  JF_TABLE_ENTRY(jaxfabric_##family##_##operation##_##type, ReduceArguments)
// The function of emulated.h that lists these kernels.
#define JF_KERNEL_TABLE(function, ...)                   \
  std::span<const EmulatedKernel> function() {           \
    static const EmulatedKernel table[] = {__VA_ARGS__}; \
    return table;                                        \
  }
#endif
