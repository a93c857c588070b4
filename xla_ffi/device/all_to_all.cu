#include "device/all_to_all.cuh"
#include "device/kernels.cuh"

namespace jaxfabric::device {

JF_KERNEL(jaxfabric_all_to_all_packets, MoveArguments) { MovePackets<AllToAll>(arguments); }
JF_KERNEL(jaxfabric_all_to_all_push, MoveArguments) { MovePush<AllToAll>(arguments); }

JF_KERNEL_TABLE(AllToAllKernels, JF_TABLE_ENTRY(jaxfabric_all_to_all_packets, MoveArguments)
                                     JF_TABLE_ENTRY(jaxfabric_all_to_all_push, MoveArguments))

}  // namespace jaxfabric::device
