#include "common/shm/slab.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

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
    return Slab::Create("test", GetParam(), size_bytes,
                        GetParam() == SlabBacking::kTmpfsFile ? dir_.File("slab") : std::string());
  }
  TempDir dir_;
};
INSTANTIATE_TEST_SUITE_P(Backings, SlabBackingTest,
                         ::testing::Values(SlabBacking::kTmpfsFile, SlabBacking::kMemfd, SlabBacking::kSealedMemfd,
                                           SlabBacking::kFrozenMemfd),
                         [](const auto& info) {
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
    EXPECT_EQ(access(dir_.File("slab").c_str(), F_OK) == 0, GetParam() == SlabBacking::kTmpfsFile);
  }
  EXPECT_EQ(CountFds(), fds);
  EXPECT_NE(access(dir_.File("slab").c_str(), F_OK), 0);
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
  EXPECT_NE(access(dir_.File("slab").c_str(), F_OK), 0);
}

TEST(SlabTest, ExistingFileIsNeitherUsedNorRemoved) {
  const TempDir dir;
  dir.Write("slab", "another job's shards");
  const auto slab = Slab::Create("shards", SlabBacking::kTmpfsFile, kMiB, dir.File("slab"));
  EXPECT_EQ(slab.status().code(), absl::StatusCode::kAlreadyExists) << slab.status();
  EXPECT_EQ(testing::ReadWholeFile(dir.File("slab")), "another job's shards");
}

TEST(SlabTest, MissingFolderAndMissingPathAreErrors) {
  const TempDir dir;
  EXPECT_EQ(Slab::Create("shards", SlabBacking::kTmpfsFile, kMiB, dir.File("no/slab")).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Slab::Create("shards", SlabBacking::kTmpfsFile, kMiB).status().code(), absl::StatusCode::kInvalidArgument);
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

// The tests below mount a tmpfs of their own: in a child with its own mount namespace, so that nothing stays behind.
#define SKIP_UNLESS_ROOT()                                                    \
  if (geteuid() != 0) {                                                       \
    GTEST_SKIP() << "mounting a tmpfs needs root (euid " << geteuid() << ")"; \
  }

void MountTmpfs(const std::string& path, const char* options) {
  CHILD_CHECK(unshare(CLONE_NEWNS) == 0);
  CHILD_CHECK(mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
  CHILD_CHECK(mount("tmpfs", path.c_str(), "tmpfs", 0, options) == 0);
}

TEST(SlabTest, FullTmpfsIsResourceExhaustedAndSaysWhatToDo) {
  SKIP_UNLESS_ROOT();
  const TempDir dir;
  Child child([&dir] {
    MountTmpfs(dir.path(), "size=4m,huge=never");
    const auto first = Slab::Create("shards", SlabBacking::kTmpfsFile, 3 * kMiB, dir.File("first"));
    CHILD_CHECK(first.ok());
    const absl::Status status =
        Slab::Create("optimizer", SlabBacking::kTmpfsFile, 2 * kMiB, dir.File("second")).status();
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    CHILD_CHECK(status.code() == absl::StatusCode::kResourceExhausted);
    CHILD_CHECK(absl::StrContains(status.message(), absl::StrCat("got ", kMiB, " bytes free")));
    CHILD_CHECK(absl::StrContains(status.message(), absl::StrCat("want ", 2 * kMiB, " bytes")));
    CHILD_CHECK(absl::StrContains(status.message(), "--shm-size"));
    CHILD_CHECK(access(dir.File("second").c_str(), F_OK) != 0);
    // What was there is untouched, and what fits still fits, to the last byte.
    CHILD_CHECK(Slab::Create("optimizer", SlabBacking::kTmpfsFile, kMiB, dir.File("second")).ok());
    return 0;
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST(SlabTest, TmpfsThatFillsUpAfterTheCheckIsAnErrorAndNotSigbus) {
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

TEST(SlabTest, HugePagesAreReportedWhereTheKernelMapsThemAndOnlyThere) {
  SKIP_UNLESS_ROOT();
  for (const bool wanted : {true, false}) {
    const TempDir dir;
    Child child([&dir, wanted] {
      MountTmpfs(dir.path(), wanted ? "size=64m,huge=always" : "size=64m,huge=never");
      const auto slab = Slab::Create("shards", SlabBacking::kTmpfsFile, 9 * kMiB, dir.File("slab"));
      CHILD_CHECK(slab.ok());
      const int64_t huge_bytes = SmapsBytes((*slab)->data(), "ShmemPmdMapped");
      std::fprintf(stderr, "huge=%s: %ld of %ld bytes\n", wanted ? "always" : "never", static_cast<long>(huge_bytes),
                   static_cast<long>((*slab)->size_bytes()));
      CHILD_CHECK((*slab)->huge_pages() == (huge_bytes >= 8 * kMiB));
      CHILD_CHECK(wanted || !(*slab)->huge_pages());
      CHILD_CHECK(SmapsBytes((*slab)->data(), "Rss") >= 9 * kMiB);
      return wanted && !(*slab)->huge_pages() ? 2 : 0;
    });
    const int code = child.Wait();
    if (code == 2) {
      GTEST_SKIP() << "this kernel gives no huge pages to tmpfs";
    }
    EXPECT_EQ(code, 0);
  }
}

TEST(SlabTest, SmallSlabsNeverClaimHugePages) {
  const auto slab = Slab::Create("page", SlabBacking::kMemfd, kPageBytes);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_FALSE((*slab)->huge_pages());
  EXPECT_EQ(SmapsBytes((*slab)->data(), "ShmemPmdMapped"), 0);
}

TEST(SlabTest, LargeMemfdReportsWhatSmapsReports) {
  const auto slab = Slab::Create("pool", SlabBacking::kMemfd, 8 * kMiB);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_EQ((*slab)->huge_pages(), SmapsBytes((*slab)->data(), "ShmemPmdMapped") == 8 * kMiB);
}

}  // namespace
}  // namespace shardd
