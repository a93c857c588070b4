#include "device/kernels.cuh"
#include "device/reduce_scatter.cuh"

namespace jaxfabric::device {

JF_FOR_EACH_REDUCTION(JF_REDUCTION_KERNEL, reduce_scatter_packets)
JF_FOR_EACH_REDUCTION(JF_REDUCTION_KERNEL, reduce_scatter_pull)

JF_KERNEL_TABLE(ReduceScatterKernels,
                JF_FOR_EACH_REDUCTION(JF_REDUCTION_ENTRY, reduce_scatter_packets)
                    JF_FOR_EACH_REDUCTION(JF_REDUCTION_ENTRY, reduce_scatter_pull))

}  // namespace jaxfabric::device
