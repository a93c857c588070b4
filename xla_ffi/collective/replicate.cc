// What ranks of other hosts see of an execution. They cannot address this process's window, so the
// owner puts what changes into a mirror of the window that each of their processes keeps: the
// staged bytes, then counters and lines, the tag last, in the order in which they change here.
// Readers use a mirror as they use a window.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>

#include "collective/fabric.h"
#include "collective/op.h"
#include "collective/participant.h"

namespace jaxfabric {
namespace {

std::span<const std::byte> BytesOf(const void* begin, size_t size) {
  return {static_cast<const std::byte*>(begin), size};
}

// Or will not be: nobody reads it any more.
bool IsSent(const MessageChannel& channel, uint64_t ticket) {
  return channel.Sent() >= ticket || !channel.status().ok();
}

}  // namespace

bool Participant::FindRemotes() {
  std::map<int, RemotePeer> remotes;  // by process
  local_readers_ = false;
  const auto contains = [](const std::vector<int>& positions, int position) {
    return std::binary_search(positions.begin(), positions.end(), position);
  };
  for (int position = 0; position < size(); ++position) {
    const PeerView& peer = peers_[static_cast<size_t>(position)];
    const bool reads = contains(plan_.readers, position);
    local_readers_ |= reads && !peer.remote;
    if (!peer.remote || !(reads || contains(plan_.sources, position))) continue;
    RemotePeer& remote = remotes[peer.process];
    if (reads) remote.positions.push_back(position);
  }
  remote_of_.assign(peers_.size(), 0);
  for (auto& [process, remote] : remotes) {
    const auto link = fabric_.LinkTo(process);
    if (!link.ok()) {
      fabric_.ReportFailure(link.status().WithContext(DescribeCall()));
      return false;
    }
    remote.channel = link->channel;
    remote.region = link->mirror_region;
    remote.window_region = link->window_region;
    for (size_t position = 0; position < peers_.size(); ++position) {
      if (peers_[position].process == process) remote_of_[position] = remotes_.size();
    }
    remotes_.push_back(std::move(remote));
  }
  if (plan_.algorithm == Algorithm::kRelay) {
    roles_ = HostRoles(plan_.hosts, position_);
    relay_rings_ = RelayRings(plan_.kind, plan_.hosts, position_);
    relay_sources_.clear();
    for (const auto& relay : roles_.relays) {
      relay_sources_.push_back(
          {RelayRings(plan_.kind, plan_.hosts, relay.position), plan_.hosts.members(relay.host)});
    }
  }
  if (plan_.algorithm == Algorithm::kHosts) {
    roles_ = HostRoles(plan_.hosts, position_);
    layouts_.resize(peers_.size());
    for (int member : roles_.members) {
      layouts_[static_cast<size_t>(member)] = HostsLayout(plan_.hosts, member);
    }
  }
  if (plan_.algorithm == Algorithm::kPattern && plan_.member >= 0) {
    messages_ =
        PatternMessages(plan_.pattern, plan_.kind, static_cast<int32_t>(plan_.members.size()),
                        plan_.member, static_cast<int32_t>(plan_.root), plan_.array_bytes());
  }
  return true;
}

uint64_t Participant::WindowOffset(const void* address) const {
  return static_cast<uint64_t>(static_cast<const std::byte*>(address) - fabric_.window());
}

void Participant::Posted(const Status& status) {
  if (status.code() == Code::kResourceExhausted || status.code() == Code::kOutOfRange) {
    fabric_.ReportFailure(status.WithContext(DescribeCall()));
  }
}

void Op::Announce() {
  const bool tells = participant_.plan().algorithm != Algorithm::kRelay || HasRelayed();
  if (tells && !participant_.remotes_.empty()) {
    for (const RemotePeer& remote : participant_.remotes_) Tell(remote);
    told_ = {true, produced_, results_, consumed_told(), results_consumed_};
  }
  participant_.RingPeers();
}

// What is put to a host straight from the input is not copied before it is on its way.
bool Op::Sent() const {
  for (size_t i = 0; i < tickets_.size(); ++i) {
    if (!SentTo(i, tickets_[i])) return false;
  }
  return true;
}

bool Op::SentTo(size_t remote, uint64_t ticket) const {
  return IsSent(*participant_.remotes_[remote].channel, ticket);
}

void Op::PostInput(size_t offset, size_t bytes) {
  const Plan& plan = participant_.plan();
  if (plan.places) return PostToOutputs(offset, bytes);
  if (plan.algorithm == Algorithm::kRelay) return;  // others get what Relay() posts
  const auto& remotes = participant_.remotes_;
  for (size_t i = 0; i < remotes.size(); ++i) {
    if (plan.sub_streams() == 1) {
      if (!remotes[i].positions.empty()) Post(i, 0, buffers_.input + offset, offset, bytes);
      continue;
    }
    for (int to : remotes[i].positions) {
      const size_t end = SubStreamEnd(to);
      if (offset >= end) continue;
      const std::byte* from = plan.algorithm == Algorithm::kRagged
                                  ? staging_ + static_cast<size_t>(to) * ring_ + offset % ring_
                                  : buffers_.input + SubStreamBegin(to) + offset;
      Post(i, static_cast<size_t>(to), from, offset, std::min(bytes, end - offset));
    }
  }
}

void Op::PostResults(size_t offset, size_t bytes) {
  const std::byte* from = result_staging_ + offset % result_ring_;
  for (const RemotePeer& remote : participant_.remotes_) {
    if (remote.positions.empty()) continue;
    const auto posted =
        remote.channel->PostPut({from, bytes}, remote.region, participant_.WindowOffset(from));
    participant_.Posted(posted.status());
  }
}

// Of a peer on another host there are bytes in this rank's output only, and the other way round.
bool Op::Placed(int peer) const {
  return participant_.plan().places && participant_.peers_[static_cast<size_t>(peer)].remote;
}

// Lets sources on other hosts put into the output. False if the execution has failed.
bool Op::OpenOutput() {
  const std::vector<int>& sources = participant_.plan().sources;
  if (std::none_of(sources.begin(), sources.end(), [this](int from) { return Placed(from); })) {
    return true;
  }
  const auto region = participant_.fabric().messages()->Register(
      {buffers_.output, participant_.plan().output_bytes});
  if (region.ok()) {
    output_region_ = *region;
  } else {
    const Status failed = participant_.WithCaller(region.status());
    participant_.fabric().ReportFailure(failed);
    Fail(failed);
  }
  return region.ok();
}

// What arrives later is dropped.
void Op::CloseOutput() {
  if (!output_region_) return;
  participant_.fabric().messages()->Deregister(*output_region_);
  output_region_.reset();
}

bool Op::FindOutputs() {
  if (outputs_found_) return true;
  for (int reader : participant_.plan().readers) {
    if (Placed(reader) && !Find(reader)) {
      waiting_for_ = reader;
      return false;
    }
  }
  return outputs_found_ = true;
}

void Op::PostToOutputs(size_t offset, size_t bytes) {
  const Plan& plan = participant_.plan();
  const bool whole = plan.kind == OpKind::kPermute || plan.kind == OpKind::kBroadcast;
  const size_t place = whole ? 0 : static_cast<size_t>(plan.position) * plan.stream;
  for (int reader : plan.readers) {
    if (!Placed(reader)) continue;
    const size_t index = participant_.RemoteOf(reader);
    const auto region =
        static_cast<uint32_t>(found_[static_cast<size_t>(reader)]->publish.staged.output_region);
    const std::byte* from = buffers_.input + offset;
    if (plan.scattered) from += SubStreamBegin(reader);
    const Result<uint64_t> ticket =
        participant_.remotes_[index].channel->PostPut({from, bytes}, region, place + offset);
    if (ticket.ok()) tickets_[index] = *ticket;
    participant_.Posted(ticket.status());
  }
}

// Puts bytes to where they would be staged for their readers.
void Op::Post(size_t remote, size_t sub_stream, const std::byte* from, size_t offset,
              size_t bytes) {
  const RemotePeer& peer = participant_.remotes_[remote];
  const std::byte* place = staging_ + sub_stream * ring_ + offset % ring_;
  const Result<uint64_t> ticket =
      peer.channel->PostPut({from, bytes}, peer.region, participant_.WindowOffset(place));
  if (ticket.ok()) tickets_[remote] = *ticket;
  participant_.Posted(ticket.status());
}

// A counter as the lines of this rank show it: ragged_all_to_all marks its end by another value.
uint64_t Op::consumed_told() const {
  return mine_->consume.consumed.load(std::memory_order_relaxed);
}

void Op::Tell(const RemotePeer& remote) {
  MessageChannel& channel = *remote.channel;
  const auto word = [&](const std::atomic<uint64_t>& at, uint64_t value) {
    participant_.Posted(channel.PostWord(value, remote.region, participant_.WindowOffset(&at)));
  };
  if (!told_.published) {
    // As in Publish(): a reader that holds the slot by its old tag sees that one change first.
    word(mine_->publish.tag, 0);
    word(mine_->produce.produced, produced_);
    word(mine_->produce.results, results_);
    word(mine_->consume.consumed, consumed_told());
    word(mine_->consume.results_consumed, results_consumed_);
    PublishLine line{};
    std::memcpy(static_cast<void*>(&line), &mine_->publish, sizeof(line));
    if (participant_.plan().algorithm == Algorithm::kRelay) ShowRelayed(line);
    const size_t behind_tag = sizeof(line.tag);
    participant_.Posted(channel
                            .PostPut(BytesOf(reinterpret_cast<const std::byte*>(&line) + behind_tag,
                                             sizeof(line) - behind_tag),
                                     remote.region,
                                     participant_.WindowOffset(&mine_->publish) + behind_tag)
                            .status());
    // Copied as other executions of this rank may write to it.
    const LastSeen& seen = *participant_.last_seen_;
    const uint64_t last_seen[] = {
        seen.key.load(std::memory_order_relaxed), seen.call.load(std::memory_order_relaxed),
        seen.tag.load(std::memory_order_relaxed), seen.core.load(std::memory_order_relaxed)};
    static_assert(sizeof(last_seen) == sizeof(LastSeen));
    participant_.Posted(channel
                            .PostPut(BytesOf(last_seen, sizeof(last_seen)), remote.region,
                                     participant_.WindowOffset(&seen))
                            .status());
    word(mine_->publish.tag, tag_);
  } else {
    if (produced_ != told_.produced) word(mine_->produce.produced, produced_);
    if (results_ != told_.results) word(mine_->produce.results, results_);
    if (consumed_told() != told_.consumed) word(mine_->consume.consumed, consumed_told());
    if (results_consumed_ != told_.results_consumed) {
      word(mine_->consume.results_consumed, results_consumed_);
    }
  }
  (void)channel.Push();
}

// Positions on hosts that have not taken all of this rank's contribution.
std::vector<int> Op::ReadersNotSentTo() const {
  std::vector<int> missing;
  for (size_t i = 0; i < tickets_.size(); ++i) {
    const RemotePeer& remote = participant_.remotes_[i];
    if (IsSent(*remote.channel, tickets_[i])) continue;
    missing.insert(missing.end(), remote.positions.begin(), remote.positions.end());
  }
  return missing;
}

}  // namespace jaxfabric
