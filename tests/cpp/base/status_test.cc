#include "base/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>

namespace jaxfabric {
namespace {

TEST(Status, OkHasNoMessage) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), Code::kOk);
  EXPECT_EQ(status.ToString(), "OK");
  EXPECT_TRUE(status.WithContext("rank 3").ok());
}

TEST(Status, CopiesAndAddsContext) {
  const Status status(Code::kUnavailable, "peer 3 died");
  Status copy = status;
  EXPECT_EQ(copy.ToString(), "UNAVAILABLE: peer 3 died");
  copy = status.WithContext("psum");
  EXPECT_EQ(copy.code(), Code::kUnavailable);
  EXPECT_EQ(copy.message(), "psum: peer 3 died");
}

TEST(Status, UnknownCodesHaveAName) {
  EXPECT_EQ(CodeName(Code::kUnauthenticated), "UNAUTHENTICATED");
  EXPECT_EQ(CodeName(static_cast<Code>(99)), "UNKNOWN");
  EXPECT_EQ(CodeName(static_cast<Code>(-1)), "UNKNOWN");
}

TEST(Status, ErrnoGivesTheFittingCode) {
  EXPECT_EQ(ErrnoStatus("open", EACCES).code(), Code::kPermissionDenied);
  EXPECT_EQ(ErrnoStatus("send", EPIPE).code(), Code::kUnavailable);
  EXPECT_EQ(ErrnoStatus("mmap", ENOMEM).code(), Code::kResourceExhausted);
  EXPECT_NE(ErrnoStatus("mmap", ENOMEM).message().find("mmap: "), std::string_view::npos);
}

Result<int> Half(int value) {
  if (value % 2 != 0) return Status(Code::kInvalidArgument, "odd");
  return value / 2;
}

Result<int> Quarter(int value) {
  JF_ASSIGN_OR_RETURN(const int half, Half(value));
  return Half(half);
}

Status CheckQuarter(int value) {
  JF_RETURN_IF_ERROR(Quarter(value).status());
  return OkStatus();
}

TEST(Result, CarriesAValueOrAStatus) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Quarter(6).status().message(), "odd");
  EXPECT_EQ(CheckQuarter(5).code(), Code::kInvalidArgument);
  EXPECT_TRUE(CheckQuarter(4).ok());
}

TEST(Result, MovesOutWhatCannotBeCopied) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  const std::unique_ptr<int> value = std::move(result).value();
  EXPECT_EQ(*value, 7);
}

TEST(StrCat, JoinsTextAndNumbers) {
  EXPECT_EQ(StrCat("rank ", 3, ' ', true, " ", 1.5, std::string("!")), "rank 3 true 1.5!");
  EXPECT_EQ(StrCat(), "");
}

}  // namespace
}  // namespace jaxfabric
