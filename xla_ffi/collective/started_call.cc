#include "collective/started_call.h"

#include <algorithm>
#include <utility>

#include "memory/copy.h"

namespace jaxfabric {

void StartedCall::Finish(const Status& status) {
  Finished finished;
  {
    std::lock_guard lock(mutex_);
    status_ = status;
    if (finished_ && status.ok()) Copy(destination_, output(), output_bytes());
    finished = std::exchange(finished_, nullptr);
  }
  if (finished) finished(status);
}

std::optional<Status> StartedCall::Wait(std::byte* destination,
                                        const std::function<Finished()>& make_finished) {
  std::lock_guard lock(mutex_);
  if (!status_) {
    destination_ = destination;
    finished_ = make_finished();
    return std::nullopt;
  }
  if (status_->ok()) Copy(destination, output(), output_bytes());
  return status_;
}

bool StartedCall::ended() {
  std::lock_guard lock(mutex_);
  return status_.has_value();
}

StartedCalls& StartedCalls::Get() {
  static StartedCalls calls;
  return calls;
}

StartedCalls::Made StartedCalls::Make(size_t input_bytes, size_t output_bytes) {
  std::shared_ptr<StartedCall> call;
  std::lock_guard lock(mutex_);
  const auto fits = std::find_if(idle_.begin(), idle_.end(), [&](const auto& idle) {
    return idle->input_.size() == input_bytes && idle->output_.size() == output_bytes;
  });
  if (fits != idle_.end()) {
    call = std::move(*fits);
    idle_.erase(fits);
    call->status_.reset();
  } else {
    call = std::make_shared<StartedCall>();
    call->input_.resize(input_bytes);
    call->output_.resize(output_bytes);
  }
  if (calls_.size() >= kMostStarted && calls_.begin()->second->ended()) {
    calls_.erase(calls_.begin());
  }
  calls_.emplace(++last_, call);
  return {last_, std::move(call)};
}

std::shared_ptr<StartedCall> StartedCalls::Take(uint64_t number) {
  std::lock_guard lock(mutex_);
  const auto found = calls_.find(number);
  if (found == calls_.end()) return nullptr;
  auto call = std::move(found->second);
  calls_.erase(found);
  return call;
}

void StartedCalls::Recycle(std::shared_ptr<StartedCall> call) {
  std::lock_guard lock(mutex_);
  if (idle_.size() == kKept) idle_.erase(idle_.begin());
  idle_.push_back(std::move(call));
}

void StartedCalls::Clear() {
  std::lock_guard lock(mutex_);
  calls_.clear();
  idle_.clear();
}

}  // namespace jaxfabric
