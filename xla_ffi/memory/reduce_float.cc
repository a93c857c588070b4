#include "memory/reduce_kernels.h"

namespace jaxfabric {
namespace {

JF_TARGET_CLONES
void ReduceFloat32(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                   size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<float>>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES
void ReduceFloat64(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                   size_t begin, size_t count) {
  internal::ReduceAny<PlainCodec<double>>(op, destination, sources, source_count, begin, count);
}

}  // namespace

ReduceFunction FloatReduction(DType dtype) {
  return dtype == DType::kFloat64 ? ReduceFloat64 : ReduceFloat32;
}

}  // namespace jaxfabric
