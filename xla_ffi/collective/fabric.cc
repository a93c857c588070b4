#include "collective/fabric.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "base/log.h"
#include "memory/copy.h"
#include "os/process_memory.h"
#include "transport/registry.h"

namespace jaxfabric {
namespace {

std::string ReadLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string ReadLink(const char* path) {
  char target[256];
  const ssize_t size = ::readlink(path, target, sizeof(target));
  return size < 0 ? std::string() : std::string(target, static_cast<size_t>(size));
}

std::string HostName() {
  utsname names{};
  return ::uname(&names) == 0 ? names.nodename : "unknown host";
}

// Processes with equal ids share memory, abstract sockets and process numbers.
std::string HostId() {
  return StrCat(ReadLine("/proc/sys/kernel/random/boot_id"), ReadLink("/proc/self/ns/net"),
                ReadLink("/proc/self/ns/pid"));
}

uint64_t NextSerial() {
  // Relaxed: only the numbers matter.
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

size_t LastSeenOffset(size_t index) { return 256 + index * 16; }
constexpr size_t kMaxLocalRanks = (kWindowHeaderBytes - 256) / 16;

struct PublishedAddress {
  int process = -1;
  pid_t pid = 0;
  std::string name, host, host_id;
  std::vector<int64_t> ranks;
};

Result<PublishedAddress> ParseAddress(const std::string& address) {
  WireReader reader(std::as_bytes(std::span(address.data(), address.size())));
  PublishedAddress parsed;
  parsed.process = static_cast<int>(reader.Get<uint32_t>());
  parsed.pid = reader.Get<int32_t>();
  parsed.name = reader.GetString();
  parsed.host = reader.GetString();
  parsed.host_id = reader.GetString();
  parsed.ranks = reader.GetInts();
  if (!reader.ok()) {
    return Status(Code::kInvalidArgument,
                  "an address is not one of this jaxfabric version: do all processes run the same "
                  "version?");
  }
  return parsed;
}

}  // namespace

Fabric::Fabric(int process, int process_count, std::vector<int64_t> local_ranks, Options options)
    : serial_(NextSerial()),
      process_(process),
      local_ranks_(std::move(local_ranks)),
      options_(options),
      host_(HostName()),
      host_id_(HostId()),
      peers_(static_cast<size_t>(process_count)) {}

Result<std::unique_ptr<Fabric>> Fabric::Create(int process, int process_count,
                                               std::vector<int64_t> local_ranks, Options options) {
  if (process < 0 || process >= process_count) {
    return Status(Code::kInvalidArgument, StrCat("process_index ", process, " is not one of ",
                                                 process_count, " processes"));
  }
  if (local_ranks.empty() || local_ranks.size() > kMaxLocalRanks) {
    return Status(Code::kInvalidArgument,
                  StrCat("local_ranks has ", local_ranks.size(), " entries; 1 to ", kMaxLocalRanks,
                         " can be used"));
  }
  constexpr size_t kLeast = 64 * 1024;
  if (options.segment_bytes < kLeast) {
    return Status(Code::kInvalidArgument, StrCat("segment_bytes is ", options.segment_bytes,
                                                 "; at least ", kLeast, " bytes are needed"));
  }
  std::sort(local_ranks.begin(), local_ranks.end());
  std::unique_ptr<Fabric> fabric(
      new Fabric(process, process_count, std::move(local_ranks), options));
  JF_RETURN_IF_ERROR(fabric->Bind());
  return fabric;
}

Status Fabric::Bind() {
  JF_ASSIGN_OR_RETURN(transport_, FindTransport(peers_.size() == 1 ? "inproc" : "shm"));
  JF_RETURN_IF_ERROR(transport_->Probe());
  // A quarter for cells, of which a page is touched only when used; the rest is staging.
  const size_t bytes = local_ranks_.size() * options_.segment_bytes / 4096 * 4096;
  JF_ASSIGN_OR_RETURN(endpoint_,
                      transport_->Bind(process_, static_cast<int>(peers_.size()), bytes));
  window_ = endpoint_->window();
  cell_count_ = static_cast<uint32_t>((bytes / 4 - kWindowHeaderBytes) / sizeof(Cell));
  cells_ = std::make_unique<CellAllocator>(cell_count_);
  staging_ = std::make_unique<StagingPool>(kWindowHeaderBytes + cell_count_ * sizeof(Cell), bytes);
  auto* header = reinterpret_cast<WindowHeader*>(window_.data());
  header->magic = kWindowMagic;
  header->process = static_cast<uint32_t>(process_);
  header->cells = cell_count_;
  JF_ASSIGN_OR_RETURN(mesh_, Mesh::Create(process_, static_cast<int>(peers_.size())));
  completions_ = std::make_unique<CompletionThreads>(2 * local_ranks_.size() + 2);
  return OkStatus();
}

Fabric::~Fabric() { Shutdown(); }

std::string Fabric::Address() const {
  WireWriter writer(MessageType::kHello);
  writer.Add(static_cast<uint32_t>(process_)).Add(static_cast<int32_t>(::getpid()));
  writer.Add(std::string_view(mesh_->name())).Add(std::string_view(host_));
  writer.Add(std::string_view(host_id_)).Add(std::span<const int64_t>(local_ranks_));
  const auto bytes = writer.bytes();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Status Fabric::Connect(const std::vector<std::string>& addresses) {
  if (addresses.size() != peers_.size()) {
    return Status(Code::kInvalidArgument,
                  StrCat("got ", addresses.size(), " addresses for ", peers_.size(), " processes"));
  }
  const Deadline deadline = Deadline::AfterSeconds(options_.connect_timeout);
  std::vector<std::string> names;
  size_t ranks = 0;
  for (size_t process = 0; process < peers_.size(); ++process) {
    JF_ASSIGN_OR_RETURN(PublishedAddress address, ParseAddress(addresses[process]));
    if (address.process != static_cast<int>(process)) {
      return Status(Code::kInvalidArgument,
                    StrCat("address ", process, " belongs to process ", address.process,
                           ": addresses go in process order"));
    }
    Peer& peer = peers_[process];
    peer.pid = address.pid;
    peer.host = address.host;
    peer.ranks = address.ranks;
    ranks += address.ranks.size();
    names.push_back(address.name);
    for (int64_t rank : address.ranks) {
      if (!process_of_.emplace(rank, static_cast<int>(process)).second) {
        return Status(Code::kInvalidArgument, StrCat("rank ", rank, " belongs to two processes"));
      }
    }
    if (address.host_id != host_id_) {
      return Status(
          Code::kUnimplemented,
          StrCat("process ", process, " on ", address.host, " does not share memory with process ",
                 process_, " on ", host_,
                 ": this version connects the processes of one host (and one container) only"));
    }
  }
  Peer& self = peers_[static_cast<size_t>(process_)];
  self.window = window_;
  self.header = reinterpret_cast<WindowHeader*>(window_.data());

  const EndpointAddress own = endpoint_->address();
  WireWriter hello(MessageType::kHello);
  hello.Add(static_cast<uint32_t>(process_)).Add(std::string_view(own.kind));
  hello.Add(std::string_view(reinterpret_cast<const char*>(own.bytes.data()), own.bytes.size()));
  hello.Add(reinterpret_cast<uint64_t>(window_.data()));
  JF_ASSIGN_OR_RETURN(std::vector<Mesh::Greeting> greetings,
                      mesh_->Connect(names, hello.bytes(), own.fds, deadline));
  process_reads_ = peers_.size() > 1;
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) == process_) continue;
    JF_RETURN_IF_ERROR(Greet(static_cast<int>(process), greetings[process],
                             std::move(greetings[process].hello.fds)));
  }
  JF_RETURN_IF_ERROR(AgreeOnProcessReads(deadline));

  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const bool shared_cores = ranks > cores;
  // A pause is about 15 ns.
  const double spin_microseconds = options_.spin_microseconds >= 0 ? options_.spin_microseconds
                                   : shared_cores                  ? 1
                                                                   : 50;
  waiting_.spins = static_cast<int>(spin_microseconds * 1000 / 15);
  waiting_.yields = shared_cores ? 64 : 4;
  waiting_.inline_limit = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double, std::micro>(options_.inline_microseconds));

  mesh_->Start({.on_message = [this](int process, WireReader& m) { OnMessage(process, m); },
                .on_gone = [this](int process) { OnGone(process); }});
  progress_ = std::thread([this] { ProgressLoop(); });
  ::pthread_setname_np(progress_.native_handle(), "jf-progress");
  return OkStatus();
}

Status Fabric::Greet(int process, const Mesh::Greeting& greeting, std::vector<UniqueFd> fds) {
  Peer& peer = peers_[static_cast<size_t>(process)];
  WireReader reader(greeting.hello.bytes);
  EndpointAddress address;
  reader.Get<uint32_t>();
  address.kind = reader.GetString();
  const std::string bytes = reader.GetString();
  const auto window_address = reader.Get<uint64_t>();
  if (!reader.ok() || reader.type() != MessageType::kHello ||
      greeting.credentials.pid != peer.pid) {
    return Status(Code::kInvalidArgument, StrCat("process ", process, " sent a malformed hello"));
  }
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
  address.bytes.assign(begin, begin + bytes.size());
  JF_ASSIGN_OR_RETURN(peer.channel,
                      endpoint_->Connect(address, std::move(fds),
                                         Deadline::AfterSeconds(options_.connect_timeout)));
  peer.window = peer.channel->peer_window();
  peer.header = reinterpret_cast<WindowHeader*>(peer.window.data());
  if (peer.window.size() < kWindowHeaderBytes || peer.header->magic != kWindowMagic ||
      peer.header->process != static_cast<uint32_t>(process)) {
    return Status(Code::kInvalidArgument,
                  StrCat("the window of process ", process, " is not ours"));
  }
  uint64_t magic = 0;
  process_reads_ &= ReadProcessMemory(peer.pid, window_address, &magic, sizeof(magic)).ok() &&
                    magic == kWindowMagic;
  return OkStatus();
}

// Whether process_vm_readv works is decided by the one process for which it does not.
Status Fabric::AgreeOnProcessReads(Deadline deadline) {
  WireWriter ready(MessageType::kReady);
  ready.Add(uint32_t{process_reads_});
  mesh_->Broadcast(ready);
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) == process_) continue;
    JF_ASSIGN_OR_RETURN(SocketMessage message, mesh_->Receive(static_cast<int>(process), deadline));
    WireReader reader(message.bytes);
    const bool reads = reader.Get<uint32_t>() != 0;
    if (!reader.ok() || reader.type() != MessageType::kReady) {
      return Status(Code::kInvalidArgument,
                    StrCat("process ", process, " sent a malformed answer"));
    }
    process_reads_ &= reads;
  }
  return OkStatus();
}

void Fabric::Shutdown() {
  if (shut_down_.exchange(true)) return;
  const Status cancelled(Code::kCancelled, "jaxfabric was shut down");
  {
    std::lock_guard lock(mutex_);
    for (auto& [ranks, communicator] : communicators_) communicator->Poison(cancelled);
  }
  if (progress_.joinable()) {
    if (failure().ok()) mesh_->Broadcast(WireWriter(MessageType::kGoodbye));
    stopping_.store(true, std::memory_order_seq_cst);
    Ring(peers_[static_cast<size_t>(process_)].header);
    progress_.join();
  }
  mesh_->Stop();
  completions_->Stop();
  // Executions on callers' threads see the poison and end.
  while (true) {
    std::unique_lock lock(mutex_);
    const bool idle = std::all_of(participants_.begin(), participants_.end(),
                                  [](const Participant* p) { return p->idle(); });
    if (idle) break;
    lock.unlock();
    std::this_thread::yield();
  }
  for (Peer& peer : peers_) peer.channel.reset();
  endpoint_.reset();
}

Status Fabric::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::map<std::string, uint64_t> Fabric::Counters() const {
  std::map<std::string, uint64_t> counters;
  counters["handed_off"] = handed_off_.load(std::memory_order_relaxed);
  counters["sleeps"] = sleeps_.load(std::memory_order_relaxed);
  counters["staging_allocations"] = staging_allocations_.load(std::memory_order_relaxed);
  counters["staging_free_bytes"] = staging_->free_bytes();
  counters["window_bytes"] = window_.size();
  counters["dropped_messages"] = mesh_->dropped_messages();
  counters["process_reads"] = process_reads_ ? 1 : 0;
  std::lock_guard lock(mutex_);
  counters["communicators"] = communicators_.size();
  counters["instances"] = participants_.size();
  return counters;
}

int Fabric::LocalIndex(int64_t rank) const {
  // Device ids of a process are usually consecutive.
  const int64_t guess = rank - local_ranks_[0];
  if (guess >= 0 && guess < static_cast<int64_t>(local_ranks_.size()) &&
      local_ranks_[static_cast<size_t>(guess)] == rank) {
    return static_cast<int>(guess);
  }
  const auto found = std::lower_bound(local_ranks_.begin(), local_ranks_.end(), rank);
  if (found == local_ranks_.end() || *found != rank) return -1;
  return static_cast<int>(found - local_ranks_.begin());
}

std::string Fabric::DescribeRank(int64_t rank) const {
  const auto found = process_of_.find(rank);
  if (found == process_of_.end()) return StrCat("rank ", rank, " (of no known process)");
  const Peer& peer = peers_[static_cast<size_t>(found->second)];
  return StrCat("rank ", rank, " (process ", found->second, ", pid ", peer.pid, " on ", peer.host,
                ")");
}

void Fabric::Register(Participant& participant) {
  std::lock_guard lock(mutex_);
  participants_.insert(&participant);
}

void Fabric::Unregister(Participant& participant) {
  const uint64_t key = participant.key();
  const auto position = static_cast<uint32_t>(participant.position());
  {
    std::lock_guard lock(mutex_);
    participants_.erase(&participant);
    if (!participant.cell_) return;
    RetiredCell retired{*participant.cell_, {}};
    for (const auto& slot : participant.slots_) retired.staging.push_back(slot.staging);
    retired_cells_.emplace(key, std::move(retired));
  }
  if (shut_down_.load()) return;
  const bool last = directory_.Retire(key, position);
  if (participant.communicator() == nullptr || !participant.communicator()->one_process()) {
    WireWriter message(MessageType::kRetire);
    mesh_->Broadcast(message.Add(key).Add(position));
  }
  if (last) FreeRetiredCells(key);
}

void Fabric::FreeRetiredCells(uint64_t key) {
  std::lock_guard lock(mutex_);
  const auto [begin, end] = retired_cells_.equal_range(key);
  for (auto entry = begin; entry != end; ++entry) {
    std::memset(static_cast<void*>(OwnCell(entry->second.cell)), 0, sizeof(Cell));
    for (const auto& block : entry->second.staging) staging_->Free(block);
    cells_->Free(entry->second.cell);
  }
  retired_cells_.erase(begin, end);
}

void Fabric::Announce(const Participant& participant, int32_t launch) {
  Directory::Announcement announcement;
  announcement.key = participant.key();
  announcement.size = static_cast<uint32_t>(participant.plan().size);
  announcement.position = static_cast<uint32_t>(participant.position());
  announcement.member = {participant.rank(), process_, participant.cell_index(), launch, false};
  announcement.label = participant.spec().label;
  announcement.source = SiteRegistry::Get().Source(participant.spec().site);
  directory_.Add(announcement);
  std::set<int> processes;
  const auto& group = participant.spec().groups[static_cast<size_t>(participant.group())];
  for (size_t process = 0; process < peers_.size(); ++process) {
    const auto& ranks = peers_[process].ranks;
    const bool member = participant.spec().by_position ||
                        std::any_of(ranks.begin(), ranks.end(), [&](int64_t rank) {
                          return std::find(group.begin(), group.end(), rank) != group.end();
                        });
    if (member && static_cast<int>(process) != process_) {
      mesh_->Send(static_cast<int>(process), announcement.ToMessage());
    }
  }
  Ring(peers_[static_cast<size_t>(process_)].header);
}

PeerView Fabric::View(const Directory::Member& member) const {
  const Peer& peer = peers_[static_cast<size_t>(member.process)];
  auto* cells = reinterpret_cast<Cell*>(peer.window.data() + kWindowHeaderBytes);
  JF_CHECK(member.cell < peer.header->cells);
  return {member.rank, member.process, peer.pid, peer.window.data(), cells + member.cell};
}

std::shared_ptr<Communicator> Fabric::CommunicatorFor(const std::vector<int64_t>& ranks,
                                                      bool one_process) {
  std::lock_guard lock(mutex_);
  auto& communicator = communicators_[ranks];
  if (!communicator) {
    communicator = std::make_shared<Communicator>(ranks, one_process);
    if (!failure_.ok()) communicator->Poison(failure_);
  }
  return communicator;
}

Cell* Fabric::OwnCell(uint32_t index) const {
  return reinterpret_cast<Cell*>(window_.data() + kWindowHeaderBytes) + index;
}

std::optional<StagingPool::Block> Fabric::TryAllocateStaging(uint64_t bytes, Participant& user) {
  staging_allocations_.fetch_add(1, std::memory_order_relaxed);
  if (auto block = staging_->TryAllocate(bytes)) return block;
  {
    std::lock_guard lock(mutex_);
    for (Participant* participant : participants_) {
      if (participant != &user) participant->ReleaseIdleStaging();
    }
  }
  return staging_->TryAllocate(bytes);
}

void Fabric::SetLastSeen(int64_t rank, uint64_t key, uint64_t tag) {
  auto* seen = reinterpret_cast<LastSeen*>(window_.data() +
                                           LastSeenOffset(static_cast<size_t>(LocalIndex(rank))));
  // Relaxed: read for messages only.
  seen->key.store(key, std::memory_order_relaxed);
  seen->tag.store(tag, std::memory_order_relaxed);
}

std::string Fabric::LastSeenAt(int64_t rank) const {
  const auto found = process_of_.find(rank);
  if (found == process_of_.end()) return "never";
  const Peer& peer = peers_[static_cast<size_t>(found->second)];
  const auto& ranks = peer.ranks;
  const size_t index =
      static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
  const auto* seen = reinterpret_cast<const LastSeen*>(peer.window.data() + LastSeenOffset(index));
  const uint64_t key = seen->key.load(std::memory_order_relaxed);
  if (key == 0) return "in no collective yet";
  const uint64_t tag = seen->tag.load(std::memory_order_relaxed);
  return StrCat("in ", directory_.Describe(key), ", launch ", TagLaunch(tag), ", call ",
                TagOccurrence(tag));
}

void Fabric::Ring(WindowHeader* header) {
  header->bell.fetch_add(1, std::memory_order_release);
  FutexWakeAll(&header->bell);
}

}  // namespace jaxfabric
