#include "server/storage/slab_pieces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

#include "common/plan/slab_spread.h"

namespace shardd {
namespace {

constexpr int kSlabs = 5, kGpus = 8, kRanks = 8;

OpenFiles Files(int64_t open, int64_t limit) {
  OpenFiles files;
  files.open = open;
  files.limit = limit;
  return files;
}

TEST(SlabPiecesTest, AreAsManyAsAllowedWhereNothingIsShort) {
  EXPECT_EQ(*PiecesPerSection(Files(100, INT64_MAX), kSlabs, kSlabs, kGpus, kRanks), kMaxSlabPieces);
  EXPECT_EQ(*PiecesPerSection(Files(100, 1 << 20), kSlabs, kSlabs, kGpus, kRanks), kMaxSlabPieces);
  EXPECT_EQ(*PiecesPerSection(Files(100, INT64_MAX), 0, 0, kGpus, kRanks), kMaxSlabPieces) << "a job without slabs";
}

// Whatever the limit, the pieces fit into it, and half of it stays for others.
TEST(SlabPiecesTest, TakeHalfOfWhatIsLeft) {
  for (const int64_t limit : {1024, 2048, 4096, 65536}) {
    for (const int64_t open : {50, 500}) {
      const absl::StatusOr<int> pieces = PiecesPerSection(Files(open, limit), kSlabs, kSlabs, kGpus, kRanks);
      ASSERT_TRUE(pieces.ok()) << pieces.status();
      EXPECT_GE(*pieces, 1);
      EXPECT_LE(3 * kSlabs * *pieces, (limit - open) / 2) << limit << " " << open;
      const absl::StatusOr<int> per_section = PiecesPerSection(Files(open, limit), kSlabs, 2 * kSlabs, kGpus, kRanks);
      EXPECT_LE(3 * 2 * kSlabs * *per_section, (limit - open) / 2) << limit << " " << open;
    }
  }
}

TEST(SlabPiecesTest, AreRefusedWhereThereIsNotOneOnEachGpu) {
  const int64_t least = 3 * kSlabs * kGpus + 14 * kRanks + 32;
  EXPECT_EQ(*PiecesPerSection(Files(1000, 1000 + least), kSlabs, kSlabs, kGpus, kRanks), 4)
      << "one on each GPU, and few files for others";
  const absl::Status refused = PiecesPerSection(Files(1000, 1000 + least - 1), kSlabs, kSlabs, kGpus, kRanks).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("(got 263 left of 1263, want at least 264)"));
  EXPECT_FALSE(PiecesPerSection(Files(1000, 500), kSlabs, kSlabs, kGpus, kRanks).ok());
}

TEST(OpenFilesTest, CountsWhatThisProcessHas) {
  const OpenFiles before = CountOpenFiles();
  EXPECT_GE(before.open, 3);
  EXPECT_GT(before.limit, before.open);
  FILE* const one = fopen("/dev/null", "r");
  EXPECT_EQ(CountOpenFiles().open, before.open + 1);
  fclose(one);
  EXPECT_EQ(CountOpenFiles().open, before.open);
}

}  // namespace
}  // namespace shardd
