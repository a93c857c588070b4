// The handlers for platform "CUDA": the same targets and attributes as on CPUs, kernels on XLA's
// stream.
//
// Initialize sets a call up, which may wait for the other ranks; execute only launches, so that it
// may be captured into a CUDA graph and replayed with other buffers. Halves of a call are not
// captured: their events tie streams together, which a graph of one half could not.
#pragma once

#include <memory>

#include "collective/gpu/call.h"
#include "ffi/handler.h"

namespace jaxfabric {

// Made by the instantiate stage, once per call instruction of an executable.
struct CudaCallState {
  static ffi::TypeId id;
  static const ffi::TypeInfo type_info;
  CudaCallState(CallSpec spec, GpuCall::Slot slot) : call(std::move(spec), slot) {}
  GpuCall call;
};

ffi::ErrorOr<std::unique_ptr<CudaCallState>> MakeCudaState(ffi::ErrorOr<CallSpec> spec,
                                                           GpuCall::Slot slot);

template <ffi::ErrorOr<CallSpec> (*decode)(ffi::Dictionary), GpuCall::Slot slot>
ffi::ErrorOr<std::unique_ptr<CudaCallState>> CudaInstantiate(ffi::Dictionary attributes) {
  return MakeCudaState(decode(attributes), slot);
}

using DecodeBuffers = ffi::ErrorOr<Buffers>(ffi::RemainingArgs, ffi::RemainingRets);

// Of the ops that have one operand and one result.
ffi::ErrorOr<Buffers> DecodeCudaBuffers(ffi::RemainingArgs arguments, ffi::RemainingRets results);

// The stages of an op whose operands and result decode() reads.
template <DecodeBuffers* decode>
ffi::Error CudaInitialize(CudaCallState* state, int32_t ordinal, ffi::RemainingArgs arguments,
                          ffi::RemainingRets results) {
  auto buffers = decode(arguments, results);
  if (!buffers.has_value()) return buffers.error();
  return ToFfiError(state->call.Prepare(ordinal, *buffers));
}
template <DecodeBuffers* decode>
ffi::Error CudaExecute(CudaCallState* state, int32_t ordinal, cuda::CUstream stream,
                       ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  auto buffers = decode(arguments, results);
  if (!buffers.has_value()) return buffers.error();
  return ToFfiError(state->call.Launch(ordinal, stream, *buffers));
}

#define JF_CUDA_STAGES(name, decode, slot, decode_buffers, execute, ...)                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Cuda##name##Instantiate,                                  \
                                (::jaxfabric::CudaInstantiate<decode, slot>),             \
                                ::xla::ffi::Ffi::BindInstantiate().Attrs());              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Cuda##name##Initialize,                                   \
                                ::jaxfabric::CudaInitialize<decode_buffers>,              \
                                ::xla::ffi::Ffi::BindInitialize()                         \
                                    .Ctx<::xla::ffi::State<::jaxfabric::CudaCallState>>() \
                                    .Ctx<::xla::ffi::DeviceOrdinal>()                     \
                                    .RemainingArgs()                                      \
                                    .RemainingRets());                                    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                          \
      Cuda##name##Execute, execute,                                                       \
      ::xla::ffi::Ffi::Bind()                                                             \
          .Ctx<::xla::ffi::State<::jaxfabric::CudaCallState>>()                           \
          .Ctx<::xla::ffi::DeviceOrdinal>()                                               \
          .Ctx<::xla::ffi::PlatformStream<::jaxfabric::cuda::CUstream>>()                 \
          .RemainingArgs()                                                                \
          .RemainingRets(),                                                               \
      {__VA_ARGS__})

// JF_DEFINE_CUDA_OP(AllReduce, Decode) defines CudaAllReduceInstantiate, -Initialize and -Execute.
#define JF_DEFINE_CUDA_OP(name, decode) \
  JF_DEFINE_CUDA_OP_WITH(name, decode, ::jaxfabric::DecodeCudaBuffers)
#define JF_DEFINE_CUDA_OP_WITH(name, decode, decode_buffers)                         \
  JF_CUDA_STAGES(name, decode, ::jaxfabric::GpuCall::Slot::kInOrder, decode_buffers, \
                 ::jaxfabric::CudaExecute<decode_buffers>,                           \
                 ::xla::ffi::Traits::kCmdBufferCompatible)
// The first half of an op.
#define JF_DEFINE_CUDA_START(name, decode)                                  \
  JF_CUDA_STAGES(name##Start, decode, ::jaxfabric::GpuCall::Slot::kStarted, \
                 ::jaxfabric::DecodeCudaBuffers, ::jaxfabric::CudaStart)

// These calls, for the module that adds windows to them.
const WindowCore& CudaWindowCore();

// x -> y, token: launches beside the stream.
ffi::Error CudaStart(CudaCallState* state, int32_t ordinal, cuda::CUstream stream,
                     ffi::RemainingArgs arguments, ffi::RemainingRets results);

}  // namespace jaxfabric
