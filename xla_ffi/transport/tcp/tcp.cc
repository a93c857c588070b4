#include "transport/tcp/tcp.h"

#include <sys/random.h>

#include <cstring>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "transport/segment.h"
#include "transport/tcp/hub.h"

namespace jaxfabric {
namespace tcp {
namespace {

constexpr std::string_view kName = "tcp";

// What an endpoint publishes.
struct Published {
  static constexpr uint64_t kMagic = 0x313050435446584a;  // "JXFTCP01"

  uint64_t magic = kMagic;
  uint32_t number = 0;
  uint32_t max_peers = 0;
  uint64_t window_bytes = 0;
  char address[56] = {};  // as text, filled up with zeros
  uint64_t check = 0;     // of all the above

  uint64_t Check() const {
    const std::string_view bytes(reinterpret_cast<const char*>(this), offsetof(Published, check));
    return Hasher().Add(bytes).Finish();
  }
};
static_assert(sizeof(Published) == 88);

class TcpChannel : public MessageChannel {
 public:
  TcpChannel(std::shared_ptr<Hub> hub, int peer) : hub_(std::move(hub)), peer_(hub_->peer(peer)) {}

  Status PostWord(uint64_t value, uint32_t region, uint64_t offset) override {
    if (offset % 8 != 0) {
      return Status(Code::kInvalidArgument, StrCat("a word at offset ", offset,
                                                   " is not aligned: offsets of words are "
                                                   "multiples of 8"));
    }
    FrameHeader header{.type = FrameType::kWord};
    header.region = region;
    header.offset = offset;
    header.value = value;
    return peer_.Post(header, {}).status();
  }
  Result<uint64_t> PostPut(std::span<const std::byte> local, uint32_t region,
                           uint64_t offset) override {
    FrameHeader header{.type = FrameType::kPut};
    header.region = region;
    header.offset = offset;
    return peer_.Post(header, local);
  }
  Status PostSignal() override { return peer_.Post({.type = FrameType::kSignal}, {}).status(); }
  Status Push() override { return peer_.Push(); }
  uint64_t Sent() const override { return peer_.sent(); }
  Status status() const override { return peer_.status(); }

  Status Put(std::span<const std::byte> local, size_t offset) override {
    JF_RETURN_IF_ERROR(WaitForRoom());
    JF_ASSIGN_OR_RETURN(const uint64_t ticket, PostPut(local, kWindowRegion, offset));
    if (local.size() <= kCopiedPutBytes) return OkStatus();  // goes with what follows
    JF_RETURN_IF_ERROR(peer_.Push());
    WaitUntil([&] { return peer_.sent() >= ticket; }, Deadline::Never());
    return peer_.sent() >= ticket ? OkStatus() : peer_.status();
  }
  Status Signal() override {
    JF_RETURN_IF_ERROR(WaitForRoom());
    JF_RETURN_IF_ERROR(PostSignal());
    return peer_.Push();
  }

  Status Wait(uint64_t count, Deadline deadline) override {
    if (!peer_.aborted() && peer_.signals() >= count) return OkStatus();
    // What is posted may be what the peer needs to answer.
    (void)peer_.Push();
    WaitUntil([&] { return peer_.signals() >= count || peer_.aborted_by_peer(); }, deadline);
    if (peer_.aborted()) return peer_.status();
    if (peer_.signals() >= count) return OkStatus();
    if (peer_.aborted_by_peer()) {
      return Status(Code::kUnavailable, StrCat("peer ", peer_.number(), " aborted the channel"));
    }
    JF_RETURN_IF_ERROR(peer_.status());
    return Status(Code::kDeadlineExceeded,
                  StrCat("peer ", peer_.number(), " had signalled ", peer_.signals(),
                         " times, not ", count, ", when the deadline passed"));
  }

  Status Flush(Deadline deadline) override {
    if (peer_.aborted()) return peer_.status();
    JF_ASSIGN_OR_RETURN(const uint64_t number, peer_.PostFlush());
    (void)peer_.Push();  // an error does not matter if all has come before
    WaitUntil([&] { return peer_.flushed() >= number; }, deadline);
    if (peer_.aborted()) return peer_.status();
    if (peer_.flushed() >= number) return OkStatus();
    JF_RETURN_IF_ERROR(peer_.status());
    return Status(Code::kDeadlineExceeded,
                  StrCat("peer ", peer_.number(), " had not taken all when the deadline passed"));
  }

  void Abort() override { peer_.Abort(); }
  std::span<std::byte> peer_window() override { return {}; }

 private:
  // Until `done`, or the channel has failed; false at the deadline.
  template <class Done>
  bool WaitUntil(Done done, Deadline deadline) {
    return hub_->poller().WaitUntil([&] { return done() || !peer_.status().ok(); }, deadline);
  }
  Status WaitForRoom() {
    if (peer_.HasRoom()) return OkStatus();
    (void)peer_.Push();
    WaitUntil([&] { return peer_.HasRoom(); }, Deadline::Never());
    return peer_.status();
  }

  const std::shared_ptr<Hub> hub_;
  Peer& peer_;
};

class TcpEndpoint : public MessageEndpoint {
 public:
  explicit TcpEndpoint(std::shared_ptr<Hub> hub) : hub_(std::move(hub)) {}
  ~TcpEndpoint() override { hub_->Close(); }

  EndpointAddress address() const override {
    Published published;
    published.number = static_cast<uint32_t>(hub_->self());
    published.max_peers = static_cast<uint32_t>(hub_->max_peers());
    published.window_bytes = hub_->window().size();
    const std::string text = hub_->address().ToString();
    text.copy(published.address, sizeof(published.address) - 1);
    published.check = published.Check();
    std::vector<std::byte> bytes(sizeof(published));
    std::memcpy(bytes.data(), &published, sizeof(published));
    return {std::string(kName), std::move(bytes), {}};
  }
  std::span<std::byte> window() override { return hub_->window(); }

  Result<std::unique_ptr<Channel>> Connect(const EndpointAddress& peer, std::vector<UniqueFd>,
                                           Deadline) override {
    JF_ASSIGN_OR_RETURN(std::unique_ptr<MessageChannel> channel, ConnectMessages(peer));
    return std::unique_ptr<Channel>(std::move(channel));
  }
  Result<std::unique_ptr<MessageChannel>> ConnectMessages(const EndpointAddress& peer) override {
    Published published;
    if (peer.kind != kName || peer.bytes.size() != sizeof(published)) {
      return Status(Code::kInvalidArgument,
                    StrCat("an address of transport '", peer.kind, "' with ", peer.bytes.size(),
                           " bytes is none of '", kName, "', which have ", sizeof(published)));
    }
    std::memcpy(&published, peer.bytes.data(), sizeof(published));
    if (published.magic != Published::kMagic || published.check != published.Check()) {
      return Status(Code::kInvalidArgument,
                    "the address of a tcp endpoint is damaged, or of another version: all "
                    "processes need the same jaxfabric");
    }
    const auto self = static_cast<uint32_t>(hub_->self());
    if (published.number >= static_cast<uint32_t>(hub_->max_peers()) ||
        self >= published.max_peers || published.number == self) {
      return Status(
          Code::kInvalidArgument,
          StrCat("endpoint ", hub_->self(), " of ", hub_->max_peers(),
                 " cannot connect to endpoint ", published.number, " of ", published.max_peers));
    }
    const int number = static_cast<int>(published.number);
    const std::string_view text(published.address,
                                ::strnlen(published.address, sizeof(published.address)));
    JF_ASSIGN_OR_RETURN(const TcpAddress address, TcpAddress::Parse(text));
    hub_->peer(number).SetAddress(address, published.window_bytes);
    return std::unique_ptr<MessageChannel>(new TcpChannel(hub_, number));
  }

  Result<uint32_t> Register(std::span<std::byte> memory) override {
    if (reinterpret_cast<uintptr_t>(memory.data()) % 8 != 0) {
      return Status(Code::kInvalidArgument, "memory for puts must be aligned to 8 bytes");
    }
    return hub_->regions().Add(memory);
  }
  void Deregister(uint32_t region) override {
    if (region != kWindowRegion) hub_->regions().Remove(region);
  }
  bool Progress(Clock::duration wait) override { return hub_->poller().Progress(wait); }
  void SetArrivalHandler(std::function<void()> handler) override {
    hub_->arrival_handler = std::move(handler);
  }
  void SetLostHandler(std::function<void(int, const Status&)> handler) override {
    hub_->lost_handler = std::move(handler);
  }
  MessageCounters counters() const override { return hub_->counters(); }

 private:
  const std::shared_ptr<Hub> hub_;
};

class TcpTransport : public Transport {
 public:
  explicit TcpTransport(TcpTransportOptions options) : options_(std::move(options)) {}

  std::string_view name() const override { return kName; }
  Status Probe() override {
    const Result<std::unique_ptr<Endpoint>> endpoint = Bind(0, 1, 1);
    if (endpoint.ok()) return OkStatus();
    const Status& status = endpoint.status();
    return Status(status.code(),
                  StrCat(status.message(), "; tcp needs to listen on ", options_.ip));
  }
  Result<std::unique_ptr<Endpoint>> Bind(int self, int max_peers, size_t window_bytes) override {
    JF_ASSIGN_OR_RETURN(std::unique_ptr<MessageEndpoint> endpoint,
                        BindTcp(options_, self, max_peers, window_bytes));
    return std::unique_ptr<Endpoint>(std::move(endpoint));
  }

 private:
  const TcpTransportOptions options_;
};

}  // namespace
}  // namespace tcp

Result<std::unique_ptr<MessageEndpoint>> BindTcp(const TcpTransportOptions& options, int self,
                                                 int max_peers, size_t window_bytes) {
  JF_RETURN_IF_ERROR(Segment::Bytes(self, max_peers, window_bytes).status());  // as for all
  JF_ASSIGN_OR_RETURN(std::shared_ptr<tcp::Hub> hub,
                      tcp::Hub::Create(options, self, max_peers, window_bytes));
  return std::unique_ptr<MessageEndpoint>(new tcp::TcpEndpoint(std::move(hub)));
}

std::unique_ptr<Transport> MakeTcpTransport(TcpTransportOptions options) {
  if (options.secret.empty()) {
    char secret[32];
    // Where that fails Bind() says that there is no secret.
    if (::getrandom(secret, sizeof(secret), 0) == sizeof(secret)) {
      options.secret.assign(secret, sizeof(secret));
    }
  }
  return std::make_unique<tcp::TcpTransport>(std::move(options));
}

}  // namespace jaxfabric
