#include "transport/registry.h"

#include <string>

#include "transport/inproc/inproc.h"
#include "transport/shm/shm.h"
#include "transport/tcp/tcp.h"

namespace jaxfabric {

std::span<const std::unique_ptr<Transport>> Transports() {
  // Never destroyed: endpoints may outlive static destruction.
  static auto* const transports = [] {
    auto* list = new std::vector<std::unique_ptr<Transport>>;
    list->push_back(MakeInprocTransport());
    list->push_back(MakeShmTransport());
    list->push_back(MakeTcpTransport());
    return list;
  }();
  return *transports;
}

Result<Transport*> FindTransport(std::string_view name) {
  std::string known;
  for (const auto& transport : Transports()) {
    if (transport->name() == name) return transport.get();
    known.append(known.empty() ? "" : ", ").append(transport->name());
  }
  return Status(Code::kNotFound, StrCat("no transport '", name, "'; known: ", known));
}

std::vector<TransportProbe> ProbeTransports() {
  std::vector<TransportProbe> probes;
  for (const auto& transport : Transports()) {
    probes.push_back({transport->name(), transport->Probe()});
  }
  return probes;
}

}  // namespace jaxfabric
