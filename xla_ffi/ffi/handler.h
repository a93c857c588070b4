// What the handlers of all ops share: the state of a call instance, the execute stage, and the
// attributes. One file per op adds the attributes of its own.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "collective/call_site.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfabric {

namespace ffi = xla::ffi;

// Made by the instantiate stage, once per call instruction of an executable, destroyed with it.
struct CallState {
  static ffi::TypeId id;
  static const ffi::TypeInfo type_info;
  explicit CallState(CallSpec spec) : site(std::move(spec)) {}
  CallSite site;
};

// The common attributes.
ffi::ErrorOr<CallSpec> DecodeCommon(OpKind kind, const ffi::Dictionary& attributes);
ffi::ErrorOr<ReduceOp> DecodeReduction(const ffi::Dictionary& attributes);
ffi::ErrorOr<std::unique_ptr<CallState>> MakeState(ffi::ErrorOr<CallSpec> spec);

ffi::Error ToFfiError(const Status& status);
void Resolve(ffi::Promise& promise, const Status& status);

// Where the spec is by position, the partition id: the operand behind the op's own `index`.
ffi::ErrorOr<std::optional<uint32_t>> DecodePartition(const CallSpec& spec,
                                                      ffi::RemainingArgs arguments, size_t index);

// x and, for specs by position, the partition id. Pointers: the buffer objects die with the call.
struct Operands {
  const std::byte* input;
  size_t bytes;
  DType dtype;
  std::optional<uint32_t> partition;
};
ffi::ErrorOr<Operands> DecodeOperands(const CallSpec& spec, ffi::RemainingArgs arguments);

// The result of an execution: done, failed, or to be done by a future. Unlike ffi::Future alone it
// costs no allocation where the collective finished on the caller's thread.
struct ExecuteResult {
  std::variant<std::monostate, ffi::Error, ffi::Future> value;
};

// The execute stage of the ops that have one operand.
ExecuteResult Execute(CallState* state, ffi::RunId run_id, int32_t device,
                      ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer> result);

// What every execute stage ends in.
ExecuteResult ExecuteOn(CallState* state, ffi::RunId run_id, int32_t device,
                        std::optional<uint32_t> partition, const Buffers& buffers);

// The instantiate stage of an op whose attributes decode() turns into a spec.
template <ffi::ErrorOr<CallSpec> (*decode)(ffi::Dictionary)>
ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  return MakeState(decode(attributes));
}

// The two handlers of an op: JF_DEFINE_OP(AllReduce, Decode) defines AllReduceInstantiate and
// AllReduceExecute.
#define JF_DEFINE_OP(name, decode) JF_DEFINE_OP_WITH(name, decode, ::jaxfabric::Execute)
// The same with an execute stage of its own.
#define JF_DEFINE_OP_WITH(name, decode, execute)                                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##Instantiate, ::jaxfabric::Instantiate<decode>,  \
                                ::xla::ffi::Ffi::BindInstantiate().Attrs());          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##Execute, execute,                               \
                                ::xla::ffi::Ffi::Bind()                               \
                                    .Ctx<::xla::ffi::State<::jaxfabric::CallState>>() \
                                    .Ctx<::xla::ffi::RunId>()                         \
                                    .Ctx<::xla::ffi::DeviceOrdinal>()                 \
                                    .RemainingArgs() /* x, and the partition id */    \
                                    .Ret<::xla::ffi::AnyBuffer>() /* y */)

}  // namespace jaxfabric

template <>
struct xla::ffi::ResultEncoding<xla::ffi::ExecutionStage::kExecute, jaxfabric::ExecuteResult> {
  static std::variant<XLA_FFI_Error*, XLA_FFI_Future*> Encode(const XLA_FFI_Api* api,
                                                              XLA_FFI_ExecutionContext* context,
                                                              jaxfabric::ExecuteResult result) {
    if (auto* future = std::get_if<xla::ffi::Future>(&result.value)) {
      return ResultEncoding<ExecutionStage::kExecute, Future>::Encode(api, context,
                                                                      std::move(*future));
    }
    if (auto* error = std::get_if<xla::ffi::Error>(&result.value)) {
      return internal::CreateError(api, *error);
    }
    return static_cast<XLA_FFI_Error*>(nullptr);
  }
};
