#include "common/versions/versions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/version.h"
#include "tests/testing/build_paths.h"
#include "tests/testing/files.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

absl::StatusOr<int> Common(VersionRange mine, VersionRange theirs) {
  return CommonVersion("protocol version", {"this daemon", mine}, {"the client", theirs});
}

TEST(VersionsTest, TheNewestOfBothRangesIsSpoken) {
  EXPECT_EQ(*Common({13, 13}, {13, 13}), 13);
  EXPECT_EQ(*Common({13, 15}, {14, 17}), 15);
  EXPECT_EQ(*Common({14, 17}, {13, 15}), 15);
  EXPECT_EQ(*Common({13, 17}, {14, 15}), 15);
  EXPECT_EQ(*Common({13, 14}, {14, 20}), 14);
}

TEST(VersionsTest, DisjointRangesAreNamedWithWhoIsBehind) {
  const absl::Status behind = Common({13, 14}, {15, 16}).status();
  EXPECT_EQ(behind.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      behind.message(),
      "this daemon and the client have no common protocol version (got 15 to 16, want 13 to 14); upgrade this daemon");
  EXPECT_EQ(Common({15, 15}, {13, 14}).status().message(),
            "this daemon and the client have no common protocol version (got 13 to 14, want 15); upgrade the client");
  EXPECT_EQ(Common({13, 13}, {0, 0}).status().code(), absl::StatusCode::kFailedPrecondition) << "says no version";
}

TEST(VersionsTest, WhatIsNoRangeIsRefused) {
  const absl::Status status = Common({13, 14}, {14, 13}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "what the client says is no range of protocol versions (got 14 to 13)");
  EXPECT_EQ(Common({13, 14}, {14, -1}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(VersionsTest, OneNumberIsARange) {
  EXPECT_EQ(SaidRange(13, 0).newest, 13);
  EXPECT_EQ(SaidRange(13, 15).newest, 15);
  EXPECT_FALSE(SaidRange(13, 0).Has(14));
}

TEST(VersionsTest, AFormatIsReadOrTheRemedyNamed) {
  EXPECT_TRUE(CheckFormat("journal", 2, {2, 3}).ok());
  EXPECT_TRUE(CheckFormat("journal", 3, {2, 3}).ok());
  EXPECT_EQ(CheckFormat("journal", 4, {2, 3}).message(),
            "journal: this version of shardd does not read its format (got 4, want 2 to 3); start a newer one");
  EXPECT_EQ(CheckFormat("journal", 1, {2, 3}).message(),
            "journal: this version of shardd does not read its format (got 1, want 2 to 3); start an older one");
}

TEST(VersionsTest, ThisBuildsRangesAreRanges) {
  for (const VersionRange range :
       {kProtocolVersions, kCustodyVersions, kCustodyFormats, kJournalFormats, kTakeUpFormats}) {
    EXPECT_GT(range.oldest, 0);
    EXPECT_LE(range.oldest, range.newest);
  }
}

// deploy/docs/versions.md: of each row the words between bars.
std::vector<std::vector<std::string>> Table() {
  const std::string text = testing::ReadWholeFile(built::kSourceDir + "/deploy/docs/versions.md");
  std::vector<std::vector<std::string>> rows;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StartsWith(line, "|")) {
      if (!rows.empty()) break;  // of the first table alone
      continue;
    }
    std::vector<std::string> cells;
    for (const absl::string_view cell : absl::StrSplit(absl::StripSuffix(absl::StripPrefix(line, "|"), "|"), '|')) {
      cells.emplace_back(absl::StripAsciiWhitespace(cell));
    }
    rows.push_back(std::move(cells));
  }
  return rows;
}

TEST(VersionsTest, TheTableOfVersionsMatchesThisBuild) {
  const std::vector<std::vector<std::string>> rows = Table();
  ASSERT_GT(rows.size(), 2u);
  EXPECT_THAT(rows[0], ElementsAre("release", "protocol", "custody", "job record", "journal", "take-up log"));
  EXPECT_THAT(rows.back(), ElementsAre(kVersion, kProtocolVersions.Text(), kCustodyVersions.Text(),
                                       kCustodyFormats.Text(), kJournalFormats.Text(), kTakeUpFormats.Text()));
}

// A release that is recorded has its row, and its bytes are there.
TEST(VersionsTest, TheTableHasARowForEachRecordedRelease) {
  std::set<std::string> recorded, in_table;
  for (const auto& entry : std::filesystem::directory_iterator(built::kSourceDir + "/tests/recorded")) {
    if (entry.is_directory()) recorded.insert(entry.path().filename());
  }
  const std::vector<std::vector<std::string>> rows = Table();
  for (size_t i = 2; i < rows.size(); ++i) in_table.insert(rows[i][0]);
  EXPECT_EQ(recorded, in_table);
}

}  // namespace
}  // namespace shardd
