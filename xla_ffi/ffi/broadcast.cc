// x[s] -> y[s]: the root's x.
#include "ffi/cuda_handler.h"
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<CallSpec> Decode(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kBroadcast, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  auto root = attributes.get<int64_t>("root");
  if (!root.has_value()) return ffi::Unexpected(root.error());
  spec->root = *root;
  return spec;
}

}  // namespace

JF_DEFINE_OP(Broadcast, Decode);
JF_DEFINE_CUDA_OP(Broadcast, Decode);
JF_DEFINE_CUDA_START(Broadcast, Decode);

}  // namespace jaxfabric
