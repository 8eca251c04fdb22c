// What a daemon answers to one that wants its place, at moments that processes meet rarely.

#include "server/handover/handover.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>

#include "tests/service/service_fixture.h"
#include "tests/testing/programs.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using testing_service::FakeJobsSource;
using testing_service::kPatience;

class HandoverTest : public ::testing::Test {
 protected:
  using Answer = std::optional<absl::StatusOr<v1::HandOverResponse>>;

  absl::StatusOr<std::unique_ptr<Custody>> Own(absl::Duration limit) const {
    return Custody::Connect(dir_.path() + "/custody.sock", limit, testing::ProgramPath("shardd-custodian"));
  }
  void Ask(Answer* answer, bool is_admin = true) {
    v1::HandOverRequest request;
    request.set_version("9.9.9");
    handover_.Ask({.tenant = {}, .is_admin = is_admin}, request, [answer](auto given) { *answer = std::move(given); });
  }

  const testing::TempDir dir_;
  FakeJobsSource jobs_;
  int stops_ = 0;
  std::shared_ptr<Custody> custody_ = *Own(kPatience);
  Handover handover_{&jobs_, custody_, /*embedded=*/false, [this] { ++stops_; }};
};

TEST_F(HandoverTest, WhoAsksBehindAStopIsAnsweredAtItsEnd) {
  handover_.BeginStop();
  Answer answer;
  Ask(&answer);
  EXPECT_FALSE(answer.has_value()) << "the place is not free yet";
  EXPECT_EQ(stops_, 0) << "it is under way";
  EXPECT_TRUE(handover_.asked());
  EXPECT_EQ(Own(absl::Milliseconds(200)).status().code(), absl::StatusCode::kFailedPrecondition);

  handover_.Complete(/*memory_is_quiet=*/true);
  ASSERT_TRUE(answer.has_value() && answer->ok());
  EXPECT_EQ((**answer).pid(), getpid());
  EXPECT_TRUE(Own(kPatience).ok()) << "what is kept is the next daemon's";
  handover_.Complete(true);  // nobody waits
}

TEST_F(HandoverTest, OneDaemonAloneTakesThePlace) {
  Answer first, second;
  Ask(&first);
  Ask(&second);
  EXPECT_FALSE(first.has_value());
  ASSERT_TRUE(second.has_value());
  EXPECT_THAT(second->status().message(), HasSubstr("another daemon takes this one's place already"));
  EXPECT_EQ(stops_, 1);
  handover_.Complete(true);
  EXPECT_TRUE(first.has_value() && first->ok());
}

TEST_F(HandoverTest, AnUnansweredQuestionLeavesThePlaceFree) {
  Answer refused, failed, asked;
  Ask(&refused, /*is_admin=*/false);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->status().code(), absl::StatusCode::kPermissionDenied);
  jobs_.error = absl::UnavailableError("the loop ends");
  Ask(&failed);
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->status(), jobs_.error);
  EXPECT_FALSE(handover_.asked());
  jobs_.error = absl::OkStatus();
  Ask(&asked);
  EXPECT_TRUE(handover_.asked());
  handover_.Complete(true);
}

// Its update would begin anew, and this daemon's end would not wait for it.
TEST_F(HandoverTest, AJobThatIsTakenUpStillKeepsThePlace) {
  v1::Job& job = *jobs_.jobs.add_jobs();
  job.set_name("large");
  job.set_outlives_daemon(true);
  job.set_state(v1::JOB_STATE_TAKING_UP);
  Answer refused, asked;
  Ask(&refused);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused->status().message(), HasSubstr("being taken up (\"large\" of uid 0)"));
  EXPECT_EQ(stops_, 0);
  job.set_state(v1::JOB_STATE_WAITING);
  Ask(&asked);
  EXPECT_EQ(stops_, 1);
  handover_.Complete(true);
}

// It would be listed as lost there, and freed.
TEST_F(HandoverTest, AJobThatTheNextOneDoesNotReadKeepsThePlace) {
  v1::Job& job = *jobs_.jobs.add_jobs();
  job.set_name("copies");
  job.set_outlives_daemon(true);
  job.mutable_kept_formats()->set_take_up_log(2);
  Answer refused, asked;
  Ask(&refused);  // which reads format 1 of everything, as those do that do not say
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused->status().message(),
              HasSubstr("\"copies\" of uid 0: it does not read the format of the take-up log (got 2, want 1)"));
  EXPECT_EQ(stops_, 0);
  job.mutable_kept_formats()->set_take_up_log(1);
  Ask(&asked);
  EXPECT_EQ(stops_, 1);
  handover_.Complete(true);
}

}  // namespace
}  // namespace shardd
