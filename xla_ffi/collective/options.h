// Settings of one fabric. Defaults and validation live in jaxfabric/config.py; these are what C++
// tests use.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "collective/gpu/options.h"

namespace jaxfabric {

// Options::network_cost: by a short measurement while the job connects.
inline constexpr std::string_view kMeasured = "measured";

struct Options {
  double deadline = 300;            // seconds one collective may wait for its peers
  double warn_after = 10;           // seconds after which the log says who is late
  double mismatch_after = 1;        // seconds after which two ranks compare what they wait for
  double connect_timeout = 60;      // seconds for all processes to find each other
  size_t segment_bytes = 16 << 20;  // shared memory of one rank
  // A wait keeps the caller's thread so long before the progress thread takes over: for a peer that
  // is on its way, and for one that may be waiting for this rank elsewhere.
  double in_step_microseconds = 20000;
  double out_of_step_microseconds = 200;
  // How processes of other hosts reach this one; see os/interfaces.h.
  std::string net_interface;
  std::string net_port_range;       // "40000-40100"; empty: any
  std::string coordinator;          // "10.0.0.1:1234" or empty: helps to choose the interface
  double unreachable_after = 10;    // seconds without an answer after which a host is gone
  std::string pattern;              // see PatternChoice::Parse; the same on all processes
  std::string network_cost;         // see PatternChoice::SetCosts; the same on all processes
  double measuring_seconds = 0.05;  // for it, once the connection is open
  int tcp_sockets = 2;              // for data, between two processes of different hosts
  std::string tcp_congestion_control = "auto";  // of them, see SetCongestionControl()
  // Processes with different ones take each other for processes of other hosts: for tests.
  std::string host_suffix;
  // The ranks that are GPUs; the others are CPU devices.
  std::vector<LocalGpu> gpus;
  GpuOptions gpu;
};

}  // namespace jaxfabric
