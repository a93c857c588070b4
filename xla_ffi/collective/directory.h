// Who takes part in which call instance: filled by announcements, read at set-up and for messages.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/wire.h"

namespace jaxfabric {

class Directory {
 public:
  struct Member {
    int64_t rank = -1;
    int process = -1;
    uint32_t cell = 0;
    std::optional<uint32_t> first_run_id;  // of the executable, where the member's process knows it
    uint64_t salt = 0;                     // see Participant::salt_
    bool retired = false;
  };
  struct Announcement {
    uint64_t key = 0;
    uint32_t size = 0;
    uint32_t position = 0;
    Member member;
    std::string label;   // "psum float32[4096]"
    std::string source;  // "train.py:42"

    WireWriter ToMessage() const;
    // Empty when the message is malformed.
    static std::optional<Announcement> FromMessage(WireReader& message, int process);
  };

  // Returns the member that has been there before, if it is another rank.
  std::optional<Member> Add(const Announcement& announcement);
  // All members by position, once all have announced themselves.
  std::optional<std::vector<Member>> Complete(uint64_t key) const;
  // The member at a position, if it has announced itself.
  std::optional<Member> Find(uint64_t key, uint32_t position) const;
  // Whether that rank has announced itself, retired or not.
  bool Has(uint64_t key, int64_t rank) const;
  // "psum float32[4096] at train.py:42", or "an unknown op".
  std::string Describe(uint64_t key) const;
  // Marks one member as retired; true when that was the last one. The instance is forgotten then.
  bool Retire(uint64_t key, uint32_t position);

 private:
  struct Instance {
    std::vector<std::optional<Member>> members;
    std::string label;
    std::string source;
  };
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Instance> instances_;
};

}  // namespace jaxfabric
