// A trainer's write into memory of its own job that never comes back: its source is a page that somebody else would
// have to bring (a file system in user space, a server that is gone), and the kernel holds the file's lock meanwhile.

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel.h"
#include "common/shm/session_view.h"
#include "google/protobuf/util/json_util.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"
#include "tests/testing/run_as_uid.h"

namespace shardd::faults {
namespace {

constexpr uint32_t kStranger = 12345;
constexpr int64_t kNumel = int64_t{1} << 20;

// A page that does not come until this says so.
class MissingPage {
 public:
  MissingPage() {
    uffd_.reset(static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC)));
    uffdio_api api = {};
    api.api = UFFD_API;
    data_ = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uffdio_register registered = {};
    registered.range = {reinterpret_cast<uintptr_t>(data_), static_cast<uint64_t>(kPageBytes)};
    registered.mode = UFFDIO_REGISTER_MODE_MISSING;
    if (!uffd_.valid() || ioctl(uffd_.get(), UFFDIO_API, &api) != 0 ||
        ioctl(uffd_.get(), UFFDIO_REGISTER, &registered) != 0) {
      error_ = errno;
    }
  }
  ~MissingPage() {
    Bring();
    munmap(data_, kPageBytes);
  }
  int error() const { return error_; }
  const void* data() const { return data_; }
  // Somebody waits for it.
  bool IsAwaited() const {
    uffd_msg message;
    return read(uffd_.get(), &message, sizeof(message)) == static_cast<ssize_t>(sizeof(message));
  }
  void Bring() {
    uffdio_zeropage zero = {};
    zero.range = {reinterpret_cast<uintptr_t>(data_), static_cast<uint64_t>(kPageBytes)};
    (void)ioctl(uffd_.get(), UFFDIO_ZEROPAGE, &zero);
  }

 private:
  UniqueFd uffd_;
  void* data_ = nullptr;
  int error_ = 0;
};

class StuckWrite : public BadInput {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "being another user as well needs root (uid " << geteuid() << ")";
    if (page_.error() != 0) GTEST_SKIP() << "no userfaultfd: " << std::strerror(page_.error());
  }
  void TearDown() override {
    page_.Bring();
    if (writer_.joinable()) writer_.join();
  }

  void StartSharedDaemon() {
    StartDaemonWithJob();
    ASSERT_EQ(chmod(socket().substr(0, socket().rfind('/')).c_str(), 0711), 0);
    ASSERT_EQ(chmod(socket().c_str(), 0666), 0);
  }
  // A stranger's session of a job of its own, and its descriptors.
  void Enter() {
    UniqueFd connected;
    testing::RunAsUid(kStranger, [&] { connected = ConnectTo(socket()); });
    ASSERT_TRUE(connected.valid());
    client_ = std::make_unique<RawClient>(socket(), std::move(connected));
    v1::JobSpec spec;
    ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(
                    absl::StrCat(R"({"name": "stuck", "worldSize": 1, "tree": {"modules": [{"className": "Root",
                                     "parent": -1, "mark": "MODULE_MARK_FULLY_SHARD", "parameters": [{"name": "w", "shape": [)",
                                 kNumel, R"(], "dtype": "DTYPE_FLOAT32", "requiresGrad": true}]}]},
                                 "config": {"trainersNeverWrite": true, "optimizer": {"kind": "OPTIMIZER_KIND_ADAMW"}}})"),
                    &spec)
                    .ok());
    absl::Status entered;
    absl::StatusOr<std::vector<UniqueFd>> fds;
    // Descriptors come to who has the session's uid.
    testing::RunAsUid(kStranger, [&] {
      entered = client_->Enter(spec, 0);
      if (entered.ok()) {
        fds = FetchSessionFds(socket(), client_->session().session_id(), client_->session().token(), testing::kLimit);
      }
    });
    ASSERT_TRUE(entered.ok()) << entered;
    ASSERT_TRUE(fds.ok()) << fds.status();
    fds_ = *std::move(fds);
  }
  void WriteForEver(SessionFd which) {
    writer_ = std::thread(
        [this, fd = fds_[which].get()] { (void)pwrite(fd, page_.data(), static_cast<size_t>(kPageBytes), 0); });
    ASSERT_TRUE(page_.IsAwaited());
  }
  // How many slabs of shards the daemon has mapped.
  int ShardSlabs() const {
    std::ifstream maps(absl::StrCat("/proc/", daemon_pid(), "/maps"));
    int slabs = 0;
    for (std::string line; std::getline(maps, line);) slabs += absl::StrContains(line, "memfd:shardd-shards") ? 1 : 0;
    return slabs;
  }

  MissingPage page_;
  std::unique_ptr<RawClient> client_;
  std::vector<UniqueFd> fds_;
  std::thread writer_;
};

TEST_F(StuckWrite, IntoGradientsDoesNotHoldTheDevice) {
  StartSharedDaemon();
  ASSERT_NO_FATAL_FAILURE(Enter());
  client_->Send(Record(Opcode::kCommitParameters));
  ASSERT_TRUE(client_->Consumed());
  ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("stuck", "parameters", "version 1"); }));
  // As the library gives back what it does not look at.
  ASSERT_EQ(fallocate(fds_[kFdGradients].get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kNumel * 4), 0);
  ASSERT_NO_FATAL_FAILURE(WriteForEver(kFdGradients));
  client_->Send(Record(Opcode::kUnshard, 0, v1::PHASE_FORWARD));
  client_->Send(Record(Opcode::kSubmitGradients, 0));
  client_->Send(Record(Opcode::kReshard, 0));
  client_->Send(Record(Opcode::kBackwardDone));
  ASSERT_TRUE(client_->Consumed());
  ExpectJobIntact();  // on the same device
  ExpectServesOthers();
}

TEST_F(StuckWrite, IntoASessionsMemoryKeepsNoOtherMemory) {
  StartSharedDaemon();
  ASSERT_NO_FATAL_FAILURE(Enter());
  ASSERT_NO_FATAL_FAILURE(WriteForEver(kFdSessionMemory));
  const absl::Status closed = client_->Close(Job("stuck").job_id());
  ASSERT_TRUE(closed.ok()) << closed;
  client_.reset();
  ExpectServesOthers();
  EXPECT_TRUE(testing::PollUntil([this] { return ShardSlabs() == 1; })) << ShardSlabs() << " jobs have their shards";
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
