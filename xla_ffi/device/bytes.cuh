// How a block moves bytes: in the widest accesses that the addresses allow.
#pragma once

#include "device/hardware.cuh"

namespace jaxfabric::device {

// [begin, end): the part of `total` that one of `parts` takes, a multiple of `unit` except at the
// end.
struct Slice {
  uint64_t begin, end;
  JF_DEVICE Slice(uint64_t total, uint32_t part, uint32_t parts, uint32_t unit) {
    const uint64_t size = (total + uint64_t{parts} * unit - 1) / (uint64_t{parts} * unit) * unit;
    begin = size * part < total ? size * part : total;
    end = total - begin < size ? total : begin + size;
  }
  JF_DEVICE uint64_t size() const { return end - begin; }
};

template <class T>
struct JF_MAY_ALIAS Unit {
  T value;
};

JF_DEVICE uint64_t Misalignment(const void* a, const void* b, uint32_t unit) {
  return (reinterpret_cast<uint64_t>(a) | reinterpret_cast<uint64_t>(b)) % unit;
}

template <class T, class Size>
JF_DEVICE void CopyUnits(std::byte* to, const std::byte* from, Size bytes) {
  auto* out = reinterpret_cast<T*>(to);
  const auto* in = reinterpret_cast<const T*>(from);
  const Size count = bytes / sizeof(T), stride = hw::Threads();
  Size i = hw::Thread();
  // Several loads on their way at once: one per thread would not fill a link. Single bytes do not
  // fill it either way, and would take registers from their callers.
  for (; sizeof(T) > 1 && i + 3 * stride < count; i += 4 * stride) {
    const T a = in[i], b = in[i + stride], c = in[i + 2 * stride], d = in[i + 3 * stride];
    out[i] = a, out[i + stride] = b, out[i + 2 * stride] = c, out[i + 3 * stride] = d;
  }
  for (; i < count; i += stride) out[i] = in[i];
  for (Size k = count * sizeof(T) + hw::Thread(); k < bytes; k += stride) to[k] = from[k];
}

// By all threads of the block; SyncBlock before another thread reads it. Counts in Size, the
// smaller of which takes fewer registers.
template <class Size>
JF_DEVICE void CopyBlock(std::byte* to, const std::byte* from, Size bytes) {
  if (to == from) return;
  if (Misalignment(to, from, 16) == 0) {
    CopyUnits<Vector>(to, from, bytes);
  } else if (Misalignment(to, from, 4) == 0) {
    CopyUnits<Unit<uint32_t>>(to, from, bytes);
  } else {
    CopyUnits<Unit<uint8_t>>(to, from, bytes);
  }
}

JF_DEVICE void ZeroBlock(std::byte* to, uint64_t bytes) {
  if (Misalignment(to, to, 16) == 0) {
    for (uint64_t i = hw::Thread(); i < bytes / 16; i += hw::Threads()) {
      reinterpret_cast<Vector*>(to)[i] = Vector{};
    }
    for (uint64_t k = bytes / 16 * 16 + hw::Thread(); k < bytes; k += hw::Threads()) {
      to[k] = std::byte{0};
    }
  } else {
    for (uint64_t k = hw::Thread(); k < bytes; k += hw::Threads()) to[k] = std::byte{0};
  }
}

// 16 bytes of an array with any alignment, zeros behind its end.
JF_DEVICE Vector LoadVector(const std::byte* from, uint32_t bytes, uint32_t at, bool aligned) {
  if (aligned && at + sizeof(Vector) <= bytes) {
    return *reinterpret_cast<const Vector*>(from + at);
  }
  Vector v{};
  JF_UNROLL
  for (uint32_t k = 0; k < sizeof(Vector); ++k) {
    if (at + k < bytes) v.word[k / 4] |= static_cast<uint32_t>(from[at + k]) << (8 * (k % 4));
  }
  return v;
}

// An array as words of 8 bytes, the last of which may be incomplete.
class Words {
 public:
  static JF_DEVICE uint64_t Count(uint64_t bytes) { return (bytes + 7) / 8; }

  JF_DEVICE Words(const void* base, uint64_t bytes)
      : base_(static_cast<std::byte*>(const_cast<void*>(base))),
        bytes_(bytes),
        aligned_(Misalignment(base, base, 8) == 0) {}

  JF_DEVICE uint64_t Load(uint64_t word) const {
    const std::byte* at = base_ + word * 8;
    if (aligned_ && word * 8 + 8 <= bytes_) {
      return reinterpret_cast<const Unit<uint64_t>*>(at)->value;
    }
    uint64_t value = 0;
    for (uint32_t k = 0; k < 8 && word * 8 + k < bytes_; ++k) value |= uint64_t(at[k]) << (8 * k);
    return value;
  }
  JF_DEVICE void Store(uint64_t word, uint64_t value) const {
    std::byte* at = base_ + word * 8;
    if (aligned_ && word * 8 + 8 <= bytes_) {
      reinterpret_cast<Unit<uint64_t>*>(at)->value = value;
      return;
    }
    for (uint32_t k = 0; k < 8 && word * 8 + k < bytes_; ++k) {
      at[k] = static_cast<std::byte>(value >> (8 * k));
    }
  }

 private:
  std::byte* base_;
  uint64_t bytes_;
  bool aligned_;
};

JF_DEVICE Packet MakePacket(uint64_t data, uint32_t flag) {
  return {static_cast<uint32_t>(data), flag, static_cast<uint32_t>(data >> 32), flag};
}
JF_DEVICE uint64_t PacketData(const Packet& packet) {
  return uint64_t{packet.data1} << 32 | packet.data0;
}

}  // namespace jaxfabric::device
