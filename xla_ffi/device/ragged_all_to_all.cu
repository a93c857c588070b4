#include "device/kernels.cuh"
#include "device/ragged_all_to_all.cuh"

namespace jaxfabric::device {

JF_KERNEL(jaxfabric_ragged_all_to_all_push_int32, RaggedArguments) {
  ragged_all_to_all_push_body<int32_t>(arguments);
}
JF_KERNEL(jaxfabric_ragged_all_to_all_push_int64, RaggedArguments) {
  ragged_all_to_all_push_body<int64_t>(arguments);
}

JF_KERNEL_TABLE(RaggedAllToAllKernels,
                JF_TABLE_ENTRY(jaxfabric_ragged_all_to_all_push_int32, RaggedArguments)
                    JF_TABLE_ENTRY(jaxfabric_ragged_all_to_all_push_int64, RaggedArguments))

}  // namespace jaxfabric::device
