#include "collective/completion.h"

#include <pthread.h>

#include <utility>

namespace jaxfabric {

void CompletionThreads::Run(std::function<void()> completion) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(completion));
  if (queue_.size() > idle_ && threads_.size() < limit_) {
    threads_.emplace_back([this] { Loop(); });
    ::pthread_setname_np(threads_.back().native_handle(), "jf-completion");
  }
  wake_.notify_one();
}

void CompletionThreads::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    --idle_;
    if (queue_.empty()) return;
    auto completion = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    completion();
    lock.lock();
  }
}

void CompletionThreads::Stop() {
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  wake_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jaxfabric
