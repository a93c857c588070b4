// The transport between the processes of one host: segments of shared memory without a name, whose
// descriptors travel with the address.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace jaxfabric {

std::unique_ptr<Transport> MakeShmTransport();

}  // namespace jaxfabric
