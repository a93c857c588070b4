// What kernels call: this runs on a fibre.
#include <cstring>

#include "base/status.h"
#include "drivers/cuda/fake/grid.h"
#include "drivers/cuda/fake/sanitizer.h"
#include "drivers/cuda/fake/scheduler.h"

namespace jaxfabric::emulation {

using internal::Block;
using internal::Event;
using internal::running;
using internal::SharedStorage;
using internal::TsanAcquire;
using internal::TsanRelease;

uint32_t ThreadIndex() { return running->current->index; }
uint32_t ThreadCount() { return running->current->launched->dim.threads; }
uint32_t BlockIndex() { return running->current->block->index; }
uint32_t BlockCount() { return running->current->launched->dim.blocks; }

void SyncBlock(std::source_location where) {
  Grid::Impl& grid = *running;
  Block& block = *grid.current->block;
  void* const token = &block.barrier_tokens[block.barrier & 1];
  TsanRelease(token);
  grid.where = where;
  grid.Leave(Event::kArrived);
  TsanAcquire(token);
}

void Pause() { running->Leave(Event::kPaused); }

void MaybeSwitch() {
  Grid::Impl& grid = *running;
  ++grid.current->operations;
  if (grid.Below(4) == 0) grid.Leave(Event::kSwitched);
}

uint64_t NanoClock() { return running->now; }

void Trap(const char* reason) {
  running->trapping = reason;
  running->Leave(Event::kTrapped);
  __builtin_unreachable();
}

void* Shared(const void* key, size_t bytes, size_t alignment) {
  Block& block = *running->current->block;
  // Whoever comes second finds the storage made.
  TsanAcquire(&block.shared_token);
  for (const SharedStorage& item : block.shared) {
    if (item.key == key) {
      JF_CHECK(item.bytes == bytes && static_cast<size_t>(item.alignment) == alignment);
      return item.storage;
    }
  }
  const auto align = static_cast<std::align_val_t>(alignment);
  void* const storage = ::operator new(bytes, align);
  std::memset(storage, 0xA5, bytes);
  block.shared.push_back({key, bytes, align, storage});
  TsanRelease(&block.shared_token);
  return storage;
}

}  // namespace jaxfabric::emulation
