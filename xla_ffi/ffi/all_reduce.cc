// x[s] -> y[s]: every rank gets the reduction over the ranks.
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kAllReduce, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  auto reduction = DecodeReduction(attributes);
  if (!reduction.has_value()) return ffi::Unexpected(reduction.error());
  spec->reduction = *reduction;
  return MakeState(*std::move(spec));
}

}  // namespace

JF_DEFINE_OP(AllReduce, Instantiate);

}  // namespace jaxfabric
