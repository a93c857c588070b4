#include "device/broadcast.cuh"
#include "device/kernels.cuh"

namespace jaxfabric::device {

JF_KERNEL(jaxfabric_broadcast_packets, MoveArguments) { MovePackets<Broadcast>(arguments); }
JF_KERNEL(jaxfabric_broadcast_push, MoveArguments) { MovePush<Broadcast>(arguments); }

JF_KERNEL_TABLE(BroadcastKernels, JF_TABLE_ENTRY(jaxfabric_broadcast_packets, MoveArguments)
                                      JF_TABLE_ENTRY(jaxfabric_broadcast_push, MoveArguments))

}  // namespace jaxfabric::device
