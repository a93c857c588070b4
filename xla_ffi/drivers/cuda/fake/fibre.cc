#include "drivers/cuda/fake/fibre.h"

#include <cstdint>

#include "drivers/cuda/fake/sanitizer.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(JAXFABRIC_FIBRES_BY_ASSEMBLY)
// jaxfabric_switch_stack(void** save, void* load): what the ABI has a callee preserve goes onto the
// old stack and comes from the new one. swapcontext() would also save the signal mask, with two
// system calls.
extern "C" __attribute__((visibility("hidden"))) void jaxfabric_switch_stack(void** save,
                                                                             void* load);
#if defined(__x86_64__)
__asm__(R"(
.text
.globl jaxfabric_switch_stack
.hidden jaxfabric_switch_stack
.type jaxfabric_switch_stack, @function
.p2align 4
jaxfabric_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  subq $8, %rsp
  stmxcsr (%rsp)
  fnstcw 4(%rsp)
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  ldmxcsr (%rsp)
  fldcw 4(%rsp)
  addq $8, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size jaxfabric_switch_stack, .-jaxfabric_switch_stack
)");
#else
__asm__(R"(
.text
.globl jaxfabric_switch_stack
.hidden jaxfabric_switch_stack
.type jaxfabric_switch_stack, %function
.p2align 4
jaxfabric_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size jaxfabric_switch_stack, .-jaxfabric_switch_stack
)");
#endif
#endif

namespace jaxfabric::emulation::internal {
namespace {

// The fibre that is being entered for the first time on this OS thread.
thread_local Fibre* entering = nullptr;

}  // namespace

#if defined(JAXFABRIC_FIBRES_BY_ASSEMBLY)

void Fibre::Switch(Context& from, Context& to) { jaxfabric_switch_stack(&from, to); }

void Fibre::Prepare() {
  const uintptr_t end = reinterpret_cast<uintptr_t>(stack_.data() + stack_.size()) & ~uintptr_t{63};
  auto* top = reinterpret_cast<uint64_t*>(end);
#if defined(__x86_64__)
  // The entry finds the stack as a call would leave it, with a return address that ends unwinding.
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(&Fibre::Enter);
  for (int i = 0; i < 6; ++i) *--top = 0;
  uint32_t mxcsr;
  uint16_t x87;
  __asm__ volatile("stmxcsr %0" : "=m"(mxcsr));
  __asm__ volatile("fnstcw %0" : "=m"(x87));
  *--top = mxcsr | uint64_t{x87} << 32;
#else
  for (int i = 0; i < 20; ++i) *--top = 0;
  top[11] = reinterpret_cast<uint64_t>(&Fibre::Enter);
#endif
  own_ = top;
}

#else

void Fibre::Switch(Context& from, Context& to) { ::swapcontext(&from, &to); }

void Fibre::Prepare() {
  ::getcontext(&own_);
  own_.uc_stack.ss_sp = stack_.data();
  own_.uc_stack.ss_size = stack_.size();
  own_.uc_link = nullptr;
  ::makecontext(&own_, &Fibre::Enter, 0);
}

#endif

Fibre::~Fibre() {
#if defined(JAXFABRIC_THREAD_SANITIZER)
  if (tsan_own_ != nullptr) __tsan_destroy_fiber(tsan_own_);
#endif
}

void Fibre::Start(Body body, void* argument) {
  body_ = body;
  argument_ = argument;
  if (!prepared_) Prepare();
  prepared_ = true;
}

void Fibre::Resume() {
  entering = this;
#if defined(JAXFABRIC_THREAD_SANITIZER)
  if (tsan_own_ == nullptr) tsan_own_ = __tsan_create_fiber(0);
  tsan_resumer_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(tsan_own_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, stack_.data(), stack_.size());
#endif
  Switch(resumer_, own_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#endif
}

void Fibre::Leave() {
#if defined(JAXFABRIC_THREAD_SANITIZER)
  __tsan_switch_to_fiber(tsan_resumer_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&asan_own_, asan_resumer_stack_, asan_resumer_bytes_);
#endif
  Switch(own_, resumer_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(asan_own_, &asan_resumer_stack_, &asan_resumer_bytes_);
#endif
}

void Fibre::Enter() {
  Fibre* const self = entering;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &self->asan_resumer_stack_, &self->asan_resumer_bytes_);
#endif
  // A new view of an old stack: what the last one did with it was before.
  TsanAcquire(self);
  for (;;) {
    self->body_(self->argument_);
    self->Leave();
  }
}

void Fibre::Abandon([[maybe_unused]] void* token) {
#if defined(JAXFABRIC_THREAD_SANITIZER)
  // A view with calls that never return would overflow if it were used again.
  if (tsan_own_ != nullptr) {
    void* const current = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_own_, __tsan_switch_to_fiber_no_sync);
    TsanRelease(token);
    TsanRelease(this);
    __tsan_switch_to_fiber(current, __tsan_switch_to_fiber_no_sync);
    __tsan_destroy_fiber(tsan_own_);
    tsan_own_ = nullptr;
  }
#endif
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack_.data(), stack_.size());
#endif
  prepared_ = false;
}

}  // namespace jaxfabric::emulation::internal
