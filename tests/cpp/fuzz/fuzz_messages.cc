// Control messages and addresses, with every field that a reader may ask for.
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "collective/address.h"
#include "collective/directory.h"
#include "control/wire.h"

namespace jaxfabric {
namespace {

// The fields are chosen by bytes of the input itself.
void ReadAnything(std::span<const std::byte> choice, std::span<const std::byte> bytes) {
  WireReader reader(bytes);
  size_t read = 0;
  for (std::byte field : choice) {
    switch (static_cast<int>(field) % 4) {
      case 0:
        reader.Get<uint32_t>();
        break;
      case 1:
        reader.Get<int64_t>();
        break;
      case 2:
        read += reader.GetString().size();
        break;
      case 3:
        read += reader.GetInts().size() * sizeof(int64_t);
        break;
    }
  }
  JF_CHECK(read <= bytes.size());
}

void ReadAddress(std::span<const std::byte> bytes) {
  const auto address =
      ProcessAddress::Decode({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  if (!address.ok()) return;
  const std::string again = address->Encode();
  JF_CHECK(again.size() <= bytes.size());
  const auto same = ProcessAddress::Decode(again);
  JF_CHECK(same.ok() && same->Encode() == again);
}

void ReadAnnouncement(std::span<const std::byte> bytes) {
  WireReader reader(bytes);
  const auto announcement = Directory::Announcement::FromMessage(reader, 1);
  if (!announcement) return;
  JF_CHECK(announcement->position < announcement->size);
  const auto written = announcement->ToMessage();
  WireReader again(written.bytes());
  JF_CHECK(Directory::Announcement::FromMessage(again, 1).has_value());
}

}  // namespace
}  // namespace jaxfabric

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jaxfabric;
  const std::span<const std::byte> input = std::as_bytes(std::span(data, size));
  // As it is, and behind a header that is right: few inputs begin with one.
  WireWriter whole(MessageType::kInstance);
  for (std::byte byte : input) whole.Add(static_cast<uint8_t>(byte));
  for (std::span<const std::byte> bytes : {input, whole.bytes()}) {
    ReadAnything(input.first(std::min<size_t>(size, 16)), bytes);
    ReadAddress(bytes);
    ReadAnnouncement(bytes);
  }
  return 0;
}
