#include "server/job/membership/absent_ranks.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "server/job/job_events.h"
#include "server/observe/events.h"
#include "server/session/session_stream.h"
#include "server/tenant/tenant.h"
#include "tests/server/job/facts_fixture.h"
#include "tests/testing/poll.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

constexpr uint64_t kThen = 100;  // ticks

class NoStream final : public SessionStream {
 public:
  void Send(v1::SessionEvent) override {}
  void Finish(absl::Status) override {}
};

class AbsentRanksTest : public FactsTest {
 protected:
  void Refuse(int rank, const std::string& why) {
    absent_.Answered(rank, absl::FailedPreconditionError(why), kThen, now_);
  }
  void AttachLive(int rank, uint64_t start_ticks) {
    Attach(rank);
    sessions_[rank]->stream = std::make_shared<NoStream>();
    sessions_[rank]->start_ticks = start_ticks;
  }
  std::vector<std::string> Events(const std::string& kind) {
    std::vector<std::string> texts;
    for (const v1::Event& event : log_.List()) {
      if (event.kind() == kind) texts.push_back(event.text());
    }
    return texts;
  }

  const absl::Time now_ = MonotonicNow();
  EventLog log_;
  JobEvents events_{"job", Tenant{}, &committed_, &log_};
  AbsentRanks absent_{"job", {&sessions_, &leavers_}, &events_};
};

TEST_F(AbsentRanksTest, WhoWaitsForARefusedRankWaitsInVain) {
  AttachLive(0, /*start_ticks=*/kThen - 1);
  EXPECT_FALSE(absent_.SomeWaitInVain(now_));
  Refuse(1, "another plan");
  EXPECT_TRUE(absent_.SomeWaitInVain(now_));
  EXPECT_EQ(absent_.refused(), std::vector<int>{1});
  ExpectRefused(absent_.RefusedError(), "job \"job\" waits for a rank that does not come: rank 1 was refused: another");
}

TEST_F(AbsentRanksTest, ProcessesOfAnotherAttemptDoNotWaitInVain) {
  AttachLive(0, /*start_ticks=*/kThen);
  Refuse(1, "another plan");
  EXPECT_FALSE(absent_.SomeWaitInVain(now_));
}

TEST_F(AbsentRanksTest, NobodyWaitsInVainForLongerThanAnAttempt) {
  AttachLive(0, /*start_ticks=*/kThen - 1);
  Refuse(1, "another plan");
  EXPECT_FALSE(absent_.SomeWaitInVain(now_ + AbsentRanks::kOneAttempt));
}

TEST_F(AbsentRanksTest, ARefusalIsToldToOperatorsOnce) {
  Refuse(1, "another plan");
  Refuse(1, "another plan");
  EXPECT_EQ(Events("refused"), std::vector<std::string>{"another plan"});
  Refuse(1, "a third plan");
  EXPECT_EQ(Events("refused").size(), 2u);
}

TEST_F(AbsentRanksTest, WhatARetryWouldHelpIsNoRefusal) {
  absent_.Answered(1, absl::AbortedError("attach again"), kThen, now_);
  absent_.Answered(1, absl::OkStatus(), kThen, now_);
  Refuse(-1, "it did not say which");
  Refuse(2, "no such rank");
  EXPECT_TRUE(absent_.refused().empty());
}

TEST_F(AbsentRanksTest, NobodyWaitsForAPresentOrFinishedRank) {
  Attach(0);
  leavers_.Left(1, /*finished=*/true);
  Refuse(0, "another plan");
  Refuse(1, "another plan");
  EXPECT_TRUE(absent_.refused().empty());
}

TEST_F(AbsentRanksTest, ARankThatComesIsForgiven) {
  Refuse(1, "another plan");
  absent_.Came(1);
  EXPECT_TRUE(absent_.refused().empty());
  EXPECT_EQ(absent_.WhyRefused(), "");
}

TEST_F(AbsentRanksTest, AProcessThatEndsBehindItsEpochIsToldOnce) {
  testing::Child child([] { return 0; });
  const pid_t pid = child.pid();
  absent_.SessionEnded(1, pid, UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))));
  ASSERT_TRUE(testing::PollUntil([&] {
    absent_.TellEnded();
    return !Events("lost").empty();
  }));
  absent_.TellEnded();
  ASSERT_EQ(Events("lost").size(), 1u);
  EXPECT_THAT(Events("lost")[0], ::testing::HasSubstr("ended without attaching again"));
}

TEST_F(AbsentRanksTest, LivingProcessesOfEarlierEpochsComeAgain) {
  Attach(0);
  EXPECT_TRUE(absent_.SomeStayAway()) << "nothing is known of rank 1";
  absent_.SessionEnded(1, getpid(), UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0))));
  EXPECT_FALSE(absent_.SomeStayAway());
  Refuse(1, "another plan");
  EXPECT_TRUE(absent_.SomeStayAway());
  absent_.Came(1);
  testing::Child child([] { return 0; });
  absent_.SessionEnded(1, child.pid(), UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, child.pid(), 0))));
  EXPECT_TRUE(testing::PollUntil([&] { return absent_.SomeStayAway(); }));
  leavers_.Left(1, /*finished=*/true);
  EXPECT_FALSE(absent_.SomeStayAway()) << "nobody waits for it";
}

}  // namespace
}  // namespace shardd
