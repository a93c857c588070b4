// One execution of a collective on one rank, as a state machine that never blocks.
//
// Advance() is called in a loop: by the thread that entered the call while the peers are near, then
// by the progress thread. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collective/blocks.h"
#include "collective/call.h"
#include "collective/layout.h"
#include "collective/pattern/pattern.h"

namespace jaxfabric {

class Participant;
struct RemotePeer;

class Op {
 public:
  enum class Stage : uint8_t {
    kSetup,     // the instance is not yet known on all ranks, or the launch number not settled
    kClaim,     // waiting for a free slot or staging memory
    kTransfer,  // published; bytes move
    kLinger,    // this rank has its result, its buffers are still read
    kRevoke,    // failed; waiting until nobody can touch the buffers
    kFinished,
  };

  explicit Op(Participant& participant) : participant_(participant) {}
  // For a fresh execution.
  void Reset(const Buffers& buffers, int64_t run_id, uint32_t occurrence, uint64_t entry);

  // Does what can be done now; true if that was anything. Finished or not: see finished().
  bool Advance();
  bool finished() const { return stage_ == Stage::kFinished; }
  // Why it failed; OK for a result. Only once finished.
  const Status& status() const { return status_; }
  // Gives up: the result of the execution will be `status`. Its buffers stay in use until Advance()
  // has finished it.
  void Fail(Status status);

  Participant& participant() const { return participant_; }
  Stage stage() const { return stage_; }
  // Whether it is known which launch of its executable this is, among those of equal ones.
  bool numbered() const { return numbered_; }
  uint64_t tag() const { return tag_; }
  // Launch and occurrence: see MakeTag().
  uint64_t plain_tag() const;
  int slot() const { return slot_; }
  // Position of a peer that this execution waits for, -1 if it is none in particular. Found without
  // a search: there may be others, and one of those may be the one that holds everybody up.
  int waiting_for() const { return waiting_for_; }
  // It waits for the network to take what was sent, which rings no bell.
  bool awaits_sending() const {
    return stage_ == Stage::kLinger || stage_ == Stage::kRevoke || pattern_.awaits_sending;
  }
  // All of them: the execution cannot end unless each of these peers does something more.
  std::vector<int> Missing() const;

  // For the progress thread.
  std::function<void(const Status&)> on_finished;
  Clock::time_point started{};
  Clock::time_point reported{};
  Clock::time_point looked{};  // at the reports of others
  bool warned = false;

 private:
  friend class Participant;

  bool Setup();
  bool Claim();
  bool PlaceStaging(size_t ring_bytes);
  bool TryPlaceInReserve(uint64_t rings, uint64_t counters);
  void Publish();
  void RunLocal();
  bool StepOneShot();
  bool StepTwoShot();
  bool StepRagged();
  bool StepPull();
  bool Linger();
  bool Revoke();
  // The result is there; `ring`: the peers may be waiting for what this rank has written.
  void Finish(bool ring);
  void FreeSlot();

  // replicate.cc
  // Tells the peers of what has been written since the last time.
  void Announce();
  void Tell(const RemotePeer& remote);
  uint64_t consumed_told() const;
  bool Sent() const;
  bool SentTo(size_t remote, uint64_t ticket) const;
  std::vector<int> ReadersNotSentTo() const;
  // Puts a segment to its readers on other hosts.
  void PostInput(size_t offset, size_t bytes);
  void PostResults(size_t offset, size_t bytes);
  void Post(size_t remote, size_t sub_stream, const std::byte* from, size_t offset, size_t bytes);
  // Plan::places: what of the own input is for a rank of another host, into that one's output.
  bool FindOutputs();
  void PostToOutputs(size_t offset, size_t bytes);
  bool OpenOutput();
  void CloseOutput();
  bool Placed(int peer) const;

  // algorithm/exchange.cc
  bool ReadsStaged(int reader) const;
  bool Produce();
  size_t SubStreamBegin(int to) const;
  size_t SubStreamEnd(int to) const;
  void StageSegment(size_t offset, size_t bytes);
  void Consume(size_t offset, size_t bytes);
  void CopyOwn(size_t offset, size_t bytes);
  size_t ContiguousLimit(size_t offset) const;
  bool FindSources();
  // algorithm/pull.cc
  bool PullFrom(int source);
  bool Revoked(int peer);
  void ReduceDirect();
  Status ReadPeer(int peer, uint64_t address, void* destination, size_t bytes);

  // algorithm/hosts.cc
  bool StepHosts();
  void ClearCounters();
  size_t PartBegin(int part) const;
  size_t PartBytes(int part) const;
  std::byte* BlockOf(int position);
  size_t RingOf(int position) const;
  void PutToPartner(int position, const std::byte* from, size_t bytes, size_t place, size_t counter,
                    uint64_t count);
  bool StageForHost();
  void ReduceHost(int part, size_t offset, size_t bytes, std::byte* to);
  bool ReduceForOwners();
  bool CombineOwn();
  bool CollectResults();
  bool ServeHost();

  // algorithm/relay.cc
  bool StepRelay();
  bool RelayLocals();
  void Relay(size_t bytes);
  const std::byte* LocalContribution(int member, int sub) const;
  void SumLocals(int sub, std::byte* to, size_t bytes);
  void PostRelayed(int to, size_t ring, size_t bytes);
  void ShowRelayed(PublishLine& line) const;
  bool CollectRelayed();
  bool HasRelayed() const { return results_ > 0; }
  bool RelayNeeds(int peer) const;
  std::byte* RelayRing(size_t ring) const { return result_staging_ + ring * result_ring_; }

  // algorithm/pattern.cc
  bool ClaimForPattern();
  bool TakeBlock();
  void GiveBlock();
  bool StepPattern();
  void ShowOperand();
  bool StepOfOthers();
  bool AddLocals();
  void ShowResult();
  void BeginPattern();
  void EndPattern();
  int MemberAt(int32_t member) const;
  std::byte* PatternArray() const;
  size_t RowAhead(uint32_t distance) const;
  const std::byte* SentBlock(const Step& step, uint32_t block) const;
  std::byte* ReceivedBlock(uint32_t block) const;
  bool SendSteps();
  bool SendStep(size_t index);
  bool EnterStep();
  bool CollectSteps();
  bool TakenUpTo(size_t step);
  bool HasArrived(size_t step) const;

  // algorithm/ragged.cc
  bool PrepareRagged();
  Status CheckOwnSlices() const;
  Status CheckSlices(int source, std::span<const RaggedSlice> slices) const;
  bool AcceptSlices();
  void CopyOwnSlices();
  void StageSlices(int to, std::byte* ring, size_t offset, size_t bytes);
  bool ReceiveSlices();
  void Receive(int source, size_t bytes);
  bool Acknowledged();
  bool PullSlices(int source);

  // The peer's slot for this execution; null while it has not been published.
  Slot* Look(int peer) const;
  // The same, remembered. Fails the op when the peer's header differs.
  Slot* Find(int peer);
  const std::byte* Contribution(int peer, size_t offset) const;
  // How far the reader has come; everything if it has moved on. `slot`: its own one, if it has one.
  uint64_t Consumed(const Slot* slot, int peer, bool results) const;
  // missing.cc
  bool NeedsAsSource(int peer) const;
  bool NeedsAsReader(int peer) const;
  bool HostsNeed(int peer) const;     // algorithm/hosts.cc
  bool PatternNeeds(int peer) const;  // algorithm/pattern.cc

  Participant& participant_;
  Buffers buffers_;
  int64_t run_id_ = 0;
  int64_t own_run_id_ = 0;  // see LaunchClock::OwnRunId
  bool numbered_ = true;    // it is known
  uint32_t occurrence_ = 0;
  uint64_t entry_ = 0;  // how many executions entered before
  uint64_t tag_ = 0;
  // What this rank published before: see Participant::InStep.
  uint64_t previous_call_ = 0;
  uint64_t previous_tag_ = 0;
  Stage stage_ = Stage::kFinished;
  Status status_;
  int slot_ = -1;
  Slot* mine_ = nullptr;
  int waiting_for_ = -1;
  bool sources_found_ = false;
  bool awaits_room_ = false;           // a source may: see FindSources()
  bool outputs_found_ = false;         // of the readers on other hosts
  bool own_copied_ = false;            // with Plan::places
  std::vector<Slot*> found_;           // by position
  std::vector<const void*> operands_;  // scratch for Reduce, by position
  std::vector<uint8_t> pulled_;        // by position
  int pulled_count_ = 0;
  // What the peers of other hosts have been told, and by remote process the last put from the
  // input.
  struct Told {
    bool published = false;
    uint64_t produced = 0;
    uint64_t results = 0;
    uint64_t consumed = 0;
    uint64_t results_consumed = 0;
  } told_;
  std::vector<uint64_t> tickets_;
  std::optional<uint32_t> output_region_;  // while peers may put into the output
  size_t next_reader_ = 0;                 // Linger, Acknowledged: readers before it are done
  uint64_t ring_ = 0;                      // bytes of one of the own sub-streams' rings
  uint64_t result_ring_ = 0;
  std::byte* staging_ = nullptr;
  std::byte* result_staging_ = nullptr;
  uint64_t stream_ = 0;  // bytes of the longest of the own sub-streams
  uint64_t produced_ = 0;
  uint64_t consumed_ = 0;
  uint64_t results_ = 0;
  uint64_t results_consumed_ = 0;
  std::vector<const void*> host_operands_;  // kHosts, kRelay: scratch for Reduce
  uint64_t landed_ = 0;                     // kHosts: bytes that had arrived for others here
  struct PatternState {
    BlockPool::Block* block = nullptr;
    bool begun = false;           // the array is as it has to be before the first step
    bool awaits_sending = false;  // what has arrived would overwrite what is on its way
    // So many of the first steps ...
    size_t sent = 0;                // ... have posted what they send,
    size_t taken = 0;               // ... have had it taken from the array,
    size_t collected = 0;           // ... have got what is to be collected,
    size_t entered = 0;             // ... have what they receive in the array.
    std::vector<uint8_t> posted;    // by step: what it sends
    std::vector<uint64_t> tickets;  // by step; 0: nothing to wait for
  } pattern_;
  struct Ragged {
    std::vector<RaggedSlice> sent;      // by destination and slice
    std::vector<RaggedSlice> received;  // by source and slice
    std::vector<uint64_t> sent_bytes;   // of each destination's sub-stream
    // Of each source's sub-stream; that of its table until all tables are here.
    std::vector<uint64_t> received_bytes;
    uint64_t receive_end = 0;  // the longest of those
    bool own_copied = false;   // CopyOwnSlices() was called
  } ragged_;
};

}  // namespace jaxfabric
