// The thread of a fake driver: starts what is queued on streams, in their order, and runs the grid.
#include <sched.h>

#include <algorithm>
#include <utility>

#include "drivers/cuda/fake/state.h"

namespace jaxfabric::cuda {

// A graph that is running on a stream.
struct GraphProgress {
  std::shared_ptr<const fake::Program> program;
  std::shared_ptr<bool> busy;
  std::vector<size_t> missing;  // of each node's predecessors
  size_t left = 0;
};

namespace {

// Between two looks at what the host has queued.
constexpr uint64_t kTurns = 1024;
// With everything waiting this often, others on this machine need the core for longer.
constexpr int kYieldsBeforeSleep = 200;
constexpr auto kSleep = std::chrono::microseconds(100);

}  // namespace

void FakeDriver::State::Main() {
  std::unique_lock lock(mutex);
  int waited = 0;
  while (!stopping) {
    Reap();
    for (size_t device = 0; device < devices.size(); ++device) {
      if (devices[device].stopped) Drop(static_cast<int>(device));
    }
    grid.AdvanceClock(std::exchange(clock_advance, 0));
    if (StartAll()) host_news.notify_all();
    if (in_flight.empty()) {
      device_news.wait(lock, [&] { return news || stopping; });
      news = false;
      continue;
    }
    news = false;
    lock.unlock();
    grid.RunUntilWaiting(kTurns);
    const bool waits = grid.AllWaiting();
    waited = waits ? waited + 1 : 0;
    if (waits && waited < kYieldsBeforeSleep) ::sched_yield();
    lock.lock();
    if (waited >= kYieldsBeforeSleep) device_news.wait_for(lock, kSleep, [&] { return news; });
  }
}

bool FakeDriver::State::StartAll() {
  std::vector<CUstream> all;
  for (auto& device : devices) all.push_back(&device.legacy);
  for (auto& [stream, owned] : streams) all.push_back(stream);
  for (auto& stream : dying_streams) all.push_back(stream.get());
  bool any = false;
  for (bool more = true; more;) {  // an event may let another stream go on
    more = false;
    for (CUstream stream : all) more |= StartStream(stream);
    any |= more;
  }
  std::erase_if(dying_streams,
                [](const auto& stream) { return !stream->busy && stream->queue.empty(); });
  return any;
}

bool FakeDriver::State::StartStream(CUstream stream) {
  const Device& device = devices[static_cast<size_t>(stream->device)];
  bool any = false;
  while (!stream->busy && !stream->queue.empty() && !device.held && !device.stopped) {
    fake::Op& op = stream->queue.front();
    if (auto* wait = std::get_if<fake::Wait>(&op)) {
      if (!wait->recorded->done) break;
    } else if (auto* record = std::get_if<fake::Record>(&op)) {
      record->recorded->done = true;
      record->recorded->at = std::chrono::steady_clock::now();
    } else if (auto* work = std::get_if<fake::Work>(&op)) {
      stream->busy = true;
      Launch(stream, *work, nullptr, 0);
    } else {
      auto& run = std::get<fake::GraphRun>(op);
      if (*run.busy) break;
      auto graph = std::make_shared<GraphProgress>();
      graph->program = run.program;
      graph->left = run.program->nodes.size();
      for (const auto& after : run.program->after) graph->missing.push_back(after.size());
      if (graph->left > 0) {
        graph->busy = run.busy;
        *graph->busy = true;
        stream->busy = true;
        for (size_t node = 0; node < graph->missing.size(); ++node) {
          if (graph->missing[node] == 0) Launch(stream, graph->program->nodes[node], graph, node);
        }
      }
    }
    stream->queue.pop_front();
    any = true;
  }
  return any;
}

void FakeDriver::State::Launch(CUstream stream, const fake::Work& work,
                               std::shared_ptr<GraphProgress> graph, size_t node) {
  const uint64_t token = next_token++;
  const uint64_t launch =
      grid.Launch(work.kernel, work.arguments, work.dim,
                  [this, token](bool trapped) { ended.emplace_back(token, trapped); });
  in_flight[token] = {launch, stream, stream->device, std::move(graph), node};
}

void FakeDriver::State::Reap() {
  const auto results = std::exchange(ended, {});
  for (const auto& [token, trapped] : results) {
    const auto place = in_flight.find(token);
    if (place == in_flight.end()) continue;  // dropped by another's fault
    const InFlight done = std::move(place->second);
    in_flight.erase(place);
    if (trapped) {
      trap_reason = grid.trap_reason();
      Fail(done.device, CUDA_ERROR_LAUNCH_FAILED);
      continue;
    }
    if (done.graph != nullptr) {
      GraphProgress& graph = *done.graph;
      for (size_t node = done.node + 1; node < graph.missing.size(); ++node) {
        const auto& after = graph.program->after[node];
        if (std::find(after.begin(), after.end(), done.node) == after.end()) continue;
        if (--graph.missing[node] > 0) continue;
        Launch(done.stream, graph.program->nodes[node], done.graph, node);
      }
      if (--graph.left > 0) continue;
      *graph.busy = false;
    }
    done.stream->busy = false;
  }
  if (!results.empty()) host_news.notify_all();
}

void FakeDriver::State::Drop(int device) {
  for (auto place = in_flight.begin(); place != in_flight.end();) {
    if (place->second.device != device) {
      ++place;
      continue;
    }
    grid.Kill(place->second.launch);
    place = in_flight.erase(place);
  }
}

void FakeDriver::State::Fail(int device, CUresult code) {
  devices[static_cast<size_t>(device)].failed = code;
  Drop(device);
  const auto drop = [&](CUstream_st& stream) {
    if (stream.device != device) return;
    stream.busy = false;
    for (fake::Op& op : stream.queue) {
      // So that streams of other devices do not wait for ever.
      if (auto* record = std::get_if<fake::Record>(&op)) record->recorded->done = true;
    }
    stream.queue.clear();
  };
  for (auto& entry : devices) drop(entry.legacy);
  for (auto& [stream, owned] : streams) drop(*owned);
  for (auto& stream : dying_streams) drop(*stream);
  host_news.notify_all();
}

}  // namespace jaxfabric::cuda
