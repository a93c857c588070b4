// x[s] -> y[n, s]: y[j] is rank j's x.
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kAllGather, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  return MakeState(*std::move(spec));
}

}  // namespace

JF_DEFINE_OP(AllGather, Instantiate);

}  // namespace jaxfabric
