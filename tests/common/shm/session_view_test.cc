#include "common/shm/session_view.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/shm/slab.h"

namespace shardd {
namespace {

TEST(SessionViewTest, DaemonPagesHoldEverySlotAndGroupAndNoMore) {
  for (const auto& [slots, groups] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {1, 1}, {3, 7}, {64, 0}, {0, 64}, {1000, 100'000}}) {
    const int64_t size_bytes = DaemonPageBytes(slots, groups);
    EXPECT_EQ(size_bytes % kPageBytes, 0);
    const int64_t used = kDaemonPageTailOffset + 128 * (slots + groups);
    EXPECT_GE(size_bytes, used);
    EXPECT_LT(size_bytes, used + kPageBytes);
  }
}

TEST(SessionViewTest, EveryWordStandsOnItsOwnLinesInsideThePage) {
  constexpr int64_t kSlots = 5, kGroups = 40;
  const auto slab = Slab::Create("page", SlabBacking::kSealedMemfd, DaemonPageBytes(kSlots, kGroups));
  ASSERT_TRUE(slab.ok()) << slab.status();
  const DaemonPageView view((*slab)->data(), kSlots, kGroups);
  std::vector<TimelineWord*> words = {&view.page().epoch, &view.page().version, &view.page().consumed,
                                      &view.page().full_params};
  for (int64_t s = 0; s < kSlots; ++s) words.push_back(&view.slot(s).released);
  for (int64_t g = 0; g < kGroups; ++g) words.push_back(&view.group(g).unsharded);
  const char* const base = static_cast<const char*>((*slab)->data());
  for (size_t i = 0; i < words.size(); ++i) {
    const int64_t offset = reinterpret_cast<const char*>(words[i]) - base;
    EXPECT_EQ(offset % 128, 0);
    EXPECT_LE(offset + 128, view.size_bytes());
    if (i > 0) {
      EXPECT_GE(words[i] - words[i - 1], 16) << i;
    }
    words[i]->store(i + 1);
  }
  view.group(kGroups - 1).pool_offset_bytes = 4096;
  const ReadOnlyDaemonPageView reader(base, kSlots, kGroups);
  EXPECT_EQ(reader.page().epoch.load(), 1u);
  EXPECT_EQ(reader.slot(0).released.load(), 5u);
  EXPECT_EQ(reader.group(kGroups - 1).unsharded.load(), words.size());
  EXPECT_EQ(reader.group(kGroups - 1).pool_offset_bytes.load(), 4096);
}

TEST(SessionViewTest, RecordsWrapAroundAtTheRingsEnd) {
  const int64_t masks = 4096 + kRingBytes;
  const auto slab = Slab::Create("session", SlabBacking::kSealedMemfd, masks + 4096);
  ASSERT_TRUE(slab.ok()) << slab.status();
  const SessionMemoryView view((*slab)->data(), 4096, masks);
  EXPECT_EQ(reinterpret_cast<char*>(&view.record(0)), (*slab)->At<char>(4096));
  EXPECT_EQ(&view.record(kRingRecords), &view.record(0));
  EXPECT_EQ(&view.record(UINT64_MAX), &view.record(kRingRecords - 1));
  EXPECT_EQ(reinterpret_cast<char*>(&view.record(kRingRecords - 1)) + sizeof(CommandRecord), (*slab)->At<char>(masks));
  EXPECT_EQ(view.mask(8), (*slab)->At<uint8_t>(masks + 8));
  EXPECT_EQ(&view.page(), (*slab)->At<ClientPage>(0));
  EXPECT_TRUE(view.valid());
  EXPECT_FALSE(SessionMemoryView().valid());
}

TEST(SessionViewTest, MaskBitsAreIndependent) {
  uint8_t mask[4] = {0, 0, 0, 0};
  EXPECT_EQ(MaskBytes(0), 0);
  EXPECT_EQ(MaskBytes(8), 1);
  EXPECT_EQ(MaskBytes(9), 2);
  for (const int64_t i : {0, 7, 8, 20}) SetMaskBit(mask, i, true);
  for (int64_t i = 0; i < 24; ++i) {
    EXPECT_EQ(MaskBit(mask, i), i == 0 || i == 7 || i == 8 || i == 20) << i;
  }
  SetMaskBit(mask, 7, false);
  SetMaskBit(mask, 1, false);
  EXPECT_EQ(mask[0], 1);
  EXPECT_EQ(mask[3], 0);
}

}  // namespace
}  // namespace shardd
