// Threads that run completions.
//
// Completing an execution runs what XLA does next on the completing thread, user compute included,
// so such a thread may be gone for a long time. A completion never waits behind it: when every
// thread is busy another one is started, up to a limit.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxfabric {

class CompletionThreads {
 public:
  explicit CompletionThreads(size_t limit) : limit_(limit) {}
  ~CompletionThreads() { Stop(); }

  void Run(std::function<void()> completion);
  // Runs what is queued, then ends the threads. Idempotent.
  void Stop();

 private:
  void Loop();

  const size_t limit_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace jaxfabric
