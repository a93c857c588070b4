#include "transport/inproc/inproc.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <utility>

#include "transport/direct_channel.h"
#include "transport/segment.h"

namespace jaxfabric {
namespace {

constexpr std::string_view kName = "inproc";

// Memory of this process alone, zeroed.
class PrivateMemory {
 public:
  static Result<std::shared_ptr<PrivateMemory>> Map(size_t bytes) {
    void* address =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return ErrnoStatus(StrCat("mmap of ", bytes, " bytes"), errno);
    return std::shared_ptr<PrivateMemory>(
        new PrivateMemory(std::span(static_cast<std::byte*>(address), bytes)));
  }
  ~PrivateMemory() { ::munmap(bytes_.data(), bytes_.size()); }
  PrivateMemory(const PrivateMemory&) = delete;
  PrivateMemory& operator=(const PrivateMemory&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit PrivateMemory(std::span<std::byte> bytes) : bytes_(bytes) {}
  const std::span<std::byte> bytes_;
};

// The endpoints of this process by the nonce of their segment, for Connect to find. An address is
// thus never a pointer, and a stale or foreign one is an error.
class Directory {
 public:
  static Directory& Get() {
    static auto* const directory = new Directory;  // never destroyed: endpoints may be static
    return *directory;
  }
  void Add(uint64_t nonce, std::weak_ptr<PrivateMemory> memory) {
    const std::lock_guard lock(mutex_);
    endpoints_[nonce] = Entry{std::move(memory), ::getpid()};
  }
  void Remove(uint64_t nonce) {
    const std::lock_guard lock(mutex_);
    endpoints_.erase(nonce);
  }
  std::shared_ptr<PrivateMemory> Find(uint64_t nonce) {
    const std::lock_guard lock(mutex_);
    const auto found = endpoints_.find(nonce);
    // An entry inherited over fork() is a copy that its owner never sees.
    if (found == endpoints_.end() || found->second.pid != ::getpid()) return nullptr;
    return found->second.memory.lock();
  }

 private:
  struct Entry {
    std::weak_ptr<PrivateMemory> memory;
    pid_t pid;
  };
  std::mutex mutex_;
  std::map<uint64_t, Entry> endpoints_;
};

class InprocEndpoint : public Endpoint {
 public:
  InprocEndpoint(std::shared_ptr<PrivateMemory> memory, Segment segment)
      : memory_(std::move(memory)), segment_(segment) {
    Directory::Get().Add(segment_.header().nonce, memory_);
  }
  ~InprocEndpoint() override { Directory::Get().Remove(segment_.header().nonce); }

  EndpointAddress address() const override {
    return {std::string(kName), EncodeSegmentHeader(segment_.header()), {}};
  }
  std::span<std::byte> window() override { return segment_.window(); }

  Result<std::unique_ptr<Channel>> Connect(const EndpointAddress& peer, std::vector<UniqueFd>,
                                           Deadline) override {
    JF_ASSIGN_OR_RETURN(const SegmentHeader header, DecodeSegmentHeader(peer, kName));
    std::shared_ptr<PrivateMemory> memory = Directory::Get().Find(header.nonce);
    if (memory == nullptr) {
      return Status(Code::kUnavailable,
                    StrCat("endpoint ", header.number, " does not exist in this process"));
    }
    JF_ASSIGN_OR_RETURN(const Segment segment, Segment::Open(memory->bytes(), header));
    return DirectChannel::Create(segment_, memory_, segment, std::move(memory));
  }

 private:
  const std::shared_ptr<PrivateMemory> memory_;
  const Segment segment_;
};

class InprocTransport : public Transport {
 public:
  std::string_view name() const override { return kName; }
  Status Probe() override { return OkStatus(); }
  Result<std::unique_ptr<Endpoint>> Bind(int self, int max_peers, size_t window_bytes) override {
    JF_ASSIGN_OR_RETURN(const size_t bytes, Segment::Bytes(self, max_peers, window_bytes));
    JF_ASSIGN_OR_RETURN(std::shared_ptr<PrivateMemory> memory, PrivateMemory::Map(bytes));
    JF_ASSIGN_OR_RETURN(const Segment segment,
                        Segment::Create(memory->bytes(), self, max_peers, window_bytes));
    return std::unique_ptr<Endpoint>(new InprocEndpoint(std::move(memory), segment));
  }
};

}  // namespace

std::unique_ptr<Transport> MakeInprocTransport() { return std::make_unique<InprocTransport>(); }

}  // namespace jaxfabric
