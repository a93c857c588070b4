// A fibre: a stack of its own, entered and left by a switch in user space.
//
// A fibre runs one body after another, so that a used one costs nothing to start. It may be resumed
// by different OS threads one after the other, never by two at a time. Both sanitizers are told of
// every switch.
#pragma once

#include <cstddef>
#include <span>

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(JAXFABRIC_FIBRES_BY_UCONTEXT)
#define JAXFABRIC_FIBRES_BY_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

namespace jaxfabric::emulation::internal {

class Fibre {
 public:
  using Body = void (*)(void* argument);

  // The stack stays the caller's and outlives the fibre.
  explicit Fibre(std::span<std::byte> stack) : stack_(stack) {}
  ~Fibre();
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  // The next Resume() begins `body`. The last body has returned or was abandoned.
  void Start(Body body, void* argument);
  // Runs the body until it calls Leave() or returns.
  void Resume();
  // On the fibre: back to the one that resumed it.
  void Leave();
  // Drops a body that has left; what it did happens before what acquires `token`. Nothing is
  // unwound: kernels own nothing.
  void Abandon(void* token);

 private:
#if defined(JAXFABRIC_FIBRES_BY_ASSEMBLY)
  using Context = void*;  // a stack pointer
#else
  using Context = ucontext_t;
#endif
  static void Switch(Context& from, Context& to);
  static void Enter();
  void Prepare();

  const std::span<std::byte> stack_;
  Context own_{};
  Context resumer_{};
  Body body_ = nullptr;
  void* argument_ = nullptr;
  bool prepared_ = false;
  // The sanitizers' view of the two sides.
  void* tsan_own_ = nullptr;
  void* tsan_resumer_ = nullptr;
  void* asan_own_ = nullptr;
  const void* asan_resumer_stack_ = nullptr;
  size_t asan_resumer_bytes_ = 0;
};

}  // namespace jaxfabric::emulation::internal
