#include "memory/cache_size.h"

#include <charconv>
#include <fstream>
#include <string_view>

#include "base/status.h"

namespace jaxfabric {
namespace {

std::string ReadLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "32768K" or "8M"; 0 when it is neither.
size_t ParseSize(std::string_view text) {
  size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return 0;
  if (end == text.data() + text.size()) return value;
  switch (*end) {
    case 'K':
      return value << 10;
    case 'M':
      return value << 20;
    case 'G':
      return value << 30;
    default:
      return 0;
  }
}

// The number of CPUs in a list such as "0-3,8"; 0 when malformed.
size_t CountCpus(std::string_view text) {
  size_t count = 0;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    size_t first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc()) return 0;
    size_t last = first;
    if (parsed.ptr < end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc() || last < first) return 0;
    }
    count += last - first + 1;
    if (parsed.ptr < end && *parsed.ptr != ',') return 0;
    at = parsed.ptr + 1;
  }
  return count;
}

}  // namespace

std::optional<size_t> LastLevelCacheShare(const std::string& cpu_root) {
  constexpr int kMaxCaches = 16;
  int last_level = 0;
  size_t share = 0;
  for (int index = 0; index < kMaxCaches; ++index) {
    const std::string cache = StrCat(cpu_root, "/cpu0/cache/index", index, "/");
    const std::string level_text = ReadLine(cache + "level");
    if (level_text.empty()) break;
    const int level = static_cast<int>(ParseSize(level_text));
    if (level <= last_level || ReadLine(cache + "type") == "Instruction") continue;
    const size_t bytes = ParseSize(ReadLine(cache + "size"));
    const size_t cpus = CountCpus(ReadLine(cache + "shared_cpu_list"));
    if (bytes == 0 || cpus == 0) continue;
    last_level = level;
    share = bytes / cpus;
  }
  if (share == 0) return std::nullopt;
  return share;
}

}  // namespace jaxfabric
