// x[s] -> y[s]: the root's x.
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kBroadcast, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  auto root = attributes.get<int64_t>("root");
  if (!root.has_value()) return ffi::Unexpected(root.error());
  spec->root = *root;
  return MakeState(*std::move(spec));
}

}  // namespace

JF_DEFINE_OP(Broadcast, Instantiate);

}  // namespace jaxfabric
