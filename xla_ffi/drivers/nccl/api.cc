#include "drivers/nccl/api.h"

#include <dlfcn.h>
#include <link.h>

#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace jaxfabric::nccl {
namespace {

struct Search {
  std::string_view name;
  std::vector<std::string> paths;
};

int Look(dl_phdr_info* library, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  const std::string_view path = library->dlpi_name == nullptr ? "" : library->dlpi_name;
  if (path.substr(path.rfind('/') + 1).starts_with(search.name)) search.paths.emplace_back(path);
  return 0;
}

}  // namespace

namespace internal {

Status FillApi(const char* name, Api* api) {
  Search search{name, {}};
  ::dl_iterate_phdr(Look, &search);
  if (search.paths.empty()) {
    return Status(Code::kUnavailable, StrCat("no ", name, " is loaded in this process"));
  }
  if (search.paths.size() > 1) {
    return Status(Code::kFailedPrecondition,
                  StrCat("two libraries are loaded, and whose the windows are is not known: ",
                         search.paths[0], " and ", search.paths[1]));
  }
  // The library stays loaded, as this is one more reference to it.
  void* const library = ::dlopen(search.paths[0].c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    return Status(Code::kUnavailable, StrCat(search.paths[0], " is loaded, but does not open"));
  }
  const auto resolve = [&](const char* symbol, auto* function) -> Status {
    *function =
        reinterpret_cast<std::remove_pointer_t<decltype(function)>>(::dlsym(library, symbol));
    if (*function != nullptr) return OkStatus();
    return Status(Code::kUnavailable,
                  StrCat("NCCL is too old: ", search.paths[0], " has no ", symbol));
  };
  JF_RETURN_IF_ERROR(resolve("ncclGetErrorString", &api->ncclGetErrorString));
  JF_RETURN_IF_ERROR(resolve("ncclCommCount", &api->ncclCommCount));
  JF_RETURN_IF_ERROR(resolve("ncclCommUserRank", &api->ncclCommUserRank));
  JF_RETURN_IF_ERROR(resolve("ncclGetPeerDevicePointer", &api->ncclGetPeerDevicePointer));
  (void)resolve("ncclWinGetUserPtr", &api->ncclWinGetUserPtr);
  return OkStatus();
}

}  // namespace internal

Result<const Api*> LoadedApi() {
  static std::mutex mutex;
  static Api api;
  static bool filled = false;
  std::lock_guard lock(mutex);
  if (!filled) {
    JF_RETURN_IF_ERROR(internal::FillApi("libnccl.so", &api));
    filled = true;
  }
  return &api;
}

Status ToStatus(const Api& api, int result, const char* function) {
  if (result == 0) return OkStatus();
  const char* text = api.ncclGetErrorString(result);
  return Status(Code::kInternal, StrCat(function, ": ", text == nullptr ? "unknown error" : text));
}

}  // namespace jaxfabric::nccl
