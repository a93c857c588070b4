// Who calls a port of a job without being of it, in each of the ways that there are.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "os/handshake.h"

namespace jaxfabric {

enum class Stranger { kWrongSecret, kRandomBytes, kHalfHeader, kHugeLength, kOldIncarnation };
inline constexpr Stranger kStrangers[] = {Stranger::kWrongSecret, Stranger::kRandomBytes,
                                          Stranger::kHalfHeader, Stranger::kHugeLength,
                                          Stranger::kOldIncarnation};
inline constexpr std::string_view kStrangerNames[] = {"WrongSecret", "RandomBytes", "HalfHeader",
                                                      "HugeLength", "OldIncarnation"};

inline std::string StrangerName(const ::testing::TestParamInfo<Stranger>& each) {
  return std::string(kStrangerNames[static_cast<size_t>(each.param)]);
}

// All that the `number`th of a kind says: it waits for no answer.
inline std::string WordsOf(Stranger kind, int number, JobIdentity own, uint32_t called,
                           Purpose purpose) {
  std::mt19937 random(static_cast<uint32_t>(number));
  if (kind == Stranger::kOldIncarnation) own.incarnation ^= 1;
  Handshake handshake = Handshake::Call(own, called, purpose, 0);
  const auto call = handshake.outgoing();
  std::string words(reinterpret_cast<const char*>(call.data()), call.size());
  switch (kind) {
    case Stranger::kWrongSecret: {
      std::string proof(24, '\0');
      std::memcpy(proof.data(), &kHandshakeMagic, 4);
      std::memcpy(proof.data() + 4, &kHandshakeVersion, 4);
      for (size_t i = 8; i < proof.size(); ++i) proof[i] = static_cast<char>(random());
      return words + proof;
    }
    case Stranger::kRandomBytes:
      words.resize(48 + random() % 1000);
      for (char& byte : words) byte = static_cast<char>(random());
      return words;
    case Stranger::kHalfHeader:
      return words.substr(0, 24);
    case Stranger::kHugeLength:
      return std::string(words.size(), '\xff');
    case Stranger::kOldIncarnation:
      return words;
  }
  return {};
}

// So many of a kind call `address` one after the other, and stay. `own` is the identity of a
// process that could call process `called`.
inline std::vector<UniqueFd> CallByStrangers(Stranger kind, int count, const TcpAddress& address,
                                             const JobIdentity& own, uint32_t called,
                                             Purpose purpose) {
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < count; ++i) {
    auto socket = ConnectTcp(address, {}, Deadline::AfterSeconds(20));
    EXPECT_TRUE(socket.ok()) << socket.status().ToString();
    if (!socket.ok()) break;
    const std::string words = WordsOf(kind, i, own, called, purpose);
    ::send(socket->get(), words.data(), words.size(), MSG_NOSIGNAL);
    strangers.push_back(*std::move(socket));
  }
  return strangers;
}

inline int LinesIn(std::string_view text) {
  int lines = 0;
  for (char each : text) lines += each == '\n';
  return lines;
}

}  // namespace jaxfabric
