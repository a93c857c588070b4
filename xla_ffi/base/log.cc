#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <string>

namespace jaxfabric {
namespace {
// Relaxed everywhere: the level guards no other data.
std::atomic<int> g_level{static_cast<int>(LogLevel::kWarning)};
}  // namespace

void SetLogLevel(LogLevel level) {
  g_level.store(static_cast<int>(level), std::memory_order_relaxed);
}

void Log(LogLevel level, std::string_view message) {
  if (static_cast<int>(level) > g_level.load(std::memory_order_relaxed)) return;
  static constexpr std::string_view kNames[] = {"error", "warning", "info"};
  std::string line = "jaxfabric: ";
  line.append(kNames[static_cast<int>(level)]).append(": ").append(message).append("\n");
  // One write, so that lines of several processes do not mix. Nothing can be done if it fails.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace jaxfabric
