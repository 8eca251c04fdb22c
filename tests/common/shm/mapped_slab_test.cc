#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "common/shm/slab_internal.h"
#include "tests/common/shm/process_util.h"

namespace shardd {
namespace {

using testing::Child;
using testing::CountFds;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

UniqueFd Duplicate(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

class MappedSlabTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto slab = Slab::Create("session", SlabBacking::kSealedMemfd, kMiB);
    ASSERT_TRUE(slab.ok()) << slab.status();
    slab_ = *std::move(slab);
  }
  std::unique_ptr<Slab> slab_;
};

TEST_F(MappedSlabTest, SharesMemoryBothWaysAndIsPopulated) {
  auto mapped = MappedSlab::Map(Duplicate(slab_->fd()), kMiB, /*writable=*/true);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ(testing::SmapsBytes(mapped->data(), "Rss"), kMiB);
  std::strcpy(mapped->At<char>(100), "from the client");
  EXPECT_STREQ(slab_->At<char>(100), "from the client");
  std::strcpy(slab_->At<char>(200), "from the daemon");
  EXPECT_STREQ(mapped->At<char>(200), "from the daemon");
}

TEST_F(MappedSlabTest, AReadOnlyMapIsPopulatedAndCannotBecomeWritable) {
  auto fd = slab_->ReadOnlyFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  auto mapped = MappedSlab::Map(*std::move(fd), kMiB, /*writable=*/false);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ(testing::SmapsBytes(mapped->data(), "Rss"), kMiB);
  EXPECT_EQ(mprotect(mapped->data(), kMiB, PROT_READ | PROT_WRITE), -1);

  fd = slab_->ReadOnlyFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(MappedSlab::Map(*std::move(fd), kMiB, /*writable=*/true).status().code(),
            absl::StatusCode::kPermissionDenied);
}

TEST_F(MappedSlabTest, DescriptorIsClosedAfterMappingAndAfterEveryError) {
  const int fds = CountFds();
  auto mapped = MappedSlab::Map(Duplicate(slab_->fd()), kMiB, true);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ(CountFds(), fds);
  EXPECT_FALSE(MappedSlab::Map(Duplicate(slab_->fd()), 2 * kMiB, true).ok());
  EXPECT_FALSE(MappedSlab::Map(Duplicate(slab_->fd()), 0, true).ok());
  EXPECT_EQ(CountFds(), fds);
}

TEST_F(MappedSlabTest, ATooSmallObjectIsRefusedBeforeItCanFault) {
  const absl::Status status = MappedSlab::Map(Duplicate(slab_->fd()), kMiB + 1, true).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("got ", kMiB, " bytes, want ", kMiB + 1)));
}

TEST_F(MappedSlabTest, SizesAndObjectsThatMakeNoSenseAreRefused) {
  for (const int64_t size_bytes : {int64_t{0}, int64_t{-4096}, INT64_MIN, INT64_MAX}) {
    EXPECT_EQ(MappedSlab::Map(Duplicate(slab_->fd()), size_bytes, true).status().code(),
              absl::StatusCode::kInvalidArgument)
        << size_bytes;
  }
  EXPECT_EQ(MappedSlab::Map(UniqueFd(eventfd(0, EFD_CLOEXEC)), 8, true).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(MappedSlab::Map(UniqueFd(open("/dev/zero", O_RDWR | O_CLOEXEC)), kPageBytes, true).status().code(),
            absl::StatusCode::kInternal);
  EXPECT_FALSE(MappedSlab::Map(UniqueFd(), kPageBytes, true).ok());
}

TEST_F(MappedSlabTest, ForkedChildDoesNotHaveTheMapping) {
  auto mapped = MappedSlab::Map(Duplicate(slab_->fd()), kMiB, true);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_THAT(testing::SmapsField(mapped->data(), "VmFlags"), HasSubstr(" dc"));
  volatile char* const byte = mapped->At<char>(0);
  Child child([byte] {
    signal(SIGSEGV, SIG_DFL);  // past a sanitizer's handler
    *byte = 1;
    return 0;
  });
  EXPECT_EQ(child.Wait(), 1000 + SIGSEGV);
  EXPECT_EQ(*byte, 0);

  // The owner's mapping is an ordinary one: the difference is the flag, not the memory.
  volatile char* const owned = slab_->At<char>(0);
  Child other([owned] {
    *owned = 2;
    return 0;
  });
  EXPECT_EQ(other.Wait(), 0);
  EXPECT_EQ(*byte, 2);
}

TEST_F(MappedSlabTest, MovedMappingIsUnmappedOnce) {
  auto first = MappedSlab::Map(Duplicate(slab_->fd()), kMiB, true);
  ASSERT_TRUE(first.ok()) << first.status();
  void* const data = first->data();
  {
    MappedSlab second(*std::move(first));
    EXPECT_EQ(second.data(), data);
    EXPECT_EQ(first->data(), nullptr);
    MappedSlab third;
    third = std::move(second);
    EXPECT_EQ(third.data(), data);
    EXPECT_EQ(third.size_bytes(), kMiB);
    EXPECT_EQ(testing::SmapsBytes(data, "Rss"), kMiB);
  }
  EXPECT_EQ(testing::SmapsField(data, "Rss"), "");
}

TEST_F(MappedSlabTest, MappingOutlivesTheDaemonsSlab) {
  auto mapped = MappedSlab::Map(Duplicate(slab_->fd()), kMiB, true);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  *slab_->At<int>(0) = 41;
  slab_.reset();
  *mapped->At<int>(0) += 1;
  EXPECT_EQ(*mapped->At<int>(0), 42);
}

}  // namespace
}  // namespace shardd
