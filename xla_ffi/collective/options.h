// Settings of one fabric. Defaults and validation live in jaxfabric/config.py; these are what C++
// tests use.
#pragma once

#include <cstddef>

namespace jaxfabric {

struct Options {
  double deadline = 300;            // seconds one collective may wait for its peers
  double warn_after = 10;           // seconds after which the log says who is late
  double mismatch_after = 1;        // seconds after which two ranks compare what they wait for
  double connect_timeout = 60;      // seconds for all processes to find each other
  size_t segment_bytes = 16 << 20;  // shared memory of one rank
  double spin_microseconds =
      -1;  // a wait spins so long before it yields; -1: chosen by the free cores
  double inline_microseconds =
      1000;  // a wait keeps the caller's thread so long before others take over
};

}  // namespace jaxfabric
