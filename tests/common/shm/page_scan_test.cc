#include "common/shm/page_scan.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "common/shm/slab_internal.h"
#include "common/shm/unique_fd.h"

namespace shardd::shm_internal {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

class PageScanTest : public ::testing::Test {
 protected:
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;

  void SetUp() override {
    const int64_t hole_bytes = 32 * kMiB;  // where the kernel then maps what comes next, and so behind `data_`
    void* const hole = mmap(nullptr, hole_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = static_cast<char*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    ASSERT_NE(data_, MAP_FAILED);
    munmap(hole, hole_bytes);
    ASSERT_EQ(madvise(data_, kBytes, MADV_NOHUGEPAGE), 0);
    if (absl::IsUnimplemented(Scan({.all_of = kPagePresent}).status)) {
      GTEST_SKIP() << "this kernel does not scan page tables (before 6.7)";
    }
  }
  void TearDown() override { munmap(data_, kBytes); }

  struct Found {
    absl::Status status;
    Ranges ranges;  // neighbours as one
  };
  Found Scan(WantedPages wanted) {
    Found found;
    found.status = ScanPages(page_map_.get(), data_, 0, kBytes, wanted, [&found](int64_t first, int64_t end) {
      if (!found.ranges.empty() && found.ranges.back().second == first) {
        found.ranges.back().second = end;
      } else {
        found.ranges.emplace_back(first, end);
      }
    });
    return found;
  }

  static constexpr int64_t kBytes = 200 * kMiB;
  const UniqueFd page_map_{open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)};
  char* data_ = nullptr;
};

TEST_F(PageScanTest, FindsWhatIsPresentAcrossPieces) {
  for (const int64_t at : {int64_t{0}, 64 * kMiB - kPageBytes, 64 * kMiB, kBytes - kPageBytes}) data_[at] = 1;
  const Found found = Scan({.all_of = kPagePresent});
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_EQ(found.ranges,
            (Ranges{{0, kPageBytes}, {64 * kMiB - kPageBytes, 64 * kMiB + kPageBytes}, {kBytes - kPageBytes, kBytes}}));
}

TEST_F(PageScanTest, MoreRangesThanOneCallReturnsAreAllFound) {
  constexpr int kTouched = 1000;
  for (int i = 0; i < kTouched; ++i) data_[2 * i * kPageBytes] = 1;
  const Found found = Scan({.all_of = kPagePresent});
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_EQ(found.ranges.size(), kTouched);
}

TEST_F(PageScanTest, AHugePageIsOne) {
  ASSERT_EQ(madvise(data_, kBytes, MADV_HUGEPAGE), 0);
  char* const huge = reinterpret_cast<char*>(RoundUpToPage(reinterpret_cast<int64_t>(data_ + kHugePageBytes - 1)) /
                                             kHugePageBytes * kHugePageBytes);
  huge[0] = 1;
  const Found found = Scan({.all_of = kPageHuge});
  ASSERT_TRUE(found.status.ok()) << found.status;
  if (found.ranges.empty()) {
    GTEST_SKIP() << "the kernel gave no huge page (transparent_hugepage/enabled, or none is free)";
  }
  EXPECT_EQ(found.ranges, (Ranges{{huge - data_, huge - data_ + kHugePageBytes}}));
}

TEST_F(PageScanTest, OfNoMappingIsNothing) {
  munmap(data_ + kMiB, static_cast<size_t>(kMiB));
  data_[0] = 1;
  const Found found = Scan({.none_of = kPageOfFile, .any_of = kPagePresent | kPageSwapped});
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_EQ(found.ranges, (Ranges{{0, kPageBytes}}));
}

// Of bytes that this process has read from files, of the whole process.
int64_t BytesRead() {
  std::ifstream file("/proc/self/io");
  std::string key;
  int64_t value = 0;
  file >> key >> value;
  EXPECT_EQ(key, "rchar:");
  return value;
}

// smaps has some 700 bytes for each mapping, and walks the page tables of all of them: gigabytes of other jobs.
TEST_F(PageScanTest, ANewSlabDoesNotLookAtOtherMappings) {
  for (int64_t at = 0; at < kBytes; at += 2 * kPageBytes << 6) {
    ASSERT_EQ(mprotect(data_ + at, kPageBytes, PROT_READ), 0);
  }
  const int64_t before = BytesRead();
  const absl::StatusOr<std::unique_ptr<Slab>> slab = Slab::Create("slab", SlabBacking::kSealedMemfd, 4 * kMiB);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_LT(BytesRead() - before, 32 << 10);
}

}  // namespace
}  // namespace shardd::shm_internal
