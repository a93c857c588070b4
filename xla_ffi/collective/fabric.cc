#include "collective/fabric.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "base/log.h"
#include "memory/copy.h"
#include "os/pages.h"
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

}  // namespace

Fabric::Fabric(int process, int process_count, std::vector<int64_t> local_ranks, Options options)
    : serial_(NextSerial()),
      process_(process),
      local_ranks_(std::move(local_ranks)),
      options_(options),
      host_(HostName()),
      host_id_(HostId() + options_.host_suffix),
      peers_(static_cast<size_t>(process_count)) {}

Result<std::unique_ptr<Fabric>> Fabric::Create(int process, int process_count,
                                               std::vector<int64_t> local_ranks, Options options) {
  if (process < 0 || process >= process_count) {
    return Status(Code::kInvalidArgument, StrCat("process_index ", process, " is not one of ",
                                                 process_count, " processes"));
  }
  if ((local_ranks.empty() && options.gpus.empty()) || local_ranks.size() > kMaxLocalRanks) {
    return Status(Code::kInvalidArgument,
                  StrCat("local_ranks has ", local_ranks.size(), " entries; 1 to ", kMaxLocalRanks,
                         " can be used"));
  }
  constexpr size_t kLeast = 64 * 1024;
  if (options.segment_bytes < kLeast) {
    return Status(Code::kInvalidArgument, StrCat("segment_bytes is ", options.segment_bytes,
                                                 "; at least ", kLeast, " bytes are needed"));
  }
  KeepFreedMemory();
  std::sort(local_ranks.begin(), local_ranks.end());
  JF_ASSIGN_OR_RETURN(PatternChoice patterns, PatternChoice::Parse(options.pattern));
  if (options.network_cost != kMeasured) {
    JF_RETURN_IF_ERROR(patterns.SetCosts(options.network_cost));
  }
  std::unique_ptr<Fabric> fabric(
      new Fabric(process, process_count, std::move(local_ranks), options));
  fabric->patterns_ = std::move(patterns);
  JF_RETURN_IF_ERROR(fabric->Bind());
  return fabric;
}

Status Fabric::Bind() {
  JF_ASSIGN_OR_RETURN(transport_, FindTransport(peers_.size() == 1 ? "inproc" : "shm"));
  JF_RETURN_IF_ERROR(transport_->Probe());
  const size_t ranks = std::max(local_ranks_.size(), size_t{1});  // it may have GPUs only
  const size_t bytes = ranks * options_.segment_bytes / 4096 * 4096;
  auto endpoint = transport_->Bind(process_, static_cast<int>(peers_.size()), bytes);
  if (!endpoint.ok()) {
    return Status(endpoint.status().code(),
                  StrCat(endpoint.status().message(), " (segment_bytes, ", options_.segment_bytes,
                         ", for each of ", local_ranks_.size(), " local ranks)"));
  }
  endpoint_ = *std::move(endpoint);
  window_ = endpoint_->window();
  cell_count_ = CellsOfWindow(bytes);
  cells_ = std::make_unique<CellAllocator>(cell_count_);
  staging_ = std::make_unique<StagingPool>(kWindowHeaderBytes + cell_count_ * sizeof(Cell), bytes);
  auto* header = reinterpret_cast<WindowHeader*>(window_.data());
  header->magic = kWindowMagic;
  header->process = static_cast<uint32_t>(process_);
  header->cells = cell_count_;
  JF_RETURN_IF_ERROR(BindControl());
  completions_ = std::make_unique<CompletionThreads>(2 * local_ranks_.size() + 2);
  if (!options_.gpus.empty()) OpenGpus();
  return OkStatus();
}

// Whether other hosts take part is not known yet: what keeps them out is told if they do.
Status Fabric::BindControl() {
  const auto count = static_cast<int>(peers_.size());
  if (const Status chosen = count > 1 ? ChooseNetwork() : OkStatus(); !chosen.ok()) {
    network_reason_ = chosen.ToString();
  }
  auto mesh = Mesh::Create(process_, count, network_);
  if (!mesh.ok() && network_) {
    network_.reset();
    data_port_.Reset();
    network_reason_ = mesh.status().ToString();
    mesh = Mesh::Create(process_, count);
  }
  if (!mesh.ok()) return mesh.status();
  mesh_ = *std::move(mesh);
  if (count > 1) Log(LogLevel::kInfo, StrCat("the network for other hosts: ", network_reason_));
  return OkStatus();
}

void Fabric::OpenGpus() {
  GpuOptions options = options_.gpu;
  options.deadline = options_.deadline;
  auto domain = GpuDomain::Open(
      process_, options_.gpus, options,
      {.send = [this](int process, const WireWriter& message) { mesh_->Send(process, message); },
       .fail = [this](const Status& status) { ReportFailure(status); },
       .describe_process = [this](int process) { return DescribeProcess(process); }});
  if (domain.ok()) {
    gpus_ = *std::move(domain);
  } else {
    GiveUpGpus(domain.status().ToString());
  }
}

void Fabric::GiveUpGpus(std::string reason) {
  gpus_.reset();
  gpu_reason_ = std::move(reason);
}

Fabric::~Fabric() { Shutdown(); }

void Fabric::Shutdown() {
  if (shut_down_.exchange(true)) return;
  if (completions_ == nullptr) return;  // Bind() failed: nothing was started.
  const Status cancelled(Code::kCancelled, "jaxfabric was shut down");
  if (gpus_) gpus_->Stop();
  {
    std::lock_guard lock(mutex_);
    for (auto& [ranks, communicator] : communicators_) communicator->Poison(cancelled);
  }
  FlushLinks();
  if (progress_.joinable()) {
    if (failure().ok()) mesh_->Broadcast(WireWriter(MessageType::kGoodbye));
    {
      std::lock_guard lock(queue_mutex_);
      stopping_.store(true, std::memory_order_seq_cst);
    }
    queue_filled_.notify_one();
    Ring(peers_[static_cast<size_t>(process_)].header);
    // What no peer has taken by now is not waited for: executions give their buffers back.
    AbortLinks();
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
  {
    std::lock_guard lock(links_mutex_);
    for (Peer& peer : peers_) {
      peer.channel.reset();
      peer.link.reset();
    }
  }
  messages_.reset();
  endpoint_.reset();
}

Status Fabric::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

int Fabric::LocalIndex(int64_t rank) const {
  if (local_ranks_.empty()) return -1;
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

std::string Fabric::NameRank(int64_t rank) const {
  const auto found = process_of_.find(rank);
  if (found == process_of_.end()) return StrCat("rank ", rank, " (of no known process)");
  return StrCat("rank ", rank, " (process ", found->second, ")");
}

std::string Fabric::DescribeRank(int64_t rank) const {
  const auto found = process_of_.find(rank);
  if (found == process_of_.end()) return NameRank(rank);
  return StrCat("rank ", rank, " (", DescribeProcess(found->second), ")");
}

std::string Fabric::DescribeProcess(int process) const {
  const Peer& peer = peers_[static_cast<size_t>(process)];
  return StrCat("process ", process, ", pid ", peer.pid, " on ", peer.host);
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

void Fabric::Announce(const Participant& participant) {
  Directory::Announcement announcement;
  announcement.key = participant.key();
  announcement.size = static_cast<uint32_t>(participant.size());
  announcement.position = static_cast<uint32_t>(participant.position());
  announcement.member = {participant.rank(),       process_,
                         participant.cell_index(), participant.first_run_id(),
                         participant.own_salt_,    false};
  announcement.label = participant.spec().label;
  announcement.source = SiteRegistry::Get().Source(participant.spec().site);
  AddToDirectory(announcement);
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
  const auto index = static_cast<size_t>(
      std::lower_bound(peer.ranks.begin(), peer.ranks.end(), member.rank) - peer.ranks.begin());
  return {member.rank,
          member.process,
          peer.pid,
          peer.remote,
          peer.window.data(),
          cells + member.cell,
          LastSeenOf(peer.window.data(), index)};
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

std::string Fabric::LastSeenAt(int64_t rank) const {
  const auto found = process_of_.find(rank);
  if (found == process_of_.end()) return "never";
  const Peer& peer = peers_[static_cast<size_t>(found->second)];
  const auto& ranks = peer.ranks;
  const size_t index =
      static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
  const LastSeen* seen = LastSeenOf(peer.window.data(), index);
  const uint64_t key = seen->key.load(std::memory_order_relaxed);
  if (key == 0) return "in no collective yet";
  const uint64_t tag = seen->tag.load(std::memory_order_relaxed);
  return StrCat("in ", directory_.Describe(key), ", launch ", TagLaunch(tag), ", call ",
                TagOccurrence(tag), peer.remote ? ", as far as this host was told" : "");
}

void Fabric::Ring(WindowHeader* header) {
  header->bell.fetch_add(1, std::memory_order_release);
  FutexWakeAll(&header->bell);
}

}  // namespace jaxfabric
