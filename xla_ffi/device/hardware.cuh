// Everything about the hardware that kernels use, by name: the only place where a kernel's source
// differs between a GPU and the host, where the fake driver's grid runs it.
//
// On a GPU these are single instructions. Loads and stores that other ranks take part in have
// system scope, since a peer is another GPU; what they order is said where they are used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/layout.h"

#if defined(__CUDACC__)
#define JF_DEVICE __device__ __forceinline__
#define JF_COLD __device__ __noinline__
// A kernel with one argument. At most kBlockThreads threads.
#define JF_KERNEL(name, Arguments)                                                    \
  extern "C" __global__ void __launch_bounds__(::jaxfabric::device::kBlockThreads, 1) \
      name(const __grid_constant__ Arguments arguments)
// A variable that the threads of a block share.
#define JF_SHARED(Type, name) __shared__ Type name
#define JF_UNROLL _Pragma("unroll")
#define JF_MAY_ALIAS
#else
#include <source_location>

#include "drivers/cuda/fake/grid.h"
#define JF_DEVICE inline
#define JF_COLD
#define JF_KERNEL(name, Arguments) static void name(const Arguments& arguments)
#define JF_SHARED(Type, name)       \
  static const char name##_key = 0; \
  Type& name = *static_cast<Type*>( \
      ::jaxfabric::emulation::Shared(&name##_key, sizeof(Type), alignof(Type)))
#define JF_UNROLL
#define JF_MAY_ALIAS [[gnu::may_alias]]
#endif

namespace jaxfabric::device {

// 16 bytes, the widest access there is, of whatever type lies there.
struct alignas(16) JF_MAY_ALIAS Vector {
  uint32_t word[4];
};

namespace hw {

#if defined(__CUDACC__)

JF_DEVICE uint32_t Thread() { return threadIdx.x; }
JF_DEVICE uint32_t Threads() { return blockDim.x; }
JF_DEVICE uint32_t Block() { return blockIdx.x; }
JF_DEVICE uint32_t Blocks() { return gridDim.x; }
JF_DEVICE void SyncBlock() { __syncthreads(); }

JF_DEVICE uint64_t AcquireLoad(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
JF_DEVICE void ReleaseStore(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
// Returns when everybody sees what this thread has stored.
JF_DEVICE void SystemFence() { __threadfence_system(); }
// Of a word that the host writes, or reads.
JF_DEVICE uint32_t HostLoad(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
JF_DEVICE void HostReleaseStore(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Atomically sets a word of this GPU that was 0; true for the one that did.
JF_DEVICE bool TryClaim(uint32_t* word) { return atomicCAS(word, 0u, 1u) == 0u; }
// Adds to a word of this GPU and returns what it was.
JF_DEVICE uint32_t AcquireReleaseAdd(uint32_t* word, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(word), "r"(value)
               : "memory");
  return old;
}

// A packet's halves are never torn; each tells by its flag whether it is there.
JF_DEVICE Packet LoadPacket(const Packet* address) {
  Packet p;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(p.data0), "=r"(p.flag0), "=r"(p.data1), "=r"(p.flag1)
               : "l"(address)
               : "memory");
  return p;
}
JF_DEVICE void StorePacket(Packet* address, const Packet& p) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(p.data0),
               "r"(p.flag0), "r"(p.data1), "r"(p.flag1)
               : "memory");
}

JF_DEVICE uint64_t Nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}
JF_DEVICE void Pause() {}
// Ends the kernel, and with it the CUDA context: the only way to make a stream fail.
[[noreturn]] JF_DEVICE void Trap() {
  asm volatile("trap;");
  __builtin_unreachable();
}

#else

inline uint32_t Thread() { return emulation::ThreadIndex(); }
inline uint32_t Threads() { return emulation::ThreadCount(); }
inline uint32_t Block() { return emulation::BlockIndex(); }
inline uint32_t Blocks() { return emulation::BlockCount(); }
inline void SyncBlock(std::source_location where = std::source_location::current()) {
  emulation::SyncBlock(where);
}

inline uint64_t AcquireLoad(const uint64_t* address) {
  emulation::MaybeSwitch();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void ReleaseStore(uint64_t* address, uint64_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
  emulation::MaybeSwitch();
}
inline void SystemFence() { emulation::MaybeSwitch(); }
inline uint32_t HostLoad(const uint32_t* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline void HostReleaseStore(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline bool TryClaim(uint32_t* word) {
  uint32_t expected = 0;
  return __atomic_compare_exchange_n(word, &expected, 1u, false, __ATOMIC_RELAXED,
                                     __ATOMIC_RELAXED);
}
inline uint32_t AcquireReleaseAdd(uint32_t* word, uint32_t value) {
  emulation::MaybeSwitch();
  return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}

// As on a GPU, a half (data and its flag) is never torn, and the two halves may come apart.
inline Packet LoadPacket(const Packet* address) {
  const auto* halves = reinterpret_cast<const uint64_t*>(address);
  emulation::MaybeSwitch();
  const uint64_t low = __atomic_load_n(halves, __ATOMIC_RELAXED);
  emulation::MaybeSwitch();
  const uint64_t high = __atomic_load_n(halves + 1, __ATOMIC_RELAXED);
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}
inline void StorePacket(Packet* address, const Packet& p) {
  auto* halves = reinterpret_cast<uint64_t*>(address);
  const uint64_t value[2] = {(uint64_t{p.flag0} << 32) | p.data0,
                             (uint64_t{p.flag1} << 32) | p.data1};
  // Either half first.
  const uint32_t first = (reinterpret_cast<uintptr_t>(address) / sizeof(Packet) + p.flag0) & 1;
  __atomic_store_n(halves + first, value[first], __ATOMIC_RELAXED);
  emulation::MaybeSwitch();
  __atomic_store_n(halves + 1 - first, value[1 - first], __ATOMIC_RELAXED);
  emulation::MaybeSwitch();
}

inline uint64_t Nanoseconds() { return emulation::NanoClock(); }
inline void Pause() { emulation::Pause(); }
[[noreturn]] inline void Trap() { emulation::Trap(); }

#endif

}  // namespace hw
}  // namespace jaxfabric::device
