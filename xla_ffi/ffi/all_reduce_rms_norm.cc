// x[..., d], residual[..., d], weight[d] -> y[..., d], new_residual[..., d]: on GPUs only.
#include <algorithm>

#include "ffi/cuda_handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<CallSpec> Decode(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kAllReduceRmsNorm, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  auto epsilon = attributes.get<float>("epsilon");
  if (!epsilon.has_value()) return ffi::Unexpected(epsilon.error());
  spec->epsilon = *epsilon;
  return spec;
}

ffi::ErrorOr<Buffers> DecodeNorm(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  auto buffers = DecodeCudaBuffers(arguments, results);
  if (!buffers.has_value()) return buffers;
  auto input = arguments.get<ffi::AnyBuffer>(0);
  auto output = results.get<ffi::AnyBuffer>(0);
  auto residual = arguments.get<ffi::AnyBuffer>(1);
  if (!residual.has_value()) return ffi::Unexpected(residual.error());
  auto weight = arguments.get<ffi::AnyBuffer>(2);
  if (!weight.has_value()) return ffi::Unexpected(weight.error());
  auto new_residual = results.get<ffi::AnyBuffer>(1);
  if (!new_residual.has_value()) return ffi::Unexpected(new_residual.error());
  const auto shape = input->dimensions();
  const auto like_input = [&](const ffi::AnyBuffer& buffer, size_t from) {
    const auto dimensions = buffer.dimensions();
    return buffer.element_type() == input->element_type() &&
           std::equal(shape.begin() + from, shape.end(), dimensions.begin(), dimensions.end());
  };
  if (shape.size() == 0 || !like_input(*residual, 0) || !like_input(**output, 0) ||
      !like_input(**new_residual, 0) || !like_input(*weight, shape.size() - 1)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "all_reduce_rms_norm: the operands and results differ in shape or type"));
  }
  buffers->norm = {weight->element_count(), static_cast<const std::byte*>(residual->untyped_data()),
                   static_cast<const std::byte*>(weight->untyped_data()),
                   static_cast<std::byte*>((*new_residual)->untyped_data())};
  return buffers;
}

}  // namespace

JF_DEFINE_CUDA_OP_WITH(AllReduceRmsNorm, Decode, DecodeNorm);

}  // namespace jaxfabric
