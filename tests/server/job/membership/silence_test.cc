#include "server/job/membership/silence.h"

#include <string>

#include "tests/server/job/facts_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class SilenceTest : public FactsTest {
 protected:
  SilenceTest() {
    Attach(0);
    Attach(1);
    for (const int rank : {0, 1}) {
      sessions_[rank]->last_command_time = now_;
      sessions_[rank]->SetLastCommand("Step");
    }
  }
  // Rank 0 waits for rank 1.
  absl::Status Check(absl::Duration after) {
    asked_ = 0;
    silent_ = -1;
    return CheckSilentRanks(
        sessions_, committed_, kLimit, now_ + after,
        [this](int rank) {
          ++asked_;
          return rank == 0 ? Wait{1, "Step"} : Wait();
        },
        &silent_);
  }

  static constexpr absl::Duration kLimit = absl::Seconds(120);
  const absl::Time now_ = MonotonicNow() + absl::Hours(1);  // behind whatever progress sessions have shown
  int asked_ = 0;
  int silent_ = -1;
};

TEST_F(SilenceTest, IsAFaultOfWhomAnotherWaitsFor) {
  const absl::Status status = Check(kLimit + absl::Seconds(1));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(silent_, 1) << "rank 0 is as silent, and nobody waits for it";
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 1 has sent nothing for 2m1s (last command: Step; limit 2m)"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 waits for rank 1: Step"));
  EXPECT_EQ(asked_, 2) << "each rank once";
}

TEST_F(SilenceTest, AsksNobodyWithinTheLimit) {
  EXPECT_TRUE(Check(kLimit - absl::Seconds(1)).ok());
  EXPECT_EQ(asked_, 0);
}

TEST_F(SilenceTest, IsShorterForWhoGaveUp) {
  sessions_[1]->gave_up = true;
  EXPECT_TRUE(Check(absl::Seconds(9)).ok());
  EXPECT_THAT(std::string(Check(absl::Seconds(11)).message()), HasSubstr("after its program gave up"));
  EXPECT_EQ(silent_, 1);
}

TEST_F(SilenceTest, WhoHasFinishedWaitsForNobodyAndIsNotAsked) {
  for (const int finished : {0, 1}) {
    const std::unique_ptr<Session> gone = sessions_.Take(finished);
    EXPECT_TRUE(Check(kLimit + absl::Seconds(1)).ok()) << "rank " << finished;
    EXPECT_EQ(asked_, 1) << "the other one";
    EXPECT_EQ(silent_, -1);
    if (finished == 0) Attach(0);
  }
}

TEST_F(SilenceTest, OfARankThatIsHeldIsNotItsOwn) {
  sessions_[1]->held = true;
  EXPECT_TRUE(Check(kLimit + absl::Seconds(1)).ok());
}

}  // namespace
}  // namespace shardd
