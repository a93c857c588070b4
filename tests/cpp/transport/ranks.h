// Runs one body on several ranks, as threads of this process or as forked processes.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/transport.h"

namespace jaxfabric {

enum class RankMode { kThreads, kProcesses };

using TransportFactory = std::function<std::unique_ptr<Transport>()>;

// What a body sees of its rank. Expectations that fail in a process are printed there and fail the
// test in the parent.
struct Rank {
  int number;
  int count;
  Endpoint* endpoint;
  std::vector<std::unique_ptr<Channel>> channels;  // by rank; the own one is null

  Channel& to(int rank) const { return *channels[static_cast<size_t>(rank)]; }
};

struct RankOptions {
  int count = 2;
  size_t window_bytes = 4096;
  // Processes that the body kills; -1 for none.
  int killed = -1;
};

// Long enough for a loaded machine, short enough for a test: nothing that works waits for it.
inline Deadline TestDeadline() { return Deadline::AfterSeconds(60); }

// Every rank binds, learns the others' addresses, connects to all, and runs `body`. Also expects
// that nobody is left with more descriptors or mappings than before.
void RunRanks(RankMode mode, const TransportFactory& factory, const RankOptions& options,
              const std::function<void(Rank&)>& body);

// Returns once thread `tid` of this process is asleep in the kernel.
void WaitUntilAsleep(int tid);

}  // namespace jaxfabric
