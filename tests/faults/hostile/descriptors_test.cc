// The descriptors of a session in the hands of a client that means ill: what it may write it cannot shrink under the
// daemon, and what it may only read it cannot write.

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel.h"
#include "common/shm/session_view.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace shardd::faults {
namespace {

using e2e::Args;

// 0 or errno, of a call that gives -1 on failure.
int ErrorOf(int64_t result) { return result == -1 ? errno : 0; }

int64_t SizeOf(int fd) {
  struct stat object {};
  return fstat(fd, &object) == 0 ? int64_t{object.st_size} : -1;
}

// errno of a shared mapping that can be written, 0 where it is given.
int MapForWriting(int fd) {
  void* data = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int error = data == MAP_FAILED ? errno : 0;
  if (data != MAP_FAILED) munmap(data, kPageBytes);
  return error;
}

// errno of lifting the protection of a mapping that was made to read.
int ProtectForWriting(int fd) {
  void* data = mmap(nullptr, kPageBytes, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return -errno;
  const int error = ErrorOf(mprotect(data, kPageBytes, PROT_READ | PROT_WRITE));
  munmap(data, kPageBytes);
  return error;
}

// How a job is made, by which slabs there are.
struct Shape {
  const char* name;
  Args args;
  std::vector<int> read_only;  // SessionFd
};
std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << shape.name; }

// The object cannot be shrunk under the daemon, nor grown past what was planned, nor closed to it.
void ExpectSizeIsSealed(int fd) {
  const int64_t size_bytes = SizeOf(fd);
  ASSERT_GT(size_bytes, 0);
  EXPECT_EQ(ErrorOf(ftruncate(fd, 0)), EPERM);
  EXPECT_EQ(ErrorOf(ftruncate(fd, size_bytes - 1)), EPERM);
  EXPECT_EQ(ErrorOf(ftruncate(fd, size_bytes + kPageBytes)), EPERM);
  EXPECT_EQ(ErrorOf(fallocate(fd, 0, size_bytes, int64_t{1} << 30)), EPERM);
  for (const int seal : {F_SEAL_WRITE, F_SEAL_FUTURE_WRITE, F_SEAL_SHRINK}) {
    EXPECT_EQ(ErrorOf(fcntl(fd, F_ADD_SEALS, seal)), EPERM) << seal;
  }
  EXPECT_EQ(SizeOf(fd), size_bytes);
  // Emptying it is the client's right; the daemon then reads zeros.
  EXPECT_EQ(ErrorOf(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, size_bytes)), 0);
}

class Descriptors : public BadInput, public ::testing::WithParamInterface<Shape> {
 protected:
  // A session and its descriptors, once more.
  void EnterAndFetch(RawClient& client) {
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    auto fetched = FetchSessionFds(socket(), client.session().session_id(), client.session().token(), testing::kLimit);
    ASSERT_TRUE(fetched.ok()) << fetched.status();
    fds_ = *std::move(fetched);
  }
  std::vector<UniqueFd> fds_;
};

INSTANTIATE_TEST_SUITE_P(Jobs, Descriptors,
                         ::testing::Values(Shape{"ZeroCopy", {}, {kFdShards}},
                                           Shape{"Cast", {{"param_dtype", "bf16"}}, {kFdShards, kFdParameters}},
                                           Shape{"Pooled", {{"unshard_mode", "POOLED"}}, {kFdShards, kFdPool}}),
                         [](const auto& info) { return info.param.name; });

TEST_P(Descriptors, OfWhatAClientWritesKeepTheirSize) {
  StartDaemonWithJob({}, GetParam().args);
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterAndFetch(client));
    for (const int which : {kFdSessionMemory, kFdGradients}) {
      SCOPED_TRACE(which);
      ExpectSizeIsSealed(fds_[which].get());
    }
    EXPECT_TRUE(DaemonAlive());
  }
  ExpectJobIntact();
}

// Behind the places are the pieces of slabs on several GPUs, and this job has none.
TEST_F(BadInput, DescriptorsThatASessionDoesNotHaveAreRefused) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf({{"name", "few"}, {"world", "1"}}), 0).ok());
    const auto fetch = [&](FdRange range) {
      return FetchSessionFds(socket(), client.session().session_id(), client.session().token(), testing::kLimit,
                             nullptr, range);
    };
    for (const FdRange range : {FdRange{kSessionFdCount, 1}, FdRange{0, kSessionFdCount + 1}, FdRange{UINT32_MAX, 253},
                                FdRange{kSessionFdCount - 1, 2}}) {
      const absl::Status status = fetch(range).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    }
    const auto two = fetch({kFdShards, 2});
    ASSERT_TRUE(two.ok()) << two.status();
    EXPECT_TRUE((*two)[0].valid());
    EXPECT_FALSE((*two)[1].valid()) << "there is no cast copy";
  }
  ExpectJobIntact();
}

// Shards and optimizer state too, where the optimizer is the trainers' own.
TEST_F(BadInput, DescriptorsOfWhatTrainersWriteKeepTheirSize) {
  StartDaemonWithJob();
  {
    v1::JobSpec spec = SpecOf({{"name", "writes"}, {"world", "1"}});
    spec.mutable_config()->set_trainers_never_write(false);
    spec.mutable_config()->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
    spec.mutable_config()->mutable_optimizer()->set_trainer_states(2);
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(spec, 0).ok());
    auto fds = FetchSessionFds(socket(), client.session().session_id(), client.session().token(), testing::kLimit);
    ASSERT_TRUE(fds.ok()) << fds.status();
    for (const int which : {kFdSessionMemory, kFdShards, kFdOptimizer, kFdGradients}) {
      SCOPED_TRACE(which);
      ExpectSizeIsSealed((*fds)[which].get());
    }
    client.Send(Record(Opcode::kCommitParameters));  // reads what was emptied
    EXPECT_TRUE(testing::PollUntil([this] { return HasEvent("writes", "parameters", "version 1"); }));
  }
  ExpectJobIntact();
}

TEST_P(Descriptors, OfWhatAClientReadsCannotBeWritten) {
  StartDaemonWithJob({}, GetParam().args);
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterAndFetch(client));
    for (const int which : {kFdShards, kFdParameters, kFdPool}) {
      const bool wanted =
          std::find(GetParam().read_only.begin(), GetParam().read_only.end(), which) != GetParam().read_only.end();
      EXPECT_EQ(fds_[which].valid(), wanted) << which;
    }
    for (const int which : GetParam().read_only) {
      SCOPED_TRACE(which);
      const int fd = fds_[which].get();
      const int64_t size_bytes = SizeOf(fd);
      ASSERT_GT(size_bytes, 0);
      EXPECT_EQ(MapForWriting(fd), EACCES);
      EXPECT_EQ(ProtectForWriting(fd), EACCES);
      EXPECT_EQ(ErrorOf(pwrite(fd, "x", 1, 0)), EBADF);
      EXPECT_NE(ErrorOf(ftruncate(fd, 0)), 0);
      EXPECT_NE(ErrorOf(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPageBytes)), 0);
      EXPECT_NE(ErrorOf(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE)), 0);
      EXPECT_EQ(SizeOf(fd), size_bytes);
    }
  }
  ExpectJobIntact();
}

// A trainer of the daemon's user, or that is root in its container, opens the file of a read-only descriptor once more,
// for writing. It may change what lies there, which is its own job's, and no size: the daemon would read past the end.
TEST_P(Descriptors, KeepTheirSizeWhenTheyAreOpenedAnewForWriting) {
  StartDaemonWithJob({}, GetParam().args);
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterAndFetch(client));
    for (int which = 0; which < kSessionFdCount; ++which) {
      struct stat object {};
      if (which == kFdDoorbell || !fds_[which].valid() || fstat(fds_[which].get(), &object) != 0) continue;
      SCOPED_TRACE(which);
      const UniqueFd again(open(absl::StrCat("/proc/self/fd/", fds_[which].get()).c_str(), O_RDWR | O_CLOEXEC));
      ASSERT_TRUE(again.valid()) << std::strerror(errno);
      for (const int64_t size_bytes : {int64_t{0}, int64_t{object.st_size} - kPageBytes, int64_t{object.st_size} * 2}) {
        EXPECT_EQ(ErrorOf(ftruncate(again.get(), size_bytes)), EPERM) << size_bytes;
      }
      EXPECT_EQ(SizeOf(again.get()), int64_t{object.st_size});
    }
    EXPECT_TRUE(DaemonAlive());
  }
  ExpectJobIntact();
}

// Not even by a process of the daemon's own user, which may open it anew.
TEST_P(Descriptors, OfTheDaemonsPageCannotBeWrittenByAnybody) {
  StartDaemonWithJob({}, GetParam().args);
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterAndFetch(client));
    const int fd = fds_[kFdDaemonPage].get();
    EXPECT_NE(MapForWriting(fd), 0);
    const UniqueFd again(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(again.valid()) << std::strerror(errno);
    EXPECT_EQ(MapForWriting(again.get()), EPERM);
    EXPECT_EQ(ErrorOf(pwrite(again.get(), "x", 1, 0)), EPERM);
    EXPECT_EQ(ErrorOf(ftruncate(again.get(), 0)), EPERM);
    EXPECT_EQ(ErrorOf(fcntl(again.get(), F_ADD_SEALS, F_SEAL_WRITE)), EPERM);
  }
  ExpectJobIntact();
}

// The doorbell is one file for both ends: full, and set to block, it stops nobody but the client.
TEST_P(Descriptors, AFullDoorbellThatBlocksHoldsUpNobody) {
  StartDaemonWithJob({}, GetParam().args);
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterAndFetch(client));
    const int fd = fds_[kFdDoorbell].get();
    const uint64_t full = ~uint64_t{0} - 1;
    uint64_t rung = 0;
    EXPECT_EQ(ErrorOf(read(fd, &rung, sizeof(rung))), EAGAIN);
    ASSERT_EQ(write(fd, &full, sizeof(full)), static_cast<ssize_t>(sizeof(full)));
    ASSERT_EQ(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK), 0);
    EXPECT_TRUE(DaemonAlive());
    ExpectServesOthers();
    EXPECT_EQ(Ranks()[0].session_id(), client.session().session_id());
  }
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
