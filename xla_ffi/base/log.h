// One line to stderr per event, prefixed "jaxfabric: "; the first function that decides logs.
#pragma once

#include <string_view>

namespace jaxfabric {

enum class LogLevel { kError = 0, kWarning = 1, kInfo = 2 };

// Messages above the level are dropped. Default: kWarning.
void SetLogLevel(LogLevel level);
void Log(LogLevel level, std::string_view message);

}  // namespace jaxfabric
