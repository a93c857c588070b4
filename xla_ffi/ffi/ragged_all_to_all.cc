// x[r, s], y[q, s], four arrays [k] -> y[q, s]: y, and in it slices of every rank's x where their
// senders want them.
#include <algorithm>
#include <array>

#include "ffi/cuda_handler.h"
#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<CallSpec> Decode(ffi::Dictionary attributes) {
  return DecodeCommon(OpKind::kRaggedAllToAll, attributes);
}

constexpr size_t kOperands = 6;

// The operands on either platform; offsets and sizes are int64, or on GPUs int32 if all are.
ffi::ErrorOr<Buffers> DecodeRagged(ffi::RemainingArgs arguments, ffi::AnyBuffer result,
                                   bool may_be_int32) {
  auto input = arguments.get<ffi::AnyBuffer>(0);
  if (!input.has_value()) return ffi::Unexpected(input.error());
  auto initial = arguments.get<ffi::AnyBuffer>(1);
  if (!initial.has_value()) return ffi::Unexpected(initial.error());
  const auto rows_in = input->dimensions();
  const auto rows_out = result.dimensions();
  const auto like_result = [&](const ffi::AnyBuffer& buffer, size_t from) {
    const auto dimensions = buffer.dimensions();
    return buffer.element_type() == result.element_type() && rows_out.size() > 0 &&
           dimensions.size() == rows_out.size() &&
           std::equal(dimensions.begin() + from, dimensions.end(), rows_out.begin() + from);
  };
  if (!like_result(*input, 1) || !like_result(*initial, 0)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "ragged_all_to_all: the operand, the output and the result differ in rows or type"));
  }
  Buffers buffers;
  RaggedSizes& sizes = buffers.ragged_sizes;
  std::array<const int64_t*, 4> metadata;
  for (size_t i = 0; i < metadata.size(); ++i) {
    auto values = arguments.get<ffi::AnyBuffer>(2 + i);
    if (!values.has_value()) return ffi::Unexpected(values.error());
    const ffi::DataType type = values->element_type();
    const size_t bytes = type == ffi::DataType::S32 ? 4 : 8;
    if (i == 0) {
      sizes.slices = values->element_count();
      sizes.index_bytes = bytes;
    }
    const bool right = type == ffi::DataType::S64 || (type == ffi::DataType::S32 && may_be_int32);
    if (!right || bytes != sizes.index_bytes || values->dimensions().size() != 1 ||
        values->element_count() != sizes.slices) {
      return ffi::Unexpected(ffi::Error::InvalidArgument(
          "ragged_all_to_all: offsets and sizes differ in length or type"));
    }
    metadata[i] = static_cast<const int64_t*>(values->untyped_data());
  }
  buffers.input = static_cast<const std::byte*>(input->untyped_data());
  buffers.output = static_cast<std::byte*>(result.untyped_data());
  buffers.input_bytes = input->size_bytes();
  buffers.output_bytes = result.size_bytes();
  buffers.dtype = static_cast<DType>(input->element_type());
  sizes.row_bytes = DTypeSize(buffers.dtype);
  for (size_t i = 1; i < rows_in.size(); ++i) sizes.row_bytes *= static_cast<size_t>(rows_in[i]);
  sizes.input_rows = static_cast<size_t>(rows_in[0]);
  sizes.output_rows = static_cast<size_t>(rows_out[0]);
  buffers.ragged = {static_cast<const std::byte*>(initial->untyped_data()), metadata[0],
                    metadata[1], metadata[2], metadata[3]};
  return buffers;
}

ExecuteResult ExecuteRagged(CallState* state, ffi::RunId run_id, int32_t device,
                            ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer> result) {
  auto buffers = DecodeRagged(arguments, *result, /*may_be_int32=*/false);
  if (!buffers.has_value()) return {buffers.error()};
  auto partition = DecodePartition(state->site.spec(), arguments, kOperands);
  if (!partition.has_value()) return {partition.error()};
  return ExecuteOn(state, run_id, device, *partition, *buffers);
}

ffi::ErrorOr<Buffers> DecodeCudaRagged(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  auto result = results.get<ffi::AnyBuffer>(0);
  if (!result.has_value()) return ffi::Unexpected(result.error());
  return DecodeRagged(arguments, **result, /*may_be_int32=*/true);
}

}  // namespace

JF_DEFINE_OP_WITH(RaggedAllToAll, Decode, ExecuteRagged);
JF_DEFINE_CUDA_OP_WITH(RaggedAllToAll, Decode, DecodeCudaRagged);

}  // namespace jaxfabric
