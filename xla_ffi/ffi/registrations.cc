#include "ffi/registrations.h"

// Handlers are C functions, defined by JF_DEFINE_OP in one file per op.
#define JF_DECLARE_OP(name)                                        \
  extern "C" XLA_FFI_Error* name##Instantiate(XLA_FFI_CallFrame*); \
  extern "C" XLA_FFI_Error* name##Execute(XLA_FFI_CallFrame*)

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

}  // namespace jaxfabric
