// What a message between hosts costs: measured by two processes while the job connects, and told to
// all, because all have to choose the same patterns.
#include <algorithm>
#include <optional>
#include <vector>

#include "base/log.h"
#include "collective/fabric.h"

namespace jaxfabric {
namespace {

constexpr uint64_t kPings = 21;
constexpr uint64_t kBulks = 4;
constexpr uint64_t kEnd = ~uint64_t{0};
constexpr size_t kBulkBytes = 256 * 1024;
constexpr size_t kLeastBulk = 16 * 1024;
// The first message opens the connection.
constexpr double kOpeningSeconds = 1;
constexpr double kPicoseconds = 1e-12;

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

uint64_t ToPicoseconds(double seconds) {
  return static_cast<uint64_t>(std::clamp(seconds, kPicoseconds, 10.0) / kPicoseconds);
}

}  // namespace

// Where staging begins in a window or its mirror; nothing else uses it yet.
std::span<std::byte> Fabric::StagingOf(int process) const {
  const Peer& peer = peers_[static_cast<size_t>(process)];
  return peer.window.subspan(kWindowHeaderBytes + peer.header->cells * sizeof(Cell));
}

// Waits until the peer has put `value`, or the end, to the first word of its staging; false if it
// does not come.
bool Fabric::AwaitWord(int process, uint64_t value, Deadline deadline) {
  const auto& word = *reinterpret_cast<const std::atomic<uint64_t>*>(StagingOf(process).data());
  // Acquire: what came before the word.
  while (!deadline.expired()) {
    const uint64_t seen = word.load(std::memory_order_acquire);
    if (seen >= value) return seen == value;
    messages_->Progress(std::chrono::milliseconds(1));
  }
  return false;
}

std::optional<PathCost> Fabric::MeasurePath(int partner) {
  const auto link = LinkTo(partner);
  if (!link.ok()) return std::nullopt;
  const std::span<std::byte> staging = StagingOf(process_);
  const auto word_at = static_cast<uint64_t>(staging.data() - window_.data());
  const size_t room = std::min(staging.size(), StagingOf(partner).size());
  const size_t bulk = std::min(kBulkBytes, room / 2 / 64 * 64);
  std::vector<double> pings, posts, bulks;
  Deadline deadline = Deadline::AfterSeconds(kOpeningSeconds);
  bool answered = true;
  for (uint64_t round = 0; answered && round <= kPings + kBulks; ++round) {
    const bool is_bulk = round > kPings;
    if (is_bulk && bulk < kLeastBulk) break;
    const auto begin = Clock::now();
    if (is_bulk) {
      (void)link->channel->PostPut(staging.subspan(64, bulk), link->mirror_region, word_at + 64);
    }
    (void)link->channel->PostWord(round + 1, link->mirror_region, word_at);
    (void)link->channel->Push();
    const auto posted = Clock::now();
    answered = AwaitWord(partner, round + 1, deadline);
    const std::chrono::duration<double> whole = Clock::now() - begin, posting = posted - begin;
    if (round == 0) deadline = Deadline::AfterSeconds(options_.measuring_seconds);
    if (round == 0 || !answered) continue;
    (is_bulk ? bulks : pings).push_back(whole.count());
    if (!is_bulk) posts.push_back(posting.count());
  }
  (void)link->channel->PostWord(kEnd, link->mirror_region, word_at);
  (void)link->channel->Push();
  if (pings.size() < 3) return std::nullopt;
  PathCost cost = patterns_.model.between;
  const double round_trip = Median(pings);
  cost.alpha = round_trip / 2;
  cost.overhead = std::min(Median(posts), cost.alpha);
  if (!bulks.empty()) {
    const double best = *std::min_element(bulks.begin(), bulks.end());
    cost.beta = std::max(best - round_trip, 0.0) / static_cast<double>(bulk);
  }
  return cost;
}

void Fabric::AnswerPath(int measuring) {
  const auto link = LinkTo(measuring);
  if (!link.ok()) return;
  const auto word_at = static_cast<uint64_t>(StagingOf(process_).data() - window_.data());
  Deadline deadline = Deadline::AfterSeconds(kOpeningSeconds);
  for (uint64_t round = 1; AwaitWord(measuring, round, deadline); ++round) {
    (void)link->channel->PostWord(round, link->mirror_region, word_at);
    (void)link->channel->Push();
    if (round == 1) deadline = Deadline::AfterSeconds(2 * options_.measuring_seconds);
  }
}

// Process 0 and the first one on another host measure; the others wait for what comes of it. Where
// that is nothing, all have the defaults.
Status Fabric::AgreeOnCosts(Deadline deadline) {
  if (options_.network_cost != kMeasured) return OkStatus();
  int partner = 0;
  while (peers_[static_cast<size_t>(partner)].host_number == peers_[0].host_number) ++partner;
  std::optional<PathCost> measured;
  if (process_ == 0) measured = MeasurePath(partner);
  if (process_ == partner) AnswerPath(0);
  WireWriter costs(MessageType::kCosts);
  costs.Add(uint64_t{measured.has_value()});
  const PathCost own = measured.value_or(patterns_.model.between);
  for (double figure : {own.alpha, own.overhead, own.beta}) costs.Add(ToPicoseconds(figure));
  JF_ASSIGN_OR_RETURN(const std::vector<SocketMessage> answers,
                      mesh_->Exchange(costs, {}, deadline));
  WireReader reader(process_ == 0 ? costs.bytes() : std::span<const std::byte>(answers[0].bytes));
  const bool any = reader.Get<uint64_t>() != 0;
  PathCost agreed;
  for (double* figure : {&agreed.alpha, &agreed.overhead, &agreed.beta}) {
    *figure = static_cast<double>(reader.Get<uint64_t>()) * kPicoseconds;
  }
  if (!reader.ok() || reader.type() != MessageType::kCosts) {
    return Status(Code::kInvalidArgument, "process 0 sent malformed costs");
  }
  if (!any) {
    Log(LogLevel::kInfo, "messages between hosts could not be timed: costs are the defaults");
    return OkStatus();
  }
  patterns_.measured = agreed;
  return OkStatus();
}

}  // namespace jaxfabric
