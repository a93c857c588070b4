// Calls that read and write the other ranks' own arrays, where these lie in windows: memory of all
// ranks that each of them addresses (collective/gpu/windows.h).
//
// In the first step ranks tell each other where in its window each one's arrays are, which may be
// another place on each, or that they are in none. All see what all have said, so all decide alike:
// without copies, or as if there were no windows. The step also says that operands are there and
// results may be written, and a last one that nobody reads or writes this rank's arrays any more.
//
// No rank writes what another may still read: peers write parts of a result that only they read of
// its operand (all_reduce, whose result may be its operand), or the result is other memory than the
// operand, which the host has seen to.
#pragma once

#include "device/all_reduce.cuh"
#include "device/lane.cuh"
#include "device/move.cuh"
#include "device/reduce_scatter.cuh"

namespace jaxfabric::device {

// The arrays of every rank, as this one addresses them.
struct WindowAddresses {
  const std::byte* input[kMaxRanks];
  std::byte* output[kMaxRanks];
};

// One step. Whether the arrays of all ranks are in windows; if so `found`, which the block shares,
// is filled.
template <class Arguments>
JF_DEVICE bool FindWindows(Lane& lane, const Arguments& a, WindowAddresses& found) {
  const WindowTable* table = a.table;
  const bool fits =
      table != nullptr && table->input == a.call.input && table->output == a.call.output;
  const WindowPlace own = fits ? WindowPlace{table->input_offset, table->output_offset}
                               : WindowPlace{kInNoWindow, kInNoWindow};
  lane.Begin();
  for (uint32_t rank = hw::Thread(); rank < lane.ranks(); rank += hw::Threads()) {
    reinterpret_cast<WindowPlace*>(lane.Bulk(rank))[lane.rank()] = own;
  }
  lane.Signal();
  lane.Await();
  const auto* places = reinterpret_cast<const WindowPlace*>(lane.Bulk(lane.rank()));
  for (uint32_t rank = 0; rank < lane.ranks(); ++rank) {
    if (places[rank].input != kInNoWindow) continue;
    // The call goes on in a lane of its own.
    lane.End();
    hw::SyncBlock();
    return false;
  }
  for (uint32_t rank = hw::Thread(); rank < lane.ranks(); rank += hw::Threads()) {
    found.input[rank] = table->base[rank].input + places[rank].input;
    found.output[rank] = table->base[rank].output + places[rank].output;
  }
  hw::SyncBlock();
  return true;
}

// The last step: all ranks are done with each other's arrays.
JF_DEVICE void LeaveWindows(Lane& lane) {
  lane.Begin();
  lane.Signal();
  lane.Await();
  lane.End();
}

// Loads on their way at once: half of what there are elsewhere, as the kernel has two ways to go,
// and registers for both; with all threads of a block still more than a link needs.
template <class Codec>
inline constexpr uint32_t kWindowLoads = kLoads<typename Codec::Storage> / 2;

// store(i, v): v is the combination of the ranks' vectors number i of their operands, for those
// that lie in bytes [begin, end), which are multiples of 16.
template <class Codec, class Op, class Store>
JF_DEVICE void CombineWindows(const WindowAddresses& windows, uint32_t ranks, uint64_t begin,
                              uint64_t end, Store store) {
  // In 32 bits, which take fewer registers; larger operands are not planned so (launch.cc).
  const auto last = static_cast<uint32_t>(end / sizeof(Vector));
  for (uint32_t i = static_cast<uint32_t>(begin / sizeof(Vector)) + hw::Thread(); i < last;
       i += hw::Threads()) {
    store(i, Combine<Codec, Op, Vector, Vector, kWindowLoads<Codec>>(
                 ranks,
                 [&](uint32_t rank) {
                   return reinterpret_cast<const Vector*>(windows.input[rank])[i];
                 },
                 [](const Vector& value, uint32_t) { return value; }));
  }
}

// Each rank combines one part of all operands and writes it into all results.
template <class Codec, class Op>
JF_DEVICE void all_reduce_window_body(const WindowReduceArguments& a) {
  JF_SHARED(WindowAddresses, windows);
  {
    Lane lane(a.call.communicator, a.call.header);
    if (FindWindows(lane, a, windows)) {
      const uint32_t ranks = lane.ranks();
      const Slice slice(a.call.count * sizeof(typename Codec::Storage), hw::Block(), hw::Blocks(),
                        kLineBytes);
      const Slice part(slice.size(), lane.rank(), ranks, sizeof(Vector));
      CombineWindows<Codec, Op>(windows, ranks, slice.begin + part.begin, slice.begin + part.end,
                                [&](uint32_t i, const Vector& v) {
                                  for (uint32_t peer = 0; peer < ranks; ++peer) {
                                    reinterpret_cast<Vector*>(windows.output[peer])[i] = v;
                                  }
                                });
      LeaveWindows(lane);
      return;
    }
  }
  all_reduce_two_shot_body<Codec, Op, kWindowLoads<Codec>>(a.call);
}

// Each rank combines its own row of all operands.
template <class Codec, class Op>
JF_DEVICE void reduce_scatter_window_body(const WindowReduceArguments& a) {
  JF_SHARED(WindowAddresses, windows);
  {
    Lane lane(a.call.communicator, a.call.header);
    if (FindWindows(lane, a, windows)) {
      const uint64_t row = a.call.count * sizeof(typename Codec::Storage);
      const Slice slice(row, hw::Block(), hw::Blocks(), kLineBytes);
      const uint64_t own = lane.rank() * row;
      CombineWindows<Codec, Op>(
          windows, lane.ranks(), own + slice.begin, own + slice.end,
          [&](uint32_t i, const Vector& v) {
            static_cast<Vector*>(a.call.output)[i - static_cast<uint32_t>(own / sizeof(Vector))] =
                v;
          });
      LeaveWindows(lane);
      return;
    }
  }
  reduce_scatter_pull_body<Codec, Op>(a.call);
}

// Apart, so that it takes no registers from the rest.
template <class Pattern>
JF_COLD void MoveInArenas(const MoveArguments& a) {
  MovePush<Pattern>(a);
}

// Each rank writes into the results of those that it sends to. What a source sends lies at
// Pattern::ReceiveOffset in the result of any rank.
template <class Pattern>
JF_DEVICE void MoveWindow(const WindowMoveArguments& a) {
  JF_SHARED(WindowAddresses, windows);
  Lane lane(a.call.communicator, a.call.header);
  if (FindWindows(lane, a, windows)) {
    const auto* input = static_cast<const std::byte*>(a.call.input);
    const Slice slice(a.call.bytes, hw::Block(), hw::Blocks(), kLineBytes);
    const uint64_t at = Pattern::ReceiveOffset(a.call, lane.rank()) + slice.begin;
    for (uint32_t step = 1; step < lane.ranks(); ++step) {
      const uint32_t peer = (lane.rank() + step) % lane.ranks();
      if (!Pattern::SendsTo(a.call, peer)) continue;
      CopyBlock(windows.output[peer] + at, input + Pattern::SendOffset(a.call, peer) + slice.begin,
                slice.size());
    }
    Pattern::Keep(a.call, slice.begin, slice.size());
    LeaveWindows(lane);
    return;
  }
  MoveInArenas<Pattern>(a.call);
}

}  // namespace jaxfabric::device
