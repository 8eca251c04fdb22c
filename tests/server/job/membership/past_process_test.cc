#include "server/job/membership/past_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "server/job/wait.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kTrainer = 12345;

// A process that has taken these uids: real, effective and saved.
class WithUids {
 public:
  WithUids(uint32_t real, uint32_t effective, uint32_t saved)
      : ready_(Pipe()), child_([&] {
          const bool taken = syscall(SYS_setresuid, real, effective, saved) == 0;
          (void)!write(ends_[1], taken ? "y" : "n", 1);
          pause();
          return 0;
        }) {
    char answer = 0;
    EXPECT_EQ(read(ends_[0], &answer, 1), 1);
    EXPECT_EQ(answer, 'y');
    process_ = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, child_.pid(), 0)));
  }
  ~WithUids() {
    close(ends_[0]);
    close(ends_[1]);
  }
  absl::Status KillFor(uint32_t uid) { return KillProcess(process_, child_.pid(), uid); }
  bool Ended() { return child_.Ended(); }
  int Wait() { return child_.Wait(); }

 private:
  bool Pipe() { return pipe(ends_) == 0; }
  int ends_[2] = {-1, -1};
  const bool ready_;
  testing::Child child_;
  UniqueFd process_;
};

class KillProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "processes of another user need root (uid " << geteuid() << ")";
  }
};

TEST_F(KillProcessTest, AProcessOfItsUserIsKilled) {
  WithUids trainer(kTrainer, kTrainer, kTrainer);
  EXPECT_TRUE(trainer.KillFor(kTrainer).ok());
  EXPECT_EQ(trainer.Wait(), 1000 + SIGKILL);
  EXPECT_TRUE(trainer.KillFor(kTrainer).ok()) << "it has ended";
}

// It has run a program that is set-user-ID since it attached, as su is.
TEST_F(KillProcessTest, AProcessThatHasBecomeAnothersIsNot) {
  const uint32_t uids[][3] = {{0, 0, 0}, {kTrainer, 0, 0}, {kTrainer, kTrainer, 0}, {kTrainer, kTrainer + 1, kTrainer}};
  for (const auto& [real, effective, saved] : uids) {
    WithUids changed(real, effective, saved);
    const absl::Status refused = changed.KillFor(kTrainer);
    EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("uid 12345"));
    EXPECT_FALSE(changed.Ended()) << real << " " << effective << " " << saved;
  }
}

}  // namespace
}  // namespace shardd
