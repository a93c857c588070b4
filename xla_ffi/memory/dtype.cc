#include "memory/dtype.h"

namespace jaxfabric {
namespace {

struct Info {
  size_t size;
  std::string_view name;
};

Info InfoOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return {1, "bool"};
    case DType::kInt8:
      return {1, "int8"};
    case DType::kInt16:
      return {2, "int16"};
    case DType::kInt32:
      return {4, "int32"};
    case DType::kInt64:
      return {8, "int64"};
    case DType::kUint8:
      return {1, "uint8"};
    case DType::kUint16:
      return {2, "uint16"};
    case DType::kUint32:
      return {4, "uint32"};
    case DType::kUint64:
      return {8, "uint64"};
    case DType::kFloat16:
      return {2, "float16"};
    case DType::kFloat32:
      return {4, "float32"};
    case DType::kFloat64:
      return {8, "float64"};
    case DType::kComplex64:
      return {8, "complex64"};
    case DType::kBfloat16:
      return {2, "bfloat16"};
    case DType::kComplex128:
      return {16, "complex128"};
    case DType::kFloat8E5M2:
      return {1, "float8_e5m2"};
    case DType::kFloat8E4M3FN:
      return {1, "float8_e4m3fn"};
    case DType::kInvalid:
      break;
  }
  return {0, "invalid"};  // also numbers that are no enumerator: they come from outside
}

}  // namespace

size_t DTypeSize(DType dtype) { return InfoOf(dtype).size; }
std::string_view DTypeName(DType dtype) { return InfoOf(dtype).name; }

}  // namespace jaxfabric
