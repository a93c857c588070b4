// The two hashes that JAX numbers launches with (jaxlib's py_executable.cc): an executable's first
// run id is the low half of the hash of its fingerprint, plus that of its device list where that
// reaches into other processes. Nothing promises them, so a base that is not found by them is
// settled by time: see LaunchClock.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace jaxfabric {

// FarmHash's Fingerprint64 of 33 to 64 bytes, or none; nothing for other lengths. JAX's
// fingerprints of CPU executables have 37 to 39 digits, and those of programs without arguments are
// empty.
std::optional<uint64_t> FarmFingerprint(std::string_view text);

// XLA's fingerprint of an ordered list of device ids (ifrt's device_list.cc): HighwayHash-64 of
// their decimal digits, without anything in between.
uint64_t DeviceListFingerprint(std::span<const int64_t> devices);

}  // namespace jaxfabric
