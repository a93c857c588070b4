#include "memory/copy.h"

#include <cstring>

#include "memory/cache_size.h"
#include "memory/stream.h"

namespace jaxfabric {

void Copy(void* destination, const void* source, size_t bytes, Store store) {
  if (bytes == 0) return;  // memcpy wants valid pointers even then
  if (store == Store::kCached) {
    std::memcpy(destination, source, bytes);
    return;
  }
  StreamCopy(destination, source, bytes);
  StreamFence();
}

size_t NonTemporalThreshold() {
  static const size_t threshold =
      LastLevelCacheShare("/sys/devices/system/cpu").value_or(size_t{8} << 20);
  return threshold;
}

}  // namespace jaxfabric
