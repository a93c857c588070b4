// x[s] -> y[n, s]: y[j] is rank j's x.
#include "ffi/cuda_handler.h"
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<CallSpec> Decode(ffi::Dictionary attributes) {
  return DecodeCommon(OpKind::kAllGather, attributes);
}

}  // namespace

JF_DEFINE_OP(AllGather, Decode);
JF_DEFINE_CUDA_OP(AllGather, Decode);
JF_DEFINE_CUDA_START(AllGather, Decode);

}  // namespace jaxfabric
