#include "collective/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "collective/hosts.h"
#include "collective/order.h"
#include "memory/codec.h"
#include "memory/reduce.h"

namespace jaxfabric::testing {
namespace {

// Random words become values of a type by these bits: word & keep | set.
struct BitPattern {
  uint64_t keep;
  uint64_t set;
};

// Floats are finite and of about the same size, so that rounding depends on the order of additions.
BitPattern PatternOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return {0x0101010101010101, 0};
    case DType::kFloat16:
      return {0x8bff8bff8bff8bff, 0x3400340034003400};
    case DType::kBfloat16:
      return {0x80ff80ff80ff80ff, 0x3f003f003f003f00};
    case DType::kFloat32:
    case DType::kComplex64:
      return {0x80ffffff80ffffff, 0x3f0000003f000000};
    case DType::kFloat64:
    case DType::kComplex128:
      return {0x801fffffffffffff, 0x3fe0000000000000};
    case DType::kFloat8E5M2:
      return {0x8787878787878787, 0x3838383838383838};
    case DType::kFloat8E4M3FN:
      return {0x8f8f8f8f8f8f8f8f, 0x3030303030303030};
    default:
      return {~uint64_t{0}, 0};
  }
}

// splitmix64: word `index` of the stream `seed`, without those before it.
uint64_t Word(uint64_t seed, uint64_t index) {
  uint64_t x = seed + index * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

constexpr float kEpsilon = 0.5f;

// Calls use() with the codec of one of the types that have a norm.
template <class Use>
void WithFloats(DType dtype, Use use) {
  if (dtype == DType::kFloat16) {
    use(Float16Codec());
  } else if (dtype == DType::kBfloat16) {
    use(Bfloat16Codec());
  } else {
    use(PlainCodec<float>());
  }
}

}  // namespace

size_t Problem::row_bytes() const { return count * DTypeSize(dtype); }

size_t Problem::input_bytes() const {
  const bool rows = kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll ||
                    kind == OpKind::kRaggedAllToAll;
  return row_bytes() * (rows ? static_cast<size_t>(size) : 1);
}

size_t Problem::output_bytes() const {
  const bool rows =
      kind == OpKind::kAllGather || kind == OpKind::kAllToAll || kind == OpKind::kRaggedAllToAll;
  return row_bytes() * (rows ? static_cast<size_t>(size) : 1);
}

std::vector<int64_t> Problem::Pairs() const {
  if (kind != OpKind::kPermute || !pairs.empty()) return pairs;
  std::vector<int64_t> ring;
  for (int rank = 0; rank < size; ++rank) {
    ring.push_back(rank);
    ring.push_back((rank + 1) % size);
  }
  return ring;
}

Bytes Problem::Input(int position, int launch) const {
  if (kind == OpKind::kAllReduceRmsNorm) {
    return Integers(static_cast<uint64_t>(16 * launch + position), count);
  }
  return Part(position, launch, 0, input_bytes());
}

Bytes Problem::Part(int position, int launch, size_t offset, size_t size_in_bytes) const {
  const uint64_t seed = static_cast<uint64_t>(position) * 1000003 +
                        static_cast<uint64_t>(launch) * 7919 + count * 31 +
                        static_cast<uint64_t>(kind) * 101;
  const BitPattern bits = PatternOf(dtype);
  Bytes bytes(size_in_bytes);
  for (size_t at = 0; at < bytes.size();) {
    const size_t from = (offset + at) % 8;
    const size_t length = std::min(8 - from, bytes.size() - at);
    const uint64_t word = (Word(seed, (offset + at) / 8) & bits.keep) | bits.set;
    std::memcpy(bytes.data() + at, reinterpret_cast<const char*>(&word) + from, length);
    at += length;
  }
  return bytes;
}

Bytes Problem::Output(int position, int launch) const {
  const size_t row = row_bytes();
  const auto me = static_cast<size_t>(position);
  const bool scattered = kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll;
  // What this rank gets of another.
  const auto part = [&](int from) { return Part(from, launch, scattered ? me * row : 0, row); };
  switch (kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter: {
      const auto sum = [&](const std::vector<Bytes>& parts) {
        std::vector<const void*> sources;
        for (const Bytes& bytes : parts) sources.push_back(bytes.data());
        Bytes out(row);
        Reduce(dtype, reduction, out.data(), sources, count);
        return out;
      };
      std::vector<Bytes> parts;
      for (int rank = 0; rank < size; ++rank) parts.push_back(part(rank));
      if (host_of.empty()) return sum(parts);
      const Hosts hosts(host_of);
      std::vector<Bytes> sums;
      for (int host = 0; host < hosts.count(); ++host) {
        std::vector<Bytes> own;
        for (int rank : hosts.members(host)) own.push_back(parts[static_cast<size_t>(rank)]);
        sums.push_back(sum(own));
      }
      if (!pattern) return sum(sums);
      return SumInOrder(*pattern, scattered ? position : -1, dtype, reduction, count, sums);
    }
    case OpKind::kAllGather:
    case OpKind::kAllToAll: {
      Bytes out;
      for (int rank = 0; rank < size; ++rank) {
        const Bytes bytes = part(rank);
        out.insert(out.end(), bytes.begin(), bytes.end());
      }
      return out;
    }
    case OpKind::kPermute: {
      const std::vector<int64_t> all = Pairs();
      for (size_t i = 0; i < all.size(); i += 2) {
        if (all[i + 1] == position) return part(static_cast<int>(all[i]));
      }
      return Bytes(row);
    }
    case OpKind::kBroadcast:
      return part(static_cast<int>(root));
    case OpKind::kBarrier:
      return part(position);
    case OpKind::kRaggedAllToAll:
      return RaggedOutput(position, launch);
    case OpKind::kAllReduceRmsNorm:
      return Normalised(position, launch);
  }
  return {};
}

RaggedSizes Problem::Ragged() const {
  if (kind != OpKind::kRaggedAllToAll) return {};
  RaggedSizes sizes;
  sizes.row_bytes = row_elements * DTypeSize(dtype);
  sizes.input_rows = sizes.output_rows = count * static_cast<size_t>(size) / row_elements;
  sizes.slices = SlicesEach() * static_cast<size_t>(size);
  return sizes;
}

Bytes Problem::Initial(int position, int launch) const {
  return Bytes(output_bytes(), static_cast<std::byte>(0x40 + 8 * position + launch % 8));
}

// Slice `index` from `position` to `peer`, and the size of the one that comes back.
void Problem::AddSlice(Slices& all, int position, int launch, int peer, size_t index) const {
  const size_t each = SlicesEach();
  const size_t rows = count / row_elements;  // of the result, for each sender
  const auto begin = [&](int from, size_t i) {
    return static_cast<size_t>(from) * rows + i * rows / each;
  };
  const auto sizes = [&](int from, int to) {
    const uint64_t random = Word(
        static_cast<uint64_t>(launch) + 77,
        (static_cast<uint64_t>(from) * static_cast<uint64_t>(size) + static_cast<uint64_t>(to)) *
                each +
            index);
    const size_t room = begin(from, index + 1) - begin(from, index);
    // Nothing, all there is room for, or anything between.
    const size_t size_there = random % 4 == 0   ? 0
                              : random % 4 == 1 ? room
                                                : static_cast<size_t>(random / 4) % (room + 1);
    const auto spare = [&](size_t limit) {
      return static_cast<size_t>(random >> 20) % (limit - size_there + 1);
    };
    return std::tuple(size_there, spare(static_cast<size_t>(size) * rows),
                      begin(from, index) + spare(room));
  };
  const auto [sent, input_offset, output_offset] = sizes(position, peer);
  all.input_offsets.push_back(static_cast<int64_t>(input_offset));
  all.send_sizes.push_back(static_cast<int64_t>(sent));
  all.output_offsets.push_back(static_cast<int64_t>(output_offset));
  all.recv_sizes.push_back(static_cast<int64_t>(std::get<0>(sizes(peer, position))));
}

Slices Problem::SlicesOf(int position, int launch) const {
  if (slices) return slices(position, launch);
  Slices all;
  for (int peer = 0; kind == OpKind::kRaggedAllToAll && peer < size; ++peer) {
    for (size_t i = 0; i < SlicesEach(); ++i) AddSlice(all, position, launch, peer, i);
  }
  return all;
}

Bytes Problem::RaggedOutput(int position, int launch) const {
  const size_t row = Ragged().row_bytes;
  Bytes out = Initial(position, launch);
  for (int from = 0; from < size; ++from) {
    const Slices sent = SlicesOf(from, launch);
    const Bytes input = Input(from, launch);
    for (size_t i = 0; i < SlicesEach(); ++i) {
      const size_t slice = static_cast<size_t>(position) * SlicesEach() + i;
      const auto bytes = static_cast<size_t>(sent.send_sizes[slice]) * row;
      if (bytes == 0) continue;
      std::memcpy(out.data() + static_cast<size_t>(sent.output_offsets[slice]) * row,
                  input.data() + static_cast<size_t>(sent.input_offsets[slice]) * row, bytes);
    }
  }
  return out;
}

Bytes Problem::Integers(uint64_t seed, size_t elements) const {
  Bytes bytes;
  WithFloats(dtype, [&]<class Codec>(Codec) {
    for (size_t i = 0; i < elements; ++i) {
      const auto value = static_cast<float>(static_cast<int>(Word(seed, i) % 9) - 4);
      const typename Codec::Storage stored = Codec::Store(value);
      const auto* begin = reinterpret_cast<const std::byte*>(&stored);
      bytes.insert(bytes.end(), begin, begin + sizeof(stored));
    }
  });
  return bytes;
}

Bytes Problem::Residual(int position, int launch) const {
  return Integers(static_cast<uint64_t>(16 * launch + position + 5000), count);
}

Bytes Problem::Weight() const { return Integers(9000, row_elements); }

Bytes Problem::NewResidual(int position, int launch) const {
  std::vector<Bytes> parts;
  std::vector<const void*> sources;
  for (int rank = 0; rank < size; ++rank) parts.push_back(Input(rank, launch));
  for (const Bytes& bytes : parts) sources.push_back(bytes.data());
  Bytes sum(row_bytes()), out(row_bytes());
  Reduce(dtype, ReduceOp::kSum, sum.data(), sources, count);
  const Bytes residual = Residual(position, launch);
  Reduce(dtype, ReduceOp::kSum, out.data(), std::vector<const void*>{sum.data(), residual.data()},
         count);
  return out;
}

Bytes Problem::Normalised(int position, int launch) const {
  Bytes out = NewResidual(position, launch);
  const Bytes weight = Weight();
  WithFloats(dtype, [&]<class Codec>(Codec) {
    using Storage = typename Codec::Storage;
    const auto load = [](const Bytes& bytes, size_t i) {
      Storage stored;
      std::memcpy(&stored, bytes.data() + i * sizeof(Storage), sizeof(Storage));
      return Codec::Load(stored);
    };
    for (size_t begin = 0; begin < count; begin += row_elements) {
      float squares = 0;
      for (size_t i = 0; i < row_elements; ++i) {
        squares += load(out, begin + i) * load(out, begin + i);
      }
      const float scale = 1.0f / std::sqrt(squares / static_cast<float>(row_elements) + kEpsilon);
      for (size_t i = 0; i < row_elements; ++i) {
        const Storage stored = Codec::Store(load(out, begin + i) * scale * load(weight, i));
        std::memcpy(out.data() + (begin + i) * sizeof(Storage), &stored, sizeof(Storage));
      }
    }
  });
  return out;
}

CallSpec Problem::Spec(const std::vector<int64_t>& ids, uint64_t site) const {
  CallSpec spec;
  spec.kind = kind;
  spec.reduction = reduction;
  spec.site = site;
  spec.place = site;
  spec.label = Describe();
  spec.groups = {ids};
  spec.pairs = Pairs();
  spec.root = root;
  if (kind == OpKind::kAllReduceRmsNorm) spec.epsilon = kEpsilon;
  return spec;
}

std::string Problem::Describe() const {
  return std::string(OpKindName(kind)) + " " + std::string(DTypeName(dtype)) + "[" +
         std::to_string(count) + "] on " + std::to_string(size) + " ranks";
}

std::vector<Problem> EveryKind(int size, size_t count, DType dtype) {
  std::vector<Problem> problems;
  for (OpKind kind :
       {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kReduceScatter, OpKind::kAllToAll,
        OpKind::kPermute, OpKind::kBroadcast, OpKind::kBarrier, OpKind::kRaggedAllToAll}) {
    const bool reduces = kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter;
    const bool maximum = dtype == DType::kBool;
    if (reduces && !CheckReducible(dtype, maximum ? ReduceOp::kMax : ReduceOp::kSum).ok()) continue;
    Problem problem;
    problem.kind = kind;
    problem.dtype = dtype;
    problem.count = count;
    problem.size = size;
    problem.reduction = maximum ? ReduceOp::kMax : ReduceOp::kSum;
    if (kind == OpKind::kBroadcast) problem.root = size - 1;
    problems.push_back(problem);
    if (kind == OpKind::kPermute && size > 1) {
      problem.pairs = {0, size - 1};  // one sender, one receiver, all others get zeros
      problems.push_back(problem);
    }
  }
  return problems;
}

}  // namespace jaxfabric::testing
