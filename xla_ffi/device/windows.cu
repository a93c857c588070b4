#include "device/all_gather.cuh"
#include "device/all_to_all.cuh"
#include "device/broadcast.cuh"
#include "device/kernels.cuh"
#include "device/permute.cuh"
#include "device/windows.cuh"

namespace jaxfabric::device {

#define JF_FOR_EACH_WINDOW_REDUCTION(X)             \
  X(all_reduce_window, float16, Float16Codec)       \
  X(all_reduce_window, bfloat16, Bfloat16Codec)     \
  X(all_reduce_window, float32, PlainCodec<float>)  \
  X(reduce_scatter_window, float16, Float16Codec)   \
  X(reduce_scatter_window, bfloat16, Bfloat16Codec) \
  X(reduce_scatter_window, float32, PlainCodec<float>)
#define JF_WINDOW_KERNEL(family, type, Codec)                         \
  JF_KERNEL(jaxfabric_##family##_sum_##type, WindowReduceArguments) { \
    family##_body<Codec, SumOp>(arguments);                           \
  }
#define JF_WINDOW_ENTRY(family, type, Codec) \
  JF_TABLE_ENTRY(jaxfabric_##family##_sum_##type, WindowReduceArguments)

JF_FOR_EACH_WINDOW_REDUCTION(JF_WINDOW_KERNEL)
JF_KERNEL(jaxfabric_all_gather_window, WindowMoveArguments) { MoveWindow<AllGather>(arguments); }
JF_KERNEL(jaxfabric_all_to_all_window, WindowMoveArguments) { MoveWindow<AllToAll>(arguments); }
JF_KERNEL(jaxfabric_permute_window, WindowMoveArguments) { MoveWindow<Permute>(arguments); }
JF_KERNEL(jaxfabric_broadcast_window, WindowMoveArguments) { MoveWindow<Broadcast>(arguments); }

// Not a copy by the driver: from memory that is not pinned that one may wait for the stream.
JF_KERNEL(jaxfabric_write_window_table, WriteTableArguments) {
  const auto* from = reinterpret_cast<const uint64_t*>(&arguments.table);
  auto* to = reinterpret_cast<uint64_t*>(arguments.to);
  for (uint32_t i = hw::Thread(); i < sizeof(WindowTable) / sizeof(uint64_t); i += hw::Threads()) {
    to[i] = from[i];
  }
}

JF_KERNEL_TABLE(WindowKernels,
                JF_FOR_EACH_WINDOW_REDUCTION(JF_WINDOW_ENTRY)
                    JF_TABLE_ENTRY(jaxfabric_all_gather_window, WindowMoveArguments)
                        JF_TABLE_ENTRY(jaxfabric_all_to_all_window, WindowMoveArguments)
                            JF_TABLE_ENTRY(jaxfabric_permute_window, WindowMoveArguments)
                                JF_TABLE_ENTRY(jaxfabric_broadcast_window, WindowMoveArguments)
                                    JF_TABLE_ENTRY(jaxfabric_write_window_table,
                                                   WriteTableArguments))

}  // namespace jaxfabric::device
