// The transport between the devices of one process: they read each other's memory directly.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace jaxfabric {

std::unique_ptr<Transport> MakeInprocTransport();

}  // namespace jaxfabric
