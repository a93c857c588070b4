// A test with a fake driver whose first device is current, and shorthands for its calls.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "drivers/cuda/fake/driver.h"
#include "drivers/cuda/handles.h"
#include "os/open_fds.h"

namespace jaxfabric::cuda {

#define EXPECT_CUDA_OK(call) EXPECT_EQ(call, CUDA_SUCCESS)
#define ASSERT_CUDA_OK(call) ASSERT_EQ(call, CUDA_SUCCESS)

template <class T>
T Must(Result<T> result) {
  JF_CHECK(
      (std::fputs(result.ok() ? "" : result.status().ToString().c_str(), stderr), result.ok()));
  return std::move(result).value();
}

class FakeGpuTest : public ::testing::Test {
 protected:
  explicit FakeGpuTest(FakeConfig config = {})
      : before_(OpenFds()),
        threads_(Threads()),
        driver_(std::make_unique<FakeDriver>(std::move(config))) {
    for (int i = 0; i < 2; ++i) contexts_.push_back(Must(PrimaryContext::Retain(api(), i)));
    current_ = std::make_unique<ScopedContext>(api(), contexts_[0].context());
  }
  ~FakeGpuTest() override {
    loaded_.clear();
    current_.reset();
    contexts_.clear();
    EXPECT_EQ(driver_->Leaks(), "");
    driver_.reset();
    EXPECT_EQ(OpenFds(), before_);
#if !defined(__SANITIZE_THREAD__)  // which has a thread of its own from our first one on
    // A thread that has been joined may show for a moment longer.
    const Deadline deadline = Deadline::AfterSeconds(10);
    while (Threads() > threads_ && !deadline.expired()) std::this_thread::yield();
    EXPECT_EQ(Threads(), threads_);
#endif
    EXPECT_EQ(SharedMappings(), 0);
  }

  const Api& api() const { return driver_->api(); }
  FakeDriver& driver() { return *driver_; }
  CUcontext context(int ordinal) const { return contexts_[static_cast<size_t>(ordinal)].context(); }

  // A kernel, known to the driver by `name`.
  CUfunction Kernel(const char* name, emulation::Kernel kernel, size_t argument_bytes) {
    driver_->AddKernel(name, kernel, argument_bytes);
    loaded_.push_back(Must(Module::Load(api(), "image")));
    return Must(loaded_.back().Function(name));
  }
  template <class Arguments>
  CUresult Launch(CUfunction function, CUstream stream, Arguments arguments, unsigned blocks = 1,
                  unsigned threads = 1) {
    void* parameters[] = {&arguments};
    return api().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters,
                                nullptr);
  }

 private:
  static long Threads() {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  }

  const std::set<std::string> before_;
  const long threads_;
  std::unique_ptr<FakeDriver> driver_;
  std::vector<PrimaryContext> contexts_;
  std::unique_ptr<ScopedContext> current_;

 protected:
  std::vector<Module> loaded_;
};

inline std::byte* Pointer(CUdeviceptr address) {
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address));
}

}  // namespace jaxfabric::cuda
