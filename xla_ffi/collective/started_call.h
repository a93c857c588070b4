// Collectives that were started and not yet waited for.
//
// XLA takes a start for complete when it returns, and may end a program without its done. So a
// started call works on memory of its own: its operand is copied in, its result out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"

namespace jaxfabric {

class StartedCall {
 public:
  using Finished = std::function<void(const Status&)>;

  std::byte* input() { return input_.data(); }
  std::byte* output() { return output_.data(); }
  size_t output_bytes() const { return output_.size(); }

  // The collective has ended: its result, or why there is none.
  void Finish(const Status& status);
  // Copies the result to `destination` and tells how the call ended, if it has; otherwise
  // `make_finished` is called, and what it returns gets to know later, on the thread of Finish().
  std::optional<Status> Wait(std::byte* destination,
                             const std::function<Finished()>& make_finished);

 private:
  friend class StartedCalls;

  std::vector<std::byte> input_;
  std::vector<std::byte> output_;
  bool ended();

  std::mutex mutex_;
  std::optional<Status> status_;
  std::byte* destination_ = nullptr;
  Finished finished_;
};

// By the number that a start gives to its done.
class StartedCalls {
 public:
  static StartedCalls& Get();

  struct Made {
    uint64_t number;
    std::shared_ptr<StartedCall> call;
  };
  Made Make(size_t input_bytes, size_t output_bytes);
  // Null for a number that was never given out, or has been taken already.
  std::shared_ptr<StartedCall> Take(uint64_t number);
  // Keeps the memory of a call that has been waited for.
  void Recycle(std::shared_ptr<StartedCall> call);
  // Forgets those that nobody will wait for any more.
  void Clear();

 private:
  static constexpr size_t kKept = 8;
  // Beyond these, calls that have ended and that nobody waits for are forgotten: their programs
  // have failed, or never will.
  static constexpr size_t kMostStarted = 1024;
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::map<uint64_t, std::shared_ptr<StartedCall>> calls_;
  std::vector<std::shared_ptr<StartedCall>> idle_;
};

}  // namespace jaxfabric
