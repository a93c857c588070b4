// Failure: how one process learns of it, and what every rank is told.
#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "collective/fabric.h"

namespace jaxfabric {

Status Fabric::HeaderMismatch(const Participant& participant, int peer) const {
  return Status(
      Code::kFailedPrecondition,
      StrCat("ranks disagree: ", participant.DescribeCall(), " on ", NameRank(participant.rank()),
             ", ", directory_.Describe(participant.key()),
             " with another type, size or reduction on ", participant.DescribePeer(peer)));
}

std::optional<int64_t> Fabric::RankAt(const Participant& participant, int position) const {
  const auto member = directory_.Find(participant.key(), static_cast<uint32_t>(position));
  if (member) return member->rank;
  if (participant.spec().by_position) return std::nullopt;
  return participant.spec()
      .groups[static_cast<size_t>(participant.group())][static_cast<size_t>(position)];
}

bool Fabric::HasLeft(int64_t rank) const {
  const auto process = process_of_.find(rank);
  return process != process_of_.end() && peers_[static_cast<size_t>(process->second)].has_left();
}

std::vector<int> Fabric::Late(const Op& op) const {
  const Participant& participant = op.participant();
  const std::vector<int> missing = op.Missing();
  std::lock_guard lock(mutex_);
  const auto expired = Clock::now() - 2 * ReportInterval();
  const auto waits_here = [&](int position) {
    const auto rank = RankAt(participant, position);
    return std::any_of(stuck_.begin(), stuck_.end(), [&](const Stuck& stuck) {
      return rank == stuck.waiting_rank && stuck.key == participant.key() &&
             stuck.tag == op.tag() && stuck.received >= expired;
    });
  };
  std::vector<int> late;
  std::copy_if(missing.begin(), missing.end(), std::back_inserter(late),
               [&](int position) { return !waits_here(position); });
  if (!late.empty()) return late;
  // All of them wait themselves, and for whom need not be a peer of this rank.
  for (int position = 0; position < participant.size(); ++position) {
    const auto rank = RankAt(participant, position);
    const bool named = rank && std::any_of(stuck_.begin(), stuck_.end(), [&](const Stuck& stuck) {
                         return stuck.late_rank == *rank && stuck.key == participant.key() &&
                                stuck.tag == op.tag() && stuck.received >= expired;
                       });
    if (named && !waits_here(position)) late.push_back(position);
  }
  return late.empty() ? missing : late;
}

bool Fabric::NeedsCell(const Op& op) {
  return op.stage() == Op::Stage::kSetup && !op.participant().has_cell();
}

std::string Fabric::DescribeLate(Op& op) const {
  Participant& participant = op.participant();
  if (NeedsCell(op)) {
    return StrCat(": no cell is free for one more collective call (", cell_count_,
                  " are in use); raise JAXFABRIC_SEGMENT_BYTES");
  }
  const std::vector<int> late = Late(op);
  if (late.empty() && !op.numbered()) {
    return ": an equal program was launched without a collective, so it cannot be told which "
           "launch of which of the two this is; give one of them another name";
  }
  if (late.empty()) {
    return op.stage() == Op::Stage::kSetup ? ": its peers disagree about the launch of the program"
                                           : " for executions of it that entered earlier";
  }
  constexpr size_t kDescribed = 8;
  constexpr const char* kDisagree = "; the ranks disagree about what comes next";
  std::string text;
  bool disagree = false;
  bool unknown = false;
  for (size_t i = 0; i < late.size() && i < kDescribed; ++i) {
    const auto rank = RankAt(participant, late[i]);
    text += StrCat(i == 0 ? " for " : "; ", participant.DescribePeer(late[i]));
    if (!rank) {
      unknown = true;
      continue;
    }
    text += StrCat(", last seen ", LastSeenAt(*rank));
    const std::string report = StuckReport(*rank, op);
    if (!report.empty()) {
      text += StrCat("; it waits for rank ", participant.rank(), " in ", report);
      disagree = true;
    }
  }
  if (late.size() > kDescribed) text += StrCat("; and ", late.size() - kDescribed, " more");
  // Any of the others may be any of those positions: what they do is said once, after all of them.
  const std::string elsewhere = unknown ? Elsewhere(participant) : "";
  text += elsewhere;
  if (disagree || !elsewhere.empty()) text += kDisagree;
  return text;
}

Status Fabric::DeadlineError(Op& op, double seconds) {
  Participant& participant = op.participant();
  const std::string text = StrCat(NameRank(participant.rank()), " waited ", seconds, " s in ",
                                  participant.DescribeCall());
  return Status(NeedsCell(op) ? Code::kResourceExhausted : Code::kDeadlineExceeded,
                text + DescribeLate(op));
}

bool Fabric::HasBeenThere(const Stuck& stuck) const {
  for (const Participant* own : participants_) {
    if (own->key() == stuck.key && own->rank() == stuck.late_rank) {
      return own->HasEntered(stuck.tag);
    }
  }
  return directory_.Has(stuck.key, stuck.late_rank);  // in a program that is gone
}

// What a late rank says that itself waits for `participant`, at the same place of the same program
// but in another call, where this rank has not been. If the late rank has not been in this one
// either, which only itself knows, the two can never meet.
std::optional<Fabric::Stuck> Fabric::Disagreement(const Participant& participant,
                                                  int64_t late) const {
  std::lock_guard lock(mutex_);
  const auto expired = Clock::now() - 2 * ReportInterval();
  for (const Stuck& stuck : stuck_) {
    if (stuck.waiting_rank != late || stuck.late_rank != participant.rank()) continue;
    if (stuck.received < expired || stuck.place == 0) continue;
    if (stuck.place != participant.spec().place || stuck.site == participant.spec().site) continue;
    if (!HasBeenThere(stuck)) return stuck;
  }
  return std::nullopt;
}

Status Fabric::MismatchError(const Participant& participant, const Stuck& other) const {
  return Status(
      Code::kFailedPrecondition,
      StrCat("ranks disagree: ", participant.DescribeCall(), " on ", NameRank(participant.rank()),
             ", ", other.call, " on ", DescribeRank(other.waiting_rank)));
}

// The call of another execution in which that rank waits for the one of `op`.
std::string Fabric::StuckReport(int64_t waiting, const Op& op) const {
  const Participant& participant = op.participant();
  std::lock_guard lock(mutex_);
  const auto expired = Clock::now() - 2 * ReportInterval();
  for (auto stuck = stuck_.rbegin(); stuck != stuck_.rend(); ++stuck) {
    const bool same = stuck->key == participant.key() && stuck->tag == op.tag();
    if (stuck->waiting_rank == waiting && stuck->late_rank == participant.rank() && !same &&
        stuck->received >= expired) {
      return stuck->call;
    }
  }
  return {};
}

// Which rank has a mesh position is known once it has announced itself; until then all ranks that
// wait for somebody are worth a look.
std::string Fabric::Elsewhere(const Participant& participant) const {
  std::lock_guard lock(mutex_);
  const auto expired = Clock::now() - 2 * ReportInterval();
  std::string text;
  // A rank reports one wait to each rank that it misses.
  std::set<std::pair<int64_t, std::string_view>> said;
  for (const Stuck& stuck : stuck_) {
    if (stuck.waiting_rank == participant.rank() || stuck.key == participant.key()) continue;
    if (stuck.late_rank >= 0 && stuck.late_rank != participant.rank()) continue;
    if (stuck.received < expired) continue;
    if (!said.emplace(stuck.waiting_rank, stuck.call).second) continue;
    text += StrCat("; meanwhile ", DescribeRank(stuck.waiting_rank), " waits in ", stuck.call);
  }
  return text;
}

void Fabric::Poison(const Status& status) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = failure_.ok();
    if (first) failure_ = status;
    for (auto& [ranks, communicator] : communicators_) communicator->Poison(failure_);
  }
  if (first) {
    WireWriter message(MessageType::kFailure);
    // A message has a limited size; who is late comes first in the text.
    constexpr size_t kLongest = 16 * 1024;
    message.Add(static_cast<uint32_t>(status.code())).Add(status.message().substr(0, kLongest));
    mesh_->Broadcast(message);
  }
  if (first) AbortLinks();
  if (first && gpus_) gpus_->Abort(status);
  Ring(peers_[static_cast<size_t>(process_)].header);
}

void Fabric::OnMessage(int process, WireReader& message) {
  switch (message.type()) {
    case MessageType::kInstance: {
      auto announcement = Directory::Announcement::FromMessage(message, process);
      if (!announcement) return;
      Peer& peer = peers_[static_cast<size_t>(process)];
      const bool owned = std::find(peer.ranks.begin(), peer.ranks.end(),
                                   announcement->member.rank) != peer.ranks.end();
      if (!owned || announcement->member.cell >= peer.header->cells) return;
      AddToDirectory(*announcement);
      Ring(peers_[static_cast<size_t>(process_)].header);
      return;
    }
    case MessageType::kRetire: {
      const auto key = message.Get<uint64_t>();
      const auto position = message.Get<uint32_t>();
      if (message.ok() && directory_.Retire(key, position)) FreeRetiredCells(key);
      return;
    }
    case MessageType::kStuck:
      OnStuck(message);
      return;
    case MessageType::kFailure: {
      const auto code = static_cast<Code>(message.Get<uint32_t>());
      const std::string text = message.GetString();
      // Passed on: who told it may end before it has told all, and this process before those.
      if (message.ok() && code != Code::kOk) Poison(Status(code, text));
      return;
    }
    case MessageType::kGoodbye:
      peers_[static_cast<size_t>(process)].left.store(true, std::memory_order_relaxed);
      return;
    case MessageType::kGpuArena:
    case MessageType::kGpuAsk:
    case MessageType::kGpuTell:
      if (gpus_) gpus_->OnMessage(process, message);
      return;
    case MessageType::kHello:
    case MessageType::kReady:
    case MessageType::kGpuSetup:
    case MessageType::kCosts:
      return;
  }
}

void Fabric::AddToDirectory(const Directory::Announcement& announcement) {
  const auto other = directory_.Add(announcement);
  if (!other) return;
  ReportFailure(
      Status(Code::kFailedPrecondition,
             StrCat(DescribeRank(other->rank), " and ", DescribeRank(announcement.member.rank),
                    " both are mesh position ", announcement.position, " in ", announcement.label,
                    " at ", announcement.source,
                    ": two meshes run one program that names no devices, and it cannot be told who "
                    "belongs together; lower it on a mesh of devices, not on an AbstractMesh")));
}

void Fabric::OnStuck(WireReader& message) {
  Stuck stuck;
  stuck.key = message.Get<uint64_t>();
  stuck.tag = message.Get<uint64_t>();
  stuck.place = message.Get<uint64_t>();
  stuck.site = message.Get<uint64_t>();
  stuck.waiting_rank = message.Get<int64_t>();
  stuck.late_rank = message.Get<int64_t>();
  stuck.other_key = message.Get<uint64_t>();
  stuck.other_tag = message.Get<uint64_t>();
  stuck.call = message.GetString();
  if (!message.ok()) return;
  {
    std::lock_guard lock(mutex_);
    // One per pair of ranks and instance; reports are repeated while the wait lasts.
    const auto expired = Clock::now() - 2 * ReportInterval();
    std::erase_if(stuck_, [&](const Stuck& old) {
      const bool same = old.waiting_rank == stuck.waiting_rank &&
                        old.late_rank == stuck.late_rank && old.key == stuck.key;
      return same || old.received < expired;
    });
    stuck.received = Clock::now();
    stuck_.push_back(std::move(stuck));
  }
}

bool Fabric::MayCome(const Participant& participant) const {
  std::set<int64_t> announced;
  for (int position = 0; position < participant.size(); ++position) {
    const auto member = directory_.Find(participant.key(), static_cast<uint32_t>(position));
    if (member) announced.insert(member->rank);
  }
  for (const Peer& peer : peers_) {
    if (peer.has_left()) continue;
    for (int64_t rank : peer.ranks) {
      if (!announced.contains(rank)) return true;
    }
  }
  return false;
}

std::vector<int> Fabric::Left() const {
  std::vector<int> left;
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (peers_[process].left.load(std::memory_order_relaxed)) {
      left.push_back(static_cast<int>(process));
    }
  }
  return left;
}

void Fabric::OnGone(int process, LinkEnd how) {
  Peer& peer = peers_[static_cast<size_t>(process)];
  peer.gone.store(true, std::memory_order_relaxed);
  if (!peer.left.load(std::memory_order_relaxed)) {
    std::string ranks;
    for (int64_t rank : peer.ranks) ranks += StrCat(ranks.empty() ? "" : ", ", rank);
    const std::string self = DescribeProcess(process);
    const char* word = peer.ranks.size() == 1 ? "rank " : "ranks ";
    // It may have GPUs only, which are numbered apart.
    const std::string who = ranks.empty() ? self : StrCat(word, ranks, " (", self, ")");
    const std::string what =
        how == LinkEnd::kUnreachable
            ? StrCat(" is unreachable: no answer for ", options_.unreachable_after, " s")
        : how == LinkEnd::kGarbled ? " sends what is no message"
        // Of a process on this host, only its death does that.
        : how == LinkEnd::kReset && peer.remote ? " died, or the connection to it was reset"
                                                : " died";
    Poison(Status(Code::kUnavailable, who + what));
  }
  if (gpus_) gpus_->OnGone(process);
  Ring(peers_[static_cast<size_t>(process_)].header);
}

}  // namespace jaxfabric
