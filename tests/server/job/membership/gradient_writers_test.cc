#include "server/job/membership/gradient_writers.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include "server/job/wait.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/server/job/trainer_process.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class GradientWritersTest : public ::testing::Test {
 protected:
  GradientWritersTest() {
    SpecBuilder builder(2);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.Param(0, "w", {64});
    plan_ = std::make_shared<const ShardPlan>(builder.Plan());
    auto memory = JobMemory::Create(*plan_, "job");
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    writers_ = std::make_unique<GradientWriters>(memory_.get());
  }

  // The rank's session was of this process.
  void EndEpochOf(int rank, pid_t pid) {
    auto session = Session::Create(plan_, /*id=*/1, rank, /*epoch=*/1);
    ASSERT_TRUE(session.ok()) << session.status();
    (*session)->peer.pid = pid;
    (*session)->peer.uid = getuid();
    (*session)->pidfd = DescriptorOf(pid);
    writers_->EpochEnded(**session);
  }
  AttachAnswer Attach(int rank, pid_t pid, bool replace = false) {
    return writers_->MayAttach("attach: ", rank, pid, DescriptorOf(pid), replace);
  }
  void Renew() {
    ASSERT_TRUE(writers_->CheckNoneLeft("attach: ", "why").ok());
    writers_->Begin();
    auto made = memory_->MakeGradientsAgain(*plan_);
    ASSERT_TRUE(made.ok()) << made.status();
    writers_->Leave(memory_->SetGradients(*std::move(made)));
  }

  std::shared_ptr<const ShardPlan> plan_;
  std::unique_ptr<JobMemory> memory_;
  std::unique_ptr<GradientWriters> writers_;
  testing::Child stopped_{[] {
    pause();
    return 0;
  }};
};

TEST_F(GradientWritersTest, ALivingProcessNeedsNewShardsForItsRankAlone) {
  EndEpochOf(1, stopped_.pid());
  EXPECT_EQ(Attach(0, getpid()).renew, "");
  const AttachAnswer answer = Attach(1, getpid());
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_THAT(answer.renew, HasSubstr(absl::StrCat("pid ", stopped_.pid(), ") lives")));
}

TEST_F(GradientWritersTest, AProcessThatAttachesAgainWritesNoMore) {
  EndEpochOf(1, stopped_.pid());
  EXPECT_EQ(Attach(1, stopped_.pid()).renew, "");
  EXPECT_EQ(Attach(1, getpid()).renew, "");
}

TEST_F(GradientWritersTest, AProcessThatIsReplacedIsKilled) {
  EndEpochOf(1, stopped_.pid());
  const AttachAnswer answer = Attach(1, getpid(), /*replace=*/true);
  EXPECT_EQ(answer.renew, "");
  EXPECT_TRUE(answer.not_killed.ok()) << answer.not_killed;
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("was killed and has not ended yet"));
  EXPECT_EQ(stopped_.Wait(), 1000 + SIGKILL);
  EXPECT_TRUE(Attach(1, getpid()).status.ok());
}

TEST_F(GradientWritersTest, NobodyAttachesWhileNewShardsAreMade) {
  writers_->Begin();
  EXPECT_EQ(Attach(0, getpid()).status.code(), absl::StatusCode::kAborted);
  writers_->Stop();
  EXPECT_TRUE(Attach(0, getpid()).status.ok());
}

TEST_F(GradientWritersTest, AFailureIsToldOnce) {
  writers_->Begin();
  writers_->Fail(absl::ResourceExhaustedError("no room"));
  const absl::Status told = writers_->TakeFailure("attach: ", "why");
  EXPECT_EQ(told.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(told.message()), HasSubstr("no room"));
  EXPECT_TRUE(writers_->TakeFailure("attach: ", "why").ok());
}

TEST_F(GradientWritersTest, OfTheHostTheLeftSlabIsFreeAtOnce) {
  EndEpochOf(1, stopped_.pid());
  const JobSlab* old = memory_->gradients();
  Renew();
  EXPECT_NE(memory_->gradients(), old);
  EXPECT_EQ(writers_->left(), old);
  EXPECT_EQ(writers_->TakeUnused().get(), old) << "whoever stores there takes memory of its own";
  EXPECT_EQ(writers_->left(), nullptr);
  EXPECT_EQ(Attach(1, getpid()).renew, "");
}

}  // namespace
}  // namespace shardd
