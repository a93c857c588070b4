// x[bytes] -> y[bytes]: x, after every rank has arrived.
#include "device/bytes.cuh"
#include "device/kernels.cuh"

namespace jaxfabric::device {

JF_KERNEL(jaxfabric_barrier, MoveArguments) {
  Lane lane(arguments.communicator, arguments.header);
  lane.Begin();
  lane.Signal();
  lane.Await();
  const Slice slice(arguments.bytes, hw::Block(), hw::Blocks(), kLineBytes);
  CopyBlock(static_cast<std::byte*>(arguments.output) + slice.begin,
            static_cast<const std::byte*>(arguments.input) + slice.begin, slice.size());
  lane.End();
}

JF_KERNEL_TABLE(BarrierKernels, JF_TABLE_ENTRY(jaxfabric_barrier, MoveArguments))

}  // namespace jaxfabric::device
