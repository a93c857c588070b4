#include "collective/directory.h"

#include <algorithm>

#include "base/status.h"

namespace jaxfabric {

WireWriter Directory::Announcement::ToMessage() const {
  WireWriter message(MessageType::kInstance);
  message.Add(key).Add(size).Add(position).Add(member.rank).Add(member.cell);
  message.Add(uint32_t{member.first_run_id.has_value()}).Add(member.first_run_id.value_or(0));
  message.Add(member.salt);
  message.Add(std::string_view(label)).Add(std::string_view(source));
  return message;
}

std::optional<Directory::Announcement> Directory::Announcement::FromMessage(WireReader& message,
                                                                            int process) {
  Announcement announcement;
  announcement.key = message.Get<uint64_t>();
  announcement.size = message.Get<uint32_t>();
  announcement.position = message.Get<uint32_t>();
  announcement.member.rank = message.Get<int64_t>();
  announcement.member.cell = message.Get<uint32_t>();
  const bool known = message.Get<uint32_t>() != 0;
  const auto first_run_id = message.Get<uint32_t>();
  announcement.member.salt = message.Get<uint64_t>();
  if (known) announcement.member.first_run_id = first_run_id;
  announcement.label = message.GetString();
  announcement.source = message.GetString();
  announcement.member.process = process;
  constexpr uint32_t kMaxRanks = 1 << 20;
  if (!message.ok() || announcement.size > kMaxRanks ||
      announcement.position >= announcement.size) {
    return std::nullopt;
  }
  return announcement;
}

std::optional<Directory::Member> Directory::Add(const Announcement& announcement) {
  std::lock_guard lock(mutex_);
  Instance& instance = instances_[announcement.key];
  if (instance.members.size() < announcement.size) instance.members.resize(announcement.size);
  auto& member = instance.members[announcement.position];
  std::optional<Member> other;
  if (member && member->rank != announcement.member.rank) other = member;
  member = announcement.member;
  instance.label = announcement.label;
  if (instance.source.empty() || instance.source == "unknown line") {
    instance.source = announcement.source;
  }
  return other;
}

std::optional<std::vector<Directory::Member>> Directory::Complete(uint64_t key) const {
  std::lock_guard lock(mutex_);
  const auto found = instances_.find(key);
  if (found == instances_.end()) return std::nullopt;
  std::vector<Member> members;
  for (const auto& member : found->second.members) {
    if (!member) return std::nullopt;
    members.push_back(*member);
  }
  return members;
}

std::optional<Directory::Member> Directory::Find(uint64_t key, uint32_t position) const {
  std::lock_guard lock(mutex_);
  const auto found = instances_.find(key);
  if (found == instances_.end() || position >= found->second.members.size()) return std::nullopt;
  return found->second.members[position];
}

bool Directory::Has(uint64_t key, int64_t rank) const {
  std::lock_guard lock(mutex_);
  const auto found = instances_.find(key);
  if (found == instances_.end()) return false;
  const auto& members = found->second.members;
  return std::any_of(members.begin(), members.end(),
                     [rank](const auto& member) { return member && member->rank == rank; });
}

std::string Directory::Describe(uint64_t key) const {
  std::lock_guard lock(mutex_);
  const auto found = instances_.find(key);
  if (found == instances_.end()) return "an unknown op";
  return StrCat(found->second.label, " at ", found->second.source);
}

bool Directory::Retire(uint64_t key, uint32_t position) {
  std::lock_guard lock(mutex_);
  const auto found = instances_.find(key);
  if (found == instances_.end() || position >= found->second.members.size()) return false;
  auto& members = found->second.members;
  if (!members[position]) return false;
  members[position]->retired = true;
  const bool last = std::all_of(members.begin(), members.end(),
                                [](const auto& member) { return member && member->retired; });
  if (last) instances_.erase(found);
  return last;
}

}  // namespace jaxfabric
