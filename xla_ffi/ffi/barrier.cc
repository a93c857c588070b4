// x[s] -> y[s]: x, after every rank has arrived.
#include "ffi/cuda_handler.h"
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<CallSpec> Decode(ffi::Dictionary attributes) {
  return DecodeCommon(OpKind::kBarrier, attributes);
}

}  // namespace

JF_DEFINE_OP(Barrier, Decode);
JF_DEFINE_CUDA_OP(Barrier, Decode);

}  // namespace jaxfabric
