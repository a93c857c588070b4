// x[s] -> y[s]: the x of the rank paired with this one, or zeros.
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kPermute, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  auto pairs = attributes.get<ffi::Span<const int64_t>>("pairs");
  if (!pairs.has_value()) return ffi::Unexpected(pairs.error());
  spec->pairs.assign(pairs->begin(), pairs->end());
  return MakeState(*std::move(spec));
}

}  // namespace

JF_DEFINE_OP(Permute, Instantiate);

}  // namespace jaxfabric
