// What a process holds open, for tests that nothing leaks.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <string>

namespace jaxfabric {

// "7 -> /memfd:jaxfabric (deleted)" for every open descriptor.
inline std::set<std::string> OpenFds() {
  std::set<std::string> fds;
  DIR* directory = ::opendir("/proc/self/fd");
  if (directory == nullptr) return fds;
  const std::string own = std::to_string(::dirfd(directory));
  while (const dirent* entry = ::readdir(directory)) {
    const std::string name = entry->d_name;
    if (name == "." || name == ".." || name == own) continue;
    char target[256];
    const ssize_t length = ::readlink(("/proc/self/fd/" + name).c_str(), target, sizeof(target));
    fds.insert(name + " -> " + std::string(target, length > 0 ? static_cast<size_t>(length) : 0));
  }
  ::closedir(directory);
  return fds;
}

// The number of this process's mappings of our shared memory.
inline int SharedMappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:jaxfabric") != std::string::npos) ++count;
  }
  return count;
}

}  // namespace jaxfabric
