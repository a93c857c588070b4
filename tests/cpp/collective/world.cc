#include "collective/world.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <numeric>
#include <thread>

#include "memory/copy.h"

namespace jaxfabric::testing {
namespace {

const Mesh::Job kJob{"the secret of these processes, nobody else's", 1};
constexpr auto kPatience = std::chrono::seconds(60);

// Length-prefixed strings over a socket pair; for the exchange of addresses only.
// The receiver notices what did not arrive.
void SendText(int fd, const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  std::string message(reinterpret_cast<const char*>(&size), sizeof(size));
  message += text;
  [[maybe_unused]] const ssize_t sent = ::send(fd, message.data(), message.size(), MSG_NOSIGNAL);
}

// Empty when the other end is gone or late.
std::string ReceiveText(int fd) {
  const auto receive = [fd](void* to, size_t bytes) {
    auto* at = static_cast<char*>(to);
    while (bytes > 0) {
      pollfd waiting{fd, POLLIN, 0};
      if (::poll(&waiting, 1, 100000) <= 0) return false;
      const ssize_t got = ::read(fd, at, bytes);
      if (got <= 0) return false;
      at += got;
      bytes -= static_cast<size_t>(got);
    }
    return true;
  };
  uint32_t size = 0;
  if (!receive(&size, sizeof(size))) return {};
  std::string text(size, '\0');
  return receive(text.data(), size) ? text : std::string();
}

std::string ChildBody(Shape shape, Options options, int process, int fd,
                      const std::function<std::string(LocalRanks&)>& body) {
  options.host_suffix = shape.Host(process);
  auto fabric = Fabric::Create(process, shape.processes, shape.LocalIds(process), options);
  if (!fabric.ok()) return fabric.status().ToString();
  SendText(fd, (*fabric)->Address());
  std::vector<std::string> addresses;
  for (int p = 0; p < shape.processes; ++p) addresses.push_back(ReceiveText(fd));
  if (const Status connected = (*fabric)->Connect(addresses, kJob); !connected.ok()) {
    return connected.ToString();
  }
  std::string failures;
  {
    LocalRanks ranks(**fabric, shape);
    failures = body(ranks);
    // Nobody leaves while another still works.
    SendText(fd, "done");
    ReceiveText(fd);
  }
  (*fabric)->Shutdown();
  return failures;
}

}  // namespace

Options TestOptions() {
  Options options;
  options.deadline = 30;
  options.connect_timeout = 30;
  options.segment_bytes = 4 << 20;
  options.out_of_step_microseconds = 100;
  options.net_interface = "lo";
  return options;
}

std::vector<int64_t> Shape::LocalIds(int process) const {
  std::vector<int64_t> ids;
  for (int local = 0; local < ranks_each; ++local) ids.push_back(process * 2048 + local);
  return ids;
}

std::string Shape::Host(int process) const { return StrCat("/", process % hosts); }

std::vector<int> Shape::HostOf() const {
  std::vector<int> host_of;
  for (int rank = 0; rank < size() && hosts > 1; ++rank) {
    host_of.push_back(rank / ranks_each % hosts);
  }
  return host_of;
}

std::vector<int64_t> Shape::Ids() const {
  std::vector<int64_t> ids;
  for (int process = 0; process < processes; ++process) {
    for (int64_t id : LocalIds(process)) ids.push_back(id);
  }
  return ids;
}

std::string ShapeName(const ::testing::TestParamInfo<Shape>& info) {
  const Shape& shape = info.param;
  const std::string name = StrCat(shape.processes, "x", shape.ranks_each);
  return shape.hosts == 1 ? name : StrCat(name, "_on_", shape.hosts);
}

std::string Text(const Status& status) { return status.ok() ? "" : status.ToString() + "\n"; }

LocalRanks::LocalRanks(Fabric& fabric, Shape shape)
    : fabric_(fabric), shape_(shape), first_run_id_(fabric.process() * 100000 - 3) {}

LocalRanks::~LocalRanks() {
  for (Call& call : calls_) {
    for (auto& participant : call.participants) {
      while (participant && !participant->idle()) std::this_thread::yield();
    }
  }
}

size_t LocalRanks::Add(const Problem& problem) {
  return AddUnequal(problem, [&](int) { return problem; });
}

size_t LocalRanks::AddUnequal(const Problem& attributes,
                              const std::function<Problem(int)>& problem) {
  return AddCall(attributes.Spec(shape_.Ids(), 1000 + calls_.size()), 0, problem);
}

size_t LocalRanks::AddByPosition(const Problem& problem) {
  CallSpec spec = problem.Spec(shape_.Ids(), 1000 + calls_.size());
  spec.by_position = true;
  std::iota(spec.groups[0].begin(), spec.groups[0].end(), 0);
  return AddCall(spec, 0, [&](int) { return problem; });
}

size_t LocalRanks::AddDuplicate(size_t call, uint32_t duplicate) {
  const Problem problem = calls_[call].problems[0];
  return AddCall(CallSpec(calls_[call].spec), duplicate, [&](int) { return problem; });
}

size_t LocalRanks::AddCall(const CallSpec& spec, uint32_t duplicate,
                           const std::function<Problem(int)>& problem) {
  Call call;
  call.spec = spec;
  for (int local = 0; local < shape_.ranks_each; ++local) {
    Problem& own = call.problems.emplace_back(problem(position(local)));
    Buffers sizes;
    sizes.input_bytes = own.input_bytes();
    sizes.output_bytes = own.output_bytes();
    sizes.dtype = own.dtype;
    sizes.ragged_sizes = own.Ragged();
    const Topology topology{false, false, shape_.HostOf(), shape_.processes, fabric_.patterns()};
    const Plan plan(spec, shape_.size(), position(local), sizes, topology);
    const bool by_pattern = plan.algorithm == Algorithm::kPattern;
    const bool by_host =
        plan.algorithm == Algorithm::kHosts || plan.algorithm == Algorithm::kRelay || by_pattern;
    if (by_host) own.host_of = topology.host_of;
    if (by_pattern) own.pattern = plan.pattern;
    call.participants.push_back(std::make_unique<Participant>(
        fabric_, spec, SiteRegistry::Instance{duplicate, clock_},
        shape_.LocalIds(fabric_.process())[static_cast<size_t>(local)], 0, position(local),
        first_run_id_, sizes));
  }
  calls_.push_back(std::move(call));
  return calls_.size() - 1;
}

void LocalRanks::Drop(size_t call) {
  for (auto& participant : calls_[call].participants) {
    while (!participant->idle()) std::this_thread::yield();
  }
  calls_[call].participants.clear();
}

Op* LocalRanks::Begin(size_t call, int local, int launch, int data, Execution& execution) {
  const Problem& problem = calls_[call].problems[static_cast<size_t>(local)];
  execution.input = problem.Input(position(local), data < 0 ? launch : data);
  execution.output.assign(problem.output_bytes(), std::byte{0xa5});
  Buffers buffers;
  buffers.input = execution.input.data();
  buffers.output = execution.output.data();
  buffers.input_bytes = execution.input.size();
  buffers.output_bytes = execution.output.size();
  buffers.dtype = problem.dtype;
  buffers.ragged_sizes = problem.Ragged();
  if (problem.kind == OpKind::kRaggedAllToAll) {
    execution.initial = problem.Initial(position(local), data < 0 ? launch : data);
    execution.slices = problem.SlicesOf(position(local), data < 0 ? launch : data);
    // XLA may give the result the memory of the operand that it starts from, or not.
    const bool same = launch % 2 == 1;
    if (same) Copy(buffers.output, execution.initial.data(), buffers.output_bytes);
    buffers.ragged = {same ? buffers.output : execution.initial.data(),
                      execution.slices.input_offsets.data(), execution.slices.send_sizes.data(),
                      execution.slices.output_offsets.data(), execution.slices.recv_sizes.data()};
  }
  return participant(call, local).Begin(buffers, first_run_id_ + launch);
}

std::unique_ptr<LocalRanks::Execution> LocalRanks::Enter(size_t call, int local, int launch,
                                                         int data) {
  auto execution = std::make_unique<Execution>();
  Op* op = Begin(call, local, launch, data, *execution);
  auto promise = std::make_shared<std::promise<Status>>();
  execution->done = promise->get_future();
  Participant& rank = participant(call, local);
  if (rank.WaitInline(*op)) {
    promise->set_value(op->status());
    rank.End(op);
  } else {
    op->on_finished = [promise](const Status& status) { promise->set_value(status); };
    JF_CHECK(fabric_.TryHandOff(op));
  }
  return execution;
}

std::unique_ptr<LocalRanks::Execution> LocalRanks::EnterPartly(size_t call, int local, int launch) {
  auto execution = std::make_unique<Execution>();
  execution->op = Begin(call, local, launch, launch, *execution);
  execution->op->Advance();
  return execution;
}

void LocalRanks::GiveUp(Execution& execution) {
  execution.op->Fail(Status(Code::kCancelled, "gave up"));
  while (!execution.op->finished()) execution.op->Advance();
  execution.op->participant().End(execution.op);
}

Status LocalRanks::Check(size_t call, int local, int data, Execution& execution) {
  const Problem& problem = calls_[call].problems[static_cast<size_t>(local)];
  if (execution.done.wait_for(kPatience) != std::future_status::ready) {
    // The buffers are in use: no way to go on from here.
    ADD_FAILURE() << "still waiting in " << problem.Describe();
    std::abort();
  }
  const Status status = execution.done.get();
  if (!status.ok()) return status;
  const Bytes want = problem.Output(position(local), data);
  if (execution.output == want) return OkStatus();
  size_t at = 0;
  while (execution.output[at] == want[at]) ++at;
  return Status(Code::kInternal,
                StrCat("wrong result: ", problem.Describe(), ", rank ", position(local), ", data ",
                       data, ", byte ", at, " of ", want.size()));
}

Status LocalRanks::Run(size_t call, int local, int launch) {
  auto execution = Enter(call, local, launch);
  return Check(call, local, launch, *execution);
}

World::World(Shape shape, Options options) : shape_(shape) {
  std::vector<std::string> addresses;
  for (int process = 0; process < shape.processes; ++process) {
    options.host_suffix = shape.Host(process);
    auto fabric = Fabric::Create(process, shape.processes, shape.LocalIds(process), options);
    JF_CHECK(fabric.ok());
    addresses.push_back((*fabric)->Address());
    fabrics_.push_back(*std::move(fabric));
    ranks_.push_back(std::make_unique<LocalRanks>(*fabrics_.back(), shape));
  }
  const std::string failed = OnThreads(
      shape.processes, [&](int process) { return Text(fabric(process).Connect(addresses, kJob)); });
  EXPECT_EQ(failed, "");
}

World::~World() { Shutdown(); }

void World::Shutdown() {
  ranks_.clear();
  fabrics_.clear();
}

size_t World::Add(const Problem& problem) {
  size_t call = 0;
  for (auto& ranks : ranks_) call = ranks->Add(problem);
  return call;
}

std::string World::OnEveryRank(const std::function<std::string(LocalRanks&, int local)>& body) {
  return OnThreads(shape_.size(), [&](int rank) {
    return body(ranks(rank / shape_.ranks_each), rank % shape_.ranks_each);
  });
}

std::string OnThreads(int count, const std::function<std::string(int)>& body) {
  std::vector<std::string> failures(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] { failures[static_cast<size_t>(i)] = body(i); });
  }
  for (std::thread& thread : threads) thread.join();
  std::string all;
  for (const std::string& failure : failures) {
    if (!failure.empty()) all += failure + "\n";
  }
  return all;
}

std::string InForkedProcesses(Shape shape, Options options,
                              const std::function<std::string(LocalRanks&)>& body) {
  return InForkedProcesses(shape, [&](int) { return options; }, body);
}

std::string InForkedProcesses(Shape shape, const std::function<Options(int)>& options,
                              const std::function<std::string(LocalRanks&)>& body) {
  std::vector<int> sockets;
  std::vector<pid_t> children;
  for (int process = 0; process < shape.processes; ++process) {
    int pair[2];
    JF_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    const pid_t child = ::fork();
    JF_CHECK(child >= 0);
    if (child == 0) {
      ::close(pair[0]);
      for (int fd : sockets) ::close(fd);
      const std::string failure = ChildBody(shape, options(process), process, pair[1], body);
      SendText(pair[1], failure.empty() ? "ok" : failure);
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    ::close(pair[1]);
    sockets.push_back(pair[0]);
    children.push_back(child);
  }
  std::vector<std::string> addresses;
  for (int fd : sockets) addresses.push_back(ReceiveText(fd));
  for (int fd : sockets) {
    for (const std::string& address : addresses) SendText(fd, address);
  }
  for (int fd : sockets) ReceiveText(fd);
  for (int fd : sockets) SendText(fd, "all are done");
  std::string all;
  for (size_t process = 0; process < sockets.size(); ++process) {
    const std::string result = ReceiveText(sockets[process]);
    int status = 0;
    ::waitpid(children[process], &status, 0);
    ::close(sockets[process]);
    if (result != "ok") all += StrCat("process ", process, ": ", result, "\n");
    if (status != 0) all += StrCat("process ", process, " ended with status ", status, "\n");
  }
  return all;
}

}  // namespace jaxfabric::testing
