// x[r, s], y[q, s], four arrays [ranks * slices] -> y[q, s]: y, and in it slices of every rank's x
// where their senders want them. Sizes and offsets stay on the device.
//
// In the first step every rank writes into every peer's area a table of the slices that it will
// get, and how many steps the rank needs for its rows; so all make the same number of steps. The
// rows follow, slice after slice, behind the table, which stays where it is.
//
// A rank checks its own arrays before the first step and the tables it gets before the second. All
// make at least that one, so none ends well if the arrays of any two do not fit.
#pragma once

#include "device/bytes.cuh"
#include "device/lane.cuh"

namespace jaxfabric::device {

// Cuts bytes [begin, end) of slices that lie one behind the other: visit(slice, first byte of it,
// how many bytes, bytes since `begin`). rows(i): of slice i. Less than 4 GiB at once.
template <class Rows, class Visit>
JF_DEVICE void ForEachPiece(uint32_t slices, uint64_t row_bytes, uint64_t begin, uint64_t end,
                            Rows rows, Visit visit) {
  uint64_t start = 0;
  for (uint32_t i = 0; i < slices && start < end; ++i) {
    const uint64_t stop = start + rows(i) * row_bytes;
    const uint64_t from = begin < start ? start : begin, to = stop < end ? stop : end;
    if (from < to) {
      visit(i, from - start, static_cast<uint32_t>(to - from), static_cast<uint32_t>(from - begin));
    }
    start = stop;
  }
}

// Whether rows [offset, offset + rows) are among `limit` rows. No rows are anywhere.
JF_DEVICE bool RowsFit(int64_t offset, int64_t rows, uint64_t limit) {
  const auto all = static_cast<int64_t>(limit);
  return rows == 0 || (rows > 0 && offset >= 0 && rows <= all && offset <= all - rows);
}

template <class Index>
class RaggedCall {
 public:
  JF_DEVICE RaggedCall(const RaggedArguments& a, Lane& lane)
      : a_(a),
        lane_(lane),
        region_bytes_(a.communicator.shape.bulk_bytes / a.communicator.shape.ranks),
        room_(region_bytes_ - static_cast<uint32_t>(RaggedTableBytes(a.slices))) {}

  JF_DEVICE void Run() {
    if (a_.initial != a_.output) {
      const Slice part(a_.output_rows * a_.row_bytes, hw::Block(), hw::Blocks(), kLineBytes);
      CopyBlock(Output(0) + part.begin, static_cast<const std::byte*>(a_.initial) + part.begin,
                part.size());
      // Rows of any lane may go anywhere.
      lane_.SyncGrid();
    }
    JF_SHARED(Totals, totals);
    CheckOwn();
    Exchange(totals);
    uint64_t steps = 1;
    for (uint32_t source = 0; source < lane_.ranks(); ++source) {
      const uint64_t needed = Table(source)->steps;
      steps = needed > steps ? needed : steps;
    }
    // The tables are read to the end, so the last step has their parity: whoever is in the next
    // call already writes to the other areas. An odd number of steps gets an empty one.
    steps += steps % 2;
    CheckReceived(totals);
    for (uint64_t step = 0; step < steps; ++step) {
      lane_.Begin();
      Send(totals, step * room_);
      lane_.Signal();
      lane_.Await();
      Receive(totals, step * room_);
    }
    lane_.End();
  }

 private:
  // Bytes for each peer and from each source, in all lanes.
  struct Totals {
    uint64_t sent[kMaxRanks], received[kMaxRanks], steps[kMaxRanks];
  };

  JF_DEVICE int64_t At(const void* array, uint32_t rank, uint32_t slice) const {
    return static_cast<const Index*>(array)[uint64_t{rank} * a_.slices + slice];
  }
  JF_DEVICE std::byte* Output(int64_t row) const {
    return static_cast<std::byte*>(a_.output) + static_cast<uint64_t>(row) * a_.row_bytes;
  }
  JF_DEVICE const std::byte* Input(int64_t row) const {
    return static_cast<const std::byte*>(a_.input) + static_cast<uint64_t>(row) * a_.row_bytes;
  }
  JF_DEVICE Slice Part(uint64_t total) const {
    return Slice(total, hw::Block(), hw::Blocks(), kLineBytes);
  }
  JF_DEVICE RaggedTable* TableIn(std::byte* area, uint32_t source) const {
    return reinterpret_cast<RaggedTable*>(area + uint64_t{source} * region_bytes_);
  }
  JF_DEVICE const RaggedTable* Table(uint32_t source) const {
    return TableIn(lane_.Bulk(lane_.rank(), table_parity_), source);
  }
  JF_DEVICE const RaggedEntry* Entries(uint32_t source) const {
    return reinterpret_cast<const RaggedEntry*>(Table(source) + 1);
  }
  JF_DEVICE std::byte* Rows(uint32_t rank, uint32_t source) const {
    return lane_.Bulk(rank) + uint64_t{source} * region_bytes_ + RaggedTableBytes(a_.slices);
  }
  JF_DEVICE void Refuse(uint32_t peer, uint32_t slice) {
    lane_.Fail(FaultKind::kRagged, peer, uint64_t{a_.header} << 32 | slice);
  }

  // What this rank reads from its input.
  JF_DEVICE void CheckOwn() {
    for (uint32_t i = hw::Thread(); i < lane_.ranks() * a_.slices; i += hw::Threads()) {
      if (RowsFit(At(a_.input_offsets, 0, i), At(a_.send_sizes, 0, i), a_.input_rows)) continue;
      Refuse(lane_.rank(), i);
    }
    hw::SyncBlock();
  }

  // The step of the tables, that of the rank itself included.
  JF_DEVICE void Exchange(Totals& totals) {
    for (uint32_t peer = hw::Thread(); peer < lane_.ranks(); peer += hw::Threads()) {
      uint64_t rows = 0;
      for (uint32_t i = 0; i < a_.slices; ++i) {
        rows += static_cast<uint64_t>(At(a_.send_sizes, peer, i));
      }
      totals.sent[peer] = rows * a_.row_bytes;
      totals.steps[peer] = (Part(totals.sent[peer]).size() + room_ - 1) / room_;
    }
    lane_.Begin();
    table_parity_ = lane_.parity();
    hw::SyncBlock();
    uint64_t steps = 0;
    for (uint32_t peer = 0; peer < lane_.ranks(); ++peer) {
      steps = totals.steps[peer] > steps ? totals.steps[peer] : steps;
    }
    for (uint32_t at = hw::Thread(); at < lane_.ranks() * a_.slices; at += hw::Threads()) {
      const uint32_t peer = at / a_.slices, i = at % a_.slices;
      auto* entries = reinterpret_cast<RaggedEntry*>(TableIn(lane_.Bulk(peer), lane_.rank()) + 1);
      entries[i] = {At(a_.output_offsets, peer, i), At(a_.send_sizes, peer, i)};
    }
    for (uint32_t peer = hw::Thread(); peer < lane_.ranks(); peer += hw::Threads()) {
      *TableIn(lane_.Bulk(peer), lane_.rank()) = {steps, 0};
    }
    lane_.Signal();
    lane_.Await();
  }

  // What it writes to its output.
  JF_DEVICE void CheckReceived(Totals& totals) {
    for (uint32_t at = hw::Thread(); at < lane_.ranks() * a_.slices; at += hw::Threads()) {
      const uint32_t source = at / a_.slices, i = at % a_.slices;
      const RaggedEntry entry = Entries(source)[i];
      if (entry.rows == At(a_.recv_sizes, source, i) &&
          RowsFit(entry.offset, entry.rows, a_.output_rows)) {
        continue;
      }
      Refuse(source, i);
    }
    for (uint32_t source = hw::Thread(); source < lane_.ranks(); source += hw::Threads()) {
      uint64_t rows = 0;
      for (uint32_t i = 0; i < a_.slices; ++i) {
        rows += static_cast<uint64_t>(Entries(source)[i].rows);
      }
      totals.received[source] = rows * a_.row_bytes;
    }
    hw::SyncBlock();
  }

  // The rank's own rows go to its output, as any that fit into a step.
  JF_DEVICE void Send(const Totals& totals, uint64_t done) {
    for (uint32_t step = 0; step < lane_.ranks(); ++step) {
      const uint32_t peer = (lane_.rank() + step) % lane_.ranks();
      const Slice part = Part(totals.sent[peer]);
      if (part.size() <= done) continue;
      const uint64_t begin = part.begin + done;
      const uint64_t end = part.end - begin < room_ ? part.end : begin + room_;
      ForEachPiece(
          a_.slices, a_.row_bytes, begin, end,
          [&](uint32_t i) { return static_cast<uint64_t>(At(a_.send_sizes, peer, i)); },
          [&](uint32_t i, uint64_t first, uint32_t bytes, uint32_t at) {
            std::byte* to = step == 0 ? Output(At(a_.output_offsets, peer, i)) + first
                                      : Rows(peer, lane_.rank()) + at;
            CopyBlock(to, Input(At(a_.input_offsets, peer, i)) + first, bytes);
          });
    }
  }

  JF_DEVICE void Receive(const Totals& totals, uint64_t done) {
    for (uint32_t step = 1; step < lane_.ranks(); ++step) {
      const uint32_t source = (lane_.rank() + step) % lane_.ranks();
      const Slice part = Part(totals.received[source]);
      if (part.size() <= done) continue;
      const uint64_t begin = part.begin + done;
      const uint64_t end = part.end - begin < room_ ? part.end : begin + room_;
      const std::byte* from = Rows(lane_.rank(), source);
      const RaggedEntry* entries = Entries(source);
      ForEachPiece(
          a_.slices, a_.row_bytes, begin, end,
          [&](uint32_t i) { return static_cast<uint64_t>(entries[i].rows); },
          [&](uint32_t i, uint64_t first, uint32_t bytes, uint32_t at) {
            CopyBlock(Output(entries[i].offset) + first, from + at, bytes);
          });
    }
  }

  const RaggedArguments& a_;
  Lane& lane_;
  const uint32_t region_bytes_;
  const uint32_t room_;  // for rows, behind the table
  uint32_t table_parity_ = 0;
};

template <class Index>
JF_DEVICE void ragged_all_to_all_push_body(const RaggedArguments& a) {
  Lane lane(a.communicator, a.header);
  RaggedCall<Index>(a, lane).Run();
}

}  // namespace jaxfabric::device
