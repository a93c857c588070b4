#include "windows/stages.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "xla/ffi/api/collectives_c_api.h"

namespace jaxfabric {
namespace {

namespace ffi = xla::ffi;
using Extension = XLA_FFI_Collectives_Extension;

const WindowCore* g_core = nullptr;

// The state that the core's instantiate stage made; only its type id is known here.
struct CoreState {
  static ffi::TypeId id;
};
ffi::TypeId CoreState::id = {};

// A context that is there in every call: the extension, or null.
struct MaybeExtension {};

// What a newer minor version adds is behind what is known here. Versions of a new major may be
// anything.
bool IsKnown(const XLA_FFI_Extension& extension) {
  return extension.id.major_version == XLA_FFI_Extension_Collectives_MajorVersion &&
         extension.id.minor_version >= XLA_FFI_Extension_Collectives_MinorVersion &&
         extension.struct_size >= XLA_FFI_Collectives_Extension_STRUCT_SIZE;
}

struct Request {
  std::vector<std::vector<int64_t>> groups;  // members in ascending order
  std::vector<XLA_FFI_ReplicaGroup> raw;
  int64_t windows = 0;
};

ffi::ErrorOr<Request> DecodeRequest(const ffi::Dictionary& attributes) {
  auto positions = attributes.get<ffi::Span<const int64_t>>("positions");
  if (!positions.has_value()) return ffi::Unexpected(positions.error());
  auto sizes = attributes.get<ffi::Span<const int64_t>>("group_sizes");
  if (!sizes.has_value()) return ffi::Unexpected(sizes.error());
  auto windows = attributes.get<int64_t>("windows");
  if (!windows.has_value()) return ffi::Unexpected(windows.error());
  Request request;
  request.windows = *windows;
  size_t next = 0;
  for (const int64_t size : *sizes) {
    if (size < 0 || static_cast<size_t>(size) > positions->size() - next) {
      return ffi::Unexpected(ffi::Error::InvalidArgument("group_sizes exceed positions"));
    }
    const auto begin = positions->begin() + next;
    auto& group = request.groups.emplace_back(begin, begin + size);
    std::sort(group.begin(), group.end());
    next += static_cast<size_t>(size);
  }
  for (const auto& group : request.groups) request.raw.push_back({group.data(), group.size()});
  return request;
}

// Which communicator is meant, as all requests say it.
template <class Arguments>
Arguments MakeArguments(size_t struct_size, const Request& request) {
  Arguments arguments{};
  arguments.struct_size = struct_size;
  arguments.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  arguments.groups = request.raw.data();
  arguments.num_groups = request.raw.size();
  arguments.communication_id = kCommunicationId;
  return arguments;
}
#define JF_MAKE_ARGUMENTS(Type, request) MakeArguments<Type>(Type##_STRUCT_SIZE, request)

ffi::ErrorOr<Buffers> DecodeBuffers(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
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

// An error of XLA as one of the handler, which XLA adds to its own words.
ffi::Error Take(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  const std::string message = ffi::internal::GetErrorMessage(api, error);
  ffi::internal::DestroyError(api, error);
  return ffi::Error(ffi::ErrorCode::kInternal, message);
}

// Once for a process: it would be the same for all calls.
void Tell(std::string_view what) {
  static const bool told = [&] {
    Log(LogLevel::kWarning, StrCat("calls on GPUs copy their arrays: ", what));
    return true;
  }();
  (void)told;
}

struct Xla {
  const XLA_FFI_Api* api;
  const Extension* extension;
};

ffi::Error Prepare(Xla xla, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  if (xla.extension == nullptr) {
    Tell(
        "this XLA gives handlers no communicators and windows, or in a way that is not known here");
    return ffi::Error::Success();
  }
  auto request = DecodeRequest(attributes);
  if (!request.has_value()) return request.error();
  auto buffers = DecodeBuffers(arguments, results);
  if (!buffers.has_value()) return buffers.error();
  auto communicator = JF_MAKE_ARGUMENTS(XLA_FFI_Communicator_Request_Args, *request);
  if (XLA_FFI_Error* error = xla.extension->request_communicator(xla.extension, &communicator)) {
    return Take(xla.api, error);
  }
  std::vector<XLA_FFI_CollectiveMemoryRegion> regions;
  if (request->windows & kWindowOfOperand) {
    regions.push_back({buffers->input, buffers->input_bytes, 0});
  }
  if (request->windows & kWindowOfResult) {
    regions.push_back({buffers->output, buffers->output_bytes, 0});
  }
  auto windows = JF_MAKE_ARGUMENTS(XLA_FFI_Window_Request_Args, *request);
  windows.regions = regions.data();
  windows.num_regions = regions.size();
  if (XLA_FFI_Error* error = xla.extension->request_window(xla.extension, &windows)) {
    return Take(xla.api, error);
  }
  return ffi::Error::Success();
}

// Null where XLA has none, or says why not: other ranks may have theirs, and then all copy.
GpuWindows::Place FindWindow(Xla xla, const Request& request, const void* array) {
  auto arguments = JF_MAKE_ARGUMENTS(XLA_FFI_Window_Get_Args, request);
  arguments.buffer = array;
  if (XLA_FFI_Error* error = xla.extension->get_window(xla.extension, &arguments)) {
    Tell(Take(xla.api, error).message());
    return {};
  }
  return {arguments.window, arguments.window_offset};
}

ffi::Error Initialize(Xla xla, CoreState* state, int32_t ordinal, cuda::CUstream stream,
                      ffi::RemainingArgs arguments, ffi::RemainingRets results,
                      ffi::Dictionary attributes) {
  auto request = DecodeRequest(attributes);
  if (!request.has_value()) return request.error();
  auto buffers = DecodeBuffers(arguments, results);
  if (!buffers.has_value()) return buffers.error();
  GpuWindows found;
  if (xla.extension != nullptr) {
    auto communicator = JF_MAKE_ARGUMENTS(XLA_FFI_Communicator_Get_Args, *request);
    if (XLA_FFI_Error* error = xla.extension->get_communicator(xla.extension, &communicator)) {
      Tell(Take(xla.api, error).message());
    } else {
      found.communicator = communicator.communicator;
      if (request->windows & kWindowOfOperand) {
        found.input = FindWindow(xla, *request, buffers->input);
      }
      if (request->windows & kWindowOfResult) {
        found.output = FindWindow(xla, *request, buffers->output);
      }
    }
  }
  const Status attached = g_core->attach(state, ordinal, stream, *buffers, found);
  if (attached.ok()) return ffi::Error::Success();
  return ffi::Error(static_cast<ffi::ErrorCode>(attached.code()), std::string(attached.message()));
}

}  // namespace

Status ConnectCore(const WindowCore* core) {
  const WindowCore own;
  if (core->version != own.version || core->sizes != own.sizes) {
    return Status(Code::kFailedPrecondition,
                  "the modules of jaxfabric are of two builds; install it again");
  }
  g_core = core;
  CoreState::id = {core->type_id()};
  return OkStatus();
}

ExtensionVersion CompiledExtension() {
  return {XLA_FFI_Extension_Collectives_MajorVersion, XLA_FFI_Extension_Collectives_MinorVersion};
}

}  // namespace jaxfabric

template <>
struct xla::ffi::CtxDecoding<jaxfabric::MaybeExtension> {
  using Type = jaxfabric::Xla;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_InvokeContext* context,
                                    DiagnosticEngine&) {
    XLA_FFI_InvokeContext_FindExtension_Args arguments{};
    arguments.struct_size = XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE;
    arguments.ctx = context;
    arguments.extension_type = XLA_FFI_Extension_Collectives;
    if (XLA_FFI_Error* error = api->XLA_FFI_InvokeContext_FindExtension(&arguments)) {
      internal::DestroyError(api, error);
      return Type{api, nullptr};
    }
    const XLA_FFI_Extension* const found = arguments.extension;
    if (found == nullptr || !jaxfabric::IsKnown(*found)) return Type{api, nullptr};
    return Type{api, reinterpret_cast<const jaxfabric::Extension*>(found)};
  }
};

namespace jaxfabric {

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    WindowsPrepare, Prepare,
    ffi::Ffi::BindPrepare().Ctx<MaybeExtension>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(WindowsInitialize, Initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<MaybeExtension>()
                                  .Ctx<ffi::State<CoreState>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<cuda::CUstream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

}  // namespace jaxfabric
