// Which of this machine's network interfaces processes of other hosts are given the address of.
//
// The choice is a pure function of the interfaces, the setting and the coordinator's address.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "os/tcp_socket.h"

namespace jaxfabric {

// One address of one interface.
struct Interface {
  std::string name;
  TcpAddress address;  // port 0
  int prefix = 0;      // bits of the address that are the subnet's
  bool up = true;
  bool loopback = false;
};

struct InterfaceChoice {
  Interface chosen;
  std::string why;  // "eth0, 10.0.0.5: in the coordinator's subnet"
};

// In the kernel's order.
Result<std::vector<Interface>> ListInterfaces();

// `setting`: names ("eth0"), addresses or subnets ("10.0.0.0/8", "fd00::/8"), separated by commas;
// the first that fits an interface that is up counts. Where it is empty: an interface in the
// coordinator's subnet, else the first that is up and neither loopback, link-local nor one of
// containers and virtual machines (docker*, br-*, veth*, virbr*, cni*), of the coordinator's family
// if there is one. kNotFound, with what there is, if none fits; kInvalidArgument for a setting that
// cannot be read.
Result<InterfaceChoice> ChooseInterface(const std::vector<Interface>& interfaces,
                                        std::string_view setting,
                                        const std::optional<TcpAddress>& coordinator);

}  // namespace jaxfabric
