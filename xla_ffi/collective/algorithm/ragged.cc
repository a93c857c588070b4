// ragged_all_to_all: rank i gets slices of every rank's operand, of any length, and puts them where
// their sender says. Every sub-stream begins with a table, from which the receiver learns lengths
// and places; the rows follow, slice after slice.
//
//   to rank 0   [offset, rows | offset, rows | rows of slice 0 | rows of slice 1 ......]
//   to rank 1   [offset, rows | offset, rows | rows of slice 0]
//
// The sub-streams of a rank advance together, as in exchange.cc; those that have ended hold up
// nobody. Inside one process large operands are read where they lie (pull.cc).
//
// A rank checks what it reads from its own operand before it publishes, and what it writes to its
// own result once all tables are here. It does not finish before all others have done the same, so
// that a mistake on one rank is an error on every rank.
#include <algorithm>
#include <cstring>

#include "collective/fabric.h"
#include "collective/op.h"
#include "collective/participant.h"
#include "memory/copy.h"

namespace jaxfabric {
namespace {

// The progress of a reader that needs nothing more, whatever the length of the stream.
constexpr uint64_t kEverything = uint64_t{1} << 62;
// Copies of less go through the cache: each one that does not ends with a fence.
constexpr size_t kNonTemporalPiece = 4096;

// Cuts the bytes [begin, end) of slices that lie one behind the other:
// visit(slice, first byte of it, how many bytes).
template <class Visit>
void ForEachPiece(std::span<const RaggedSlice> slices, size_t row_bytes, size_t begin, size_t end,
                  Visit visit) {
  size_t start = 0;
  for (size_t i = 0; i < slices.size() && start < end; ++i) {
    const size_t stop = start + static_cast<size_t>(slices[i].rows) * row_bytes;
    const size_t from = std::max(begin, start);
    const size_t to = std::min(end, stop);
    if (from < to) visit(i, from - start, to - from);
    start = stop;
  }
}

size_t TotalRows(std::span<const RaggedSlice> slices) {
  size_t rows = 0;
  for (const RaggedSlice& slice : slices) rows += static_cast<size_t>(slice.rows);
  return rows;
}

// Whether rows [offset, offset + rows) are among `limit` rows. No rows are anywhere.
bool Fits(int64_t offset, int64_t rows, size_t limit) {
  const auto all = static_cast<int64_t>(limit);
  return rows == 0 || (offset >= 0 && rows <= all && offset <= all - rows);
}

}  // namespace

// Reads this execution's arrays; false, and the op has failed, where they make no sense.
bool Op::PrepareRagged() {
  const Plan& plan = participant_.plan();
  const auto n = static_cast<size_t>(plan.size);
  const auto me = static_cast<size_t>(plan.position);
  const size_t each = plan.slices_each();
  // Warm after the first execution.
  ragged_.sent.resize(plan.ragged.slices);
  ragged_.received.resize(plan.ragged.slices);
  ragged_.sent_bytes.assign(n, 0);
  ragged_.received_bytes.assign(n, plan.table_bytes());
  ragged_.receive_end = plan.table_bytes();
  ragged_.own_copied = false;
  for (size_t i = 0; i < ragged_.sent.size(); ++i) {
    ragged_.sent[i] = {buffers_.ragged.output_offsets[i], buffers_.ragged.send_sizes[i]};
  }
  const std::span<const RaggedSlice> sent(ragged_.sent);
  Status status = CheckOwnSlices();
  if (status.ok()) status = CheckSlices(plan.position, sent.subspan(me * each, each));
  if (!status.ok()) {
    participant_.fabric().ReportFailure(status);
    Fail(std::move(status));
    return false;
  }
  stream_ = 0;
  for (size_t to = 0; to < n; ++to) {
    if (to == me) continue;
    ragged_.sent_bytes[to] =
        plan.table_bytes() + TotalRows(sent.subspan(to * each, each)) * plan.ragged.row_bytes;
    stream_ = std::max(stream_, ragged_.sent_bytes[to]);
  }
  return true;
}

// What this rank reads from its operand.
Status Op::CheckOwnSlices() const {
  const RaggedBuffers& ragged = buffers_.ragged;
  const RaggedSizes& sizes = participant_.plan().ragged;
  for (size_t i = 0; i < sizes.slices; ++i) {
    const int64_t rows = ragged.send_sizes[i];
    if (rows >= 0 && Fits(ragged.input_offsets[i], rows, sizes.input_rows)) continue;
    return Status(Code::kInvalidArgument,
                  StrCat(participant_.DescribeCall(), " on ",
                         participant_.DescribePeer(participant_.position()), ": input_offsets[", i,
                         "] is ", ragged.input_offsets[i], " and send_sizes[", i, "] is ", rows,
                         ", but its operand has ", sizes.input_rows, " rows"));
  }
  return OkStatus();
}

// What it writes to its result.
Status Op::CheckSlices(int source, std::span<const RaggedSlice> slices) const {
  const Plan& plan = participant_.plan();
  const size_t first = static_cast<size_t>(source) * plan.slices_each();
  const size_t first_there = static_cast<size_t>(plan.position) * plan.slices_each();
  for (size_t i = 0; i < slices.size(); ++i) {
    const auto [offset, rows] = slices[i];
    const int64_t expected = buffers_.ragged.recv_sizes[first + i];
    if (rows != expected) {
      return Status(Code::kFailedPrecondition,
                    StrCat("ranks disagree: ", participant_.DescribeCall(), ": on ",
                           participant_.DescribePeer(plan.position), " recv_sizes[", first + i,
                           "] is ", expected, ", on ", participant_.DescribePeer(source),
                           " send_sizes[", first_there + i, "] is ", rows));
    }
    if (!Fits(offset, rows, plan.ragged.output_rows)) {
      return Status(Code::kInvalidArgument,
                    StrCat(participant_.DescribeCall(), " on ", participant_.DescribePeer(source),
                           ": output_offsets[", first_there + i, "] is ", offset,
                           " and send_sizes[", first_there + i, "] is ", rows,
                           ", but the output of ", participant_.DescribePeer(plan.position),
                           " has ", plan.ragged.output_rows, " rows"));
    }
  }
  return OkStatus();
}

void Op::CopyOwnSlices() {
  const Plan& plan = participant_.plan();
  if (buffers_.ragged.initial != buffers_.output) {
    Copy(buffers_.output, buffers_.ragged.initial, buffers_.output_bytes,
         plan.nontemporal ? Store::kNonTemporal : Store::kCached);
  }
  const size_t first = static_cast<size_t>(plan.position) * plan.slices_each();
  for (size_t i = first; i < first + plan.slices_each(); ++i) {
    const auto [offset, rows] = ragged_.sent[i];
    if (rows == 0) continue;  // its offsets may be anything
    const size_t row = plan.ragged.row_bytes;
    Copy(buffers_.output + static_cast<size_t>(offset) * row,
         buffers_.input + static_cast<size_t>(buffers_.ragged.input_offsets[i]) * row,
         static_cast<size_t>(rows) * row);
  }
}

// Stages [offset, offset + bytes) of the sub-stream for rank `to`, as far as it goes.
void Op::StageSlices(int to, std::byte* ring, size_t offset, size_t bytes) {
  const Plan& plan = participant_.plan();
  const size_t first = static_cast<size_t>(to) * plan.slices_each();
  const auto slices = std::span<const RaggedSlice>(ragged_.sent).subspan(first, plan.slices_each());
  const size_t table = plan.table_bytes();
  const size_t end = std::min(offset + bytes, ragged_.sent_bytes[static_cast<size_t>(to)]);
  if (offset < table) {
    const size_t head = std::min(end, table) - offset;
    std::memcpy(ring, reinterpret_cast<const std::byte*>(slices.data()) + offset, head);
    ring += head;
    offset += head;
  }
  if (offset >= end) return;
  const size_t row = plan.ragged.row_bytes;
  ForEachPiece(slices, row, offset - table, end - table, [&](size_t i, size_t from, size_t size) {
    const auto start = static_cast<size_t>(buffers_.ragged.input_offsets[first + i]) * row;
    std::memcpy(ring, buffers_.input + start + from, size);
    ring += size;
  });
}

// Takes the next bytes of a source's sub-stream, which are all of the table or all behind it.
void Op::Receive(int source, size_t bytes) {
  const Plan& plan = participant_.plan();
  const size_t first = static_cast<size_t>(source) * plan.slices_each();
  const auto slices = std::span<RaggedSlice>(ragged_.received).subspan(first, plan.slices_each());
  const size_t table = plan.table_bytes();
  const std::byte* from = Contribution(source, consumed_);
  if (consumed_ < table) {
    std::memcpy(reinterpret_cast<std::byte*>(slices.data()) + consumed_, from, bytes);
    return;
  }
  const size_t row = plan.ragged.row_bytes;
  const size_t begin = consumed_ - table;
  ForEachPiece(slices, row, begin, begin + bytes, [&](size_t i, size_t at, size_t size) {
    const bool streams = plan.nontemporal && size >= kNonTemporalPiece;
    Copy(buffers_.output + static_cast<size_t>(slices[i].output_offset) * row + at, from, size,
         streams ? Store::kNonTemporal : Store::kCached);
    from += size;
  });
}

// All tables are here. False, and the op has failed, where they do not fit this rank's result.
bool Op::AcceptSlices() {
  const Plan& plan = participant_.plan();
  const size_t each = plan.slices_each();
  for (int source : plan.sources) {
    const auto index = static_cast<size_t>(source);
    const auto slices = std::span<const RaggedSlice>(ragged_.received).subspan(index * each, each);
    Status status = CheckSlices(source, slices);
    if (!status.ok()) {
      participant_.fabric().ReportFailure(status);
      Fail(std::move(status));
      return false;
    }
    ragged_.received_bytes[index] += TotalRows(slices) * plan.ragged.row_bytes;
    ragged_.receive_end = std::max(ragged_.receive_end, ragged_.received_bytes[index]);
  }
  return true;
}

// Receives as much as the slowest source has staged; true if that was anything.
bool Op::ReceiveSlices() {
  const Plan& plan = participant_.plan();
  size_t bytes = ragged_.receive_end - consumed_;
  if (bytes == 0) return false;
  const auto rest_of = [this](int source) {
    const uint64_t end = ragged_.received_bytes[static_cast<size_t>(source)];
    return static_cast<size_t>(end - std::min(end, consumed_));
  };
  for (int source : plan.sources) {
    if (rest_of(source) == 0) continue;
    const Slot& slot = *found_[static_cast<size_t>(source)];
    // Acquire: pairs with the release in Produce().
    const uint64_t produced = slot.produce.produced.load(std::memory_order_acquire);
    if (produced <= consumed_) {
      waiting_for_ = source;
      return false;
    }
    if (produced - consumed_ < rest_of(source)) bytes = std::min(bytes, produced - consumed_);
    bytes = std::min(bytes, UntilWrap(consumed_, slot.publish.staged.ring_bytes));
  }
  for (int source : plan.sources) Receive(source, std::min(bytes, rest_of(source)));
  consumed_ += bytes;
  if (consumed_ == plan.table_bytes() && !AcceptSlices()) return true;
  // Release: this rank's loads from the rings before the count that frees them.
  mine_->consume.consumed.store(consumed_ == ragged_.receive_end ? kEverything : consumed_,
                                std::memory_order_release);
  return true;
}

// Every other rank has seen all tables, and can do what they say.
bool Op::Acknowledged() {
  const Plan& plan = participant_.plan();
  for (; next_reader_ < plan.readers.size(); ++next_reader_) {
    const int reader = plan.readers[next_reader_];
    if (Consumed(found_[static_cast<size_t>(reader)], reader, /*results=*/false) <
        plan.table_bytes()) {
      waiting_for_ = reader;
      return false;
    }
  }
  return true;
}

bool Op::StepRagged() {
  bool moved = Produce();
  if (stage_ != Stage::kTransfer) return true;
  if (!ragged_.own_copied) {
    CopyOwnSlices();
    ragged_.own_copied = moved = true;
  }
  if (FindSources()) {
    moved |= ReceiveSlices();
    if (stage_ == Stage::kTransfer && produced_ >= stream_ && consumed_ >= ragged_.receive_end &&
        Acknowledged()) {
      Finish(moved);
      return true;
    }
  }
  if (moved) Announce();
  return moved || stage_ != Stage::kTransfer;
}

// One process: the arrays and the operand of the source are its own. False when it could not.
bool Op::PullSlices(int source) {
  const Plan& plan = participant_.plan();
  const auto& direct = found_[static_cast<size_t>(source)]->publish.direct;
  const auto& theirs = *reinterpret_cast<const RaggedBuffers*>(direct.ragged);
  const size_t each = plan.slices_each();
  const size_t first = static_cast<size_t>(plan.position) * each;
  const auto slices =
      std::span<RaggedSlice>(ragged_.received).subspan(static_cast<size_t>(source) * each, each);
  for (size_t i = 0; i < each; ++i) {
    slices[i] = {theirs.output_offsets[first + i], theirs.send_sizes[first + i]};
  }
  Status status = CheckSlices(source, slices);
  if (!status.ok()) {
    participant_.fabric().ReportFailure(status);
    Fail(std::move(status));
    return false;
  }
  const auto* input = reinterpret_cast<const std::byte*>(direct.input);
  const size_t row = plan.ragged.row_bytes;
  for (size_t i = 0; i < each; ++i) {
    const auto [offset, rows] = slices[i];
    if (rows == 0) continue;
    const size_t size = static_cast<size_t>(rows) * row;
    const bool streams = plan.nontemporal && size >= kNonTemporalPiece;
    Copy(buffers_.output + static_cast<size_t>(offset) * row,
         input + static_cast<size_t>(theirs.input_offsets[first + i]) * row, size,
         streams ? Store::kNonTemporal : Store::kCached);
  }
  return !Revoked(source);
}

}  // namespace jaxfabric
