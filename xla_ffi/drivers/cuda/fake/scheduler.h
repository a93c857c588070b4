// The scheduler behind a Grid, for the sources that implement it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "drivers/cuda/fake/fibre.h"
#include "drivers/cuda/fake/grid.h"

namespace jaxfabric::emulation {
namespace internal {

struct Launched;
struct Block;

struct Thread {
  Launched* launched = nullptr;
  Block* block = nullptr;
  Fibre* fibre = nullptr;  // from the first turn to the last
  uint32_t index = 0;
  bool in_barrier = false;
  // Calls of MaybeSwitch() since the last Pause(), and between that and the one before it. A loop
  // that waits makes equally many each time; another number means that the thread has gone on.
  uint32_t operations = 0;
  uint32_t last_operations = ~uint32_t{0};
};

struct SharedStorage {
  const void* key;
  size_t bytes;
  std::align_val_t alignment;
  void* storage;
};

struct Block {
  uint32_t index = 0;
  uint32_t alive = 0;
  uint32_t arrived = 0;
  // Barriers alternate between two tokens: a thread may arrive at the next one before another has
  // left this one.
  uint32_t barrier = 0;
  char barrier_tokens[2] = {};
  char shared_token = 0;
  std::source_location where;
  std::vector<SharedStorage> shared;
};

struct Launched {
  uint64_t id = 0;
  Kernel kernel = nullptr;
  std::vector<std::byte> arguments;
  Dim dim;
  std::function<void(bool)> finished;
  std::vector<Block> blocks;
  std::vector<Thread> threads;  // block by block
  uint64_t alive = 0;
  char begin_token = 0;
  char end_token = 0;
};

enum class Event { kReturned, kSwitched, kPaused, kArrived, kTrapped };

}  // namespace internal

struct Grid::Impl {
  using Event = internal::Event;
  using Thread = internal::Thread;
  using Block = internal::Block;
  using Launched = internal::Launched;

  explicit Impl(uint64_t seed) : random(seed) {}
  ~Impl();

  uint64_t Random();
  // Uniform in [0, bound), for bounds far below 2^32.
  size_t Below(size_t bound) { return ((Random() >> 32) * bound) >> 32; }

  void Turn();
  void EndRound();
  void Leave(Event what);
  void AddReady(Thread& thread);
  void RemoveReady(size_t index);
  void Arrived(size_t index, Thread& thread);
  void PassBarrier(Block& block, Launched& launched);
  void Returned(size_t index, Thread& thread);
  void End(Launched& launched, bool trapped);
  void Abandon(Launched& launched);
  std::unique_ptr<Launched> Take(Launched& launched);
  internal::Fibre* TakeFibre();
  static void RunThread(void* thread);

  uint64_t random;
  uint64_t now = 0;
  // While all wait: since when, on the real clock, time has been added to `now`.
  std::optional<std::chrono::steady_clock::time_point> waiting_since;
  const char* trapping = nullptr;  // the reason of a trap under way
  std::string trap_reason;
  uint64_t next_id = 1;
  std::vector<std::unique_ptr<Launched>> in_flight;
  // Who can have a turn: first those, `fresh` of them, that have not paused in this round, which
  // ends when there are none.
  std::vector<Thread*> ready;
  size_t fresh = 0;
  bool progress = false;  // somebody did more than pause in this round
  bool all_waiting = false;
  Thread* current = nullptr;
  Event event = Event::kReturned;
  std::source_location where;

  std::vector<void*> slabs;
  std::vector<std::unique_ptr<internal::Fibre>> fibres;
  std::vector<internal::Fibre*> free_fibres;
};

namespace internal {
// The grid whose Run() is on this OS thread.
extern constinit thread_local Grid::Impl* running;
}  // namespace internal

}  // namespace jaxfabric::emulation
