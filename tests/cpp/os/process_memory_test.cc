#include "os/process_memory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <vector>

namespace jaxfabric {
namespace {

// A child that holds the parent's memory as it was at the fork, until it is killed.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) {
      for (;;) ::pause();
    }
  }
  ~Child() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

TEST(ProcessMemory, ReadsAnotherProcess) {
  std::vector<unsigned char> data(3 << 20);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 7 + (i >> 9));
  const std::vector<unsigned char> expected = data;
  const Child child;
  ASSERT_GT(child.pid(), 0);
  std::memset(data.data(), 0, data.size());  // the child keeps its copy
  std::vector<unsigned char> read(data.size());
  const Status status = ReadProcessMemory(child.pid(), reinterpret_cast<uint64_t>(data.data()),
                                          read.data(), read.size());
  if (status.code() == Code::kPermissionDenied) GTEST_SKIP() << status.ToString();
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(read, expected);
}

TEST(ProcessMemory, UnmappedAddressIsAnError) {
  const Child child;
  char byte;
  const Status status = ReadProcessMemory(child.pid(), 8, &byte, 1);
  if (status.code() == Code::kPermissionDenied) GTEST_SKIP() << status.ToString();
  EXPECT_EQ(status.code(), Code::kOutOfRange) << status.ToString();
}

TEST(ProcessMemory, DeadProcessIsUnavailable) {
  Child child;
  const pid_t pid = child.pid();
  child.Kill();
  char byte;
  const Status status = ReadProcessMemory(pid, reinterpret_cast<uint64_t>(&byte), &byte, 1);
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  EXPECT_NE(status.message().find(std::to_string(pid)), std::string_view::npos);
}

TEST(ProcessMemory, ZeroBytesNeedNoProcess) {
  EXPECT_TRUE(ReadProcessMemory(-1, 0, nullptr, 0).ok());
}

}  // namespace
}  // namespace jaxfabric
