#include "collective/problem.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "memory/reduce.h"

namespace jaxfabric::testing {
namespace {

bool IsFloat(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBfloat16:
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3FN:
      return true;
    default:
      return false;
  }
}

// Finite values of about the same size, so that rounding depends on the order of additions.
void FillFloats(DType dtype, std::mt19937_64& random, Bytes& bytes) {
  const auto fill = [&](auto bits_of) {
    using T = decltype(bits_of(uint64_t{}));
    for (size_t at = 0; at + sizeof(T) <= bytes.size(); at += sizeof(T)) {
      const T value = bits_of(random());
      std::memcpy(bytes.data() + at, &value, sizeof(T));
    }
  };
  switch (dtype) {
    case DType::kFloat16:  // exponents around 1
      fill([](uint64_t r) { return static_cast<uint16_t>(0x3400 | (r & 0x8bff)); });
      break;
    case DType::kBfloat16:
      fill([](uint64_t r) { return static_cast<uint16_t>(0x3f00 | (r & 0x80ff)); });
      break;
    case DType::kFloat32:
    case DType::kComplex64:
      fill([](uint64_t r) { return static_cast<uint32_t>(0x3f000000 | (r & 0x80ffffff)); });
      break;
    case DType::kFloat64:
    case DType::kComplex128:
      fill([](uint64_t r) { return 0x3fe0000000000000 | (r & 0x801fffffffffffff); });
      break;
    case DType::kFloat8E5M2:
      fill([](uint64_t r) { return static_cast<uint8_t>(0x38 | (r & 0x87)); });
      break;
    default:  // kFloat8E4M3FN
      fill([](uint64_t r) { return static_cast<uint8_t>(0x30 | (r & 0x8f)); });
  }
}

}  // namespace

size_t Problem::row_bytes() const { return count * DTypeSize(dtype); }

size_t Problem::input_bytes() const {
  const bool rows = kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll;
  return row_bytes() * (rows ? static_cast<size_t>(size) : 1);
}

size_t Problem::output_bytes() const {
  const bool rows = kind == OpKind::kAllGather || kind == OpKind::kAllToAll;
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
  std::mt19937_64 random(static_cast<uint64_t>(position) * 1000003 +
                         static_cast<uint64_t>(launch) * 7919 + count * 31 +
                         static_cast<uint64_t>(kind));
  Bytes bytes(input_bytes());
  if (dtype == DType::kBool) {
    for (auto& byte : bytes) byte = static_cast<std::byte>(random() & 1);
  } else if (IsFloat(dtype)) {
    FillFloats(dtype, random, bytes);
  } else {
    for (size_t at = 0; at < bytes.size(); at += 8) {
      const uint64_t word = random();
      std::memcpy(bytes.data() + at, &word, std::min<size_t>(8, bytes.size() - at));
    }
  }
  return bytes;
}

Bytes Problem::Output(int position, int launch) const {
  const size_t row = row_bytes();
  const auto n = static_cast<size_t>(size);
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(Input(rank, launch));
  const auto me = static_cast<size_t>(position);
  Bytes out(output_bytes());
  const auto reduce = [&](size_t offset) {
    std::vector<const void*> sources;
    for (const Bytes& input : inputs) sources.push_back(input.data() + offset);
    Reduce(dtype, reduction, out.data(), sources, count);
  };
  const auto copy = [&](size_t to, const Bytes& in, size_t from) {
    if (row > 0) std::memcpy(out.data() + to * row, in.data() + from * row, row);
  };
  switch (kind) {
    case OpKind::kAllReduce:
      reduce(0);
      break;
    case OpKind::kReduceScatter:
      reduce(me * row);
      break;
    case OpKind::kAllGather:
      for (size_t from = 0; from < n; ++from) copy(from, inputs[from], 0);
      break;
    case OpKind::kAllToAll:
      for (size_t from = 0; from < n; ++from) copy(from, inputs[from], me);
      break;
    case OpKind::kPermute: {
      const std::vector<int64_t> all = Pairs();
      for (size_t i = 0; i < all.size(); i += 2) {
        if (all[i + 1] == position) copy(0, inputs[static_cast<size_t>(all[i])], 0);
      }
      break;
    }
    case OpKind::kBroadcast:
      copy(0, inputs[static_cast<size_t>(root)], 0);
      break;
    case OpKind::kBarrier:
      copy(0, inputs[me], 0);
  }
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
  return spec;
}

std::string Problem::Describe() const {
  return std::string(OpKindName(kind)) + " " + std::string(DTypeName(dtype)) + "[" +
         std::to_string(count) + "] on " + std::to_string(size) + " ranks";
}

std::vector<Problem> EveryKind(int size, size_t count, DType dtype) {
  std::vector<Problem> problems;
  for (OpKind kind : {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kReduceScatter,
                      OpKind::kAllToAll, OpKind::kPermute, OpKind::kBroadcast, OpKind::kBarrier}) {
    const bool reduces = kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter;
    const bool maximum = dtype == DType::kBool;
    if (reduces && !CheckReducible(dtype, maximum ? ReduceOp::kMax : ReduceOp::kSum).ok()) continue;
    Problem problem{kind, dtype, count, size, maximum ? ReduceOp::kMax : ReduceOp::kSum, {}, 0};
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
