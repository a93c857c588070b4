// XLA as handlers see it, and its extension for collectives, over a fake NCCL: the ranks of a job
// are threads of one process, one execution of a call each at a time.
//
// Threading: a rank's functions from its own thread. What ranks ask for in prepare is looked at by
// all in Acquire(), where they wait for each other.
#pragma once

#include <barrier>
#include <functional>
#include <string>
#include <vector>

#include "collective/call.h"
#include "drivers/cuda/abi.h"
#include "drivers/nccl/fake/fake_nccl.h"
#include "windows/stages.h"
#include "xla/ffi/api/collectives_c_api.h"

namespace jaxfabric::testing {

// What goes wrong, on one rank.
struct XlaFaults {
  bool no_extension = false;
  int32_t major = XLA_FFI_Extension_Collectives_MajorVersion;
  int32_t minor = XLA_FFI_Extension_Collectives_MinorVersion;
  size_t struct_size = sizeof(XLA_FFI_Collectives_Extension);
  bool request_fails = false;
  bool null_window = false;
  bool get_fails = false;
  bool not_at_page = false;      // the windows
  bool not_addressable = false;  // for the other ranks
  bool other_rank = false;       // in the communicator
};

class FakeXla {
 public:
  FakeXla(nccl::FakeNccl& nccl, int ranks);

  // The stages of one execution on a rank, up to the launch; "" or what went wrong. `state` is the
  // call, as the core's functions take it.
  std::string Prepare(int rank, const CallSpec& spec, const Buffers& buffers);
  // Makes the windows that all ranks have asked for, `shift` pages before their arrays.
  void Acquire(int rank, size_t shift);
  std::string Initialize(int rank, const CallSpec& spec, const Buffers& buffers, void* state,
                         int ordinal, cuda::CUstream stream);
  // All three.
  std::string Run(int rank, const CallSpec& spec, const Buffers& buffers, void* state, int ordinal,
                  cuda::CUstream stream, size_t shift);

  XlaFaults& faults(int rank) { return ranks_[static_cast<size_t>(rank)].faults; }
  // What every rank has asked for so far, but for the addresses: equal on all.
  const std::string& requests(int rank) { return ranks_[static_cast<size_t>(rank)].requests; }

  struct Rank;

 private:
  std::string Call(int rank, XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                   const CallSpec& spec, const Buffers& buffers);
  friend struct FakeXlaFunctions;

  struct Array {
    std::byte* begin = nullptr;
    size_t bytes = 0;
    void* window = nullptr;
    size_t offset = 0;
  };

 public:
  struct Rank {
    FakeXla* xla = nullptr;
    int number = 0;
    XlaFaults faults;
    std::string requests;
    XLA_FFI_Collectives_Extension extension{};
    nccl::Communicator communicator = nullptr;
    std::vector<Array> arrays;  // of this execution
    void* state = nullptr;
    int ordinal = 0;
    cuda::CUstream stream = nullptr;
  };

 private:
  nccl::FakeNccl& nccl_;
  std::vector<Rank> ranks_;
  std::barrier<> together_;
};

}  // namespace jaxfabric::testing
