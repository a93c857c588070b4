// x[n, s] -> y[n, s]: y[j] on rank i is x[i] of rank j.
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kAllToAll, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  return MakeState(*std::move(spec));
}

}  // namespace

JF_DEFINE_OP(AllToAll, Instantiate);

}  // namespace jaxfabric
