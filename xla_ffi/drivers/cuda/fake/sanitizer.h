// What the emulation tells the thread sanitizer, and nothing in other builds.
//
// The emulation's own sources are compiled without its instrumentation (CMakeLists.txt): they touch
// the scheduler's state from every fibre, on one OS thread, which only looks like a race. Kernels
// are instrumented, and these calls say what orders them.
#pragma once

#if defined(JAXFABRIC_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace jaxfabric::emulation::internal {

// What was done before TsanRelease(token) happens before what is done after TsanAcquire(token).
#if defined(JAXFABRIC_THREAD_SANITIZER)
inline void TsanAcquire(void* token) { __tsan_acquire(token); }
inline void TsanRelease(void* token) { __tsan_release(token); }
#else
inline void TsanAcquire(void*) {}
inline void TsanRelease(void*) {}
#endif

}  // namespace jaxfabric::emulation::internal
