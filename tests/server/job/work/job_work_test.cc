#include "server/job/work/job_work.h"

#include <gtest/gtest.h>

#include <atomic>

#include "server/loop/core_loop.h"
#include "tests/server/job/fake_job.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

class JobWorkTest : public ::testing::Test {
 protected:
  ~JobWorkTest() override { loop_.Stop(); }
  // Runs what the ends so far have posted.
  void Drain() {
    loop_.RunAndWait([] {});
  }

  FakeJob job_;
  CoreLoop loop_;
  JobWork work_{&loop_, &job_};
};

TEST_F(JobWorkTest, RunsOnceBehindTheLastPieceWithTheFirstError) {
  std::vector<absl::Status> ends;
  const JobWork::Done done = work_.Join(3, [&](absl::Status status) { ends.push_back(std::move(status)); });
  done(absl::OkStatus());
  done(absl::InternalError("first"));
  Drain();
  EXPECT_TRUE(ends.empty());
  done(absl::InternalError("second"));
  Drain();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].message(), "first");
  EXPECT_EQ(job_.advanced, 1);
}

TEST_F(JobWorkTest, KeepsTheJobUntilThen) {
  JobWork::Done done = work_.Join(1, [](const absl::Status&) {});
  EXPECT_EQ(job_.alive.use_count(), 2);
  done(absl::OkStatus());
  Drain();
  done = nullptr;
  EXPECT_EQ(job_.alive.use_count(), 1);
}

TEST_F(JobWorkTest, CountsWorkOnGradientsUntilItsEndIsHeard) {
  int seen = -1;
  const JobWork::Done done = work_.JoinGradientWork(1, [&](const absl::Status&) { seen = work_.gradient_work(); });
  work_.BeginGradientWork();
  EXPECT_EQ(work_.gradient_work(), 2);
  done(absl::OkStatus());
  Drain();
  EXPECT_EQ(seen, 1) << "its own work has ended";
  work_.EndGradientWork();
  EXPECT_EQ(work_.gradient_work(), 0);
}

}  // namespace
}  // namespace shardd
