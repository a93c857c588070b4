#include "ffi/handler.h"

#include <optional>
#include <utility>
#include <vector>

namespace jaxfabric {

ffi::TypeId CallState::id = {};
const ffi::TypeInfo CallState::type_info = ffi::MakeTypeInfo<CallState>();

ffi::Error ToFfiError(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(static_cast<ffi::ErrorCode>(status.code()), std::string(status.message()));
}

namespace {

ffi::ErrorOr<std::vector<int64_t>> DecodeInts(const ffi::Dictionary& attributes,
                                              std::string_view name) {
  auto values = attributes.get<ffi::Span<const int64_t>>(name);
  if (!values.has_value()) return ffi::Unexpected(values.error());
  return std::vector<int64_t>(values->begin(), values->end());
}

}  // namespace

ffi::ErrorOr<CallSpec> DecodeCommon(OpKind kind, const ffi::Dictionary& attributes) {
  CallSpec spec;
  spec.kind = kind;
  auto site = attributes.get<int64_t>("site");
  if (!site.has_value()) return ffi::Unexpected(site.error());
  auto place = attributes.get<int64_t>("place");
  if (!place.has_value()) return ffi::Unexpected(place.error());
  auto label = attributes.get<std::string_view>("label");
  if (!label.has_value()) return ffi::Unexpected(label.error());
  auto by_position = attributes.get<int64_t>("by_position");
  if (!by_position.has_value()) return ffi::Unexpected(by_position.error());
  auto members = DecodeInts(attributes, "members");
  if (!members.has_value()) return ffi::Unexpected(members.error());
  auto sizes = DecodeInts(attributes, "group_sizes");
  if (!sizes.has_value()) return ffi::Unexpected(sizes.error());
  if (attributes.contains("positions")) {
    auto positions = DecodeInts(attributes, "positions");
    if (!positions.has_value()) return ffi::Unexpected(positions.error());
    spec.positions = *std::move(positions);
  }
  spec.site = static_cast<uint64_t>(*site);
  spec.place = static_cast<uint64_t>(*place);
  spec.label = *label;
  spec.by_position = *by_position != 0;
  size_t next = 0;
  for (int64_t size : *sizes) {
    if (size < 0 || static_cast<size_t>(size) > members->size() - next) {
      return ffi::Unexpected(ffi::Error::InvalidArgument("group_sizes exceed members"));
    }
    const auto begin = members->begin() + static_cast<std::ptrdiff_t>(next);
    spec.groups.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(size));
    next += static_cast<size_t>(size);
  }
  return spec;
}

ffi::ErrorOr<ReduceOp> DecodeReduction(const ffi::Dictionary& attributes) {
  auto name = attributes.get<std::string_view>("reduction");
  if (!name.has_value()) return ffi::Unexpected(name.error());
  if (*name == "sum") return ReduceOp::kSum;
  if (*name == "max") return ReduceOp::kMax;
  if (*name == "min") return ReduceOp::kMin;
  return ffi::Unexpected(
      ffi::Error::InvalidArgument("reduction '" + std::string(*name) + "' is not sum, max or min"));
}

ffi::ErrorOr<std::unique_ptr<CallState>> MakeState(ffi::ErrorOr<CallSpec> spec) {
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  if (Status valid = spec->Validate(); !valid.ok()) return ffi::Unexpected(ToFfiError(valid));
  return std::make_unique<CallState>(*std::move(spec));
}

void Resolve(ffi::Promise& promise, const Status& status) {
  if (status.ok()) {
    promise.SetAvailable();
  } else {
    promise.SetError(ToFfiError(status));
  }
}

ffi::ErrorOr<std::optional<uint32_t>> DecodePartition(const CallSpec& spec,
                                                      ffi::RemainingArgs arguments, size_t index) {
  if (!spec.by_position) return std::optional<uint32_t>();
  auto operand = arguments.get<ffi::BufferR0<ffi::DataType::U32>>(index);
  if (!operand.has_value()) return ffi::Unexpected(operand.error());
  return std::optional<uint32_t>(*operand->typed_data());
}

ffi::ErrorOr<Operands> DecodeOperands(const CallSpec& spec, ffi::RemainingArgs arguments) {
  auto input = arguments.get<ffi::AnyBuffer>(0);
  if (!input.has_value()) return ffi::Unexpected(input.error());
  auto partition = DecodePartition(spec, arguments, 1);
  if (!partition.has_value()) return ffi::Unexpected(partition.error());
  return Operands{static_cast<const std::byte*>(input->untyped_data()), input->size_bytes(),
                  static_cast<DType>(input->element_type()), *partition};
}

ExecuteResult Execute(CallState* state, ffi::RunId run_id, int32_t device,
                      ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer> result) {
  auto operands = DecodeOperands(state->site.spec(), arguments);
  if (!operands.has_value()) return {operands.error()};
  Buffers buffers;
  buffers.input = operands->input;
  buffers.output = static_cast<std::byte*>(result->untyped_data());
  buffers.input_bytes = operands->bytes;
  buffers.output_bytes = result->size_bytes();
  buffers.dtype = operands->dtype;
  return ExecuteOn(state, run_id, device, operands->partition, buffers);
}

ExecuteResult ExecuteOn(CallState* state, ffi::RunId run_id, int32_t device,
                        std::optional<uint32_t> partition, const Buffers& buffers) {
  std::optional<ffi::Future> future;
  const auto make_finished = [&future]() -> CallSite::Finished {
    ffi::Promise promise;
    future.emplace(promise);
    return
        [promise = std::move(promise)](const Status& status) mutable { Resolve(promise, status); };
  };
  const Status status =
      state->site.Execute(device, partition, run_id.run_id, buffers, make_finished);
  if (future) return {std::move(*future)};
  if (!status.ok()) return {ToFfiError(status)};
  return {};
}

}  // namespace jaxfabric
