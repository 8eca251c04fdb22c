#include "common/shm/slab.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/shm/session_view.h"
#include "common/shm/slab_internal.h"
#include "tests/common/shm/process_util.h"

namespace shardd {
namespace {

using testing::Child;
using testing::CountFds;
using ::testing::HasSubstr;
using testing::SmapsBytes;
using testing::TempDir;

constexpr int64_t kMiB = int64_t{1} << 20;

class SlabBackingTest : public ::testing::TestWithParam<SlabBacking> {
 protected:
  absl::StatusOr<std::unique_ptr<Slab>> Create(int64_t size_bytes) {
    return Slab::Create("test", GetParam(), size_bytes);
  }
};
INSTANTIATE_TEST_SUITE_P(Backings, SlabBackingTest,
                         ::testing::Values(SlabBacking::kSealedMemfd, SlabBacking::kFrozenMemfd), [](const auto& info) {
                           std::string name(SlabBackingName(info.param));
                           name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
                           return name;
                         });

TEST_P(SlabBackingTest, EveryPageIsPresentAfterCreate) {
  const int64_t size_bytes = 5 * kMiB + 3 * kPageBytes;
  const auto slab = Create(size_bytes);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_EQ(SmapsBytes((*slab)->data(), "Rss"), size_bytes);
  std::vector<unsigned char> present(static_cast<size_t>(size_bytes / kPageBytes));
  ASSERT_EQ(mincore((*slab)->data(), static_cast<size_t>(size_bytes), present.data()), 0);
  EXPECT_THAT(present, ::testing::Each(::testing::Truly([](unsigned char page) { return (page & 1) != 0; })));
  struct stat object {};
  ASSERT_EQ(fstat((*slab)->fd(), &object), 0);
  EXPECT_GE(object.st_blocks * 512, size_bytes);
}

TEST_P(SlabBackingTest, StartsAsZerosAndIsWritableByItsOwner) {
  const auto slab = Create(kMiB);
  ASSERT_TRUE(slab.ok()) << slab.status();
  const std::vector<char> zeros(kMiB, 0);
  EXPECT_EQ(std::memcmp((*slab)->data(), zeros.data(), zeros.size()), 0);
  std::memset((*slab)->data(), 7, kMiB);
  EXPECT_EQ(*(*slab)->At<char>(kMiB - 1), 7);
}

TEST_P(SlabBackingTest, SizeIsRoundedUpToWholePages) {
  const auto slab = Create(kPageBytes + 1);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_EQ((*slab)->size_bytes(), 2 * kPageBytes);
  struct stat object {};
  ASSERT_EQ(fstat((*slab)->fd(), &object), 0);
  EXPECT_EQ(object.st_size, 2 * kPageBytes);
}

TEST_P(SlabBackingTest, OnlyTheOwnerMayOpenIt) {
  const auto slab = Create(kPageBytes);
  ASSERT_TRUE(slab.ok()) << slab.status();
  struct stat object {};
  ASSERT_EQ(fstat((*slab)->fd(), &object), 0);
  EXPECT_EQ(object.st_mode & 07777, 0600u);
  EXPECT_NE(fcntl((*slab)->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_P(SlabBackingTest, ReadOnlyDescriptorCannotWrite) {
  const auto slab = Create(kPageBytes);
  ASSERT_TRUE(slab.ok()) << slab.status();
  const auto fd = (*slab)->ReadOnlyFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(write(fd->get(), "x", 1), -1);
  EXPECT_EQ(mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0), MAP_FAILED);
  EXPECT_NE(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
  *(*slab)->At<char>(9) = 'y';
  char byte = 0;
  EXPECT_EQ(pread(fd->get(), &byte, 1, 9), 1);
  EXPECT_EQ(byte, 'y');
}

TEST_P(SlabBackingTest, LeavesNothingBehind) {
  const int fds = CountFds();
  {
    const auto slab = Create(kMiB);
    ASSERT_TRUE(slab.ok()) << slab.status();
    EXPECT_EQ(CountFds(), fds + 1);
  }
  EXPECT_EQ(CountFds(), fds);
}

TEST_P(SlabBackingTest, ImpossibleSizesAreRefused) {
  const int fds = CountFds();
  for (const int64_t size_bytes : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
    EXPECT_EQ(Create(size_bytes).status().code(), absl::StatusCode::kInvalidArgument) << size_bytes;
  }
  const absl::Status status = Create(int64_t{1} << 60).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), HasSubstr(absl::StrCat(int64_t{1} << 60)));
  EXPECT_EQ(CountFds(), fds);
}

// A memory cgroup or a machine that is too small is not seen by the kernel's call: the OOM killer comes.
TEST(SlabTest, MoreThanThereIsIsRefusedBeforeAnythingIsAllocated) {
  const auto limits = GetMemoryLimits();
  ASSERT_TRUE(limits.ok()) << limits.status();
  const int fds = CountFds();
  const absl::Status status = Slab::Create("shards", SlabBacking::kSealedMemfd, 2 * limits->free_bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), HasSubstr("allocate slab \"shards\": reserve memory: too little is left by "));
  EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("want ", 2 * limits->free_bytes, " bytes")));
  EXPECT_EQ(CountFds(), fds);
}

// The fallback for kernels before 5.14 must do the same as the kernel's own call, and keep what others have written.
TEST(SlabTest, TouchingPopulatesWithoutChangingContents) {
  for (const bool writable : {true, false}) {
    const UniqueFd fd(memfd_create("touch", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(fd.get(), kMiB), 0);
    ASSERT_EQ(pwrite(fd.get(), "kept", 4, kPageBytes), 4);
    const auto data = shm_internal::MapShared(fd.get(), kMiB, writable, "touch");
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_LT(SmapsBytes(*data, "Rss"), kMiB);
    ASSERT_TRUE(shm_internal::PopulatePages(*data, kMiB, writable, "touch", shm_internal::PopulateWith::kTouch).ok());
    EXPECT_EQ(SmapsBytes(*data, "Rss"), kMiB);
    if (writable) {
      struct stat object {};
      ASSERT_EQ(fstat(fd.get(), &object), 0);
      EXPECT_EQ(object.st_blocks * 512, kMiB) << "a read would have left holes";
    }
    EXPECT_EQ(std::memcmp(static_cast<char*>(*data) + kPageBytes, "kept", 4), 0);
    munmap(*data, kMiB);
  }
}

// Mounts a tmpfs of its own: in a child with its own mount namespace, so that nothing stays behind.
#define SKIP_UNLESS_ROOT()                                                    \
  if (geteuid() != 0) {                                                       \
    GTEST_SKIP() << "mounting a tmpfs needs root (euid " << geteuid() << ")"; \
  }

void MountTmpfs(const std::string& path, const char* options) {
  CHILD_CHECK(unshare(CLONE_NEWNS) == 0);
  CHILD_CHECK(mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
  CHILD_CHECK(mount("tmpfs", path.c_str(), "tmpfs", 0, options) == 0);
}

TEST(SlabTest, TmpfsThatFillsUpLateIsAnErrorNotSigbus) {
  SKIP_UNLESS_ROOT();
  const TempDir dir;
  Child child([&dir] {
    // A file system that says it has room and then gives none: every page beyond 1 MiB is refused at its first touch.
    MountTmpfs(dir.path(), "size=1m,huge=never");
    const UniqueFd fd(open(dir.File("file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    CHILD_CHECK(ftruncate(fd.get(), 2 * kMiB) == 0);
    const auto data = shm_internal::MapShared(fd.get(), 2 * kMiB, true, "file");
    CHILD_CHECK(data.ok());
    const absl::Status status = shm_internal::PopulatePages(*data, 2 * kMiB, true, "file");
    CHILD_CHECK(status.code() == absl::StatusCode::kResourceExhausted);
    return 0;
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST(SlabTest, SmallSlabsNeverClaimHugePages) {
  const auto slab = Slab::Create("page", SlabBacking::kSealedMemfd, kPageBytes);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_FALSE((*slab)->huge_pages());
  EXPECT_EQ(SmapsBytes((*slab)->data(), "ShmemPmdMapped"), 0);
}

// By default the kernel gives none with a fault.
TEST(SlabTest, WholeHugePagesAreMadeWhereTheKernelCan) {
  const auto probe = Slab::CreateLate("probe", SlabBacking::kSealedMemfd, 2 * kMiB);
  ASSERT_TRUE(probe.ok()) << probe.status();
  if (!shm_internal::MakeHugePages((*probe)->data(), 2 * kMiB)) {
    GTEST_SKIP() << "this kernel makes no huge pages of shared memory, or there are none left";
  }
  auto slab = Slab::Create("shards", SlabBacking::kSealedMemfd, 67 * kMiB + 4096);
  // A machine that is busy may be too slow for it once.
  for (int attempt = 0; attempt < 5 && slab.ok() && !(*slab)->huge_pages(); ++attempt) {
    slab = Slab::Create("shards", SlabBacking::kSealedMemfd, 67 * kMiB + 4096);
  }
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_TRUE((*slab)->huge_pages());
  EXPECT_EQ(SmapsBytes((*slab)->data(), "ShmemPmdMapped"), 66 * kMiB);
  EXPECT_EQ(SmapsBytes((*slab)->data(), "Rss"), 67 * kMiB + 4096) << "the rest in small ones";
  EXPECT_EQ(std::count((*slab)->At<char>(0), (*slab)->At<char>((*slab)->size_bytes()), 0), (*slab)->size_bytes());
  const auto mapped = MappedSlab::Map(UniqueFd(dup((*slab)->fd())), (*slab)->size_bytes(), /*writable=*/false);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ(SmapsBytes(mapped->data(), "ShmemPmdMapped"), 66 * kMiB) << "who maps it has them, too";
}

TEST(SlabTest, LargeMemfdReportsWhatSmapsReports) {
  const auto slab = Slab::Create("pool", SlabBacking::kSealedMemfd, 8 * kMiB);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_EQ((*slab)->huge_pages(), SmapsBytes((*slab)->data(), "ShmemPmdMapped") == 8 * kMiB);
}

}  // namespace
}  // namespace shardd
