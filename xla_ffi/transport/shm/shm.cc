#include "transport/shm/shm.h"

#include <utility>

#include "os/mapping.h"
#include "transport/direct_channel.h"
#include "transport/segment.h"

namespace jaxfabric {
namespace {

constexpr std::string_view kName = "shm";
constexpr char kLabel[] = "jaxfabric";

class ShmEndpoint : public Endpoint {
 public:
  ShmEndpoint(UniqueFd fd, std::shared_ptr<Mapping> mapping, Segment segment)
      : fd_(std::move(fd)), mapping_(std::move(mapping)), segment_(segment) {}

  EndpointAddress address() const override {
    return {std::string(kName), EncodeSegmentHeader(segment_.header()), {fd_.get()}};
  }
  std::span<std::byte> window() override { return segment_.window(); }

  // The descriptors are closed on return: the mapping keeps the memory.
  Result<std::unique_ptr<Channel>> Connect(const EndpointAddress& peer, std::vector<UniqueFd> fds,
                                           Deadline) override {
    JF_ASSIGN_OR_RETURN(const SegmentHeader header, DecodeSegmentHeader(peer, kName));
    if (fds.size() != 1) {
      return Status(Code::kInvalidArgument,
                    StrCat("the address of peer ", header.number, " came with ", fds.size(),
                           " descriptors instead of 1"));
    }
    JF_ASSIGN_OR_RETURN(const size_t bytes, SealedSize(fds[0].get()));
    JF_ASSIGN_OR_RETURN(Mapping mapped, Mapping::MapShared(fds[0].get(), bytes));
    auto mapping = std::make_shared<Mapping>(std::move(mapped));
    JF_ASSIGN_OR_RETURN(const Segment segment, Segment::Open(mapping->bytes(), header));
    return DirectChannel::Create(segment_, mapping_, segment, std::move(mapping));
  }

 private:
  const UniqueFd fd_;
  const std::shared_ptr<Mapping> mapping_;
  const Segment segment_;
};

class ShmTransport : public Transport {
 public:
  std::string_view name() const override { return kName; }

  Status Probe() override {
    const Result<std::unique_ptr<Endpoint>> endpoint = Bind(0, 1, 1);
    if (endpoint.ok()) return OkStatus();
    const Status& status = endpoint.status();
    return Status(status.code(),
                  StrCat(status.message(),
                         "; shared memory needs memfd_create (Linux 3.17), which a container's "
                         "seccomp profile may have to allow"));
  }

  Result<std::unique_ptr<Endpoint>> Bind(int self, int max_peers, size_t window_bytes) override {
    JF_ASSIGN_OR_RETURN(const size_t bytes, Segment::Bytes(self, max_peers, window_bytes));
    JF_ASSIGN_OR_RETURN(UniqueFd fd, CreateSharedMemory(kLabel, bytes));
    JF_ASSIGN_OR_RETURN(Mapping mapped, Mapping::MapShared(fd.get(), bytes));
    auto mapping = std::make_shared<Mapping>(std::move(mapped));
    JF_ASSIGN_OR_RETURN(const Segment segment,
                        Segment::Create(mapping->bytes(), self, max_peers, window_bytes));
    return std::unique_ptr<Endpoint>(new ShmEndpoint(std::move(fd), std::move(mapping), segment));
  }
};

}  // namespace

std::unique_ptr<Transport> MakeShmTransport() { return std::make_unique<ShmTransport>(); }

}  // namespace jaxfabric
