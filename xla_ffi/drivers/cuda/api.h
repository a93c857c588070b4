// The CUDA driver as a table of functions: from libcuda.so.1, opened when it is first asked for, or
// from a fake. A table never changes once it is made; any thread may call through it.
#pragma once

#include <string_view>

#include "base/status.h"
#include "drivers/cuda/abi.h"

namespace jaxfabric::cuda {

struct Api {
#define JF_CUDA_FUNCTION(kind, name, symbol, parameters) CUresult(*name) parameters = nullptr;
#include "drivers/cuda/functions.inc"
#undef JF_CUDA_FUNCTION
};

// The driver of this machine, initialised; the same answer for the life of the process. The error
// says what is missing: the library, a function (by a driver that is too old), or a device.
Result<const Api*> LoadApi();

// "what: CUDA_ERROR_OUT_OF_MEMORY (out of memory)", in the driver's own words.
Status ToStatus(const Api& api, CUresult result, std::string_view what);

// Calls api.function(...) and returns its Status.
#define JF_CUDA_CALL(api, function, ...) \
  ::jaxfabric::cuda::ToStatus((api), (api).function(__VA_ARGS__), #function)

namespace internal {
// Opens the library and fills the table; for tests, which have no driver.
Status FillApi(const char* library, Api* api);
}  // namespace internal

}  // namespace jaxfabric::cuda
