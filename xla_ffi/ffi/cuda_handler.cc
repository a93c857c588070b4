#include "ffi/cuda_handler.h"

#include <utility>

#include "collective/call_site.h"
#include "collective/fabric.h"

namespace jaxfabric {

ffi::TypeId CudaCallState::id = {};
const ffi::TypeInfo CudaCallState::type_info = ffi::MakeTypeInfo<CudaCallState>();

ffi::ErrorOr<Buffers> DecodeCudaBuffers(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  auto input = arguments.get<ffi::AnyBuffer>(0);
  if (!input.has_value()) return ffi::Unexpected(input.error());
  auto output = results.get<ffi::AnyBuffer>(0);
  if (!output.has_value()) return ffi::Unexpected(output.error());
  Buffers buffers;
  buffers.input = static_cast<const std::byte*>(input->untyped_data());
  buffers.output = static_cast<std::byte*>((*output)->untyped_data());
  buffers.input_bytes = input->size_bytes();
  buffers.output_bytes = (*output)->size_bytes();
  buffers.dtype = static_cast<DType>(input->element_type());
  return buffers;
}

ffi::ErrorOr<std::unique_ptr<CudaCallState>> MakeCudaState(ffi::ErrorOr<CallSpec> spec,
                                                           GpuCall::Slot slot) {
  if (!spec.has_value()) return ffi::Unexpected(spec.error());
  if (Status valid = spec->Validate(); !valid.ok()) return ffi::Unexpected(ToFfiError(valid));
  return std::make_unique<CudaCallState>(*std::move(spec), slot);
}

const WindowCore& CudaWindowCore() {
  static const WindowCore core = {
      .type_id = [] { return CudaCallState::id.type_id; },
      .attach =
          [](void* state, int ordinal, cuda::CUstream stream, const Buffers& buffers,
             const GpuWindows& windows) {
            return static_cast<CudaCallState*>(state)->call.Attach(ordinal, stream, buffers,
                                                                   windows);
          },
  };
  return core;
}

ffi::Error CudaStart(CudaCallState* state, int32_t ordinal, cuda::CUstream stream,
                     ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  auto buffers = DecodeCudaBuffers(arguments, results);
  if (!buffers.has_value()) return buffers.error();
  return ToFfiError(state->call.Start(ordinal, stream, *buffers));
}

namespace {

// x, y, token -> y: the stream waits for the call that was started with this site.
ffi::Error Done(int32_t ordinal, cuda::CUstream stream, ffi::RemainingArgs arguments,
                ffi::RemainingRets results, ffi::Dictionary attributes) {
  auto site = attributes.get<int64_t>("site");
  if (!site.has_value()) return site.error();
  const std::shared_ptr<Fabric> fabric = CurrentFabric();
  if (!fabric || fabric->gpus() == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "a collective is waited for in a fabric that has been shut down");
  }
  GpuDomain& domain = *fabric->gpus();
  const Status finished = domain.Finish(ordinal, stream, static_cast<uint64_t>(*site));
  if (!finished.ok()) return ToFfiError(finished);
  auto from = arguments.get<ffi::AnyBuffer>(1);
  if (!from.has_value()) return from.error();
  auto to = results.get<ffi::AnyBuffer>(0);
  if (!to.has_value()) return to.error();
  // XLA is told that they are the same, and may have reasons of its own.
  if (from->untyped_data() == (*to)->untyped_data()) return ffi::Error::Success();
  return ToFfiError(domain.Copy(ordinal, stream, (*to)->untyped_data(), from->untyped_data(),
                                from->size_bytes()));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDoneExecute, Done,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<cuda::CUstream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

}  // namespace jaxfabric
