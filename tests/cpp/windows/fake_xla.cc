#include "windows/fake_xla.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};
struct XLA_FFI_InvokeContext {
  jaxfabric::testing::FakeXla::Rank* rank;
};

namespace jaxfabric::testing {
namespace {

constexpr size_t kPage = 4096;

XLA_FFI_Error* Fail(std::string message) {
  return new XLA_FFI_Error{std::move(message), XLA_FFI_Error_Code_INTERNAL};
}

// Memory of a window may begin anywhere before the array, but at a page.
std::byte* WindowOf(std::byte* array, size_t shift, const XlaFaults& faults) {
  auto begin = reinterpret_cast<uintptr_t>(array) / kPage * kPage - shift * kPage;
  return reinterpret_cast<std::byte*>(begin + (faults.not_at_page ? 256 : 0));
}

}  // namespace

struct FakeXlaFunctions {
  static FakeXla::Rank& RankOf(const XLA_FFI_Collectives_Extension* self) {
    return *reinterpret_cast<FakeXla::Rank*>(self->state);
  }

  template <class Arguments>
  static std::string Describe(const char* what, const Arguments& arguments) {
    std::string text = StrCat(what, " mode ", static_cast<int>(arguments.group_mode), " id ",
                              arguments.communication_id);
    for (size_t i = 0; i < arguments.num_groups; ++i) {
      text += " (";
      for (size_t k = 0; k < arguments.groups[i].size; ++k) {
        text += StrCat(" ", arguments.groups[i].ids[k]);
      }
      text += " )";
    }
    return text;
  }

  static XLA_FFI_Error* RequestCommunicator(const XLA_FFI_Collectives_Extension* self,
                                            XLA_FFI_Communicator_Request_Args* arguments) {
    FakeXla::Rank& rank = RankOf(self);
    if (rank.faults.request_fails) return Fail("no such group");
    rank.requests += Describe("communicator", *arguments) + "\n";
    return nullptr;
  }
  static XLA_FFI_Error* RequestWindow(const XLA_FFI_Collectives_Extension* self,
                                      XLA_FFI_Window_Request_Args* arguments) {
    FakeXla::Rank& rank = RankOf(self);
    rank.requests += Describe("windows", *arguments);
    for (size_t i = 0; i < arguments->num_regions; ++i) {
      const XLA_FFI_CollectiveMemoryRegion& region = arguments->regions[i];
      rank.requests += StrCat(" ", region.byte_size, " bytes, flags ", region.flags);
      auto* begin = const_cast<std::byte*>(static_cast<const std::byte*>(region.buffer));
      rank.arrays.push_back({begin, region.byte_size, nullptr, 0});
    }
    rank.requests += "\n";
    return nullptr;
  }
  static XLA_FFI_Error* GetCommunicator(const XLA_FFI_Collectives_Extension* self,
                                        XLA_FFI_Communicator_Get_Args* arguments) {
    arguments->communicator = static_cast<XLA_FFI_Communicator*>(RankOf(self).communicator);
    return nullptr;
  }
  static XLA_FFI_Error* GetWindow(const XLA_FFI_Collectives_Extension* self,
                                  XLA_FFI_Window_Get_Args* arguments) {
    FakeXla::Rank& rank = RankOf(self);
    if (rank.faults.get_fails) return Fail("symmetric memory is not supported");
    for (const auto& array : rank.arrays) {
      if (array.begin != arguments->buffer) continue;
      arguments->window = static_cast<XLA_FFI_Window*>(array.window);
      arguments->window_offset = array.offset;
      return nullptr;
    }
    return Fail("this array was not asked for");
  }

  // --- the part of the FFI that the stages use
  static XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* arguments) {
    return new XLA_FFI_Error{arguments->message, arguments->errc};
  }
  static void GetErrorDetails(XLA_FFI_Error_GetDetails_Args* arguments) {
    arguments->message = arguments->error->message.c_str();
    arguments->errc = arguments->error->code;
  }
  static void DestroyError(XLA_FFI_Error_Destroy_Args* arguments) { delete arguments->error; }
  static XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* arguments) {
    arguments->stream = arguments->ctx->rank->stream;
    return nullptr;
  }
  static XLA_FFI_Error* GetState(XLA_FFI_State_Get_Args* arguments) {
    if (arguments->type_id->type_id != 7) return Fail("another type");
    arguments->state = arguments->ctx->rank->state;
    return nullptr;
  }
  static XLA_FFI_Error* GetOrdinal(XLA_FFI_DeviceOrdinal_Get_Args* arguments) {
    arguments->device_ordinal = arguments->ctx->rank->ordinal;
    return nullptr;
  }
  static XLA_FFI_Error* FindExtension(XLA_FFI_InvokeContext_FindExtension_Args* arguments) {
    FakeXla::Rank& rank = *arguments->ctx->rank;
    if (arguments->extension_type != XLA_FFI_Extension_Collectives) return Fail("unknown");
    if (!rank.faults.no_extension) arguments->extension = &rank.extension.extension_base;
    return nullptr;
  }
  static const XLA_FFI_Api& Api() {
    static const XLA_FFI_Api api = [] {
      XLA_FFI_Api made{};
      made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
      made.api_version.major_version = XLA_FFI_API_MAJOR;
      made.api_version.minor_version = XLA_FFI_API_MINOR;
      made.XLA_FFI_Error_Create = CreateError;
      made.XLA_FFI_Error_GetDetails = GetErrorDetails;
      made.XLA_FFI_Error_Destroy = DestroyError;
      made.XLA_FFI_Stream_Get = GetStream;
      made.XLA_FFI_State_Get = GetState;
      made.XLA_FFI_DeviceOrdinal_Get = GetOrdinal;
      made.XLA_FFI_InvokeContext_FindExtension = FindExtension;
      return made;
    }();
    return api;
  }
};

FakeXla::FakeXla(nccl::FakeNccl& nccl, int ranks)
    : nccl_(nccl), ranks_(static_cast<size_t>(ranks)), together_(ranks) {
  for (int i = 0; i < ranks; ++i) {
    Rank& rank = ranks_[static_cast<size_t>(i)];
    rank.xla = this;
    rank.number = i;
    rank.extension.request_communicator = FakeXlaFunctions::RequestCommunicator;
    rank.extension.get_communicator = FakeXlaFunctions::GetCommunicator;
    rank.extension.request_window = FakeXlaFunctions::RequestWindow;
    rank.extension.get_window = FakeXlaFunctions::GetWindow;
    rank.extension.state = reinterpret_cast<XLA_FFI_CollectivesState*>(&rank);
  }
}

std::string FakeXla::Prepare(int rank, const CallSpec& spec, const Buffers& buffers) {
  ranks_[static_cast<size_t>(rank)].arrays.clear();
  return Call(rank, WindowsPrepare, XLA_FFI_ExecutionStage_PREPARE, spec, buffers);
}

void FakeXla::Acquire(int number, size_t shift) {
  Rank& own = ranks_[static_cast<size_t>(number)];
  const int count = static_cast<int>(ranks_.size());
  own.communicator =
      nccl_.MakeCommunicator(own.faults.other_rank ? (number + 1) % count : number, count);
  // Where each begins is told to all.
  for (Array& array : own.arrays) {
    std::byte* const begin = WindowOf(array.begin, shift, own.faults);
    array.offset = static_cast<size_t>(array.begin - begin);
  }
  together_.arrive_and_wait();
  for (size_t i = 0; i < own.arrays.size(); ++i) {
    std::vector<std::byte*> begins;
    bool everywhere = true;
    for (const Rank& rank : ranks_) {
      everywhere &= rank.arrays.size() == own.arrays.size();
      if (!everywhere) break;
      const bool hidden = rank.number != number && rank.faults.not_addressable;
      begins.push_back(hidden ? nullptr : rank.arrays[i].begin - rank.arrays[i].offset);
    }
    if (everywhere && !own.faults.null_window) {
      own.arrays[i].window = nccl_.MakeWindow(own.communicator, std::move(begins));
    }
  }
  together_.arrive_and_wait();
}

std::string FakeXla::Initialize(int rank, const CallSpec& spec, const Buffers& buffers, void* state,
                                int ordinal, cuda::CUstream stream) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.state = state;
  own.ordinal = ordinal;
  own.stream = stream;
  return Call(rank, WindowsInitialize, XLA_FFI_ExecutionStage_INITIALIZE, spec, buffers);
}

std::string FakeXla::Run(int rank, const CallSpec& spec, const Buffers& buffers, void* state,
                         int ordinal, cuda::CUstream stream, size_t shift) {
  std::string failed = Prepare(rank, spec, buffers);
  Acquire(rank, shift);
  if (failed.empty()) failed = Initialize(rank, spec, buffers, state, ordinal, stream);
  return failed;
}

std::string FakeXla::Call(int number, XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                          const CallSpec& spec, const Buffers& buffers) {
  Rank& rank = ranks_[static_cast<size_t>(number)];
  rank.extension.extension_base = {
      rank.faults.struct_size,
      {XLA_FFI_Extension_Collectives, rank.faults.major, rank.faults.minor},
      nullptr};
  const auto type = static_cast<XLA_FFI_DataType>(buffers.dtype);
  const auto count = [&](size_t bytes) {
    return static_cast<int64_t>(bytes / DTypeSize(buffers.dtype));
  };
  int64_t dims[] = {count(buffers.input_bytes), count(buffers.output_bytes)};
  XLA_FFI_Buffer arrays[2] = {};
  for (int i = 0; i < 2; ++i) {
    arrays[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    arrays[i].dtype = type;
    arrays[i].rank = 1;
    arrays[i].dims = &dims[i];
  }
  arrays[0].data = const_cast<std::byte*>(buffers.input);
  arrays[1].data = buffers.output;
  void* operands[] = {&arrays[0]};
  void* results[] = {&arrays[1]};
  XLA_FFI_ArgType operand_types[] = {XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType result_types[] = {XLA_FFI_RetType_BUFFER};

  std::vector<int64_t> positions = spec.positions, sizes;
  for (const auto& group : spec.groups) sizes.push_back(static_cast<int64_t>(group.size()));
  int64_t windows = (PeersReadInput(spec.kind) ? kWindowOfOperand : 0) |
                    (PeersWriteOutput(spec.kind) ? kWindowOfResult : 0);
  XLA_FFI_Array size_array{XLA_FFI_DataType_S64, sizes.size(), sizes.data()};
  XLA_FFI_Array position_array{XLA_FFI_DataType_S64, positions.size(), positions.data()};
  XLA_FFI_Scalar scalar{XLA_FFI_DataType_S64, &windows};
  // By name.
  XLA_FFI_ByteSpan names[] = {{"group_sizes", 11}, {"positions", 9}, {"windows", 7}};
  XLA_FFI_ByteSpan* name_pointers[] = {&names[0], &names[1], &names[2]};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_ARRAY,
                              XLA_FFI_AttrType_SCALAR};
  void* values[] = {&size_array, &position_array, &scalar};

  XLA_FFI_InvokeContext context{&rank};
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &FakeXlaFunctions::Api();
  frame.ctx = &context;
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, 1, operand_types, operands};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 1, result_types, results};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 3, types, name_pointers, values};
  const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  return error ? error->message : "";
}

}  // namespace jaxfabric::testing
