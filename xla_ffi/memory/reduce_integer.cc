#include "memory/reduce_kernels.h"

namespace jaxfabric {
namespace {

JF_TARGET_CLONES
void ReduceInt8(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<int8_t>>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES
void ReduceInt16(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                 size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<int16_t>>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES
void ReduceInt32(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                 size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<int32_t>>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES
void ReduceInt64(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                 size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<int64_t>>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES
void ReduceUint8(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                 size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<uint8_t>>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES
void ReduceUint16(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                  size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<uint16_t>>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES
void ReduceUint32(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                  size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<uint32_t>>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES
void ReduceUint64(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                  size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<uint64_t>>(op, destination, sources, source_count, begin, count);
}

}  // namespace

ReduceFunction IntegerReduction(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return ReduceInt8;
    case DType::kInt16:
      return ReduceInt16;
    case DType::kInt32:
      return ReduceInt32;
    case DType::kInt64:
      return ReduceInt64;
    case DType::kBool:  // 0 or 1: max is or, min is and
    case DType::kUint8:
      return ReduceUint8;
    case DType::kUint16:
      return ReduceUint16;
    case DType::kUint32:
      return ReduceUint32;
    case DType::kUint64:
      return ReduceUint64;
    default:
      return nullptr;
  }
}

}  // namespace jaxfabric
