// x[n, s] -> y[n, s]: y[j] on rank i is x[i] of rank j.
#include "ffi/cuda_handler.h"
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<CallSpec> Decode(ffi::Dictionary attributes) {
  return DecodeCommon(OpKind::kAllToAll, attributes);
}

}  // namespace

JF_DEFINE_OP(AllToAll, Decode);
JF_DEFINE_CUDA_OP(AllToAll, Decode);
JF_DEFINE_CUDA_START(AllToAll, Decode);

}  // namespace jaxfabric
