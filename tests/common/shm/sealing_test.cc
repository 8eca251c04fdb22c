// What a hostile receiver of a descriptor can and cannot do. The receiver is another process, with its own descriptor.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "common/shm/timeline.h"
#include "tests/common/shm/process_util.h"

namespace shardd {
namespace {

using testing::Child;
using testing::kLimit;

constexpr int64_t kMiB = int64_t{1} << 20;

std::unique_ptr<Slab> Create(SlabBacking backing) {
  auto slab = Slab::Create("test", backing, kMiB);
  EXPECT_TRUE(slab.ok()) << slab.status();
  return *std::move(slab);
}

bool Refused(long result) { return result == -1 && errno == EPERM; }

TEST(SealingTest, ReceiverCannotTruncateGrowOrUnsealAnyMemfd) {
  for (const SlabBacking backing : {SlabBacking::kSealedMemfd, SlabBacking::kFrozenMemfd}) {
    const std::unique_ptr<Slab> slab = Create(backing);
    Child receiver([&slab] {
      const int fd = open(absl::StrCat("/proc/self/fd/", slab->fd()).c_str(), O_RDWR);
      CHILD_CHECK(fd >= 0);
      CHILD_CHECK(Refused(ftruncate(fd, 0)));
      CHILD_CHECK(Refused(ftruncate(fd, kMiB - kPageBytes)));
      CHILD_CHECK(Refused(ftruncate(fd, 2 * kMiB)));
      CHILD_CHECK(Refused(fallocate(fd, 0, kMiB, kMiB)));
      CHILD_CHECK(pwrite(fd, "x", 1, kMiB) == -1);
      return 0;
    });
    EXPECT_EQ(receiver.Wait(), 0) << SlabBackingName(backing);
    struct stat object {};
    ASSERT_EQ(fstat(slab->fd(), &object), 0);
    EXPECT_EQ(object.st_size, kMiB);
    *slab->At<char>(kMiB - 1) = 1;  // would be SIGBUS
  }
}

TEST(SealingTest, ReceiverCannotSealTheDaemonOut) {
  for (const SlabBacking backing : {SlabBacking::kSealedMemfd, SlabBacking::kFrozenMemfd}) {
    const std::unique_ptr<Slab> slab = Create(backing);
    Child receiver([&slab] {
      CHILD_CHECK(Refused(fcntl(slab->fd(), F_ADD_SEALS, F_SEAL_WRITE)));
      CHILD_CHECK(Refused(fcntl(slab->fd(), F_ADD_SEALS, F_SEAL_SHRINK)));
      return 0;
    });
    EXPECT_EQ(receiver.Wait(), 0);
  }
}

TEST(SealingTest, SealedMemoryIsWritableByTheReceiver) {
  const std::unique_ptr<Slab> slab = Create(SlabBacking::kSealedMemfd);
  Child receiver([&slab] {
    auto mapped = MappedSlab::Map(UniqueFd(dup(slab->fd())), kMiB, /*writable=*/true);
    CHILD_CHECK(mapped.ok());
    std::strcpy(mapped->At<char>(kMiB - 100), "gradients");
    return 0;
  });
  EXPECT_EQ(receiver.Wait(), 0);
  EXPECT_STREQ(slab->At<char>(kMiB - 100), "gradients");
}

TEST(SealingTest, TheReceiverCannotWriteFrozenMemoryInAnyWay) {
  const std::unique_ptr<Slab> slab = Create(SlabBacking::kFrozenMemfd);
  std::strcpy(slab->At<char>(0), "before");
  Child receiver([&slab] {
    const int fd = open(absl::StrCat("/proc/self/fd/", slab->fd()).c_str(), O_RDWR);
    CHILD_CHECK(fd >= 0);  // opening is not refused, using it is
    CHILD_CHECK(Refused(pwrite(fd, "hack", 4, 0)));
    CHILD_CHECK(mmap(nullptr, kMiB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EPERM);
    CHILD_CHECK(Refused(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPageBytes)));
    CHILD_CHECK(MappedSlab::Map(UniqueFd(dup(fd)), kMiB, /*writable=*/true).status().code() ==
                absl::StatusCode::kPermissionDenied);
    auto mapped = MappedSlab::Map(UniqueFd(dup(fd)), kMiB, /*writable=*/false);
    CHILD_CHECK(mapped.ok());
    CHILD_CHECK(mprotect(mapped->data(), kMiB, PROT_READ | PROT_WRITE) == -1);
    CHILD_CHECK(std::strcmp(mapped->At<char>(0), "before") == 0);
    return 0;
  });
  EXPECT_EQ(receiver.Wait(), 0);
  EXPECT_STREQ(slab->At<char>(0), "before");
}

TEST(SealingTest, OwnersWriteFrozenMemoryOnWhichReceiversCanSleep) {
  const std::unique_ptr<Slab> page = Create(SlabBacking::kFrozenMemfd);
  const std::unique_ptr<Slab> own = Create(SlabBacking::kSealedMemfd);
  auto* const waiting = own->At<std::atomic<uint32_t>>(0);
  Child receiver([&] {
    auto mapped = MappedSlab::Map(UniqueFd(dup(page->fd())), kMiB, /*writable=*/false);
    CHILD_CHECK(mapped.ok());
    const TimelineWord& word = mapped->At<DaemonPage>(0)->version;
    // The call itself, for TimelineWait would hide an error behind its slices: it sleeps out its time.
    const timespec timeout = {.tv_sec = 0, .tv_nsec = 1'000'000};
    CHILD_CHECK(syscall(SYS_futex, &word, FUTEX_WAIT, 0, &timeout, nullptr, 0) == -1 && errno == ETIMEDOUT);
    CHILD_CHECK(syscall(SYS_futex, &word, FUTEX_WAIT, 1, &timeout, nullptr, 0) == -1 && errno == EAGAIN);
    CHILD_CHECK(TimelineWait(word, 7, *waiting, kLimit, absl::ZeroDuration()) == WaitResult::kReached);
    return 0;
  });
  ASSERT_TRUE(testing::PollUntil([&] { return waiting->load() != 0; }));
  TimelineStore(page->At<DaemonPage>(0)->version, 7, waiting);
  EXPECT_EQ(receiver.Wait(), 0);
  EXPECT_EQ(waiting->load(), 0u);
}

TEST(SealingTest, PeerKilledWhileItWritesLeavesMemoryUsable) {
  const std::unique_ptr<Slab> slab = Create(SlabBacking::kSealedMemfd);
  auto* const started = slab->At<std::atomic<uint64_t>>(0);
  Child writer([&slab] {
    auto mapped = MappedSlab::Map(UniqueFd(dup(slab->fd())), kMiB, /*writable=*/true);
    CHILD_CHECK(mapped.ok());
    for (uint64_t n = 1;; ++n) {
      std::memset(mapped->At<char>(kPageBytes), static_cast<int>(n), kMiB - kPageBytes);
      mapped->At<std::atomic<uint64_t>>(0)->store(n);
    }
    return 0;
  });
  ASSERT_TRUE(testing::PollUntil([started] { return started->load() > 3; }));
  writer.Kill();
  EXPECT_EQ(writer.Wait(), 1000 + SIGKILL);
  const uint64_t last = started->load();
  std::memset(slab->data(), 0, kMiB);
  EXPECT_GT(last, 3u);
  EXPECT_EQ(started->load(), 0u) << "nobody writes any more";
}

TEST(SealingTest, AnotherUserCannotReopenItForWriting) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "becoming another user needs root (euid " << geteuid() << ")";
  }
  const std::unique_ptr<Slab> slab = Create(SlabBacking::kSealedMemfd);
  const UniqueFd unrestricted(memfd_create("control", MFD_CLOEXEC));
  const auto read_only = slab->ReadOnlyFd();
  ASSERT_TRUE(read_only.ok()) << read_only.status();
  Child other([&] {
    CHILD_CHECK(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
    CHILD_CHECK(prctl(PR_SET_DUMPABLE, 1) == 0);  // else /proc/self itself is closed to us, whatever the file's mode
    CHILD_CHECK(open(absl::StrCat("/proc/self/fd/", unrestricted.get()).c_str(), O_RDWR) >= 0);
    CHILD_CHECK(open(absl::StrCat("/proc/self/fd/", read_only->get()).c_str(), O_RDWR) == -1 && errno == EACCES);
    char byte;
    CHILD_CHECK(pread(read_only->get(), &byte, 1, 0) == 1);
    return 0;
  });
  EXPECT_EQ(other.Wait(), 0);
}

}  // namespace
}  // namespace shardd
