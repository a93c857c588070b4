#include "collective/address.h"

#include <span>

#include "control/wire.h"

namespace jaxfabric {

std::string ProcessAddress::Encode() const {
  WireWriter writer(MessageType::kHello);
  writer.Add(static_cast<uint32_t>(process)).Add(static_cast<int32_t>(pid));
  writer.Add(std::string_view(name)).Add(std::string_view(host)).Add(std::string_view(host_id));
  writer.Add(std::span<const int64_t>(ranks));
  writer.Add(std::string_view(tcp_address)).Add(std::string_view(network));
  writer.Add(std::string_view(data.kind));
  writer.Add(std::string_view(reinterpret_cast<const char*>(data.bytes.data()), data.bytes.size()));
  const auto bytes = writer.bytes();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Result<ProcessAddress> ProcessAddress::Decode(std::string_view text) {
  WireReader reader(std::as_bytes(std::span(text.data(), text.size())));
  ProcessAddress address;
  address.process = static_cast<int>(reader.Get<uint32_t>());
  address.pid = reader.Get<int32_t>();
  address.name = reader.GetString();
  address.host = reader.GetString();
  address.host_id = reader.GetString();
  address.ranks = reader.GetInts();
  address.tcp_address = reader.GetString();
  address.network = reader.GetString();
  address.data.kind = reader.GetString();
  const std::string data = reader.GetString();
  const auto* begin = reinterpret_cast<const std::byte*>(data.data());
  address.data.bytes.assign(begin, begin + data.size());
  if (!reader.ok()) {
    return Status(Code::kInvalidArgument,
                  "an address is not one of this jaxfabric version: do all processes run the same "
                  "version?");
  }
  return address;
}

}  // namespace jaxfabric
