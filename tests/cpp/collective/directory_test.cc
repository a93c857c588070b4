#include "collective/directory.h"

#include <gtest/gtest.h>

namespace jaxfabric {
namespace {

Directory::Announcement Announce(uint64_t key, uint32_t position, uint32_t size = 3) {
  Directory::Announcement announcement;
  announcement.key = key;
  announcement.size = size;
  announcement.position = position;
  announcement.member = {int64_t{position} * 2048, static_cast<int>(position), position + 40,
                         std::nullopt, false};
  announcement.label = "psum float32[8]";
  announcement.source = "train.py:42";
  return announcement;
}

TEST(DirectoryTest, IsCompleteWhenEveryMemberIsThere) {
  Directory directory;
  EXPECT_FALSE(directory.Complete(9).has_value());
  EXPECT_FALSE(directory.Add(Announce(9, 2)));
  EXPECT_FALSE(directory.Add(Announce(9, 0)));
  // Again is nothing; another rank at that position is.
  EXPECT_FALSE(directory.Add(Announce(9, 0)));
  Directory::Announcement stranger = Announce(9, 0);
  stranger.member.rank += 1000;
  EXPECT_EQ(directory.Add(stranger)->rank, stranger.member.rank - 1000);
  EXPECT_TRUE(directory.Add(Announce(9, 0)));
  EXPECT_FALSE(directory.Complete(9).has_value());
  EXPECT_FALSE(directory.Find(9, 1).has_value());
  EXPECT_FALSE(directory.Find(9, 3).has_value());
  directory.Add(Announce(9, 1));
  const auto members = directory.Complete(9);
  ASSERT_TRUE(members.has_value());
  for (uint32_t position = 0; position < 3; ++position) {
    EXPECT_EQ((*members)[position].rank, position * 2048);
    EXPECT_EQ((*members)[position].cell, position + 40);
  }
  EXPECT_EQ(directory.Describe(9), "psum float32[8] at train.py:42");
  EXPECT_EQ(directory.Describe(10), "an unknown op");
}

TEST(DirectoryTest, IsForgottenWhenEveryMemberHasRetired) {
  Directory directory;
  for (uint32_t position = 0; position < 3; ++position) directory.Add(Announce(9, position));
  EXPECT_FALSE(directory.Retire(9, 1));
  EXPECT_FALSE(directory.Retire(9, 1));
  EXPECT_FALSE(directory.Retire(9, 7));
  EXPECT_FALSE(directory.Retire(8, 0));
  EXPECT_FALSE(directory.Retire(9, 0));
  EXPECT_TRUE(directory.Retire(9, 2));
  EXPECT_EQ(directory.Describe(9), "an unknown op");
  EXPECT_FALSE(directory.Retire(9, 2));
}

TEST(DirectoryTest, AMemberThatNeverCameKeepsTheInstance) {
  Directory directory;
  directory.Add(Announce(9, 0));
  EXPECT_FALSE(directory.Retire(9, 0));
  directory.Add(Announce(9, 1));
  directory.Add(Announce(9, 2));
  EXPECT_FALSE(directory.Retire(9, 1));
  EXPECT_TRUE(directory.Retire(9, 2));
}

TEST(DirectoryTest, AnnouncementsTravel) {
  const WireWriter message = Announce(9, 1).ToMessage();
  WireReader reader(message.bytes());
  const auto read = Directory::Announcement::FromMessage(reader, 5);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->key, 9u);
  EXPECT_EQ(read->position, 1u);
  EXPECT_EQ(read->member.rank, 2048);
  EXPECT_EQ(read->member.process, 5);
  EXPECT_EQ(read->member.cell, 41u);
  EXPECT_EQ(read->label, "psum float32[8]");
  EXPECT_EQ(read->source, "train.py:42");
}

TEST(DirectoryTest, MalformedAnnouncementsAreRefused) {
  const WireWriter message = Announce(9, 1).ToMessage();
  for (size_t size = 12; size < message.bytes().size(); ++size) {
    WireReader reader(message.bytes().first(size));
    EXPECT_FALSE(Directory::Announcement::FromMessage(reader, 5).has_value()) << size;
  }
  for (auto [position, size] : {std::pair{3u, 3u}, {0u, 0u}, {0u, 0xffffffffu}}) {
    const WireWriter wrong = Announce(9, position, size).ToMessage();
    WireReader reader(wrong.bytes());
    EXPECT_FALSE(Directory::Announcement::FromMessage(reader, 5).has_value());
  }
}

}  // namespace
}  // namespace jaxfabric
