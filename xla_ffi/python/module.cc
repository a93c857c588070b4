// jaxfabric._ext: the compiled core as Python sees it. Bindings translate; nothing is decided here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/log.h"
#include "collective/call_site.h"
#include "collective/fabric.h"
#include "collective/gpu/compilation.h"
#include "device/image.h"
#include "drivers/cuda/api.h"
#include "ffi/cuda_handler.h"
#include "ffi/registrations.h"
#include "os/interfaces.h"
#include "python/simulation.h"
#include "transport/registry.h"

namespace nb = nanobind;

namespace jaxfabric {
namespace {

// Raised as jaxfabric.FabricError, whose attribute `code` names the kind of failure.
class FabricException : public std::runtime_error {
 public:
  explicit FabricException(const Status& status)
      : std::runtime_error(std::string(status.message())), code_(CodeName(status.code())) {}
  const std::string& code() const { return code_; }

 private:
  std::string code_;
};

void ThrowIfError(const Status& status) {
  if (!status.ok()) throw FabricException(status);
}

nb::capsule HandlerCapsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict HandlerTable(std::span<const Registration> registrations) {
  nb::dict table;
  for (const Registration& registration : registrations) {
    nb::dict stages;
    if (registration.instantiate) {
      stages["instantiate"] = HandlerCapsule(registration.instantiate);
    }
    if (registration.initialize) stages["initialize"] = HandlerCapsule(registration.initialize);
    stages["execute"] = HandlerCapsule(registration.execute);
    table[registration.target] = stages;
  }
  return table;
}

template <class State>
nb::dict TypeTable(const char* name) {
  nb::dict entry;
  entry["type_id"] = nb::capsule(static_cast<void*>(&State::id));
  entry["type_info"] = nb::capsule(const_cast<void*>(static_cast<const void*>(&State::type_info)));
  nb::dict table;
  table[name] = entry;
  return table;
}

// "" or why collectives cannot run on GPUs in this process.
std::string CudaStatus() {
  if (KernelImages().empty()) return std::string(KernelImageReason());
  const auto api = cuda::LoadApi();
  return api.ok() ? "" : std::string(api.status().message());
}

// All GPUs that the driver shows this process.
Result<std::vector<int>> CudaOrdinals(const cuda::Api& api) {
  int count = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuDeviceGetCount, &count));
  std::vector<int> ordinals(static_cast<size_t>(count));
  std::iota(ordinals.begin(), ordinals.end(), 0);
  return ordinals;
}

// "" or which of this process's GPUs cannot reach each other's memory.
std::string CudaUnreachable() {
  const auto api = cuda::LoadApi();
  if (!api.ok()) return "";
  const auto ordinals = CudaOrdinals(**api);
  if (!ordinals.ok()) return "";
  const auto devices = FindDevices(**api, *ordinals);
  if (!devices.ok()) return "";
  const auto pair = UnreachablePair(**api, *devices);
  return pair.ok() ? *pair : std::string();
}

// "" or why GPUs of other hosts cannot reach the memory of this process's.
std::string CudaOneHost() {
  const auto api = cuda::LoadApi();
  if (!api.ok()) return std::string(api.status().message());
  const auto ordinals = CudaOrdinals(**api);
  const Status shared = ordinals.ok() ? ProbeFabric(**api, *ordinals) : ordinals.status();
  return shared.ok() ? "" : std::string(shared.message());
}

Options ParseOptions(const nb::dict& settings) {
  Options options;
  for (auto [key, value] : settings) {
    const auto name = nb::cast<std::string>(key);
    if (name == "deadline") {
      options.deadline = nb::cast<double>(value);
    } else if (name == "warn_after") {
      options.warn_after = nb::cast<double>(value);
    } else if (name == "mismatch_after") {
      options.mismatch_after = nb::cast<double>(value);
    } else if (name == "connect_timeout") {
      options.connect_timeout = nb::cast<double>(value);
    } else if (name == "segment_bytes") {
      options.segment_bytes = nb::cast<size_t>(value);
    } else if (name == "in_step_microseconds") {
      options.in_step_microseconds = nb::cast<double>(value);
    } else if (name == "out_of_step_microseconds") {
      options.out_of_step_microseconds = nb::cast<double>(value);
    } else if (name == "net_interface") {
      options.net_interface = nb::cast<std::string>(value);
    } else if (name == "net_port_range") {
      options.net_port_range = nb::cast<std::string>(value);
    } else if (name == "coordinator") {
      options.coordinator = nb::cast<std::string>(value);
    } else if (name == "pattern") {
      options.pattern = nb::cast<std::string>(value);
    } else if (name == "network_cost") {
      options.network_cost = nb::cast<std::string>(value);
    } else if (name == "tcp_sockets") {
      options.tcp_sockets = nb::cast<int>(value);
    } else if (name == "tcp_congestion_control") {
      options.tcp_congestion_control = nb::cast<std::string>(value);
    } else if (name == "unreachable_after") {
      options.unreachable_after = nb::cast<double>(value);
    } else if (name == "gpu_pool_bytes") {
      options.gpu.pool_bytes = nb::cast<size_t>(value);
    } else if (name == "gpu_multicast") {
      options.gpu.multicast = nb::cast<int>(value) != 0;
    } else if (name == "heartbeat") {
      continue;  // JAX's client does the heartbeats
    } else if (name == "log_level") {
      SetLogLevel(static_cast<LogLevel>(nb::cast<int>(value)));
    } else {
      throw nb::key_error(("unknown fabric option: " + name).c_str());
    }
  }
  return options;
}

// The fabric of one initialize(); executions use the one that connected last.
class PyFabric {
 public:
  PyFabric(int process_index, int process_count, std::vector<int64_t> local_ranks,
           const nb::dict& settings, const std::vector<std::pair<int, int64_t>>& gpu_ordinals) {
    Options options = ParseOptions(settings);
    for (const auto& [ordinal, rank] : gpu_ordinals) options.gpus.push_back({rank, ordinal});
    for (const KernelImage& image : KernelImages()) {
      options.gpu.images.push_back(image.bytes.data());
    }
    auto fabric = Fabric::Create(process_index, process_count, std::move(local_ranks), options);
    ThrowIfError(fabric.status());
    fabric_ = *std::move(fabric);
  }
  // Without giving up the GIL if there is nothing to do: a daemon thread may be the last owner, and
  // the interpreter may be ending.
  ~PyFabric() {
    if (!fabric_->shut_down()) Shutdown();
  }

  nb::bytes Address() const {
    const std::string address = fabric_->Address();
    return nb::bytes(address.data(), address.size());
  }
  void Connect(const std::vector<nb::bytes>& addresses, const nb::bytes& secret,
               uint64_t incarnation) {
    std::vector<std::string> values;
    for (const nb::bytes& address : addresses) values.emplace_back(address.c_str(), address.size());
    const Mesh::Job job{std::string(secret.c_str(), secret.size()), incarnation};
    nb::gil_scoped_release release;
    ThrowIfError(fabric_->Connect(values, job));
    SetCurrentFabric(fabric_);
  }
  void Shutdown() {
    // Completions that are under way may need the interpreter.
    nb::gil_scoped_release release;
    if (CurrentFabric() == fabric_) SetCurrentFabric(nullptr);
    fabric_->Shutdown();
  }
  std::optional<std::string> Failure() const {
    const Status failure = fabric_->failure();
    if (failure.ok()) return std::nullopt;
    return std::string(failure.message());
  }
  std::string GpuProblem() const {
    return fabric_->gpus() == nullptr ? fabric_->gpu_reason() : std::string();
  }
  std::string GpuMemory() const {
    return fabric_->gpus() == nullptr ? std::string() : fabric_->gpus()->Memory();
  }
  std::string ReadsProblem() const { return fabric_->no_process_reads(); }
  std::vector<int> Left() const { return fabric_->Left(); }
  std::map<std::string, uint64_t> Counters() const { return fabric_->Counters(); }
  void EnableTrace(size_t capacity) { fabric_->EnableTrace(capacity); }
  std::vector<std::tuple<int64_t, uint64_t, int64_t>> Trace() const {
    std::vector<std::tuple<int64_t, uint64_t, int64_t>> entries;
    for (const TraceRing::Entry& entry : fabric_->Trace()) {
      entries.emplace_back(entry.rank, entry.key, entry.run_id);
    }
    return entries;
  }

 private:
  std::shared_ptr<Fabric> fabric_;
};

std::map<std::string, std::string> TransportReasons() {
  std::map<std::string, std::string> reasons;
  for (const TransportProbe& probe : ProbeTransports()) {
    reasons[std::string(probe.name)] = probe.status.ok() ? "" : probe.status.ToString();
  }
  return reasons;
}

std::string NetworkFor(const std::string& net_interface) {
  const auto interfaces = ListInterfaces();
  ThrowIfError(interfaces.status());
  const auto choice = ChooseInterface(*interfaces, net_interface, std::nullopt);
  ThrowIfError(choice.status());
  return choice->why;
}

nb::dict CudaBuild() {
  nb::dict images;
  for (const KernelImage& image : KernelImages()) {
    images[nb::str(image.source.data(), image.source.size())] = image.bytes.size();
  }
  nb::dict build;
  build["images"] = images;
  build["architectures"] = std::string(KernelArchitectures());
  build["compiler"] = std::string(KernelCompiler());
  build["reason"] = std::string(KernelImageReason());
  return build;
}

}  // namespace

NB_MODULE(_ext, module) {
  module.doc() = "The compiled core of jaxfabric; use the package's Python functions.";

  static nb::object error_type =
      nb::steal(PyErr_NewException("jaxfabric.FabricError", PyExc_RuntimeError, nullptr));
  module.attr("FabricError") = error_type;
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const FabricException& exception) {
      nb::object error = error_type(exception.what());
      error.attr("code") = exception.code();
      PyErr_SetObject(error_type.ptr(), error.ptr());
    }
  });

  module.def(
      "registrations", [] { return HandlerTable(Registrations()); },
      "FFI target name -> stage -> handler capsule, for CPUs.");
  module.def(
      "cuda_registrations", [] { return HandlerTable(CudaRegistrations()); },
      "The same for platform CUDA.");
  module.def(
      "type_registrations", [] { return TypeTable<CallState>("jaxfabric_call"); },
      "FFI type name -> type capsules, for CPUs.");
  module.def(
      "cuda_type_registrations", [] { return TypeTable<CudaCallState>("jaxfabric_cuda_call"); },
      "The same for platform CUDA.");
  module.def(
      "window_core",
      [] {
        return nb::capsule(static_cast<const void*>(&CudaWindowCore()), "jaxfabric.WindowCore");
      },
      "The calls of platform CUDA, for jaxfabric._windows.");
  module.def("cuda_status", &CudaStatus,
             "'' or why collectives cannot run on GPUs in this process.");
  module.def("cuda_unreachable", &CudaUnreachable,
             "'' or which of this process's GPUs cannot reach each other's memory.");
  module.def("cuda_one_host", &CudaOneHost,
             "'' or why GPUs of other hosts cannot reach the memory of this process's.");
  module.def(
      "ffi_version", [] { return std::pair<int, int>(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "The FFI version (major, minor) this module was compiled against.");
  module.def(
      "register_site",
      [](int64_t site, std::string source) {
        SiteRegistry::Get().SetSource(static_cast<uint64_t>(site), std::move(source));
      },
      nb::arg("site"), nb::arg("source"), "Names the source line of a call site for messages.");
  module.def(
      "begin_compilation", [] { return SiteRegistry::Get().BeginCompilation(); },
      "An executable is made, or loaded from the compilation cache.");
  module.def(
      "end_compilation",
      [](uint64_t begun, const std::optional<nb::bytes>& fingerprint,
         const std::vector<int64_t>& devices) {
        std::optional<std::string_view> text;
        if (fingerprint) text = {fingerprint->c_str(), fingerprint->size()};
        SiteRegistry::Get().EndCompilation(begun, text, devices);
      },
      nb::arg("begun"), nb::arg("fingerprint").none(), nb::arg("devices"),
      "It is complete; ids of its devices, in order, if some are other processes'.");
  module.def(
      "begin_gpu_compilation", [] { GpuCompilations::Get().Begin(); },
      "This thread makes an executable for GPUs, or loads it from the compilation cache.");
  module.def(
      "end_gpu_compilation",
      [](const std::vector<int64_t>& devices) { GpuCompilations::Get().End(devices); },
      nb::arg("devices"), "It is complete: ids of its devices, in order.");
  module.def("transports", &TransportReasons,
             "Transport name -> '', or why it cannot be used here.");
  module.def("network", &NetworkFor, nb::arg("net_interface"),
             "The interface that processes of other hosts reach, and why that one.");
  module.def("cuda_build", &CudaBuild,
             "The GPU kernels inside: 'images' (source -> bytes), 'architectures', 'compiler', and "
             "the 'reason' where there are none.");

  BindSimulation(module);

  nb::class_<PyFabric>(module, "Fabric", "This process's end of the fabric.")
      .def(nb::init<int, int, std::vector<int64_t>, nb::dict,
                    std::vector<std::pair<int, int64_t>>>(),
           nb::arg("process_index"), nb::arg("process_count"), nb::arg("local_ranks"),
           nb::arg("options"), nb::arg("gpu_ordinals") = std::vector<std::pair<int, int64_t>>())
      .def("address", &PyFabric::Address, "What every process gives to every other's connect().")
      .def("connect", &PyFabric::Connect, nb::arg("addresses"),
           nb::arg("secret") = nb::bytes("", 0), nb::arg("incarnation") = 0,
           "The secret, of 16 bytes or more, is needed where processes are on several hosts.")
      .def("shutdown", &PyFabric::Shutdown)
      .def("failure", &PyFabric::Failure)
      .def("gpu_problem", &PyFabric::GpuProblem,
           "'' or why the collectives of GPUs are not run here, once connected.")
      .def("gpu_memory", &PyFabric::GpuMemory,
           "Through which memory GPUs reach each other, once connected; '' without GPUs.")
      .def("reads_problem", &PyFabric::ReadsProblem,
           "'' or why processes of this host do not read each other's memory, once connected.")
      .def("left", &PyFabric::Left, "Processes that have disconnected of their own accord.")
      .def("counters", &PyFabric::Counters)
      .def("enable_trace", &PyFabric::EnableTrace, nb::arg("capacity"),
           "Records the entry of the next executions, in a ring of so many.")
      .def("trace", &PyFabric::Trace, "(rank, instance, run id) per execution, oldest first.");
}

}  // namespace jaxfabric
