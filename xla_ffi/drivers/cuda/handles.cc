#include "drivers/cuda/handles.h"

namespace jaxfabric::cuda {
namespace {

// Null without a current context, which the call that follows complains about.
CUcontext CurrentContext(const Api& api) {
  CUcontext context = nullptr;
  return api.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : nullptr;
}

CUmemAllocationProp Properties(CUmemLocation location, unsigned handle_types) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(handle_types);
  properties.location = location;
  return properties;
}

Status NoMulticast() {
  return Status(Code::kUnimplemented, "the CUDA driver is too old for multicast objects");
}

}  // namespace

ScopedContext::ScopedContext(const Api& api, CUcontext context)
    : api_(api), status_(JF_CUDA_CALL(api, cuCtxPushCurrent, context)) {}

ScopedContext::~ScopedContext() {
  CUcontext popped;
  if (status_.ok()) (void)api_.cuCtxPopCurrent(&popped);
}

PrimaryContext::~PrimaryContext() {
  if (context_ != nullptr) (void)api_->cuDevicePrimaryCtxRelease(device_);
}

PrimaryContext::PrimaryContext(PrimaryContext&& other) noexcept { *this = std::move(other); }

PrimaryContext& PrimaryContext::operator=(PrimaryContext&& other) noexcept {
  std::swap(api_, other.api_);
  std::swap(device_, other.device_);
  std::swap(context_, other.context_);
  return *this;
}

Result<PrimaryContext> PrimaryContext::Retain(const Api& api, int ordinal) {
  PrimaryContext made;
  made.api_ = &api;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuDeviceGet, &made.device_, ordinal));
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuDevicePrimaryCtxRetain, &made.context_, made.device_));
  return made;
}

Result<PhysicalMemory> PhysicalMemory::Create(const Api& api, CUmemLocation location, size_t bytes,
                                              unsigned handle_types) {
  const CUmemAllocationProp properties = Properties(location, handle_types);
  CUmemGenericAllocationHandle handle = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuMemCreate, &handle, bytes, &properties, 0));
  return PhysicalMemory(Handle(api, handle, nullptr), bytes);
}

Result<size_t> PhysicalMemory::Granularity(const Api& api, CUmemLocation location,
                                           unsigned handle_types) {
  const CUmemAllocationProp properties = Properties(location, handle_types);
  size_t granularity = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuMemGetAllocationGranularity, &granularity, &properties,
                                  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  return granularity;
}

Result<PhysicalMemory> PhysicalMemory::Import(const Api& api, int fd, size_t bytes) {
  CUmemGenericAllocationHandle handle = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuMemImportFromShareableHandle, &handle,
                                  reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  return PhysicalMemory(Handle(api, handle, nullptr), bytes);
}

Result<PhysicalMemory> PhysicalMemory::Import(const Api& api, const CUmemFabricHandle& shared,
                                              size_t bytes) {
  CUmemFabricHandle copy = shared;
  CUmemGenericAllocationHandle handle = 0;
  JF_RETURN_IF_ERROR(
      JF_CUDA_CALL(api, cuMemImportFromShareableHandle, &handle, &copy, CU_MEM_HANDLE_TYPE_FABRIC));
  return PhysicalMemory(Handle(api, handle, nullptr), bytes);
}

Result<UniqueFd> PhysicalMemory::ExportFd() const {
  int fd = -1;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(handle_.api(), cuMemExportToShareableHandle, &fd, handle_.get(),
                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  return UniqueFd(fd);
}

Result<CUmemFabricHandle> PhysicalMemory::ExportFabric() const {
  CUmemFabricHandle shared{};
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(handle_.api(), cuMemExportToShareableHandle, &shared,
                                  handle_.get(), CU_MEM_HANDLE_TYPE_FABRIC, 0));
  return shared;
}

Multicast& Multicast::operator=(Multicast&& other) noexcept {
  if (this != &other) {
    UnbindAll();
    memory_ = std::move(other.memory_);
    bindings_ = std::move(other.bindings_);
  }
  return *this;
}

Result<Multicast> Multicast::Create(const Api& api, unsigned devices, size_t bytes,
                                    unsigned handle_types) {
  if (api.cuMulticastCreate == nullptr) return NoMulticast();
  const CUmulticastObjectProp properties{devices, bytes, handle_types, 0};
  CUmemGenericAllocationHandle handle = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuMulticastCreate, &handle, &properties));
  return Multicast(PhysicalMemory(PhysicalMemory::Handle(api, handle, nullptr), bytes));
}

Result<size_t> Multicast::Granularity(const Api& api, unsigned devices, size_t bytes,
                                      unsigned handle_types) {
  if (api.cuMulticastGetGranularity == nullptr) return NoMulticast();
  const CUmulticastObjectProp properties{devices, bytes, handle_types, 0};
  size_t granularity = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuMulticastGetGranularity, &granularity, &properties,
                                  CU_MULTICAST_GRANULARITY_MINIMUM));
  return granularity;
}

Status Multicast::AddDevice(CUdevice device) {
  return JF_CUDA_CALL(memory_.handle_.api(), cuMulticastAddDevice, memory_.handle(), device);
}

Status Multicast::Bind(CUdevice device, size_t offset, const PhysicalMemory& memory,
                       size_t memory_offset, size_t bytes) {
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(memory_.handle_.api(), cuMulticastBindMem, memory_.handle(),
                                  offset, memory.handle(), memory_offset, bytes, 0));
  bindings_.push_back({device, offset, bytes});
  return OkStatus();
}

void Multicast::UnbindAll() {
  if (!memory_.valid()) return;
  for (const Binding& binding : bindings_) {
    (void)memory_.handle_.api().cuMulticastUnbind(memory_.handle(), binding.device, binding.offset,
                                                  binding.bytes);
  }
  bindings_.clear();
}

AddressRange::AddressRange(AddressRange&& other) noexcept { *this = std::move(other); }

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  if (this != &other) {
    Reset();
    api_ = other.api_;
    address_ = std::exchange(other.address_, 0);
    bytes_ = std::exchange(other.bytes_, 0);
    mapped_ = std::exchange(other.mapped_, {});
  }
  return *this;
}

Result<AddressRange> AddressRange::Reserve(const Api& api, size_t bytes, size_t alignment) {
  AddressRange range;
  range.api_ = &api;
  JF_RETURN_IF_ERROR(
      JF_CUDA_CALL(api, cuMemAddressReserve, &range.address_, bytes, alignment, 0, 0));
  range.bytes_ = bytes;
  return range;
}

Status AddressRange::Map(size_t offset, const PhysicalMemory& memory) {
  JF_RETURN_IF_ERROR(
      JF_CUDA_CALL(*api_, cuMemMap, address_ + offset, memory.bytes(), 0, memory.handle(), 0));
  mapped_.push_back({offset, memory.bytes()});
  return OkStatus();
}

Status AddressRange::SetAccess(size_t offset, size_t bytes, std::span<const CUdevice> devices) {
  std::vector<CUmemAccessDesc> access;
  for (const CUdevice device : devices) {
    access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  }
  return JF_CUDA_CALL(*api_, cuMemSetAccess, address_ + offset, bytes, access.data(),
                      access.size());
}

void AddressRange::Reset() {
  if (address_ == 0) return;
  for (const Mapped& mapped : mapped_) {
    (void)api_->cuMemUnmap(address_ + mapped.offset, mapped.bytes);
  }
  mapped_.clear();
  (void)api_->cuMemAddressFree(std::exchange(address_, 0), std::exchange(bytes_, 0));
}

Result<Event> Event::Create(const Api& api, unsigned flags) {
  CUevent event = nullptr;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuEventCreate, &event, flags));
  return Event(Handle(api, event, CurrentContext(api)));
}

Result<Stream> Stream::Create(const Api& api, Priority priority) {
  int least = 0, greatest = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuCtxGetStreamPriorityRange, &least, &greatest));
  CUstream stream = nullptr;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuStreamCreateWithPriority, &stream, CU_STREAM_NON_BLOCKING,
                                  priority == Priority::kHighest ? greatest : 0));
  return Stream(Handle(api, stream, CurrentContext(api)));
}

Result<Module> Module::Load(const Api& api, const void* image) {
  CUmodule loaded = nullptr;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuModuleLoadData, &loaded, image));
  return Module(Handle(api, loaded, CurrentContext(api)));
}

Result<CUfunction> Module::Function(const char* name) const {
  CUfunction function = nullptr;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(handle_.api(), cuModuleGetFunction, &function, get(), name)
                         .WithContext(StrCat("kernel ", name)));
  return function;
}

Result<PinnedMemory> PinnedMemory::Allocate(const Api& api, size_t bytes) {
  void* pointer = nullptr;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuMemHostAlloc, &pointer, bytes,
                                  kMemHostAllocPortable | kMemHostAllocDeviceMap));
  Handle handle(api, pointer, CurrentContext(api));
  CUdeviceptr address = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuMemHostGetDevicePointer, &address, pointer, 0));
  return PinnedMemory(std::move(handle), bytes, address);
}

Result<RegisteredMemory> RegisteredMemory::Register(const Api& api, std::span<std::byte> pages) {
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuMemHostRegister, pages.data(), pages.size(),
                                  kMemHostRegisterPortable | kMemHostRegisterDeviceMap));
  Handle handle(api, pages.data(), CurrentContext(api));
  CUdeviceptr address = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuMemHostGetDevicePointer, &address, pages.data(), 0));
  return RegisteredMemory(std::move(handle), address);
}

}  // namespace jaxfabric::cuda
