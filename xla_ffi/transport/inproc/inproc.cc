#include "transport/inproc/inproc.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

#include "os/mapping.h"
#include "transport/direct_channel.h"
#include "transport/segment.h"

namespace jaxfabric {
namespace {

constexpr std::string_view kName = "inproc";

// The endpoints of this process by the nonce of their segment, for Connect to find. An address is
// thus never a pointer, and a stale or foreign one is an error.
class Directory {
 public:
  static Directory& Get() {
    static auto* const directory = new Directory;  // never destroyed: endpoints may be static
    return *directory;
  }
  void Add(uint64_t nonce, std::weak_ptr<Mapping> memory) {
    const std::lock_guard lock(mutex_);
    endpoints_[nonce] = Entry{std::move(memory), ::getpid()};
  }
  void Remove(uint64_t nonce) {
    const std::lock_guard lock(mutex_);
    endpoints_.erase(nonce);
  }
  std::shared_ptr<Mapping> Find(uint64_t nonce) {
    const std::lock_guard lock(mutex_);
    const auto found = endpoints_.find(nonce);
    // An entry inherited over fork() is a copy that its owner never sees.
    if (found == endpoints_.end() || found->second.pid != ::getpid()) return nullptr;
    return found->second.memory.lock();
  }

 private:
  struct Entry {
    std::weak_ptr<Mapping> memory;
    pid_t pid;
  };
  std::mutex mutex_;
  std::map<uint64_t, Entry> endpoints_;
};

class InprocEndpoint : public Endpoint {
 public:
  InprocEndpoint(std::shared_ptr<Mapping> memory, Segment segment)
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
    std::shared_ptr<Mapping> memory = Directory::Get().Find(header.nonce);
    if (memory == nullptr) {
      return Status(Code::kUnavailable,
                    StrCat("endpoint ", header.number, " does not exist in this process"));
    }
    JF_ASSIGN_OR_RETURN(const Segment segment, Segment::Open(memory->bytes(), header));
    return DirectChannel::Create(segment_, memory_, segment, std::move(memory));
  }

 private:
  const std::shared_ptr<Mapping> memory_;
  const Segment segment_;
};

class InprocTransport : public Transport {
 public:
  std::string_view name() const override { return kName; }
  Status Probe() override { return OkStatus(); }
  Result<std::unique_ptr<Endpoint>> Bind(int self, int max_peers, size_t window_bytes) override {
    JF_ASSIGN_OR_RETURN(const size_t bytes, Segment::Bytes(self, max_peers, window_bytes));
    JF_ASSIGN_OR_RETURN(Mapping mapped, Mapping::MapPrivate(bytes));
    auto memory = std::make_shared<Mapping>(std::move(mapped));
    JF_ASSIGN_OR_RETURN(const Segment segment,
                        Segment::Create(memory->bytes(), self, max_peers, window_bytes));
    return std::unique_ptr<Endpoint>(new InprocEndpoint(std::move(memory), segment));
  }
};

}  // namespace

std::unique_ptr<Transport> MakeInprocTransport() { return std::make_unique<InprocTransport>(); }

}  // namespace jaxfabric
