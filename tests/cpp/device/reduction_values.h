// Arrays that kernels combine, and what the CPU makes of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "memory/reduce.h"

namespace jaxfabric::device {

inline uint64_t PartBytes(DType dtype) {
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  return DTypeSize(dtype) / (complex ? 2 : 1);
}

inline bool IsFloat(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBfloat16:
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3FN:
      return true;
    default:
      return false;
  }
}

// Any values but NaN, whose payload depends on the compiler.
inline void Fill(std::mt19937_64& random, DType dtype, std::byte* data, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) {
    auto value = static_cast<uint8_t>(random());
    if (dtype == DType::kBool) value &= 1;
    if (IsFloat(dtype) && i % PartBytes(dtype) == PartBytes(dtype) - 1) value &= 0xBF;
    data[i] = std::byte{value};
  }
}

inline std::vector<std::byte> Reference(DType dtype, ReduceOp op,
                                        const std::vector<std::vector<std::byte>>& inputs) {
  std::vector<std::byte> result = inputs[0];
  if (inputs.size() == 1) return result;
  std::vector<const void*> sources;
  for (const auto& input : inputs) sources.push_back(input.data());
  Reduce(dtype, op, result.data(), sources, result.size() / DTypeSize(dtype));
  return result;
}

inline std::vector<std::byte> Part(const std::vector<std::byte>& from, uint64_t at,
                                   uint64_t bytes) {
  return {from.begin() + static_cast<std::ptrdiff_t>(at),
          from.begin() + static_cast<std::ptrdiff_t>(at + bytes)};
}

}  // namespace jaxfabric::device
