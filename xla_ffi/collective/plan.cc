#include "collective/plan.h"

#include <algorithm>
#include <bit>

#include "base/hash.h"
#include "memory/copy.h"

namespace jaxfabric {
namespace {

// Sizes below are for the sum of a rank's sub-streams, found by measurement (docs/performance.md).
constexpr size_t kSegmentBytes = 256 * 1024;
constexpr size_t kTwoShotBytes = 8 * 1024;
// Same process: from here on reading the peer's buffer beats staging plus no wait at the end.
constexpr size_t kDirectBytes = 2 * 1024;
// Same process: from here on each device reduces its part and writes it to every output.
constexpr size_t kDirectPartsBytes = 64 * 1024;
// Other process, on a core of its own: process_vm_readv costs 1 us per call, and its copy is slower
// than ours from the size on where staging overlaps with the peers' reading.
constexpr size_t kProcessReadBytes = 32 * 1024;
constexpr size_t kProcessReadLimit = 256 * 1024;
// Several hosts, some with several ranks: from here on bytes that cross the network twice cost more
// than the steps that it takes to send them once.
constexpr size_t kHostsBytes = 16 * 1024;
// The same: up to here a host may send in all, so that the steps of kHosts take longer than bytes
// that cross the network for each of its ranks.
constexpr size_t kRelayedBytes = 128 * 1024;
// An execution with that many rings has them even where no memory but a slot's share is left.
constexpr size_t kMostRelayRings = kReserveShare / 16;
// Another host: from here on waiting until the reader has told where its output is costs less than
// copying what has arrived there.
constexpr size_t kPlacedBytes = 256 * 1024;
constexpr size_t kHostsRingBytes = 4 * 1024 * 1024;  // all rings of a rank together

size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::string_view AlgorithmName(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kLocal:
      return "local";
    case Algorithm::kOneShot:
      return "one-shot";
    case Algorithm::kTwoShot:
      return "two-shot";
    case Algorithm::kRagged:
      return "ragged";
    case Algorithm::kPull:
      return "pull";
    case Algorithm::kHosts:
      return "hosts";
    case Algorithm::kRelay:
      return "relay";
    case Algorithm::kPattern:
      return "pattern";
  }
  return "unknown";
}

Status CheckSizes(const CallSpec& spec, int size, const Buffers& buffers) {
  const size_t n = static_cast<size_t>(size);
  bool fits = false;
  switch (spec.kind) {
    case OpKind::kAllGather:
      fits = buffers.output_bytes == buffers.input_bytes * n;
      break;
    case OpKind::kReduceScatter:
      fits = buffers.input_bytes == buffers.output_bytes * n;
      break;
    case OpKind::kAllToAll:
      fits = buffers.input_bytes == buffers.output_bytes && buffers.input_bytes % n == 0;
      break;
    case OpKind::kRaggedAllToAll: {
      const RaggedSizes& ragged = buffers.ragged_sizes;
      fits = buffers.input_bytes == ragged.input_rows * ragged.row_bytes &&
             buffers.output_bytes == ragged.output_rows * ragged.row_bytes && ragged.slices > 0 &&
             ragged.slices % n == 0;
      break;
    }
    case OpKind::kAllReduceRmsNorm: {
      const size_t row = buffers.norm.hidden * DTypeSize(buffers.dtype);
      fits =
          buffers.input_bytes == buffers.output_bytes && row > 0 && buffers.input_bytes % row == 0;
      break;
    }
    default:
      fits = buffers.input_bytes == buffers.output_bytes;
  }
  if (!fits) {
    return Status(
        Code::kInvalidArgument,
        StrCat(spec.label, ": ", OpKindName(spec.kind), " over ", size, " ranks got an input of ",
               buffers.input_bytes, " bytes and an output of ", buffers.output_bytes,
               spec.kind == OpKind::kRaggedAllToAll
                   ? StrCat(", and ", buffers.ragged_sizes.slices, " slices")
                   : ""));
  }
  if (spec.kind == OpKind::kAllReduce || spec.kind == OpKind::kReduceScatter) {
    return CheckReducible(buffers.dtype, spec.reduction);
  }
  return OkStatus();
}

Plan::Plan(const CallSpec& spec, int size_in, int position_in, const Buffers& buffers,
           Topology topology)
    : kind(spec.kind),
      reduction(spec.reduction),
      dtype(buffers.dtype),
      size(size_in),
      position(position_in),
      input_bytes(buffers.input_bytes),
      output_bytes(buffers.output_bytes),
      root(spec.root),
      ragged(buffers.ragged_sizes) {
  const bool is_ragged = kind == OpKind::kRaggedAllToAll;
  reduces = kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter;
  scattered = kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll || is_ragged;
  if (reduces) element = DTypeSize(dtype);

  for (int other = 0; other < size; ++other) {
    bool reads = true;    // this rank reads from other
    bool is_read = true;  // other reads from this rank
    if (kind == OpKind::kPermute) {
      reads = is_read = false;
      for (size_t i = 0; i < spec.pairs.size(); i += 2) {
        reads |= spec.pairs[i] == other && spec.pairs[i + 1] == position;
        is_read |= spec.pairs[i] == position && spec.pairs[i + 1] == other;
      }
    } else if (kind == OpKind::kBroadcast) {
      reads = other == spec.root;
      is_read = position == spec.root;
    }
    if (other == position) {
      from_self = reads;
      continue;
    }
    if (reads) sources.push_back(other);
    if (is_read) readers.push_back(other);
  }
  if (kind == OpKind::kBroadcast && position == spec.root) sources.clear();

  // Only what is equal on all ranks may decide here. The contribution's size is.
  const size_t n = static_cast<size_t>(size);
  stream = scattered ? input_bytes / n : input_bytes;
  if (kind == OpKind::kBarrier) stream = 0;
  if (is_ragged) stream = table_bytes() + slices_each() * std::min(input_bytes, output_bytes);
  const size_t contribution = kind == OpKind::kBarrier ? 0 : input_bytes;
  nontemporal = output_bytes >= NonTemporalThreshold();
  inlined = contribution <= kInlineBytes && !is_ragged;
  if (size == 1) {
    algorithm = Algorithm::kLocal;
  } else if (is_ragged) {
    const bool direct = topology.one_process && contribution > kDirectBytes;
    algorithm = direct ? Algorithm::kPull : Algorithm::kRagged;
  } else if (!inlined) {
    const bool process_read = topology.process_reads && !reduces && stream >= kProcessReadBytes &&
                              stream < kProcessReadLimit;
    if (topology.one_process ? contribution > kDirectBytes : process_read) {
      algorithm = Algorithm::kPull;
    } else if (kind == OpKind::kAllReduce && size > 2 && contribution > kTwoShotBytes) {
      algorithm = Algorithm::kTwoShot;
    }
  }
  if (!topology.host_of.empty()) {
    const Hosts all(topology.host_of);
    if (!TryRelay(topology, all)) ChooseHosts(all);
    ChoosePatternOf(topology);
    places = algorithm == Algorithm::kOneShot && !reduces && stream >= kPlacedBytes;
  }
  if (kind == OpKind::kAllReduce && size > 1 &&
      (algorithm == Algorithm::kHosts || algorithm == Algorithm::kTwoShot ||
       (algorithm == Algorithm::kPull && input_bytes >= kDirectPartsBytes))) {
    // Parts start on cache lines, so that no two ranks write to one.
    part = RoundUp((input_bytes + n - 1) / n, 64);
    if (algorithm != Algorithm::kPull) stream = part;
  }
  const size_t subs = static_cast<size_t>(sub_streams());
  const size_t whole = RoundUp(stream, 64);
  segment = std::max<size_t>(kSegmentBytes / subs / 64 * 64, 1024);
  ring = std::bit_floor(std::max<size_t>(kRingBytes / subs, 4096));
  if (algorithm == Algorithm::kHosts) {
    const size_t rings = HostsLayout(hosts, position).rings();
    ring = std::bit_floor(std::max<size_t>(kHostsRingBytes / rings, 4096));
    segment = std::min<size_t>(ring / 2, kSegmentBytes);
  }
  if (whole <= ring) ring = whole;

  Hasher hasher;
  hasher.Add(static_cast<uint64_t>(kind)).Add(static_cast<uint64_t>(dtype));
  hasher.Add(input_bytes).Add(output_bytes).Add(static_cast<uint64_t>(reduction)).Add(spec.site);
  hasher.Add(static_cast<uint64_t>(algorithm)).Add(uint64_t{places});
  hasher.Add(static_cast<uint64_t>(pattern));
  hasher.Add(ragged.row_bytes).Add(ragged.input_rows).Add(ragged.output_rows).Add(ragged.slices);
  header = static_cast<uint32_t>(hasher.Finish());
}

// Equal on all ranks: it depends on the call and on who is where.
void Plan::ChooseHosts(Hosts all) {
  const size_t crossing = kind == OpKind::kAllGather ? output_bytes : input_bytes;
  const bool fits = kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter ||
                    kind == OpKind::kAllGather || kind == OpKind::kBroadcast;
  if (!fits || inlined || !all.shared() || all.count() < 2 || crossing < kHostsBytes) return;
  algorithm = Algorithm::kHosts;
  ExchangeWithPartners(std::move(all));
}

// What is small, of hosts with several ranks. Without it every process of another host gets a
// message of each rank, which of few bytes and one process is no more than here.
bool Plan::TryRelay(const Topology& topology, const Hosts& all) {
  const bool fits = kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter ||
                    kind == OpKind::kAllGather || kind == OpKind::kAllToAll;
  if (!fits || stream == 0 || !all.shared() || all.count() < 2) return false;
  const bool one_process_each = topology.processes <= all.count();
  const bool exchanges = kind == OpKind::kAllToAll;  // each byte goes to one rank in any case
  const bool plain = exchanges || std::max(input_bytes, output_bytes) < kHostsBytes;
  if (one_process_each && plain) return false;
  size_t most_members = 1;
  for (int host = 0; host < all.count(); ++host) {
    most_members = std::max(most_members, all.members(host).size());
  }
  // A sum goes to each host whole; by parts it would cross twice, however many hosts there are.
  const bool by_parts = kind == OpKind::kAllReduce && input_bytes >= kHostsBytes;
  const size_t repeated = by_parts ? static_cast<size_t>(all.count() - 1) : 1;
  const size_t sent = (reduces ? stream : stream * most_members) * most_members * repeated;
  if (sent > (exchanges ? kRelayedBytes / 2 : kRelayedBytes)) return false;
  const size_t own_rings = static_cast<size_t>(scattered ? size : 1);
  if (own_rings >= kMostRelayRings || most_members >= kMostRelayRings) return false;
  for (int rank = 0; scattered && rank < size; ++rank) {
    if (own_rings + RelayRings(kind, all, rank).count() > kMostRelayRings) return false;
  }
  algorithm = Algorithm::kRelay;
  ExchangeWithPartners(all);
  return true;
}

void Plan::ExchangeWithPartners(Hosts all) {
  hosts = std::move(all);
  // Also of a broadcast: who acts for its root may be anybody.
  sources = hosts.PartnersOf(position);
  for (int local : hosts.members(hosts.of(position))) {
    if (local != position) sources.push_back(local);
  }
  std::sort(sources.begin(), sources.end());
  readers = sources;
}

// As above.
void Plan::ChoosePatternOf(const Topology& topology) {
  const Hosts all(topology.host_of);
  PatternCall call{.op = kind, .bytes = array_bytes(), .hosts = all.count()};
  for (int host = 0; host < all.count(); ++host) {
    call.ranks_per_host =
        std::max(call.ranks_per_host, static_cast<int32_t>(all.members(host).size()));
  }
  call.remote_processes = algorithm == Algorithm::kRelay
                              ? all.MostHandled()
                              : topology.processes - topology.processes / all.count();
  call.one_shot = algorithm != Algorithm::kTwoShot;
  const auto chosen = ChoosePattern(call, topology.patterns);
  if (!chosen) return;
  algorithm = Algorithm::kPattern;
  pattern = *chosen;
  inlined = false;
  for (int host = 0; host < all.count(); ++host) {
    const std::vector<int> ranks = all.members(host);
    members.push_back(ranks[0]);
    if (ranks[0] == position) {
      member = host;
      locals.assign(ranks.begin() + 1, ranks.end());
    } else if (host == all.of(position)) {
      locals = {ranks[0]};
    }
  }
  sources = locals;
  if (member >= 0) {
    const Pattern steps =
        MakePattern(pattern, kind, all.count(), member, static_cast<int32_t>(root));
    for (const Step& step : steps.steps) {
      if (step.to != kNobody) sources.push_back(members[static_cast<size_t>(step.to)]);
      if (step.from != kNobody) sources.push_back(members[static_cast<size_t>(step.from)]);
    }
  }
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  // Each needs the other's header, and the other's word that it has moved on.
  readers = sources;
}

std::string_view Plan::name() const {
  return algorithm == Algorithm::kPattern ? PatternName(pattern) : AlgorithmName(algorithm);
}

}  // namespace jaxfabric
