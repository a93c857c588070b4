// A call of any kind, as one of a long sequence in one communicator. What a rank has is a function
// of the call, the rank and the place.
#pragma once

#include <array>
#include <bit>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "device/layout.h"

namespace jaxfabric::device {

struct MixedCall {
  static constexpr uint32_t kMostRanks = 8;
  std::string kernel;  // without "jaxfabric_"
  uint32_t ranks, blocks, threads;
  uint64_t bytes;
  uint32_t header;
  uint32_t root, shift, silent;  // permute: by `shift`, but `silent` sends nothing

  bool Is(std::string_view op) const { return kernel.starts_with(op); }
  bool IsNorm() const { return Is("all_reduce_rms_norm"); }
  bool Combines() const { return Is("all_reduce") || Is("reduce_scatter"); }
  bool InWindows() const { return kernel.find("window") != std::string::npos; }
  // In windows every fourth call or so has a rank whose arrays are in none.
  bool HasWindow(uint32_t rank) const {
    return header % 4 != 0 || rank != (root + header / 4) % ranks;
  }
  bool AddsFloats() const { return kernel.ends_with("float32"); }
  // 4 bytes where the switch adds, which has no smaller integers.
  uint32_t ElementBytes() const { return AddsFloats() || kernel.ends_with("uint32") ? 4 : 1; }
  // Sums in windows are of whole vectors.
  uint32_t Alignment() const { return InWindows() && Combines() ? 16 : ElementBytes(); }
  uint8_t Input(uint32_t rank, uint64_t i) const {
    if (AddsFloats()) return ByteOf(Number(rank, i / 4), i);
    const auto value = static_cast<uint8_t>(Hash(rank, i));
    // So small that the sum of a byte is no concern of the next one.
    return ElementBytes() == 1 ? value : static_cast<uint8_t>(value / kMostRanks);
  }
  uint64_t InputBytes() const {
    return bytes * (Is("all_to_all") || Is("reduce_scatter") ? ranks : 1);
  }
  uint64_t OutputBytes() const {
    return bytes * (Is("all_to_all") || Is("all_gather") ? ranks : 1);
  }
  int32_t Target(uint32_t rank) const {
    return rank == silent ? -1 : static_cast<int32_t>((rank + shift) % ranks);
  }
  int32_t Source(uint32_t rank) const {
    const uint32_t source = (rank + ranks - shift % ranks) % ranks;
    return source == silent ? -1 : static_cast<int32_t>(source);
  }
  uint8_t Expected(uint32_t rank, uint64_t i) const {
    if (Is("all_gather")) return Input(static_cast<uint32_t>(i / bytes), i % bytes);
    if (Is("all_to_all")) {
      return Input(static_cast<uint32_t>(i / bytes), rank * bytes + i % bytes);
    }
    if (Is("broadcast")) return Input(root, i);
    if (Is("barrier")) return Input(rank, i);
    if (Is("permute")) {
      const int32_t source = Source(rank);
      return source < 0 ? uint8_t{0} : Input(static_cast<uint32_t>(source), i);
    }
    const uint64_t place = Is("reduce_scatter") ? rank * bytes + i : i;
    float number = 0;
    uint8_t sum = 0;
    for (uint32_t p = 0; p < ranks; ++p) {
      number += Number(p, place / 4);
      sum = static_cast<uint8_t>(sum + Input(p, place));
    }
    return AddsFloats() ? ByteOf(number, i) : sum;
  }

 private:
  uint32_t Hash(uint32_t rank, uint64_t i) const {
    return (header * 2654435761u + rank * 40503u + static_cast<uint32_t>(i) * 31u) >> 7;
  }
  // Sums of it are exact.
  float Number(uint32_t rank, uint64_t element) const {
    return static_cast<float>(Hash(rank, element) % 65536);
  }
  static uint8_t ByteOf(float number, uint64_t i) {
    return std::bit_cast<std::array<uint8_t, 4>>(number)[i % 4];
  }
};

// Every way in which a kernel uses lanes and areas; types only as far as these depend on them.
inline const std::vector<std::string>& MixedKernels() {
  static const std::vector<std::string> names = {
      "all_reduce_packets_sum_uint8",
      "all_reduce_two_shot_sum_uint8",
      "reduce_scatter_packets_sum_uint8",
      "reduce_scatter_pull_sum_uint8",
      "all_gather_packets",
      "all_gather_push",
      "all_reduce_multicast_sum_uint32",
      "reduce_scatter_multicast_sum_uint32",
      "all_gather_multicast",
      "all_to_all_packets",
      "all_to_all_push",
      "permute_packets",
      "permute_push",
      "broadcast_packets",
      "broadcast_push",
      "barrier",
      "ragged_all_to_all_push_int32",
      "ragged_all_to_all_push_int64",
      "all_reduce_rms_norm_packets_float32",
      "all_reduce_rms_norm_packets_bfloat16",
      "all_reduce_rms_norm_two_shot_float32",
      "all_reduce_rms_norm_two_shot_bfloat16",
      "all_reduce_window_sum_float32",
      "reduce_scatter_window_sum_float32",
      "all_gather_window",
      "all_to_all_window",
      "permute_window",
      "broadcast_window",
  };
  return names;
}

// Of areas that hold what calls of every kind need: a table of slices and rows from each rank.
constexpr uint32_t MixedBulkBytes(uint32_t ranks) { return kLineBytes * 2 * ranks; }

// One that fits into the areas, of up to `segments` steps or so.
inline MixedCall RandomCall(std::mt19937_64& random, const ArenaShape& shape,
                            const std::string& kernel, uint32_t segments = 3) {
  MixedCall call{kernel, shape.ranks, 1, 1, 0, 0, 0, 0, 0};
  if (kernel != "barrier") call.blocks = static_cast<uint32_t>(1 + random() % shape.lanes);
  call.threads = static_cast<uint32_t>(1 + random() % 6);
  const uint64_t most = kernel.find("packets") != std::string::npos
                            ? shape.packet_bytes
                            : uint64_t{shape.bulk_bytes} / shape.ranks * segments;
  call.bytes = 1 + random() % (most * call.blocks);
  call.bytes += (call.Alignment() - call.bytes % call.Alignment()) % call.Alignment();
  call.header = static_cast<uint32_t>(random());
  call.root = static_cast<uint32_t>(random() % shape.ranks);
  call.shift = static_cast<uint32_t>(random() % shape.ranks);
  call.silent = static_cast<uint32_t>(random() % (shape.ranks + 1));
  return call;
}

}  // namespace jaxfabric::device
