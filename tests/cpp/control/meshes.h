// Processes played by threads, on one host or as if on several, each with its mesh.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "control/mesh.h"

namespace jaxfabric {

inline std::span<const std::byte> Raw(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

inline WireWriter Hello(int process) {
  WireWriter hello(MessageType::kHello);
  return hello.Add(static_cast<uint32_t>(process));
}

// What the handlers have seen.
class Inbox {
 public:
  Mesh::Handlers Handlers() {
    return {.on_message =
                [this](int process, WireReader& message) {
                  const auto type = message.type();
                  const auto value = message.Get<uint64_t>();
                  std::lock_guard lock(mutex_);
                  if (message.ok()) messages_.push_back({process, type, value});
                  changed_.notify_all();
                },
            .on_gone =
                [this](int process, LinkEnd how) {
                  std::lock_guard lock(mutex_);
                  gone_[process] = how;
                  changed_.notify_all();
                }};
  }
  struct Message {
    int process;
    MessageType type;
    uint64_t value;
  };
  // At least `count` messages; fewer after a long while.
  std::vector<Message> WaitForMessages(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(20), [&] { return messages_.size() >= count; });
    return messages_;
  }
  // How it went; kNone if it has not within the time.
  LinkEnd WaitUntilGone(int process, Clock::duration time = std::chrono::seconds(20)) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [&] { return gone_.contains(process); });
    return gone_.contains(process) ? gone_[process] : LinkEnd::kNone;
  }

  void Forget() {
    std::lock_guard lock(mutex_);
    messages_.clear();
    gone_.clear();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Message> messages_;
  std::map<int, LinkEnd> gone_;
};

class MeshTest : public ::testing::Test {
 protected:
  // Before the inboxes go.
  void TearDown() override {
    for (auto& mesh : meshes_) mesh->Stop();
  }
  // Process i is on host i % hosts. Hosts are reached at `ip`.
  void Create(int count, int hosts = 1, const std::string& ip = "127.0.0.1") {
    hosts_ = hosts;
    for (int i = 0; i < count; ++i) {
      std::optional<Mesh::Network> network;
      if (hosts > 1) network = {*TcpAddress::FromIp(ip, 0), {}, unreachable_after_};
      auto mesh = Mesh::Create(i, count, network);
      ASSERT_TRUE(mesh.ok()) << mesh.status().ToString();
      meshes_.push_back(*std::move(mesh));
      jobs_.push_back({"0123456789abcdef0123456789abcdef", 1});
    }
    inboxes_ = std::vector<Inbox>(static_cast<size_t>(count));
    connected_.assign(static_cast<size_t>(count), OkStatus());
    greetings_.resize(static_cast<size_t>(count));
  }
  // As process `self` sees them.
  std::vector<Mesh::Peer> Peers(size_t self) const {
    std::vector<Mesh::Peer> peers;
    for (size_t i = 0; i < inboxes_.size(); ++i) {
      const bool same_host = i % static_cast<size_t>(hosts_) == self % static_cast<size_t>(hosts_);
      if (i < meshes_.size()) {
        peers.push_back({same_host, meshes_[i]->name(), meshes_[i]->tcp_address()});
      } else {
        peers.push_back({same_host, "", ""});
      }
    }
    return peers;
  }
  void StartConnecting(double seconds = 20) {
    for (size_t i = 0; i < meshes_.size(); ++i) {
      threads_.emplace_back([this, i, seconds] {
        auto greetings = meshes_[i]->Connect(Peers(i), jobs_[i], Hello(static_cast<int>(i)).bytes(),
                                             fds_, Deadline::AfterSeconds(seconds));
        connected_[i] = greetings.status();
        if (greetings.ok()) greetings_[i] = *std::move(greetings);
      });
    }
  }
  void FinishConnecting() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  void Start() {
    for (size_t i = 0; i < meshes_.size(); ++i) {
      ASSERT_TRUE(connected_[i].ok()) << connected_[i].ToString();
      meshes_[i]->Start(inboxes_[i].Handlers());
    }
  }
  void ExpectEveryMessageInOrder() {
    constexpr uint64_t kCount = 500;
    std::vector<std::thread> senders;
    for (auto& mesh : meshes_) {
      senders.emplace_back([&mesh] {
        for (uint64_t i = 0; i < kCount; ++i) {
          WireWriter message(MessageType::kRetire);
          mesh->Broadcast(message.Add(i));
        }
      });
    }
    for (std::thread& sender : senders) sender.join();
    const size_t others = meshes_.size() - 1;
    for (Inbox& inbox : inboxes_) {
      std::map<int, uint64_t> next;
      for (const auto& message : inbox.WaitForMessages(others * kCount)) {
        EXPECT_EQ(message.value, next[message.process]++);
      }
      EXPECT_EQ(next.size(), others);
      for (auto [process, count] : next) EXPECT_EQ(count, kCount) << process;
    }
  }

  int hosts_ = 1;
  Clock::duration unreachable_after_ = std::chrono::seconds(10);
  std::vector<int> fds_;
  std::vector<std::unique_ptr<Mesh>> meshes_;
  std::vector<Mesh::Job> jobs_;
  std::vector<Inbox> inboxes_;
  std::vector<Status> connected_;
  std::vector<std::vector<Mesh::Greeting>> greetings_;
  std::vector<std::thread> threads_;
};

}  // namespace jaxfabric
