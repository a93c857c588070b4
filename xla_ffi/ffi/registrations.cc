#include "ffi/registrations.h"

// Handlers are C functions, defined by JF_DEFINE_OP in one file per op.
#define JF_DECLARE_OP(name)                                        \
  extern "C" XLA_FFI_Error* name##Instantiate(XLA_FFI_CallFrame*); \
  extern "C" XLA_FFI_Error* name##Execute(XLA_FFI_CallFrame*)
#define JF_DECLARE_CUDA_OP(name) \
  JF_DECLARE_OP(Cuda##name);     \
  extern "C" XLA_FFI_Error* Cuda##name##Initialize(XLA_FFI_CallFrame*)

namespace jaxfabric {

JF_DECLARE_OP(AllReduce);
JF_DECLARE_OP(AllGather);
JF_DECLARE_OP(ReduceScatter);
JF_DECLARE_OP(AllToAll);
JF_DECLARE_OP(Permute);
JF_DECLARE_OP(Broadcast);
JF_DECLARE_OP(Barrier);
JF_DECLARE_OP(RaggedAllToAll);
extern "C" XLA_FFI_Error* StartExecute(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* DoneExecute(XLA_FFI_CallFrame*);
JF_DECLARE_CUDA_OP(AllReduce);
JF_DECLARE_CUDA_OP(AllGather);
JF_DECLARE_CUDA_OP(ReduceScatter);
JF_DECLARE_CUDA_OP(AllToAll);
JF_DECLARE_CUDA_OP(Permute);
JF_DECLARE_CUDA_OP(Broadcast);
JF_DECLARE_CUDA_OP(Barrier);
JF_DECLARE_CUDA_OP(RaggedAllToAll);
JF_DECLARE_CUDA_OP(AllReduceRmsNorm);
JF_DECLARE_CUDA_OP(AllReduceStart);
JF_DECLARE_CUDA_OP(AllGatherStart);
JF_DECLARE_CUDA_OP(ReduceScatterStart);
JF_DECLARE_CUDA_OP(AllToAllStart);
JF_DECLARE_CUDA_OP(PermuteStart);
JF_DECLARE_CUDA_OP(BroadcastStart);
extern "C" XLA_FFI_Error* CudaDoneExecute(XLA_FFI_CallFrame*);

std::span<const Registration> Registrations() {
  static constexpr Registration kTable[] = {
      {"jaxfabric_all_reduce", AllReduceInstantiate, AllReduceExecute},
      {"jaxfabric_all_gather", AllGatherInstantiate, AllGatherExecute},
      {"jaxfabric_reduce_scatter", ReduceScatterInstantiate, ReduceScatterExecute},
      {"jaxfabric_all_to_all", AllToAllInstantiate, AllToAllExecute},
      {"jaxfabric_permute", PermuteInstantiate, PermuteExecute},
      {"jaxfabric_broadcast", BroadcastInstantiate, BroadcastExecute},
      {"jaxfabric_barrier", BarrierInstantiate, BarrierExecute},
      {"jaxfabric_ragged_all_to_all", RaggedAllToAllInstantiate, RaggedAllToAllExecute},
      {"jaxfabric_all_reduce_start", AllReduceInstantiate, StartExecute},
      {"jaxfabric_all_gather_start", AllGatherInstantiate, StartExecute},
      {"jaxfabric_reduce_scatter_start", ReduceScatterInstantiate, StartExecute},
      {"jaxfabric_all_to_all_start", AllToAllInstantiate, StartExecute},
      {"jaxfabric_permute_start", PermuteInstantiate, StartExecute},
      {"jaxfabric_broadcast_start", BroadcastInstantiate, StartExecute},
      {"jaxfabric_done", nullptr, DoneExecute},
  };
  return kTable;
}

std::span<const Registration> CudaRegistrations() {
#define JF_CUDA_ENTRY(target, name)                                                           \
  {                                                                                           \
    "jaxfabric_" target, Cuda##name##Instantiate, Cuda##name##Execute, Cuda##name##Initialize \
  }
  static constexpr Registration kTable[] = {
      JF_CUDA_ENTRY("all_reduce", AllReduce),
      JF_CUDA_ENTRY("all_gather", AllGather),
      JF_CUDA_ENTRY("reduce_scatter", ReduceScatter),
      JF_CUDA_ENTRY("all_to_all", AllToAll),
      JF_CUDA_ENTRY("permute", Permute),
      JF_CUDA_ENTRY("broadcast", Broadcast),
      JF_CUDA_ENTRY("barrier", Barrier),
      JF_CUDA_ENTRY("ragged_all_to_all", RaggedAllToAll),
      JF_CUDA_ENTRY("all_reduce_rms_norm", AllReduceRmsNorm),
      JF_CUDA_ENTRY("all_reduce_start", AllReduceStart),
      JF_CUDA_ENTRY("all_gather_start", AllGatherStart),
      JF_CUDA_ENTRY("reduce_scatter_start", ReduceScatterStart),
      JF_CUDA_ENTRY("all_to_all_start", AllToAllStart),
      JF_CUDA_ENTRY("permute_start", PermuteStart),
      JF_CUDA_ENTRY("broadcast_start", BroadcastStart),
      {"jaxfabric_done", nullptr, CudaDoneExecute},
  };
#undef JF_CUDA_ENTRY
  return kTable;
}

}  // namespace jaxfabric
