// What a process publishes so that every other one of its job finds it (docs/wire_format.md).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "transport/transport.h"

namespace jaxfabric {

struct ProcessAddress {
  int process = -1;
  pid_t pid = 0;
  std::string name;  // of its unix socket
  std::string host;
  std::string host_id;  // processes with equal ones share memory, sockets and process numbers
  std::vector<int64_t> ranks;
  std::string tcp_address;  // of its control plane; empty: none, and `network` says why
  std::string network;      // the interface that other hosts reach, and why that one
  EndpointAddress data;     // what other hosts' endpoints connect to; without descriptors

  std::string Encode() const;
  static Result<ProcessAddress> Decode(std::string_view text);
};

}  // namespace jaxfabric
