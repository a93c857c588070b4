// Between hosts, a schedule of pattern/pattern.h: a list of steps, each of which sends something,
// receives something, or both.
//
//   rank 0  publish | send 1 | take what came in step 1, add it | send 2 | take 2 | ...
//
// A rank publishes the number of a block of memory, into which those who send to it put their
// messages: every message has a place there, and a counter that says that it has arrived. So a
// message can be put as soon as its receiver has published, whatever the receiver is doing, and
// sending never waits for the receiver to take something: no rank waits for another in any other
// way than the schedule says. A block is had by every execution that asks for one (blocks.h).
//
// Of hosts with several ranks one rank is the member, the others show it their operands in the
// host's memory and read the result there.
//
// What arrives enters the array in the order of the steps, after what they send up to the same one
// has been posted. That is stricter than the rules of pattern.h ask for, and as free of deadlock:
// what a step waits for comes before it in the schedules of both ends.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "collective/fabric.h"
#include "collective/op.h"
#include "collective/participant.h"
#include "memory/copy.h"

namespace jaxfabric {
namespace {

std::atomic<uint64_t>& Counter(BlockPool::Block* block, size_t offset) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(block->memory.data() + offset);
}

}  // namespace

// False while there is no memory for what the ranks of this host show each other, or if the
// execution has failed.
bool Op::ClaimForPattern() {
  static_assert(kMostSharedBytes <= kReserveShare);
  const Plan& plan = participant_.plan();
  if (!plan.locals.empty() && plan.stream > 0 && !PlaceStaging(kMostSharedBytes)) return false;
  return plan.member < 0 || TakeBlock();
}

// Before the tag, which says that it is there.
void Op::ShowOperand() {
  const Plan& plan = participant_.plan();
  if (plan.member < 0 && plan.stream > 0) Copy(staging_, buffers_.input, plan.stream);
}

bool Op::TakeBlock() {
  const PatternMessages& messages = participant_.messages_;
  const auto block =
      participant_.fabric().blocks().Take(*participant_.fabric().messages(), messages.bytes);
  if (!block.ok()) {
    const Status failed = participant_.WithCaller(block.status());
    participant_.fabric().ReportFailure(failed);
    Fail(failed);
    return false;
  }
  pattern_.block = *block;
  pattern_.tickets.assign(messages.pattern.steps.size(), 0);
  pattern_.posted.assign(messages.pattern.steps.size(), 0);
  for (size_t at = 0; at < messages.counter_bytes; at += sizeof(uint64_t)) {
    // Relaxed: published with the tag.
    Counter(pattern_.block, at).store(0, std::memory_order_relaxed);
  }
  return true;
}

// What all that was sent has left, and all that was to come has come to.
void Op::GiveBlock() {
  if (pattern_.block == nullptr) return;
  participant_.fabric().blocks().Give(pattern_.block);
  pattern_.block = nullptr;
}

// The sum of this host's operands, in rank order, once all are there.
bool Op::AddLocals() {
  const Plan& plan = participant_.plan();
  for (int local : plan.locals) {
    if (Find(local) != nullptr) continue;
    waiting_for_ = local;
    return false;
  }
  if (!plan.reduces) return true;
  host_operands_.assign(1, buffers_.input);
  for (int local : plan.locals) {
    host_operands_.push_back(participant_.peers_[static_cast<size_t>(local)].window +
                             found_[static_cast<size_t>(local)]->publish.staged.ring_offset);
  }
  Reduce(plan.dtype, plan.reduction, buffers_.output, host_operands_, plan.stream / plan.element);
  return true;
}

void Op::ShowResult() {
  const Plan& plan = participant_.plan();
  if (plan.locals.empty()) return;
  if (plan.stream > 0) Copy(staging_, buffers_.output, plan.stream);
  // Release: the result. One more than its bytes, of which there may be none.
  mine_->produce.results.store(plan.stream + 1, std::memory_order_release);
}

// A rank that a member acts for.
bool Op::StepOfOthers() {
  const Plan& plan = participant_.plan();
  const int actor = plan.locals[0];
  waiting_for_ = actor;
  const Slot* slot = Find(actor);
  if (slot == nullptr) return stage_ != Stage::kTransfer;
  // Acquire: pairs with ShowResult().
  if (slot->produce.results.load(std::memory_order_acquire) <= plan.stream) return false;
  if (plan.stream > 0) {
    Copy(buffers_.output,
         participant_.peers_[static_cast<size_t>(actor)].window + slot->publish.staged.ring_offset,
         plan.stream);
  } else if (buffers_.output_bytes > 0) {
    Copy(buffers_.output, buffers_.input, buffers_.output_bytes);
  }
  Finish(/*ring=*/false);
  return true;
}

int Op::MemberAt(int32_t member) const {
  return participant_.plan().members[static_cast<size_t>(member)];
}

// The array as it is before the first step.
void Op::BeginPattern() {
  const Plan& plan = participant_.plan();
  const PatternMessages& messages = participant_.messages_;
  std::byte* array = PatternArray();
  const size_t stream = plan.stream;
  const auto me = static_cast<size_t>(plan.position);
  switch (plan.kind) {
    case OpKind::kAllReduce:
      if (messages.collecting == 0 && plan.locals.empty()) {
        Copy(array, buffers_.input, buffers_.input_bytes);
      }
      return;
    case OpKind::kReduceScatter:
      if (messages.works_beside) Copy(array, buffers_.input, buffers_.input_bytes);
      return;
    case OpKind::kAllGather:
      Copy(array + me * stream, buffers_.input, stream);
      return;
    case OpKind::kAllToAll:
      Copy(buffers_.output + me * stream, buffers_.input + me * stream, stream);
      for (uint32_t block = 0; messages.works_beside && block < messages.cut.blocks; ++block) {
        Copy(array + block * stream, buffers_.input + RowAhead(block) * stream, stream);
      }
      return;
    case OpKind::kBroadcast:
      if (plan.root == plan.position) Copy(array, buffers_.input, buffers_.input_bytes);
      return;
    default:
      if (buffers_.output_bytes > 0) Copy(array, buffers_.input, buffers_.output_bytes);
  }
}

// What is left to do after the last step.
void Op::EndPattern() {
  const Plan& plan = participant_.plan();
  const PatternMessages& messages = participant_.messages_;
  if (!messages.works_beside) return;
  const std::byte* array = PatternArray();
  const size_t stream = plan.stream;
  if (plan.kind == OpKind::kReduceScatter) {
    Copy(buffers_.output, array + static_cast<size_t>(plan.position) * stream, stream);
    return;
  }
  for (uint32_t block = 1; block < messages.cut.blocks; ++block) {
    Copy(buffers_.output + RowAhead(messages.cut.blocks - block) * stream, array + block * stream,
         stream);
  }
}

std::byte* Op::PatternArray() const {
  const PatternMessages& messages = participant_.messages_;
  return messages.works_beside ? pattern_.block->memory.data() + messages.work : buffers_.output;
}

// The row of the member so far ahead of this one.
size_t Op::RowAhead(uint32_t distance) const {
  const Plan& plan = participant_.plan();
  return (static_cast<size_t>(plan.position) + distance) % static_cast<size_t>(plan.size);
}

// Where a block is that a step sends. What is in the operand still need not be copied.
const std::byte* Op::SentBlock(const Step& step, uint32_t block) const {
  const Plan& plan = participant_.plan();
  const PatternMessages& messages = participant_.messages_;
  const size_t begin = messages.cut.Begin(block);
  if (plan.kind == OpKind::kAllToAll && !messages.works_beside) {
    return buffers_.input + RowAhead(block) * plan.stream;
  }
  const bool own = step.arrival == Arrival::kCollect ||
                   (plan.kind == OpKind::kBroadcast && plan.root == plan.position);
  return (own ? buffers_.input : PatternArray()) + begin;
}

// Where a block is that a step receives.
std::byte* Op::ReceivedBlock(uint32_t block) const {
  const Plan& plan = participant_.plan();
  const PatternMessages& messages = participant_.messages_;
  if (plan.kind == OpKind::kAllToAll && !messages.works_beside) {
    return buffers_.output + RowAhead(messages.cut.blocks - block) * plan.stream;
  }
  return PatternArray() + messages.cut.Begin(block);
}

// All that the arrivals allow, in any order: receivers publish when they like.
bool Op::SendSteps() {
  const auto& steps = participant_.messages_.pattern.steps;
  bool moved = false;
  for (size_t i = pattern_.sent; i < steps.size() && steps[i].needs <= pattern_.entered; ++i) {
    if (stage_ != Stage::kTransfer) return true;  // a header mismatch
    if (pattern_.posted[i] != 0 || !SendStep(i)) continue;
    pattern_.posted[i] = 1;
    moved = true;
  }
  while (pattern_.sent < steps.size() && pattern_.posted[pattern_.sent] != 0) ++pattern_.sent;
  return moved;
}

bool Op::SendStep(size_t index) {
  const PatternMessages& messages = participant_.messages_;
  const Step& step = messages.pattern.steps[index];
  if (step.to == kNobody) return true;
  const int to = MemberAt(step.to);
  const Slot* receiver = Find(to);
  if (receiver == nullptr) {
    waiting_for_ = to;
    return false;
  }
  const size_t number = participant_.RemoteOf(to);
  const RemotePeer& remote = participant_.remotes_[number];
  const auto region = static_cast<uint32_t>(receiver->publish.staged.output_region);
  const PatternMessages::Place& place = messages.sent[index];
  size_t at = place.bytes_at;
  for (uint32_t i = 0; i < step.sent.count;) {
    // Neighbours in the array go together.
    const uint32_t block = step.sent.At(i, messages.cut.blocks);
    const std::byte* from = SentBlock(step, block);
    size_t bytes = messages.cut.Bytes(block);
    for (++i; i < step.sent.count; ++i) {
      const uint32_t next = step.sent.At(i, messages.cut.blocks);
      if (SentBlock(step, next) != from + bytes) break;
      bytes += messages.cut.Bytes(next);
    }
    if (bytes == 0) continue;
    const Result<uint64_t> ticket = remote.channel->PostPut({from, bytes}, region, at);
    if (ticket.ok() && bytes > kCopiedPutBytes) pattern_.tickets[index] = *ticket;
    participant_.Posted(ticket.status());
    at += bytes;
  }
  if (pattern_.tickets[index] != 0) tickets_[number] = pattern_.tickets[index];
  participant_.Posted(remote.channel->PostWord(1, region, place.counter));
  (void)remote.channel->Push();
  return true;
}

// Whether what was posted up to a step has been taken from the array.
bool Op::TakenUpTo(size_t step) {
  const auto& steps = participant_.messages_.pattern.steps;
  for (; pattern_.taken <= step; ++pattern_.taken) {
    const uint64_t ticket = pattern_.tickets[pattern_.taken];
    if (ticket == 0) continue;
    const int to = MemberAt(steps[pattern_.taken].to);
    if (!SentTo(participant_.RemoteOf(to), ticket)) {
      waiting_for_ = to;
      return false;
    }
  }
  return true;
}

bool Op::HasArrived(size_t step) const {
  const PatternMessages& messages = participant_.messages_;
  if (messages.pattern.steps[step].from == kNobody) return true;
  // Acquire: the bytes before their counter.
  return Counter(pattern_.block, messages.received[step].counter).load(std::memory_order_acquire) !=
         0;
}

bool Op::EnterStep() {
  const Plan& plan = participant_.plan();
  const PatternMessages& messages = participant_.messages_;
  const auto& steps = messages.pattern.steps;
  if (pattern_.entered >= steps.size() || pattern_.sent <= pattern_.entered) return false;
  if (pattern_.entered < messages.collecting) return CollectSteps();
  const Step& step = steps[pattern_.entered];
  pattern_.awaits_sending = false;
  if (!HasArrived(pattern_.entered)) {
    waiting_for_ = MemberAt(step.from);
    return false;
  }
  if (messages.changes_sent && step.from != kNobody && !TakenUpTo(pattern_.entered)) {
    pattern_.awaits_sending = true;
    return false;
  }
  const std::byte* arrived =
      pattern_.block->memory.data() + messages.received[pattern_.entered].bytes_at;
  for (uint32_t i = 0; i < step.received.count; ++i) {
    const uint32_t block = step.received.At(i, messages.cut.blocks);
    const size_t bytes = messages.cut.Bytes(block);
    std::byte* to = ReceivedBlock(block);
    if (step.arrival == Arrival::kStore) {
      Copy(to, arrived, bytes);
    } else {
      const bool before = step.arrival == Arrival::kAddBefore;
      const void* const operands[] = {before ? arrived : to, before ? to : arrived};
      Reduce(plan.dtype, plan.reduction, to, operands, bytes / plan.element);
    }
    arrived += bytes;
  }
  ++pattern_.entered;
  return true;
}

// Contributions to one block, that are added together once all have come.
bool Op::CollectSteps() {
  const Plan& plan = participant_.plan();
  const PatternMessages& messages = participant_.messages_;
  const auto& steps = messages.pattern.steps;
  if (pattern_.sent < messages.collecting) return false;
  for (; pattern_.collected < messages.collecting; ++pattern_.collected) {
    if (HasArrived(pattern_.collected)) continue;
    waiting_for_ = MemberAt(steps[pattern_.collected].from);
    return false;
  }
  const uint32_t block = steps[0].received.first;
  const size_t begin = messages.cut.Begin(block);
  operands_[static_cast<size_t>(plan.position)] = buffers_.input + begin;
  for (size_t i = 0; i < messages.collecting; ++i) {
    operands_[static_cast<size_t>(steps[i].from)] =
        pattern_.block->memory.data() + messages.received[i].bytes_at;
  }
  std::byte* to = buffers_.output + (plan.kind == OpKind::kReduceScatter ? 0 : begin);
  Reduce(plan.dtype, plan.reduction, to, operands_, messages.cut.Bytes(block) / plan.element);
  pattern_.entered = messages.collecting;
  return true;
}

// Whether this rank waits for something of a peer that may have published.
bool Op::PatternNeeds(int peer) const {
  const Plan& plan = participant_.plan();
  if (plan.member < 0) return true;  // of the one that acts for it
  const auto member = std::find(plan.members.begin(), plan.members.end(), peer);
  if (member == plan.members.end()) return !pattern_.begun && !Look(peer);
  const auto number = static_cast<int32_t>(member - plan.members.begin());
  const auto& steps = participant_.messages_.pattern.steps;
  for (size_t i = std::min(pattern_.entered, pattern_.taken); i < steps.size(); ++i) {
    if (steps[i].from == number && i >= pattern_.entered && !HasArrived(i)) return true;
    if (steps[i].to != number) continue;
    if (i >= pattern_.sent && found_[static_cast<size_t>(peer)] == nullptr && !Look(peer)) {
      return true;
    }
    if (i == pattern_.taken && pattern_.awaits_sending) return true;
  }
  return false;
}

bool Op::StepPattern() {
  if (participant_.plan().member < 0) return StepOfOthers();
  bool moved = false;
  if (!pattern_.begun) {
    if (!AddLocals()) return stage_ != Stage::kTransfer;
    BeginPattern();
    pattern_.begun = moved = true;
  }
  const size_t steps = participant_.messages_.pattern.steps.size();
  for (bool again = true; again;) {
    again = SendSteps();
    if (stage_ != Stage::kTransfer) return true;  // a header mismatch
    again |= EnterStep();
    moved |= again;
  }
  if (pattern_.sent < steps || pattern_.entered < steps) return moved;
  EndPattern();
  ShowResult();
  Finish(/*ring=*/!participant_.plan().locals.empty());
  return true;
}

}  // namespace jaxfabric
