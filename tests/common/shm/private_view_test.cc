// Stores into a private view: which are found, and what else is seen through it.

#include "common/shm/private_view.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <utility>

#include "common/shm/session_view.h"
#include "tests/common/shm/process_util.h"

namespace shardd {
namespace {

constexpr int64_t kPages = 600;  // more regions than one scan returns

// Parameter: the kernel tracks stores by itself, or each page is looked at, as before 6.7.
class Views : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (const absl::Status status = PrivateView::Supported(); !status.ok()) {
      GTEST_SKIP() << status;
    }
    auto slab = Slab::Create("view", SlabBacking::kSealedMemfd, kPages * kPageBytes);
    ASSERT_TRUE(slab.ok()) << slab.status();
    slab_ = *std::move(slab);
    auto mapped = MappedSlab::Map(UniqueFd(fcntl(slab_->fd(), F_DUPFD_CLOEXEC, 0)), kPages * kPageBytes,
                                  /*writable=*/true, /*keep_descriptor=*/true, MappedPages::kSmall);
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    mapped_ = *std::move(mapped);
    UniqueFd fd(fcntl(slab_->fd(), F_DUPFD_CLOEXEC, 0));
    const UniqueFd next(dup(fd.get()));
    rlimit limit = {};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    const rlimit tight = {static_cast<rlim_t>(next.get() + 2), limit.rlim_max};  // one more: the page table
    if (!GetParam()) {
      ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
    }
    auto view = PrivateView::Of(mapped_, std::move(fd));
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    ASSERT_TRUE(view.ok()) << view.status();
    view_ = *std::move(view);
  }
  char* own(int64_t page) { return mapped_.At<char>(page * kPageBytes); }
  char* daemons(int64_t page) { return slab_->At<char>(page * kPageBytes); }
  // "[1, 2) [5, 9)", in pages.
  std::string Changed() {
    const auto ranges = view_.Changed();
    EXPECT_TRUE(ranges.ok()) << ranges.status();
    std::string text;
    for (const PrivateView::Range& range : *ranges) {
      text += "[" + std::to_string(range.first / kPageBytes) + ", " + std::to_string(range.end / kPageBytes) + ") ";
    }
    return text;
  }

  std::unique_ptr<Slab> slab_;
  MappedSlab mapped_;
  PrivateView view_;
};

INSTANTIATE_TEST_SUITE_P(Pages, Views, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Tracked" : "LookedAt"; });

TEST_P(Views, FindStoresOfThreadsAndTheKernelAndNoOthers) {
  EXPECT_EQ(Changed(), "");
  *daemons(3) = 1;
  EXPECT_EQ(*own(3), 1);
  EXPECT_EQ(Changed(), "");
  *own(5) = 2;
  std::thread([this] { *own(6) = 3; }).join();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  EXPECT_EQ(read(ends[0], own(kPages - 1), 1), 1);
  close(ends[0]);
  close(ends[1]);
  EXPECT_EQ(Changed(), "[5, 7) [599, 600) ");
  EXPECT_EQ(*daemons(5), 0);
}

TEST_P(Views, ShowTheSlabAgainOnceDroppedAndFindNewStores) {
  for (int time = 0; time < 3; ++time) {
    *own(9) = 7;
    EXPECT_EQ(Changed(), "[9, 10) ");
    ASSERT_TRUE(view_.Drop(*view_.Changed()).ok());
    *daemons(9) = static_cast<char>(20 + time);
    EXPECT_EQ(*own(9), 20 + time);
    EXPECT_EQ(Changed(), "");
  }
}

// Of a slab in huge pages: to track these takes their mapping away, and behind a drop all of one looked stored into.
TEST_P(Views, HaveSmallPagesAndADroppedHugePageShowsNothing) {
  EXPECT_EQ(testing::SmapsBytes(mapped_.data(), "ShmemPmdMapped"), 0);
  std::memset(own(0), 1, 512 * kPageBytes);
  EXPECT_EQ(Changed(), "[0, 512) ");
  ASSERT_TRUE(view_.Drop(*view_.Changed()).ok());
  EXPECT_EQ(Changed(), "");
}

TEST_P(Views, FindPagesThatTouchNone) {
  std::string want;
  for (int64_t page = 0; page < kPages; page += 2) {
    *own(page) = 1;
    want += "[" + std::to_string(page) + ", " + std::to_string(page + 1) + ") ";
  }
  EXPECT_EQ(Changed(), want);
}

TEST_P(Views, FindStoresAfterAFork) {
  *own(1) = 1;
  const pid_t child = fork();
  if (child == 0) {
    _exit(0);
  }
  *own(2) = 1;
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  *own(4) = 1;
  EXPECT_EQ(Changed(), "[1, 3) [4, 5) ");
}

TEST_P(Views, BytesGoToTheSlabPastThem) {
  own(2)[5] = 9;
  char now = 1;
  ASSERT_TRUE(view_.ReadShared(2 * kPageBytes + 5, &now, 1).ok());
  EXPECT_EQ(now, 0);
  ASSERT_TRUE(view_.WriteShared(2 * kPageBytes + 5, 1).ok());
  EXPECT_EQ(daemons(2)[5], 9);
}

// What other nodes hold has no memory here.
TEST(PrivateView, HolesOfASlabStayHoles) {
  if (const absl::Status status = PrivateView::Supported(); !status.ok()) {
    GTEST_SKIP() << status;
  }
  auto slab = Slab::CreateParts("parts", SlabBacking::kSealedMemfd, kPages * kPageBytes,
                                {{100 * kPageBytes, 200 * kPageBytes}});
  ASSERT_TRUE(slab.ok()) << slab.status();
  struct stat before {
  }, after{};
  ASSERT_EQ(fstat((*slab)->fd(), &before), 0);
  ASSERT_LT(before.st_blocks * 512, kPages * kPageBytes / 2);
  auto mapped = MappedSlab::Map(UniqueFd(fcntl((*slab)->fd(), F_DUPFD_CLOEXEC, 0)), kPages * kPageBytes,
                                /*writable=*/true, /*keep_descriptor=*/true, MappedPages::kSmall);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  auto view = PrivateView::Of(*mapped, UniqueFd(fcntl((*slab)->fd(), F_DUPFD_CLOEXEC, 0)));
  ASSERT_TRUE(view.ok()) << view.status();
  mapped->At<char>(150 * kPageBytes)[0] = 1;
  const auto changed = view->Changed();
  ASSERT_TRUE(changed.ok()) << changed.status();
  ASSERT_EQ(changed->size(), 1u);
  EXPECT_EQ(changed->front().first, 150 * kPageBytes);
  ASSERT_EQ(fstat((*slab)->fd(), &after), 0);
  EXPECT_EQ(after.st_blocks, before.st_blocks);
}

}  // namespace
}  // namespace shardd
