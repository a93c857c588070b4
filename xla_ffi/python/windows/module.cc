// jaxfabric._windows: stages that need a newer XLA than the core does. See windows/stages.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "windows/stages.h"

namespace nb = nanobind;

namespace jaxfabric {
namespace {

void Connect(const nb::capsule& core) {
  const Status connected = ConnectCore(static_cast<const WindowCore*>(core.data()));
  if (!connected.ok()) throw std::runtime_error(std::string(connected.message()));
}

nb::dict Stages() {
  nb::dict stages;
  stages["prepare"] = nb::capsule(reinterpret_cast<void*>(WindowsPrepare));
  stages["initialize"] = nb::capsule(reinterpret_cast<void*>(WindowsInitialize));
  return stages;
}

}  // namespace

NB_MODULE(_windows, module) {
  module.doc() = "Windows around XLA's arrays on GPUs; use the package's Python functions.";
  module.def("connect", &Connect, nb::arg("core"),
             "Takes what _ext.window_core() gives, once its types are registered. RuntimeError: it "
             "is of another build.");
  module.def("stages", &Stages, "Stage -> handler capsule, for platform CUDA.");
  module.def(
      "jaxlib_version", [] { return std::string(JAXFABRIC_WINDOWS_JAXLIB); },
      "The jaxlib this module was compiled against.");
  module.def(
      "ffi_version", [] { return std::pair<int, int>(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "The FFI version (major, minor) this module was compiled against.");
  module.def(
      "extension_version",
      [] {
        const ExtensionVersion version = CompiledExtension();
        return std::pair<int, int>(version.major, version.minor);
      },
      "The same for the FFI's extension for collectives.");
}

}  // namespace jaxfabric
