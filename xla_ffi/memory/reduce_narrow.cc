#include "memory/reduce_kernels.h"

namespace jaxfabric {
namespace {

JF_TARGET_CLONES_TO_AVX2
void ReduceFloat16(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                   size_t begin, size_t count) {
  internal::ReduceAny<Float16Codec>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES_TO_AVX2
void ReduceBfloat16(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                    size_t begin, size_t count) {
  internal::ReduceAny<Bfloat16Codec>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES_TO_AVX2
void ReduceFloat8E5M2(ReduceOp op, void* destination, const void* const* sources,
                      size_t source_count, size_t begin, size_t count) {
  internal::ReduceAny<Float8E5M2Codec>(op, destination, sources, source_count, begin, count);
}

JF_TARGET_CLONES_TO_AVX2
void ReduceFloat8E4M3FN(ReduceOp op, void* destination, const void* const* sources,
                        size_t source_count, size_t begin, size_t count) {
  internal::ReduceAny<Float8E4M3FNCodec>(op, destination, sources, source_count, begin, count);
}

}  // namespace

ReduceFunction PortableNarrowReduction(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return ReduceFloat16;
    case DType::kBfloat16:
      return ReduceBfloat16;
    case DType::kFloat8E5M2:
      return ReduceFloat8E5M2;
    case DType::kFloat8E4M3FN:
      return ReduceFloat8E4M3FN;
    default:
      return nullptr;
  }
}

}  // namespace jaxfabric
