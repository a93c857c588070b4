// x[r, s], y[q, s], four arrays [k] -> y[q, s]: y, and in it slices of every rank's x where their
// senders want them.
#include <algorithm>
#include <array>

#include "ffi/handler.h"

namespace jaxfabric {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  auto spec = DecodeCommon(OpKind::kRaggedAllToAll, attributes);
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  return MakeState(*std::move(spec));
}

using Metadata = ffi::BufferR1<ffi::DataType::S64>;
constexpr size_t kOperands = 6;

ExecuteResult ExecuteRagged(CallState* state, ffi::RunId run_id, int32_t device,
                            ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer> result) {
  auto input = arguments.get<ffi::AnyBuffer>(0);
  if (!input.has_value()) return {input.error()};
  auto initial = arguments.get<ffi::AnyBuffer>(1);
  if (!initial.has_value()) return {initial.error()};
  std::array<const int64_t*, 4> metadata;
  size_t slices = 0;
  for (size_t i = 0; i < metadata.size(); ++i) {
    auto values = arguments.get<Metadata>(2 + i);
    if (!values.has_value()) return {values.error()};
    if (i > 0 && values->element_count() != slices) {
      return {ffi::Error::InvalidArgument("ragged_all_to_all: offsets and sizes differ in length")};
    }
    slices = values->element_count();
    metadata[i] = values->typed_data();
  }
  const auto rows_in = input->dimensions();
  const auto rows_out = result->dimensions();
  const auto like_result = [&](const ffi::AnyBuffer& buffer, size_t from) {
    const auto dimensions = buffer.dimensions();
    return buffer.element_type() == result->element_type() && rows_out.size() > 0 &&
           dimensions.size() == rows_out.size() &&
           std::equal(dimensions.begin() + from, dimensions.end(), rows_out.begin() + from);
  };
  if (!like_result(*input, 1) || !like_result(*initial, 0)) {
    return {ffi::Error::InvalidArgument(
        "ragged_all_to_all: the operand, the output and the result differ in rows or type")};
  }
  Buffers buffers;
  buffers.input = static_cast<const std::byte*>(input->untyped_data());
  buffers.output = static_cast<std::byte*>(result->untyped_data());
  buffers.input_bytes = input->size_bytes();
  buffers.output_bytes = result->size_bytes();
  buffers.dtype = static_cast<DType>(input->element_type());
  buffers.ragged_sizes.row_bytes = DTypeSize(buffers.dtype);
  for (size_t i = 1; i < rows_in.size(); ++i) {
    buffers.ragged_sizes.row_bytes *= static_cast<size_t>(rows_in[i]);
  }
  buffers.ragged_sizes.input_rows = static_cast<size_t>(rows_in[0]);
  buffers.ragged_sizes.output_rows = static_cast<size_t>(rows_out[0]);
  buffers.ragged_sizes.slices = slices;
  buffers.ragged = {static_cast<const std::byte*>(initial->untyped_data()), metadata[0],
                    metadata[1], metadata[2], metadata[3]};
  auto partition = DecodePartition(state->site.spec(), arguments, kOperands);
  if (!partition.has_value()) return {partition.error()};
  return ExecuteOn(state, run_id, device, *partition, buffers);
}

}  // namespace

JF_DEFINE_OP_WITH(RaggedAllToAll, Instantiate, ExecuteRagged);

}  // namespace jaxfabric
