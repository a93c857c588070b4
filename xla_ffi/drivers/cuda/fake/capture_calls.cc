// Stream capture and graphs of the fake driver, and the events that tie streams together.
#include <algorithm>
#include <cstring>
#include <thread>

#include "drivers/cuda/fake/state.h"

namespace jaxfabric::cuda {

using fake::Capture;
using fake::Work;

namespace {

struct Locked {
  Locked() : state(*fake::Current()), lock(state.mutex) {}
  FakeDriver::State& state;
  std::lock_guard<std::mutex> lock;
};

// Whether all of `nodes` come before, or are, one of `ends`.
bool Joined(const CUgraph_st& graph, const std::vector<size_t>& nodes,
            const std::vector<size_t>& ends) {
  std::vector<bool> before(graph.nodes.size(), false);
  std::vector<size_t> open = ends;
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    if (before[node]) continue;
    before[node] = true;
    open.insert(open.end(), graph.nodes[node]->after.begin(), graph.nodes[node]->after.end());
  }
  return std::all_of(nodes.begin(), nodes.end(), [&](size_t node) { return before[node]; });
}

CUresult Invalidate(Capture& capture, CUresult why) {
  capture.invalidated = true;
  return why;
}

}  // namespace

CUresult FakeDriver::State::ForbiddenInCapture() {
  CUresult result = CUDA_SUCCESS;
  for (const auto& entry : captures) {
    const auto capture = entry.lock();
    if (capture == nullptr || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
    if (capture->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL &&
        capture->thread != std::this_thread::get_id()) {
      continue;
    }
    result = Invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  return result;
}

CUresult FakeDriver::State::Submit(CUstream stream, fake::Op op) {
  if (stream->capture == nullptr) {
    stream->queue.push_back(std::move(op));
    news = true;
    device_news.notify_all();
    return CUDA_SUCCESS;
  }
  Capture& capture = *stream->capture;
  if (capture.invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  auto* work = std::get_if<Work>(&op);
  if (work == nullptr) return Invalidate(capture, CUDA_ERROR_NOT_SUPPORTED);  // by the fake
  auto node = std::make_unique<CUgraphNode_st>();
  node->work = std::move(*work);
  node->parameter = node->work.arguments.data();
  node->after = stream->tail;
  node->index = capture.graph->nodes.size();
  stream->tail = {node->index};
  capture.graph->nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}

namespace fake {

CUresult Calls::cuEventRecord(CUevent event, CUstream wanted) {
  const Locked locked;
  CUstream stream = nullptr;
  if (const CUresult error = locked.state.FindStream(wanted, &stream); error != CUDA_SUCCESS) {
    return error;
  }
  if (!locked.state.events.contains(event) || event->device != stream->device) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (stream->capture != nullptr) {
    if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->captured = true;
    event->capture = stream->capture;
    event->nodes = stream->tail;
    return CUDA_SUCCESS;
  }
  event->captured = false;
  event->recorded = std::make_shared<Recorded>();
  return locked.state.Submit(stream, Record{event->recorded});
}

CUresult Calls::cuStreamWaitEvent(CUstream wanted, CUevent event, unsigned flags) {
  const Locked locked;
  CUstream stream = nullptr;
  if (const CUresult error = locked.state.FindStream(wanted, &stream); error != CUDA_SUCCESS) {
    return error;
  }
  if (!locked.state.events.contains(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!event->captured) {
    if (event->recorded == nullptr) return CUDA_SUCCESS;
    if (stream->capture != nullptr) {
      return Invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    return locked.state.Submit(stream, Wait{event->recorded});
  }
  const std::shared_ptr<Capture> capture = event->capture.lock();
  if (capture == nullptr) return CUDA_ERROR_CAPTURED_EVENT;  // of a capture that has ended
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream->capture == nullptr) {
    if (wanted == nullptr) return Invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    stream->capture = capture;  // the fork
    stream->tail = event->nodes;
    return CUDA_SUCCESS;
  }
  if (stream->capture != capture) {
    Invalidate(*stream->capture, CUDA_SUCCESS);
    return Invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  }
  for (const size_t node : event->nodes) {
    if (std::find(stream->tail.begin(), stream->tail.end(), node) == stream->tail.end()) {
      stream->tail.push_back(node);
    }
  }
  return CUDA_SUCCESS;
}

CUresult Calls::cuStreamIsCapturing(CUstream wanted, CUstreamCaptureStatus* status) {
  const Locked locked;
  CUstream stream = nullptr;
  if (const CUresult error = locked.state.FindStream(wanted, &stream); error != CUDA_SUCCESS) {
    return error;
  }
  *status = stream->capture == nullptr     ? CU_STREAM_CAPTURE_STATUS_NONE
            : stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                           : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult Calls::cuStreamBeginCapture(CUstream wanted, CUstreamCaptureMode mode) {
  const Locked locked;
  if (wanted == nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  CUstream stream = nullptr;
  if (const CUresult error = locked.state.FindStream(wanted, &stream); error != CUDA_SUCCESS) {
    return error;
  }
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->graph = std::make_unique<CUgraph_st>();
  stream->capture = capture;
  stream->tail.clear();
  std::erase_if(locked.state.captures, [](const auto& entry) { return entry.expired(); });
  locked.state.captures.push_back(capture);
  return CUDA_SUCCESS;
}

CUresult Calls::cuStreamEndCapture(CUstream wanted, CUgraph* graph) {
  const Locked locked;
  *graph = nullptr;
  CUstream stream = nullptr;
  if (const CUresult error = locked.state.FindStream(wanted, &stream); error != CUDA_SUCCESS) {
    return error;
  }
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream) return Invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
      capture->thread != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  bool joined = true;
  const std::vector<size_t> ends = stream->tail;
  for (const auto& [other, owned] : locked.state.streams) {
    if (other->capture != capture) continue;
    joined &= Joined(*capture->graph, other->tail, ends);
    other->capture.reset();
    other->tail.clear();
  }
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  *graph = capture->graph.get();
  locked.state.graphs[*graph] = std::move(capture->graph);
  return CUDA_SUCCESS;
}

CUresult Calls::cuGraphInstantiate(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  const Locked locked;
  if (!locked.state.graphs.contains(graph)) return CUDA_ERROR_INVALID_VALUE;
  auto program = std::make_shared<Program>();
  for (const auto& node : graph->nodes) {
    program->nodes.push_back(node->work);
    program->after.push_back(node->after);
  }
  auto made = std::make_unique<CUgraphExec_st>();
  made->program = std::move(program);
  *executable = made.get();
  locked.state.executables[*executable] = std::move(made);
  return CUDA_SUCCESS;
}

CUresult Calls::cuGraphLaunch(CUgraphExec executable, CUstream wanted) {
  const Locked locked;
  CUstream stream = nullptr;
  if (const CUresult error = locked.state.FindStream(wanted, &stream); error != CUDA_SUCCESS) {
    return error;
  }
  if (!locked.state.executables.contains(executable)) return CUDA_ERROR_INVALID_VALUE;
  return locked.state.Submit(stream, GraphRun{executable->program, executable->busy});
}

CUresult Calls::cuGraphExecDestroy(CUgraphExec executable) {
  const Locked locked;
  return locked.state.executables.erase(executable) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Calls::cuGraphDestroy(CUgraph graph) {
  const Locked locked;
  return locked.state.graphs.erase(graph) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Calls::cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  const Locked locked;
  if (!locked.state.graphs.contains(graph)) return CUDA_ERROR_INVALID_VALUE;
  if (nodes == nullptr) {
    *count = graph->nodes.size();
    return CUDA_SUCCESS;
  }
  *count = std::min(*count, graph->nodes.size());
  for (size_t i = 0; i < *count; ++i) nodes[i] = graph->nodes[i].get();
  return CUDA_SUCCESS;
}

CUresult Calls::cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  const Locked locked;
  *type = node->work.type;
  return CUDA_SUCCESS;
}

CUresult Calls::cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* parameters) {
  const Locked locked;
  if (node->work.type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
  *parameters = {};
  parameters->func = node->work.function;
  parameters->gridDimX = node->work.dim.blocks;
  parameters->blockDimX = node->work.dim.threads;
  parameters->gridDimY = parameters->gridDimZ = 1;
  parameters->blockDimY = parameters->blockDimZ = 1;
  parameters->kernelParams = &node->parameter;
  return CUDA_SUCCESS;
}

CUresult Calls::cuGraphExecKernelNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                               const CUDA_KERNEL_NODE_PARAMS* parameters) {
  const Locked locked;
  if (!locked.state.executables.contains(executable)) return CUDA_ERROR_INVALID_VALUE;
  if (!locked.state.functions.contains(parameters->func)) return CUDA_ERROR_INVALID_HANDLE;
  if (node->index >= executable->program->nodes.size()) return CUDA_ERROR_INVALID_VALUE;
  // Launches that are queued keep the old one.
  auto changed = std::make_shared<Program>(*executable->program);
  Work& work = changed->nodes[node->index];
  if (work.type != CU_GRAPH_NODE_TYPE_KERNEL || work.function->device != parameters->func->device ||
      parameters->gridDimX == 0 || parameters->blockDimX == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  work.function = parameters->func;
  work.kernel = parameters->func->entry.kernel;
  work.dim = {parameters->gridDimX, parameters->blockDimX};
  work.arguments.resize(parameters->func->entry.argument_bytes);
  if (!work.arguments.empty()) {
    std::memcpy(work.arguments.data(), parameters->kernelParams[0], work.arguments.size());
  }
  executable->program = std::move(changed);
  return CUDA_SUCCESS;
}

}  // namespace fake
}  // namespace jaxfabric::cuda
