// Every transport that this build knows, usable here or not.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "transport/transport.h"

namespace jaxfabric {

// Fastest first. The objects live as long as the process and may be used from any thread.
std::span<const std::unique_ptr<Transport>> Transports();

// The transport of that name; kNotFound, listing the known ones, where there is none.
Result<Transport*> FindTransport(std::string_view name);

struct TransportProbe {
  std::string_view name;
  Status status;  // OK, or why it cannot be used and what would change that
};

std::vector<TransportProbe> ProbeTransports();

}  // namespace jaxfabric
