// The ranks of a communicator on emulated GPUs, as threads of one grid: arenas, and launches of one
// kernel on all of them.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device/emulated.h"
#include "device/launch.h"
#include "device/layout.h"
#include "drivers/cuda/fake/grid.h"
#include "drivers/cuda/fake/multicast.h"

namespace jaxfabric::device {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// How often a test tries: under the thread sanitizer a fibre costs as much as a thread.
constexpr int Rounds(int usual) { return kThreadSanitizer ? (usual + 9) / 10 : usual; }

inline const EmulatedKernel& FindKernel(const std::string& name) {
  static const auto* table = [] {
    auto* kernels = new std::map<std::string, EmulatedKernel>();
    for (auto list :
         {AllGatherKernels(), AllReduceKernels(), AllReduceRmsNormKernels(), AllToAllKernels(),
          BarrierKernels(), BroadcastKernels(), MulticastKernels(), PermuteKernels(),
          RaggedAllToAllKernels(), ReduceScatterKernels(), WindowKernels()}) {
      for (const EmulatedKernel& kernel : list) kernels->emplace(kernel.name, kernel);
    }
    return kernels;
  }();
  const auto found = table->find(name);
  if (found == table->end()) {
    ADD_FAILURE() << "no kernel " << name;
    std::abort();
  }
  return found->second;
}

// Bytes at an address that is `offset` more than a multiple of 16, with guards around them.
class Bytes {
 public:
  explicit Bytes(uint64_t size, uint32_t offset = 0)
      : storage_(size + 2 * kGuard + 32, std::byte{0xEE}), size_(size) {
    const auto base = reinterpret_cast<uintptr_t>(storage_.data()) + kGuard;
    begin_ = (16 - base % 16) % 16 + offset % 16 + kGuard;
  }
  std::byte* data() { return storage_.data() + begin_; }
  uint64_t size() const { return size_; }
  std::vector<std::byte> Copy() { return {data(), data() + size_}; }
  bool GuardsIntact() const {
    for (uint64_t i = 0; i < begin_; ++i) {
      if (storage_[i] != std::byte{0xEE}) return false;
    }
    for (uint64_t i = begin_ + size_; i < storage_.size(); ++i) {
      if (storage_[i] != std::byte{0xEE}) return false;
    }
    return true;
  }

 private:
  static constexpr uint64_t kGuard = 32;
  std::vector<std::byte> storage_;
  uint64_t size_;
  uint64_t begin_;
};

class Cluster {
 public:
  Cluster(const ArenaShape& shape, uint64_t seed) : shape_(shape), grid_(seed) {
    EXPECT_TRUE(shape.Valid());
    for (uint32_t rank = 0; rank < shape.ranks; ++rank) {
      auto* arena = static_cast<std::byte*>(std::aligned_alloc(kLineBytes, shape.Bytes()));
      std::memset(arena, 0, shape.Bytes());
      arenas_.emplace_back(arena, &std::free);
      faults_.push_back(std::make_unique<FaultRecord>());
      controls_.push_back(std::make_unique<HostControl>());
    }
  }

  ~Cluster() {
    if (multicast_ == nullptr) return;
    emulation::UnregisterMulticast(multicast_);
    ::munmap(multicast_, shape_.Bytes());
  }
  // An address that stands for all arenas.
  void EnableMulticast() {
    if (multicast_ != nullptr) return;
    void* address = ::mmap(nullptr, shape_.Bytes(), PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(address, MAP_FAILED);
    multicast_ = static_cast<std::byte*>(address);
    std::vector<std::byte*> members;
    for (const auto& arena : arenas_) members.push_back(arena.get());
    emulation::RegisterMulticast(multicast_, shape_.Bytes(), members);
  }

  uint32_t ranks() const { return shape_.ranks; }
  const ArenaShape& shape() const { return shape_; }
  std::byte* arena(uint32_t rank) { return arenas_[rank].get(); }
  const FaultRecord& fault(uint32_t rank) const { return *faults_[rank]; }
  HostControl& control(uint32_t rank) { return *controls_[rank]; }
  emulation::Grid& grid() { return grid_; }

  Communicator View(uint32_t rank) {
    Communicator view{};
    view.shape = shape_;
    view.rank = rank;
    view.wait_milliseconds = wait_milliseconds;
    view.fault = faults_[rank].get();
    view.control = controls_[rank].get();
    view.multicast = multicast_;
    for (uint32_t peer = 0; peer < ranks(); ++peer) view.arena[peer] = arena(peer);
    return view;
  }

  // Puts a launch of one rank in flight; `trapped[rank]` says how it ended.
  template <class Arguments>
  uint64_t Start(uint32_t rank, const std::string& kernel, uint32_t blocks, uint32_t threads,
                 const Arguments& arguments, std::function<void(bool)> finished = nullptr) {
    const EmulatedKernel& found = FindKernel(kernel);
    EXPECT_EQ(found.argument_bytes, sizeof(Arguments)) << kernel;
    const auto* begin = reinterpret_cast<const std::byte*>(&arguments);
    ended[rank] = false;
    return launched_[rank] =
               grid_.Launch(found.body, {begin, begin + sizeof(Arguments)}, {blocks, threads},
                            [this, rank, finished = std::move(finished)](bool trap) {
                              ended[rank] = true;
                              trapped[rank] = trap;
                              if (finished) finished(trap);
                            });
  }
  void KillAll() {
    for (const auto& [rank, id] : launched_) grid_.Kill(id);
  }
  void RunAll() {
    while (grid_.Run(1 << 20)) {
    }
  }
  // As the host sees it while kernels run.
  FaultKind Fault(uint32_t rank) const {
    // Acquire: the rest of the record was written before.
    return static_cast<FaultKind>(__atomic_load_n(&faults_[rank]->kind, __ATOMIC_ACQUIRE));
  }

  // Sets the counters of all lanes, and the cells that belong to them, as if so many steps were
  // done.
  void SetStep(uint32_t step) {
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      for (uint32_t lane = 0; lane < shape_.lanes; ++lane) {
        auto* control = reinterpret_cast<LaneControl*>(arena(rank) + shape_.ControlOffset(lane));
        control->step = step;
        for (uint32_t back = 0; back < 2; ++back) {
          auto* cells = reinterpret_cast<uint64_t*>(arena(rank) +
                                                    shape_.CellsOffset(lane, (step - back) & 1));
          for (uint32_t peer = 0; peer < ranks(); ++peer) cells[peer] = step - back;
        }
      }
    }
  }

  uint32_t wait_milliseconds = 60000;
  std::map<uint32_t, bool> trapped;
  std::map<uint32_t, bool> ended;

 private:
  ArenaShape shape_;
  std::byte* multicast_ = nullptr;
  std::map<uint32_t, uint64_t> launched_;
  std::vector<std::unique_ptr<std::byte, decltype(&std::free)>> arenas_;
  std::vector<std::unique_ptr<FaultRecord>> faults_;
  std::vector<std::unique_ptr<HostControl>> controls_;
  emulation::Grid grid_;
};

}  // namespace jaxfabric::device
