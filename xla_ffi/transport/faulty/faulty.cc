#include "transport/faulty/faulty.h"

#include <atomic>
#include <deque>
#include <optional>
#include <string>
#include <utility>

namespace jaxfabric {
namespace {

class FaultyChannel : public Channel {
 public:
  FaultyChannel(std::unique_ptr<Channel> inner, const FaultPlan& plan)
      : inner_(std::move(inner)), plan_(plan) {}

  Status Put(std::span<const std::byte> local, size_t offset) override {
    JF_RETURN_IF_ERROR(CountCall());
    const uint64_t number = puts_++;
    if (plan_.drop_puts.Contains(number)) return OkStatus();
    if (plan_.truncate_puts.Contains(number)) local = local.first(local.size() / 2);
    const bool delayed = plan_.delay_puts.Contains(number);
    if (held_.empty() && !delayed) return inner_->Put(local, offset);
    if (delayed) calls_until_release_ = plan_.delay_calls;
    held_.push_back({std::vector<std::byte>(local.begin(), local.end()), offset});
    return OkStatus();
  }

  Status Signal() override {
    JF_RETURN_IF_ERROR(CountCall());
    const uint64_t number = signals_++;
    if (plan_.drop_signals.Contains(number)) return OkStatus();
    if (held_.empty()) return inner_->Signal();
    held_.push_back({std::nullopt, 0});
    return OkStatus();
  }

  Status Wait(uint64_t count, Deadline deadline) override {
    JF_RETURN_IF_ERROR(CheckNotReset());
    JF_RETURN_IF_ERROR(Release());  // the peer may wait for what is held before it answers
    return inner_->Wait(count, deadline);
  }

  Status Flush(Deadline deadline) override {
    JF_RETURN_IF_ERROR(CheckNotReset());
    JF_RETURN_IF_ERROR(Release());
    return inner_->Flush(deadline);
  }

  void Abort() override {
    inner_->Abort();
    aborted_.store(true, std::memory_order_release);  // whoever sees it sees the inner abort
  }
  std::span<std::byte> peer_window() override { return inner_->peer_window(); }

 private:
  // A put, or a signal where there are no bytes.
  struct Held {
    std::optional<std::vector<std::byte>> bytes;
    size_t offset;
  };

  Status CheckNotReset() const {
    if (!reset_) return OkStatus();
    return Status(Code::kUnavailable, "connection reset (by the faulty transport)");
  }

  // Before every put and signal: breaks the connection or lets the held calls go when it is time.
  Status CountCall() {
    if (calls_++ == plan_.reset_at) {
      reset_ = true;
      held_.clear();
      inner_->Abort();
    }
    JF_RETURN_IF_ERROR(CheckNotReset());
    // What is held must not hide from the caller that nothing is sent any more.
    if (aborted_.load(std::memory_order_acquire)) return inner_->Flush(Deadline::Never());
    if (!held_.empty() && --calls_until_release_ == 0) return Release();
    return OkStatus();
  }

  Status Release() {
    while (!held_.empty()) {
      const Held held = std::move(held_.front());
      held_.pop_front();
      JF_RETURN_IF_ERROR(held.bytes ? inner_->Put(*held.bytes, held.offset) : inner_->Signal());
    }
    return OkStatus();
  }

  const std::unique_ptr<Channel> inner_;
  const FaultPlan plan_;
  std::deque<Held> held_;
  uint64_t calls_until_release_ = 0;
  uint64_t calls_ = 0;
  uint64_t puts_ = 0;
  uint64_t signals_ = 0;
  bool reset_ = false;
  std::atomic<bool> aborted_{false};
};

class FaultyEndpoint : public Endpoint {
 public:
  FaultyEndpoint(std::unique_ptr<Endpoint> inner, const FaultPlan& plan)
      : inner_(std::move(inner)), plan_(plan) {}

  EndpointAddress address() const override { return inner_->address(); }
  std::span<std::byte> window() override { return inner_->window(); }
  Result<std::unique_ptr<Channel>> Connect(const EndpointAddress& peer, std::vector<UniqueFd> fds,
                                           Deadline deadline) override {
    JF_ASSIGN_OR_RETURN(std::unique_ptr<Channel> channel,
                        inner_->Connect(peer, std::move(fds), deadline));
    const int number = connected_++;
    if (plan_.only_channel >= 0 && plan_.only_channel != number) return channel;
    return std::unique_ptr<Channel>(new FaultyChannel(std::move(channel), plan_));
  }

 private:
  const std::unique_ptr<Endpoint> inner_;
  const FaultPlan plan_;
  int connected_ = 0;
};

class FaultyTransport : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, const FaultPlan& plan)
      : inner_(std::move(inner)), plan_(plan), name_(StrCat("faulty+", inner_->name())) {}

  std::string_view name() const override { return name_; }
  Status Probe() override { return inner_->Probe(); }
  Result<std::unique_ptr<Endpoint>> Bind(int self, int max_peers, size_t window_bytes) override {
    JF_ASSIGN_OR_RETURN(std::unique_ptr<Endpoint> endpoint,
                        inner_->Bind(self, max_peers, window_bytes));
    return std::unique_ptr<Endpoint>(new FaultyEndpoint(std::move(endpoint), plan_));
  }

 private:
  const std::unique_ptr<Transport> inner_;
  const FaultPlan plan_;
  const std::string name_;
};

}  // namespace

std::unique_ptr<Transport> MakeFaultyTransport(std::unique_ptr<Transport> inner, FaultPlan plan) {
  return std::make_unique<FaultyTransport>(std::move(inner), plan);
}

}  // namespace jaxfabric
