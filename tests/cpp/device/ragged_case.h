// A ragged_all_to_all of any sizes: the arrays of all ranks, and what each must have in the end.
#pragma once

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "device/cluster.h"

namespace jaxfabric::device {

// One rank's arrays.
template <class Index>
struct RaggedRank {
  std::vector<Index> input_offsets, send_sizes, output_offsets, recv_sizes;
  Bytes input{0}, initial{0}, output{0};
};

template <class Index>
struct RaggedCase {
  uint32_t ranks, slices;
  uint64_t row_bytes, input_rows, output_rows;
  bool in_place;
  std::vector<RaggedRank<Index>> rank;

  uint32_t Number(uint32_t other, uint32_t slice) const { return other * slices + slice; }

  std::vector<std::byte> Expected(uint32_t receiver) {
    std::vector<std::byte> result = rank[receiver].initial.Copy();
    for (RaggedRank<Index>& sender : rank) {
      for (uint32_t i = 0; i < slices; ++i) {
        const uint32_t number = Number(receiver, i);
        if (sender.send_sizes[number] == 0) continue;
        std::memcpy(
            result.data() + static_cast<uint64_t>(sender.output_offsets[number]) * row_bytes,
            sender.input.data() + static_cast<uint64_t>(sender.input_offsets[number]) * row_bytes,
            static_cast<uint64_t>(sender.send_sizes[number]) * row_bytes);
      }
    }
    return result;
  }
  RaggedArguments Arguments(Cluster& cluster, uint32_t position, uint32_t header) {
    RaggedRank<Index>& own = rank[position];
    return {cluster.View(position),
            header,
            slices,
            own.input.data(),
            in_place ? own.output.data() : own.initial.data(),
            own.output.data(),
            own.input_offsets.data(),
            own.send_sizes.data(),
            own.output_offsets.data(),
            own.recv_sizes.data(),
            row_bytes,
            input_rows,
            output_rows};
  }
};

enum class RaggedSizes { kAny, kAllToOne, kNothing };

template <class Index>
RaggedCase<Index> MakeRagged(std::mt19937_64& random, uint32_t ranks, uint32_t slices,
                             RaggedSizes sizes) {
  constexpr uint64_t kRowBytes[] = {1, 3, 4, 16, 20, 48};
  RaggedCase<Index> c{
      ranks, slices, kRowBytes[random() % 6], 1 + random() % 30, 0, random() % 2 == 0, {}};
  const auto anything = [&] { return static_cast<Index>(random()); };
  for (uint32_t r = 0; r < ranks; ++r) {
    RaggedRank<Index>& own = c.rank.emplace_back();
    for (uint32_t i = 0; i < ranks * slices; ++i) {
      const bool empty = sizes == RaggedSizes::kNothing || random() % 4 == 0 ||
                         (sizes == RaggedSizes::kAllToOne && i / slices != ranks - 1);
      const uint64_t rows = empty ? 0 : random() % (c.input_rows + 1);
      own.send_sizes.push_back(static_cast<Index>(rows));
      own.input_offsets.push_back(
          rows == 0 ? anything() : static_cast<Index>(random() % (c.input_rows - rows + 1)));
      own.output_offsets.push_back(anything());
      own.recv_sizes.push_back(0);
    }
    own.input = Bytes(c.input_rows * c.row_bytes, static_cast<uint32_t>(random() % 16));
    for (uint64_t i = 0; i < own.input.size(); ++i) own.input.data()[i] = std::byte(random() & 255);
  }
  // Places without overlap, in any order, with gaps.
  for (uint32_t receiver = 0; receiver < ranks; ++receiver) {
    std::vector<std::pair<uint32_t, uint32_t>> order;
    for (uint32_t s = 0; s < ranks; ++s) {
      for (uint32_t i = 0; i < slices; ++i) order.emplace_back(s, i);
    }
    std::shuffle(order.begin(), order.end(), random);
    uint64_t row = 0;
    for (const auto& [s, i] : order) {
      const Index rows = c.rank[s].send_sizes[c.Number(receiver, i)];
      c.rank[receiver].recv_sizes[c.Number(s, i)] = rows;
      if (rows == 0) continue;
      row += random() % 3;
      c.rank[s].output_offsets[c.Number(receiver, i)] = static_cast<Index>(row);
      row += static_cast<uint64_t>(rows);
    }
    c.output_rows = std::max(c.output_rows, row + random() % 3);
  }
  for (RaggedRank<Index>& own : c.rank) {
    own.initial = Bytes(c.output_rows * c.row_bytes, static_cast<uint32_t>(random() % 16));
    own.output = Bytes(c.output_rows * c.row_bytes, static_cast<uint32_t>(random() % 16));
    for (uint64_t i = 0; i < own.initial.size(); ++i) own.initial.data()[i] = std::byte(i & 255);
    if (c.in_place) std::memcpy(own.output.data(), own.initial.data(), own.initial.size());
  }
  return c;
}

template <class Index>
std::string RaggedKernel() {
  return StrCat("jaxfabric_ragged_all_to_all_push_int", sizeof(Index) * 8);
}

}  // namespace jaxfabric::device
