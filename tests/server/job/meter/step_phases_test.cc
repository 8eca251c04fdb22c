#include "server/job/meter/step_phases.h"

#include <gtest/gtest.h>

#include <numeric>

namespace shardd {
namespace {

constexpr auto kMs = [](int64_t ms) { return absl::UnixEpoch() + absl::Milliseconds(ms); };
constexpr int64_t kNsOfMs = 1'000'000;

void ExpectWhole(const v1::StepRecord& step) {
  EXPECT_EQ(step.forward_ns() + step.backward_ns() + step.waiting_ns() + step.reduction_ns() + step.optimizer_ns() +
                step.commit_ns(),
            step.duration_ns())
      << step.ShortDebugString();
}

TEST(StepPhasesTest, ThePhasesOfAStepAddUpToItsDuration) {
  StepPhases phases(2, /*trainers_update=*/false);
  phases.Begin(kMs(0));
  phases.BeginBackward(0, kMs(40));
  phases.BeginBackward(1, kMs(60));
  phases.CloseBackward(0, kMs(100));
  phases.CloseStep(0, kMs(110));
  phases.CloseBackward(1, kMs(150));
  phases.CloseStep(1, kMs(150));
  const v1::StepRecord step =
      phases.Commit(kMs(200), {.total = absl::Milliseconds(40)}, {.measuring = kMs(160), .applied = kMs(190)});
  EXPECT_EQ(step.forward_ns(), 50 * kNsOfMs);
  EXPECT_EQ(step.backward_ns(), 80 * kNsOfMs) << "70 of rank 0, until Step, and 90";
  EXPECT_EQ(step.waiting_ns(), 20 * kNsOfMs) << "rank 0 for 40";
  EXPECT_EQ(step.reduction_ns(), 10 * kNsOfMs);
  EXPECT_EQ(step.optimizer_ns(), 30 * kNsOfMs);
  EXPECT_EQ(step.commit_ns(), 10 * kNsOfMs);
  ExpectWhole(step);
}

TEST(StepPhasesTest, ForwardsBetweenBackwardsAreForwards) {
  StepPhases phases(1, /*trainers_update=*/false);
  phases.Begin(kMs(0));
  for (int64_t at : {0, 100, 200}) {
    phases.BeginBackward(0, kMs(at + 30));
    phases.CloseBackward(0, kMs(at + 100));
  }
  phases.CloseStep(0, kMs(300));
  const v1::StepRecord step = phases.Commit(kMs(300), {}, {.measuring = kMs(300), .applied = kMs(300)});
  EXPECT_EQ(step.forward_ns(), 90 * kNsOfMs);
  EXPECT_EQ(step.backward_ns(), 210 * kNsOfMs);
  ExpectWhole(step);
}

TEST(StepPhasesTest, AnOptimizerOfTheTrainersIsBehindTheirBackward) {
  StepPhases phases(1, /*trainers_update=*/true);
  phases.Begin(kMs(0));
  phases.BeginBackward(0, kMs(10));
  phases.CloseBackward(0, kMs(20));
  phases.CloseStep(0, kMs(50));
  const v1::StepRecord step = phases.Commit(kMs(60), {}, {});
  EXPECT_EQ(step.optimizer_ns(), 30 * kNsOfMs);
  EXPECT_EQ(step.commit_ns(), 10 * kNsOfMs);
  EXPECT_EQ(step.reduction_ns(), 0);
  ExpectWhole(step);
}

TEST(StepPhasesTest, WaitsWithinABackwardAreNotBackward) {
  StepPhases phases(2, /*trainers_update=*/false);
  phases.Begin(kMs(0));
  for (int rank : {0, 1}) phases.BeginBackward(rank, kMs(20));
  for (int rank : {0, 1}) phases.CloseBackward(rank, kMs(100));
  for (int rank : {0, 1}) phases.CloseStep(rank, kMs(100));
  const v1::StepRecord step =
      phases.Commit(kMs(100), {.total = absl::Milliseconds(40), .asleep = absl::Milliseconds(30)},
                    {.measuring = kMs(100), .applied = kMs(100)});
  EXPECT_EQ(step.backward_ns(), 65 * kNsOfMs);
  EXPECT_EQ(step.forward_ns(), 15 * kNsOfMs) << "the others waited before it, for a pass";
  EXPECT_EQ(step.waiting_ns(), 20 * kNsOfMs);
  ExpectWhole(step);
}

TEST(StepPhasesTest, TimesOfAnEarlierStepAreNone) {
  StepPhases phases(1, /*trainers_update=*/false);
  phases.Begin(kMs(100));
  phases.CloseStep(0, kMs(130));
  const v1::StepRecord step = phases.Commit(kMs(150), {}, {.measuring = kMs(10), .applied = kMs(20)});
  EXPECT_EQ(step.commit_ns(), 20 * kNsOfMs);
  ExpectWhole(step);
}

TEST(StepPhasesTest, EachStepIsOneInEachHistogram) {
  StepPhases phases(1, /*trainers_update=*/false);
  phases.Begin(kMs(0));
  for (int step = 1; step <= 3; ++step) {
    phases.CloseStep(0, kMs(10 * step));
    phases.Commit(kMs(10 * step), {}, {});
  }
  v1::StepMetrics metrics;
  phases.Describe(&metrics);
  for (const v1::Durations* histogram :
       {&metrics.duration(), &metrics.forward(), &metrics.backward(), &metrics.optimizer(), &metrics.waiting(),
        &metrics.reduction(), &metrics.commit()}) {
    EXPECT_EQ(std::accumulate(histogram->counts().begin(), histogram->counts().end(), uint64_t{0}), 3u);
  }
  EXPECT_EQ(metrics.duration().sum_ns(), 30 * kNsOfMs);
}

}  // namespace
}  // namespace shardd
