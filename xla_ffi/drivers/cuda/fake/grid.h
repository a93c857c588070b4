// The emulated grid: runs kernels that were compiled as host C++, without a GPU.
//
// Every GPU thread of every launch in flight is a fibre. One OS thread runs them all and picks the
// next one at random from a seed: a run with the same seed, launches and kernels takes the same
// turns (the clock of waiting kernels apart). Fibres change places only inside the functions below,
// so a kernel tells with MaybeSwitch() where others could see what it did.
//
// To the thread sanitizer each fibre is a thread: Launch() happens before the launch's fibres, they
// before `finished` and the end of Kill(), and SyncBlock() orders those of a block. Nothing else
// orders them; kernels have their atomics.
//
// A Grid is used by one OS thread at a time. Kernels throw nothing and own nothing: the frames of a
// kernel that trapped or was killed are dropped, not unwound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

namespace jaxfabric::emulation {

// The body of a kernel; `arguments` is its parameter block.
using Kernel = void (*)(const void* arguments);

// Both at least 1.
struct Dim {
  uint32_t blocks = 1;
  uint32_t threads = 1;
};

class Grid {
 public:
  explicit Grid(uint64_t seed);
  ~Grid();  // kills what is in flight
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  // Puts a launch in flight and returns its id. `finished` is called inside Run() when the last
  // thread has ended; it may launch and kill.
  uint64_t Launch(Kernel kernel, std::vector<std::byte> arguments, Dim dim,
                  std::function<void(bool trapped)> finished);
  // Runs until nothing is in flight, or for `switches` turns; true if something still is.
  bool Run(uint64_t switches);
  // The same, and also returns when all fibres wait.
  bool RunUntilWaiting(uint64_t switches);
  // Whether every fibre has had a turn and did in it what it did in the last one, up to a Pause():
  // nobody here can go on by himself. May be wrong about one that waits for each of many things
  // once.
  bool AllWaiting() const;
  // A rank that died: its fibres never run again, and `finished` is not called.
  void Kill(uint64_t id);

  // Moves NanoClock() forward. By itself it goes on by 20 ns with every turn, and with real time
  // while all fibres wait.
  void AdvanceClock(uint64_t nanoseconds);
  // Why the last kernel that trapped did so; empty before.
  const std::string& trap_reason() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

// The rest is for kernels, on a fibre.

uint32_t ThreadIndex();
uint32_t ThreadCount();
uint32_t BlockIndex();
uint32_t BlockCount();

// __syncthreads: waits for all threads of the block; those that have returned count as arrived.
// Threads that meet at different places of the source trap, as far as `where` tells them apart (a
// wrapper passes its own caller's on).
void SyncBlock(std::source_location where = std::source_location::current());
// One turn of a loop that waits for others: lets them run.
void Pause();
// At a memory operation that others can see or make: lets them run, or not, at random.
void MaybeSwitch();
// Virtual time.
uint64_t NanoClock();
// Ends the kernel as a fault does: no thread of it runs any further.
[[noreturn]] void Trap(const char* reason = "trap");
// Storage of the block: the same for all its threads that ask with the same key, which also fixes
// size and alignment. Filled with 0xA5 at first.
void* Shared(const void* key, size_t bytes, size_t alignment);

}  // namespace jaxfabric::emulation
