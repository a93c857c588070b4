#include "device/kernels.cuh"
#include "device/multicast.cuh"

namespace jaxfabric::device {

JF_FOR_EACH_MULTICAST_REDUCTION(JF_REDUCTION_KERNEL, all_reduce_multicast)
JF_FOR_EACH_MULTICAST_REDUCTION(JF_REDUCTION_KERNEL, reduce_scatter_multicast)
JF_KERNEL(jaxfabric_all_gather_multicast, MoveArguments) { all_gather_multicast_body(arguments); }

JF_KERNEL_TABLE(MulticastKernels,
                JF_FOR_EACH_MULTICAST_REDUCTION(JF_REDUCTION_ENTRY, all_reduce_multicast)
                    JF_FOR_EACH_MULTICAST_REDUCTION(JF_REDUCTION_ENTRY, reduce_scatter_multicast)
                        JF_TABLE_ENTRY(jaxfabric_all_gather_multicast, MoveArguments))

}  // namespace jaxfabric::device
