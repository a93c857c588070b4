// x -> handle, and handle -> y: a collective in two halves. Start returns once the operand is
// copied; done waits for the result.
#include "collective/started_call.h"
#include "ffi/handler.h"
#include "memory/copy.h"

namespace jaxfabric {
namespace {

size_t OutputBytes(const CallSpec& spec, size_t input_bytes) {
  const size_t ranks = spec.groups[0].size();
  if (spec.kind == OpKind::kAllGather) return input_bytes * ranks;
  return spec.kind == OpKind::kReduceScatter ? input_bytes / ranks : input_bytes;
}

ffi::Error Start(CallState* state, ffi::RunId run_id, int32_t device, ffi::RemainingArgs arguments,
                 ffi::Result<ffi::BufferR0<ffi::DataType::U64>> handle) {
  auto operands = DecodeOperands(state->site.spec(), arguments);
  if (!operands.has_value()) return operands.error();
  const size_t output_bytes = OutputBytes(state->site.spec(), operands->bytes);
  const auto [number, call] = StartedCalls::Get().Make(operands->bytes, output_bytes);
  Copy(call->input(), operands->input, operands->bytes);
  Buffers buffers;
  buffers.input = call->input();
  buffers.output = call->output();
  buffers.input_bytes = operands->bytes;
  buffers.output_bytes = output_bytes;
  buffers.dtype = operands->dtype;
  const Status started =
      state->site.Start(device, operands->partition, run_id.run_id, buffers,
                        [call = call](const Status& status) { call->Finish(status); });
  if (!started.ok()) {
    StartedCalls::Get().Take(number);
    return ToFfiError(started);
  }
  *handle->typed_data() = number;
  return ffi::Error::Success();
}

ExecuteResult Done(ffi::BufferR0<ffi::DataType::U64> handle, ffi::Result<ffi::AnyBuffer> result) {
  const auto call = StartedCalls::Get().Take(*handle.typed_data());
  if (!call || call->output_bytes() != result->size_bytes()) {
    return {ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                       "a collective is waited for that was not started, or in a fabric that has "
                       "been shut down")};
  }
  std::optional<ffi::Future> future;
  const auto make_finished = [&]() -> StartedCall::Finished {
    ffi::Promise promise;
    future.emplace(promise);
    return [promise = std::move(promise), call](const Status& status) mutable {
      StartedCalls::Get().Recycle(std::move(call));
      Resolve(promise, status);
    };
  };
  const std::optional<Status> status =
      call->Wait(static_cast<std::byte*>(result->untyped_data()), make_finished);
  if (!status) return {std::move(*future)};
  StartedCalls::Get().Recycle(call);
  if (!status->ok()) return {ToFfiError(*status)};
  return {};
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(StartExecute, Start,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CallState>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()  // x, and the partition id
                                  .Ret<ffi::BufferR0<ffi::DataType::U64>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DoneExecute, Done,
    ffi::Ffi::Bind().Arg<ffi::BufferR0<ffi::DataType::U64>>().Ret<ffi::AnyBuffer>());

}  // namespace jaxfabric
