#include "device/all_reduce_rms_norm.cuh"
#include "device/kernels.cuh"

namespace jaxfabric::device {

#define JF_FOR_EACH_NORM(X)                                  \
  X(all_reduce_rms_norm_packets, float16, Float16Codec)      \
  X(all_reduce_rms_norm_packets, bfloat16, Bfloat16Codec)    \
  X(all_reduce_rms_norm_packets, float32, PlainCodec<float>) \
  X(all_reduce_rms_norm_two_shot, float16, Float16Codec)     \
  X(all_reduce_rms_norm_two_shot, bfloat16, Bfloat16Codec)   \
  X(all_reduce_rms_norm_two_shot, float32, PlainCodec<float>)
#define JF_NORM_KERNEL(family, type, Codec) \
  JF_KERNEL(jaxfabric_##family##_##type, RmsNormArguments) { family##_body<Codec>(arguments); }
#define JF_NORM_ENTRY(family, type, Codec) \
  JF_TABLE_ENTRY(jaxfabric_##family##_##type, RmsNormArguments)

JF_FOR_EACH_NORM(JF_NORM_KERNEL)

JF_KERNEL_TABLE(AllReduceRmsNormKernels, JF_FOR_EACH_NORM(JF_NORM_ENTRY))

}  // namespace jaxfabric::device
