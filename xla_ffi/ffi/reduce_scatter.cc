// x[n, s] -> y[s]: rank i gets the reduction of x[i] over the ranks.
#include "ffi/cuda_handler.h"
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<CallSpec> Decode(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kReduceScatter, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  auto reduction = DecodeReduction(attributes);
  if (!reduction.has_value()) return ffi::Unexpected(reduction.error());
  spec->reduction = *reduction;
  return spec;
}

}  // namespace

JF_DEFINE_OP(ReduceScatter, Decode);
JF_DEFINE_CUDA_OP(ReduceScatter, Decode);
JF_DEFINE_CUDA_START(ReduceScatter, Decode);

}  // namespace jaxfabric
