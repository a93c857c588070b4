// Fake GPUs in processes of their own that share memory.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "drivers/cuda/fake/multicast.h"
#include "drivers/cuda/fake_gpu.h"
#include "os/unix_socket.h"

namespace jaxfabric::cuda {
namespace {

constexpr size_t kBytes = size_t{64} * 1024;
constexpr int kSteps = 200;
constexpr CUdevice kDevice[] = {0};

// What a kernel of one process needs to meet the other's.
struct MeetArguments {
  std::byte* own;
  std::byte* peer;
  std::byte* both;  // a multicast address, or null
  uint32_t me;
  std::atomic<int>* wrong;
};

std::atomic<uint64_t>& Cell(std::byte* memory, uint32_t index) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(memory + 64 * index);
}

// Each step: tell the peer, and wait until the peer has told.
void Meet(const void* arguments) {
  const auto& args = *static_cast<const MeetArguments*>(arguments);
  for (uint64_t step = 1; step <= kSteps; ++step) {
    if (emulation::ThreadIndex() == 0) {
      if (args.both != nullptr) {
        const auto members = emulation::MulticastMembers(args.both + 64 * args.me);
        if (members.size() != 2) ++*args.wrong;
        for (std::byte* member : members) Cell(member, 0).store(step, std::memory_order_release);
      } else {
        Cell(args.peer, args.me).store(step, std::memory_order_release);
      }
      emulation::MaybeSwitch();
    }
    while (Cell(args.own, 1 - args.me).load(std::memory_order_acquire) < step) emulation::Pause();
    emulation::SyncBlock();
  }
}

enum class Way { kFd, kFabric };

class Peer {
 public:
  Peer(int me, int socket, Way way) : me_(me), socket_(socket), way_(way), driver_(Config(me)) {
    driver_.AddKernel("meet", &Meet, sizeof(MeetArguments));
  }

  // What went wrong; empty if nothing did.
  std::string Run() {
    {
      const Api& api = driver_.api();
      const PrimaryContext context = Must(PrimaryContext::Retain(api, 0));
      const ScopedContext current(api, context.context());
      const PhysicalMemory memory = Must(PhysicalMemory::Create(api, 0, kBytes, HandleType()));
      const PhysicalMemory imported = Exchange(memory);
      const AddressRange own = Map(memory), peer = Map(imported);
      Multicast object = me_ == 0 ? Must(Multicast::Create(api, 2, kBytes, HandleType()))
                                  : Multicast::Adopt(Receive());
      if (me_ == 0) Send(object.memory());
      std::atomic<int> wrong{0};
      // Binding waits for the other process to add its device.
      if (!object.AddDevice(0).ok() || !object.Bind(0, 0, memory, 0, kBytes).ok()) {
        return "multicast";
      }
      const AddressRange both = Map(object.memory());
      Barrier();  // the other has bound
      const Module loaded = Must(Module::Load(api, "image"));
      const CUfunction meet = Must(loaded.Function("meet"));
      const Stream stream = Must(Stream::Create(api));
      for (std::byte* multicast : {static_cast<std::byte*>(nullptr), Pointer(both.address())}) {
        if (api.cuMemsetD8Async(own.address(), 0, kBytes, stream.get()) != CUDA_SUCCESS ||
            api.cuStreamSynchronize(stream.get()) != CUDA_SUCCESS) {
          return "clearing";
        }
        Barrier();
        MeetArguments arguments{Pointer(own.address()), Pointer(peer.address()), multicast,
                                static_cast<uint32_t>(me_), &wrong};
        void* parameters[] = {&arguments};
        if (api.cuLaunchKernel(meet, 1, 1, 1, 8, 1, 1, 0, stream.get(), parameters, nullptr) !=
                CUDA_SUCCESS ||
            api.cuStreamSynchronize(stream.get()) != CUDA_SUCCESS) {
          return "the kernel";
        }
        Barrier();
      }
      if (wrong != 0) return "multicast members";
    }
    return driver_.Leaks();
  }

 private:
  static FakeConfig Config(int me) {
    FakeConfig config;
    config.gpus = {me};
    config.fabric_handles = true;
    config.seed = static_cast<uint64_t>(me);
    return config;
  }
  unsigned HandleType() const {
    return way_ == Way::kFd ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_FABRIC;
  }

  void Send(const PhysicalMemory& memory) {
    if (way_ == Way::kFabric) {
      const CUmemFabricHandle handle = Must(memory.ExportFabric());
      JF_CHECK(SendMessage(socket_, std::as_bytes(std::span(handle.data)), {},
                           Deadline::AfterSeconds(20))
                   .ok());
      return;
    }
    const UniqueFd fd = Must(memory.ExportFd());
    const int raw[] = {fd.get()};
    const std::byte nothing[1] = {};
    JF_CHECK(SendMessage(socket_, nothing, raw, Deadline::AfterSeconds(20)).ok());
  }
  SocketMessage ReceiveMessage() {
    for (;;) {
      std::optional<SocketMessage> message = Must(TryReceiveMessage(socket_));
      if (message) return std::move(*message);
      std::this_thread::yield();
    }
  }
  PhysicalMemory Receive() {
    const SocketMessage message = ReceiveMessage();
    if (way_ == Way::kFd) {
      return Must(PhysicalMemory::Import(driver_.api(), message.fds.at(0).get(), kBytes));
    }
    CUmemFabricHandle handle;
    std::memcpy(handle.data, message.bytes.data(), sizeof(handle.data));
    return Must(PhysicalMemory::Import(driver_.api(), handle, kBytes));
  }
  PhysicalMemory Exchange(const PhysicalMemory& memory) {
    Send(memory);
    return Receive();
  }
  void Barrier() {
    const std::byte nothing[1] = {};
    JF_CHECK(SendMessage(socket_, nothing, {}, Deadline::AfterSeconds(20)).ok());
    (void)ReceiveMessage();
  }
  AddressRange Map(const PhysicalMemory& memory) {
    AddressRange range = Must(AddressRange::Reserve(driver_.api(), kBytes, 0));
    JF_CHECK(range.Map(0, memory).ok());
    JF_CHECK(range.SetAccess(0, kBytes, kDevice).ok());
    return range;
  }

  const int me_;
  const int socket_;
  const Way way_;
  FakeDriver driver_;
};

void RunProcesses(Way way) {
  int sockets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets), 0);
  pid_t children[2];
  for (int me = 0; me < 2; ++me) {
    children[me] = ::fork();
    if (children[me] != 0) continue;
    ::alarm(60);
    const auto before = OpenFds();
    std::string error;
    {
      Peer peer(me, sockets[me], way);
      error = peer.Run();
    }
    if (error.empty() && OpenFds() != before) error = "descriptors left open";
    if (error.empty() && SharedMappings() != 0) error = "mappings left";
    if (!error.empty()) std::fprintf(stderr, "process %d: %s\n", me, error.c_str());
    ::_exit(error.empty() ? 0 : 1);
  }
  for (const int socket : sockets) ::close(socket);
  for (const pid_t child : children) {
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

TEST(FakeProcesses, MeetThroughDescriptors) { RunProcesses(Way::kFd); }
TEST(FakeProcesses, MeetThroughFabricHandles) { RunProcesses(Way::kFabric); }

TEST(FakeProcesses, AChildMakesItsOwn) {
  const pid_t child = ::fork();
  if (child == 0) {
    FakeDriver driver;
    int count = 0;
    ::_exit(driver.api().cuDeviceGetCount(&count) == CUDA_SUCCESS && count == 2 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

#if !defined(__SANITIZE_THREAD__)  // which allows no threads after a fork that had some
TEST(FakeProcesses, AChildOfAProcessWithAFakeMakesItsOwn) {
  FakeDriver parent;
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    if (parent.api().cuDeviceGetCount(&count) != CUDA_ERROR_DEINITIALIZED) ::_exit(2);
    FakeDriver driver;
    ::_exit(driver.api().cuDeviceGetCount(&count) == CUDA_SUCCESS && count == 2 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

}  // namespace
}  // namespace jaxfabric::cuda
