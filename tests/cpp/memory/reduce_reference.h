// Reductions one element at a time, without sharing code with the ones under test.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "memory/dtype.h"
#include "memory/reduce.h"
#include "memory/slow_float.h"

namespace jaxfabric {

inline const std::vector<DType>& AllDTypes() {
  static const std::vector<DType> all = {
      DType::kBool,        DType::kInt8,     DType::kInt16,      DType::kInt32,
      DType::kInt64,       DType::kUint8,    DType::kUint16,     DType::kUint32,
      DType::kUint64,      DType::kFloat16,  DType::kFloat32,    DType::kFloat64,
      DType::kComplex64,   DType::kBfloat16, DType::kComplex128, DType::kFloat8E5M2,
      DType::kFloat8E4M3FN};
  return all;
}

inline const SlowCodec* SlowCodecOf(DType dtype) {
  static const SlowCodec float16(kFloat16Format);
  static const SlowCodec bfloat16(kBfloat16Format);
  static const SlowCodec e5m2(kFloat8E5M2Format);
  static const SlowCodec e4m3fn(kFloat8E4M3FNFormat);
  switch (dtype) {
    case DType::kFloat16:
      return &float16;
    case DType::kBfloat16:
      return &bfloat16;
    case DType::kFloat8E5M2:
      return &e5m2;
    case DType::kFloat8E4M3FN:
      return &e4m3fn;
    default:
      return nullptr;
  }
}

template <class T>
T ReferenceCombine(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kSum) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    } else {
      return a + b;
    }
  }
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) return a;
    if (std::isnan(b)) return b;
  }
  // Of two equal values (+0 and -0) the later one.
  if (op == ReduceOp::kMax) return a > b ? a : b;
  return a < b ? a : b;
}

template <class T>
std::vector<std::byte> ReferenceReduceAs(ReduceOp op, std::span<const void* const> sources,
                                         size_t count) {
  std::vector<std::byte> result(count * sizeof(T));
  for (size_t i = 0; i < count; ++i) {
    T value{};
    for (size_t k = 0; k < sources.size(); ++k) {
      T next;
      std::memcpy(&next, static_cast<const std::byte*>(sources[k]) + i * sizeof(T), sizeof(T));
      value = k == 0 ? next : ReferenceCombine(op, value, next);
    }
    std::memcpy(result.data() + i * sizeof(T), &value, sizeof(T));
  }
  return result;
}

template <class T>
std::vector<std::byte> ReferenceReduceNarrow(const SlowCodec& codec, ReduceOp op,
                                             std::span<const void* const> sources, size_t count) {
  std::vector<std::byte> result(count * sizeof(T));
  for (size_t i = 0; i < count; ++i) {
    float value = 0;
    for (size_t k = 0; k < sources.size(); ++k) {
      T code;
      std::memcpy(&code, static_cast<const std::byte*>(sources[k]) + i * sizeof(T), sizeof(T));
      const float next = codec.Load(code);
      value = k == 0 ? next : ReferenceCombine(op, value, next);
    }
    const T stored = static_cast<T>(codec.Store(value));
    std::memcpy(result.data() + i * sizeof(T), &stored, sizeof(T));
  }
  return result;
}

inline std::vector<std::byte> ReferenceReduce(DType dtype, ReduceOp op,
                                              std::span<const void* const> sources, size_t count) {
  if (const SlowCodec* codec = SlowCodecOf(dtype)) {
    return DTypeSize(dtype) == 2 ? ReferenceReduceNarrow<uint16_t>(*codec, op, sources, count)
                                 : ReferenceReduceNarrow<uint8_t>(*codec, op, sources, count);
  }
  switch (dtype) {
    case DType::kInt8:
      return ReferenceReduceAs<int8_t>(op, sources, count);
    case DType::kInt16:
      return ReferenceReduceAs<int16_t>(op, sources, count);
    case DType::kInt32:
      return ReferenceReduceAs<int32_t>(op, sources, count);
    case DType::kInt64:
      return ReferenceReduceAs<int64_t>(op, sources, count);
    case DType::kBool:
    case DType::kUint8:
      return ReferenceReduceAs<uint8_t>(op, sources, count);
    case DType::kUint16:
      return ReferenceReduceAs<uint16_t>(op, sources, count);
    case DType::kUint32:
      return ReferenceReduceAs<uint32_t>(op, sources, count);
    case DType::kUint64:
      return ReferenceReduceAs<uint64_t>(op, sources, count);
    case DType::kFloat32:
      return ReferenceReduceAs<float>(op, sources, count);
    case DType::kComplex64:
      return ReferenceReduceAs<float>(op, sources, 2 * count);
    case DType::kFloat64:
      return ReferenceReduceAs<double>(op, sources, count);
    case DType::kComplex128:
      return ReferenceReduceAs<double>(op, sources, 2 * count);
    default:
      return {};
  }
}

// Whether the element at `data` is NaN in any part. NaNs are equal whatever their payload.
inline bool HasNan(DType dtype, const std::byte* data) {
  const auto nan_at = [data]<class T>(T value, size_t index) {
    std::memcpy(&value, data + index * sizeof(T), sizeof(T));
    return std::isnan(value);
  };
  if (const SlowCodec* codec = SlowCodecOf(dtype)) {
    uint16_t code = 0;
    std::memcpy(&code, data, DTypeSize(dtype));
    return codec->IsNan(code);
  }
  switch (dtype) {
    case DType::kFloat32:
      return nan_at(0.0f, 0);
    case DType::kFloat64:
      return nan_at(0.0, 0);
    case DType::kComplex64:
      return nan_at(0.0f, 0) || nan_at(0.0f, 1);
    case DType::kComplex128:
      return nan_at(0.0, 0) || nan_at(0.0, 1);
    default:
      return false;
  }
}

}  // namespace jaxfabric
