// Waiting for descriptors until a deadline.
#pragma once

#include <poll.h>

#include <span>

#include "base/deadline.h"

namespace jaxfabric {

// ppoll() until the deadline, but for an hour at the most: how many entries are ready, 0 for none,
// or -1 with errno (EINTR among others). A negative descriptor is passed over.
int PollUntil(std::span<pollfd> entries, Deadline deadline);

// Waits until the descriptor is ready for `events`. True when it is, or has failed, which using it
// then tells; false at the deadline.
bool WaitForSocket(int socket, short events, Deadline deadline);

}  // namespace jaxfabric
