// The CPU's default floating-point behaviour for the life of an object.
//
// XLA's compute threads run with denormals flushed to zero and our own threads do not. A reduction
// may run on either, so without this the ranks could disagree about tiny values.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jaxfabric {

class DefaultFloatEnvironment {
 public:
#if defined(__SSE__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) {
    if ((saved_ & ~kStickyFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloatEnvironment() {
    if ((saved_ & ~kStickyFlags) != kDefault) _mm_setcsr(saved_);
  }

 private:
  // Exceptions masked, round to nearest, denormals kept.
  static constexpr unsigned kDefault = 0x1f80;
  static constexpr unsigned kStickyFlags = 0x3f;
  const unsigned saved_;

 public:
#else
  DefaultFloatEnvironment() {}
#endif
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;
};

}  // namespace jaxfabric
