// What a peer may publish as the address of its tcp endpoint, and addresses and ranges as text.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "base/status.h"
#include "os/tcp_socket.h"
#include "transport/tcp/tcp.h"

namespace jaxfabric {
namespace {

std::unique_ptr<MessageEndpoint> Bind(int number) {
  TcpTransportOptions options;
  options.secret = "a secret of this fuzzer";
  auto bound = BindTcp(options, number, 4, 4096);
  JF_CHECK(bound.ok());
  return *std::move(bound);
}

void ReadText(std::string_view text) {
  if (const auto address = TcpAddress::Parse(text); address.ok()) {
    const auto again = TcpAddress::Parse(address->ToString());
    JF_CHECK(again.ok() && again->ToString() == address->ToString());
  }
  if (const auto range = PortRange::Parse(text); range.ok() && range->first != 0) {
    JF_CHECK(range->first <= range->last);
  }
}

}  // namespace
}  // namespace jaxfabric

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jaxfabric;
  static const auto endpoint = Bind(0);
  static const EndpointAddress valid = Bind(1)->address();
  ReadText({reinterpret_cast<const char*>(data), size});
  EndpointAddress address = valid;
  const auto bytes = std::as_bytes(std::span(data, size));
  address.bytes.assign(bytes.begin(), bytes.end());
  JF_CHECK(!endpoint->ConnectMessages(address).ok() || address.bytes == valid.bytes);
  // Behind the magic number of one that is right, with a check sum that is right.
  address.bytes = valid.bytes;
  const size_t checked = valid.bytes.size() - sizeof(uint64_t);
  std::copy_n(bytes.begin(), std::min(size, checked - 8), address.bytes.begin() + 8);
  const uint64_t check =
      Hasher().Add({reinterpret_cast<const char*>(address.bytes.data()), checked}).Finish();
  std::memcpy(address.bytes.data() + checked, &check, sizeof(check));
  (void)endpoint->ConnectMessages(address);
  return 0;
}
