// Element types, numbered as XLA_FFI_DataType (which is xla.PrimitiveType), so that the FFI layer
// converts with a cast.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace jaxfabric {

enum class DType : int32_t {
  kInvalid = 0,
  kBool = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kUint8 = 6,
  kUint16 = 7,
  kUint32 = 8,
  kUint64 = 9,
  kFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kComplex64 = 15,
  kBfloat16 = 16,
  kComplex128 = 18,
  kFloat8E5M2 = 19,
  kFloat8E4M3FN = 20,
};

// Bytes of one element, 0 for a type that cannot be reduced here (it may still be copied).
size_t DTypeSize(DType dtype);
// "float32" and so on, as numpy and ml_dtypes spell it.
std::string_view DTypeName(DType dtype);

}  // namespace jaxfabric
