#include "device/all_reduce.cuh"
#include "device/kernels.cuh"

namespace jaxfabric::device {

JF_FOR_EACH_REDUCTION(JF_REDUCTION_KERNEL, all_reduce_packets)
JF_FOR_EACH_REDUCTION(JF_REDUCTION_KERNEL, all_reduce_two_shot)

JF_KERNEL_TABLE(AllReduceKernels,
                JF_FOR_EACH_REDUCTION(JF_REDUCTION_ENTRY, all_reduce_packets)
                    JF_FOR_EACH_REDUCTION(JF_REDUCTION_ENTRY, all_reduce_two_shot))

}  // namespace jaxfabric::device
