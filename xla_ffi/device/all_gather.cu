#include "device/all_gather.cuh"
#include "device/kernels.cuh"

namespace jaxfabric::device {

JF_KERNEL(jaxfabric_all_gather_packets, MoveArguments) { MovePackets<AllGather>(arguments); }
JF_KERNEL(jaxfabric_all_gather_push, MoveArguments) { MovePush<AllGather>(arguments); }

JF_KERNEL_TABLE(AllGatherKernels, JF_TABLE_ENTRY(jaxfabric_all_gather_packets, MoveArguments)
                                      JF_TABLE_ENTRY(jaxfabric_all_gather_push, MoveArguments))

}  // namespace jaxfabric::device
