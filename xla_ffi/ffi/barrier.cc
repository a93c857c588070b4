// x[s] -> y[s]: x, after every rank has arrived.
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kBarrier, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  return MakeState(*std::move(spec));
}

}  // namespace

JF_DEFINE_OP(Barrier, Instantiate);

}  // namespace jaxfabric
