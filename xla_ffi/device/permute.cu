#include "device/kernels.cuh"
#include "device/permute.cuh"

namespace jaxfabric::device {

JF_KERNEL(jaxfabric_permute_packets, MoveArguments) { MovePackets<Permute>(arguments); }
JF_KERNEL(jaxfabric_permute_push, MoveArguments) { MovePush<Permute>(arguments); }

JF_KERNEL_TABLE(PermuteKernels, JF_TABLE_ENTRY(jaxfabric_permute_packets, MoveArguments)
                                    JF_TABLE_ENTRY(jaxfabric_permute_push, MoveArguments))

}  // namespace jaxfabric::device
