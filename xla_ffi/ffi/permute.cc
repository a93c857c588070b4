// x[s] -> y[s]: the x of the rank paired with this one, or zeros.
#include "ffi/cuda_handler.h"
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<CallSpec> Decode(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kPermute, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  auto pairs = attributes.get<ffi::Span<const int64_t>>("pairs");
  if (!pairs.has_value()) return ffi::Unexpected(pairs.error());
  spec->pairs.assign(pairs->begin(), pairs->end());
  return spec;
}

}  // namespace

JF_DEFINE_OP(Permute, Decode);
JF_DEFINE_CUDA_OP(Permute, Decode);
JF_DEFINE_CUDA_START(Permute, Decode);

}  // namespace jaxfabric
