#include "drivers/cuda/fake/grid.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "base/status.h"
#include "drivers/cuda/fake/fibre.h"
#include "drivers/cuda/fake/sanitizer.h"
#include "drivers/cuda/fake/scheduler.h"

namespace jaxfabric::emulation {

using internal::Block;
using internal::Fibre;
using internal::Launched;
using internal::running;
using internal::SharedStorage;
using internal::Thread;
using internal::TsanAcquire;
using internal::TsanRelease;

constinit thread_local Grid::Impl* internal::running = nullptr;

namespace {

#if defined(JAXFABRIC_THREAD_SANITIZER) || defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif
constexpr size_t kStacksPerSlab = 32;
// Stacks begin at different offsets, so that they do not share the sets of a cache.
constexpr size_t kStackColours = 8;
constexpr size_t kStackColourBytes = 512;
constexpr uint64_t kNanosecondsPerTurn = 20;

void FreeShared(Launched& launched) {
  for (Block& block : launched.blocks) {
    for (SharedStorage& item : block.shared) ::operator delete(item.storage, item.alignment);
    block.shared.clear();
  }
}

}  // namespace

Grid::Impl::~Impl() {
  while (!in_flight.empty()) Abandon(*in_flight.back());
  fibres.clear();
  for (void* slab : slabs) ::munmap(slab, kStacksPerSlab * kStackBytes);
}

uint64_t Grid::Impl::Random() {  // splitmix64
  uint64_t z = (random += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

Fibre* Grid::Impl::TakeFibre() {
  if (free_fibres.empty()) {
    void* slab = ::mmap(nullptr, kStacksPerSlab * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    JF_CHECK(slab != MAP_FAILED);
    slabs.push_back(slab);
    for (size_t i = 0; i < kStacksPerSlab; ++i) {
      const size_t bytes = kStackBytes - i % kStackColours * kStackColourBytes;
      fibres.push_back(std::make_unique<Fibre>(
          std::span(static_cast<std::byte*>(slab) + i * kStackBytes, bytes)));
      free_fibres.push_back(fibres.back().get());
    }
  }
  Fibre* fibre = free_fibres.back();
  free_fibres.pop_back();
  return fibre;
}

void Grid::Impl::RunThread(void* argument) {
  auto* thread = static_cast<Thread*>(argument);
  Launched* launched = thread->launched;
  TsanAcquire(&launched->begin_token);
  launched->kernel(launched->arguments.data());
  TsanRelease(&launched->end_token);
  running->event = Event::kReturned;
}

void Grid::Impl::AddReady(Thread& thread) {
  ready.push_back(&thread);
  std::swap(ready[fresh++], ready.back());
}

void Grid::Impl::RemoveReady(size_t index) {
  if (index < fresh) {
    --fresh;
    ready[index] = ready[fresh];
    index = fresh;
  }
  ready[index] = ready.back();
  ready.pop_back();
}

void Grid::Impl::EndRound() {
  all_waiting = !progress;
  progress = false;
  fresh = ready.size();
  if (!all_waiting) {
    waiting_since.reset();
    return;
  }
  const auto real = std::chrono::steady_clock::now();
  if (waiting_since) {
    const auto waited = std::chrono::nanoseconds(real - *waiting_since).count();
    now += static_cast<uint64_t>(waited);
  }
  waiting_since = real;
}

void Grid::Impl::Turn() {
  if (fresh == 0) EndRound();
  now += kNanosecondsPerTurn;
  // Mostly those whose turn in this round is due, or waiting would take all turns.
  const size_t index = Below(Below(4) == 0 ? ready.size() : fresh);
  Thread& thread = *ready[index];
  if (thread.fibre == nullptr) {
    thread.fibre = TakeFibre();
    thread.fibre->Start(&RunThread, &thread);
  }
  current = &thread;
  thread.fibre->Resume();
  current = nullptr;
  switch (event) {
    case Event::kSwitched:
      break;
    case Event::kPaused:
      if (thread.operations != thread.last_operations) progress = true;
      thread.last_operations = std::exchange(thread.operations, 0);
      if (index < fresh) std::swap(ready[index], ready[--fresh]);
      break;
    case Event::kArrived:
      Arrived(index, thread);
      break;
    case Event::kReturned:
      Returned(index, thread);
      break;
    case Event::kTrapped:
      // Not by the fibre: std::string's functions may be instrumented.
      trap_reason = trapping;
      End(*thread.launched, true);
      break;
  }
}

void Grid::Impl::Arrived(size_t index, Thread& thread) {
  Block& block = *thread.block;
  progress = true;
  if (block.arrived == 0) {
    block.where = where;
  } else if (block.where.line() != where.line() || block.where.column() != where.column() ||
             std::strcmp(block.where.file_name(), where.file_name()) != 0) {
    trap_reason =
        StrCat("threads of a block wait in different SyncBlock(): ", where.file_name(), ":",
               where.line(), " and ", block.where.file_name(), ":", block.where.line());
    std::fprintf(stderr, "jaxfabric: %s\n", trap_reason.c_str());
    End(*thread.launched, true);
    return;
  }
  RemoveReady(index);
  thread.in_barrier = true;
  ++block.arrived;
  PassBarrier(block, *thread.launched);
}

void Grid::Impl::PassBarrier(Block& block, Launched& launched) {
  if (block.arrived == 0 || block.arrived < block.alive) return;
  block.arrived = 0;
  ++block.barrier;
  Thread* threads = &launched.threads[size_t{block.index} * launched.dim.threads];
  for (uint32_t i = 0; i < launched.dim.threads; ++i) {
    if (!std::exchange(threads[i].in_barrier, false)) continue;
    AddReady(threads[i]);
  }
}

void Grid::Impl::Returned(size_t index, Thread& thread) {
  progress = true;
  free_fibres.push_back(std::exchange(thread.fibre, nullptr));
  RemoveReady(index);
  --thread.block->alive;
  if (--thread.launched->alive == 0) {
    End(*thread.launched, false);
  } else {
    PassBarrier(*thread.block, *thread.launched);
  }
}

std::unique_ptr<Launched> Grid::Impl::Take(Launched& launched) {
  auto place = std::find_if(in_flight.begin(), in_flight.end(),
                            [&](const auto& entry) { return entry.get() == &launched; });
  std::unique_ptr<Launched> taken = std::move(*place);
  in_flight.erase(place);
  return taken;
}

void Grid::Impl::End(Launched& launched, bool trapped) {
  std::function<void(bool)> finished = std::move(launched.finished);
  if (trapped) {
    Abandon(launched);
  } else {
    TsanAcquire(&launched.end_token);
    FreeShared(launched);
    Take(launched);
  }
  if (finished) finished(trapped);
}

void Grid::Impl::Abandon(Launched& launched) {
  size_t kept = 0, kept_fresh = 0;
  for (size_t i = 0; i < ready.size(); ++i) {
    if (ready[i]->launched == &launched) continue;
    kept_fresh += i < fresh;
    ready[kept++] = ready[i];
  }
  ready.resize(kept);
  fresh = kept_fresh;
  progress = true;
  for (Thread& thread : launched.threads) {
    if (thread.fibre == nullptr) continue;
    thread.fibre->Abandon(&launched.end_token);
    free_fibres.push_back(thread.fibre);
  }
  TsanAcquire(&launched.end_token);
  FreeShared(launched);
  Take(launched);
}

void Grid::Impl::Leave(Event what) {
  event = what;
  current->fibre->Leave();
}

Grid::Grid(uint64_t seed) : impl_(std::make_unique<Impl>(seed)) {}
Grid::~Grid() = default;

uint64_t Grid::Launch(Kernel kernel, std::vector<std::byte> arguments, Dim dim,
                      std::function<void(bool)> finished) {
  JF_CHECK(dim.blocks > 0 && dim.threads > 0);
  auto launched = std::make_unique<Launched>();
  launched->id = impl_->next_id++;
  launched->kernel = kernel;
  launched->arguments = std::move(arguments);
  launched->dim = dim;
  launched->finished = std::move(finished);
  launched->blocks.resize(dim.blocks);
  launched->threads.resize(size_t{dim.blocks} * dim.threads);
  launched->alive = launched->threads.size();
  Thread* thread = launched->threads.data();
  for (uint32_t b = 0; b < dim.blocks; ++b) {
    Block& block = launched->blocks[b];
    block.index = b;
    block.alive = dim.threads;
    for (uint32_t t = 0; t < dim.threads; ++t, ++thread) {
      thread->launched = launched.get();
      thread->block = &block;
      thread->index = t;
      impl_->AddReady(*thread);
    }
  }
  impl_->progress = true;
  TsanRelease(&launched->begin_token);
  const uint64_t id = launched->id;
  impl_->in_flight.push_back(std::move(launched));
  return id;
}

bool Grid::Run(uint64_t switches) {
  Impl* const outer = std::exchange(running, impl_.get());
  while (!impl_->ready.empty() && switches-- > 0) impl_->Turn();
  running = outer;
  return !impl_->ready.empty();
}

bool Grid::RunUntilWaiting(uint64_t switches) {
  Impl* const outer = std::exchange(running, impl_.get());
  while (!impl_->ready.empty() && switches-- > 0) {
    impl_->Turn();
    if (impl_->fresh == 0 && !impl_->progress) break;
  }
  running = outer;
  return !impl_->ready.empty();
}

bool Grid::AllWaiting() const {
  if (impl_->ready.empty() || impl_->progress) return false;
  return impl_->all_waiting || impl_->fresh == 0;
}

void Grid::Kill(uint64_t id) {
  for (const auto& launched : impl_->in_flight) {
    if (launched->id != id) continue;
    JF_CHECK(impl_->current == nullptr);
    impl_->Abandon(*launched);
    return;
  }
}

void Grid::AdvanceClock(uint64_t nanoseconds) { impl_->now += nanoseconds; }
const std::string& Grid::trap_reason() const { return impl_->trap_reason; }

}  // namespace jaxfabric::emulation
