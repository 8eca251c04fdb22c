#include "client/ctl/top.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace shardd::ctl {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMs = 1'000'000;

// After so many steps of 200 ms, of which the others wait 50 for rank 1.
v1::GetMetricsResponse After(int steps, int ranks = 2) {
  v1::GetMetricsResponse metrics;
  metrics.mutable_daemon()->set_version("9.9.9");
  v1::JobMetrics& job = *metrics.add_jobs();
  job.set_name("gpt");
  job.set_uid(1000);
  job.set_world_size(ranks);
  job.set_state(v1::JOB_STATE_FORWARD_BACKWARD);
  job.set_committed_step(steps);
  for (int rank = 0; rank < ranks; ++rank) job.add_ranks()->set_last_heard_ns(3 * kMs);
  job.mutable_time()->set_committed_ns(900);
  job.mutable_time()->set_slow_rank_ns(100);
  job.mutable_memory()->set_allocated_bytes(3 << 20);
  v1::StepMetrics& of = *job.mutable_steps();
  of.set_committed(steps);
  of.mutable_duration()->add_counts(static_cast<uint64_t>(steps));
  of.mutable_duration()->set_sum_ns(steps * 200 * kMs);
  of.mutable_last()->set_duration_ns(400 * kMs);
  of.mutable_last()->set_slowest_rank(-1);
  v1::RankWait& wait = *job.add_waits();
  wait.set_rank(ranks > 12 ? -1 : 0);
  wait.set_awaited(1);
  wait.set_wait_ns(steps * (ranks - 1) * 50 * kMs);
  v1::InterruptionCount& lost = *job.add_interruptions();
  lost.set_cause(v1::INTERRUPTION_CAUSE_RANK_LOST);
  lost.set_count(2);
  return metrics;
}

v1::ListRanksResponse Ranks(int count) {
  v1::ListRanksResponse ranks;
  for (int number = 0; number < count; ++number) {
    v1::Rank& rank = *ranks.add_ranks();
    rank.set_rank(number);
    rank.set_state(v1::RANK_STATE_STEPPED);
    rank.set_waiting_for("rank 1: Step");
  }
  return ranks;
}

TEST(TopTest, EachJobsLineSaysItsPaceAndSlowestRank) {
  const v1::GetMetricsResponse before = After(10);
  const std::string text = ShowTop({After(15), &before}, View());
  EXPECT_THAT(text, AllOf(HasSubstr("shardd 9.9.9"), HasSubstr("1 job,")));
  for (const char* cell : {"gpt", "1000", "forward_backward", "2/2", " 15 ", "200.0 ms", " 5 ", "90.0 %",
                           "rank 1, 25.0 %", "3.0 MiB", " 2 "}) {
    EXPECT_THAT(text, HasSubstr(cell));
  }
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

TEST(TopTest, TheFirstTableIsOfTheLastStep) {
  EXPECT_THAT(ShowTop({After(15)}, View()), AllOf(HasSubstr("400.0 ms"), Not(HasSubstr("rank 1"))));
  v1::GetMetricsResponse fresh = After(0);
  fresh.mutable_jobs(0)->mutable_steps()->clear_last();
  fresh.mutable_jobs(0)->clear_time();
  EXPECT_THAT(ShowTop({fresh}, View()), AllOf(HasSubstr("gpt"), Not(HasSubstr("nan")), Not(HasSubstr("%"))));
  EXPECT_THAT(ShowTop({v1::GetMetricsResponse()}, View()), HasSubstr("no jobs"));
}

TEST(TopTest, RanksSayWhomTheyWaitForAndWhoAwaitsThem) {
  const v1::GetMetricsResponse before = After(10), now = After(15);
  v1::ListRanksResponse ranks = Ranks(2);
  ranks.mutable_ranks(1)->set_state(v1::RANK_STATE_BACKWARD);
  ranks.mutable_ranks(1)->clear_waiting_for();
  ranks.mutable_ranks(1)->set_last_command("Unshard \x1b[2J");
  const std::string text = ShowTop({now, &before}, now.jobs(0), ranks, 0, View());
  EXPECT_THAT(text, AllOf(HasSubstr("slowest, awaited  rank 1, 25.0 %"), HasSubstr("rank 1: Step"),
                          HasSubstr("25.0 %  Unshard \\x1b[2J"), HasSubstr("3.0 ms"), Not(HasSubstr("\x1b"))));
}

TEST(TopTest, AbsentAndAwaitedRanksAreShownWhereNotAllFit) {
  const v1::GetMetricsResponse before = After(10, 1000), now = After(15, 1000);
  v1::ListRanksResponse ranks = Ranks(1000);
  ranks.mutable_ranks(900)->set_state(v1::RANK_STATE_ABSENT);
  ranks.mutable_ranks(777)->clear_waiting_for();
  const std::string text = ShowTop({now, &before}, now.jobs(0), ranks, 4, View());
  EXPECT_THAT(text, AllOf(HasSubstr("\n 900  absent"), HasSubstr("\n 777  stepped"), HasSubstr("\n   1  stepped"),
                          HasSubstr("\n   0  stepped"), Not(HasSubstr("\n   2  ")), HasSubstr("and 996 more ranks")));
  EXPECT_THAT(ShowTop({now, &before}, now.jobs(0), ranks, 0, View()),
              AllOf(HasSubstr("\n   2  "), Not(HasSubstr("more ranks"))));
}

TEST(TopTest, JsonHasTheSameFiguresAsNumbers) {
  const v1::GetMetricsResponse before = After(10), now = After(15);
  const v1::ListRanksResponse ranks = Ranks(2);
  const std::string text = TopJson({now, &before}, &now.jobs(0), &ranks);
  EXPECT_EQ(text.find('\n'), text.size() - 1) << "one line";
  const json all = json::parse(text);
  const json& job = all["jobs"][0];
  EXPECT_EQ(job["name"], "gpt");
  EXPECT_EQ(job["committed_step"], 15);
  EXPECT_NEAR(job["step_seconds"].get<double>(), 0.2, 1e-9);
  EXPECT_NEAR(job["steps_per_second"].get<double>(), 5, 1e-9);
  EXPECT_NEAR(job["goodput"].get<double>(), 0.9, 1e-9);
  EXPECT_EQ(job["slowest_rank"], 1);
  EXPECT_NEAR(job["slowest_rank_share"].get<double>(), 0.25, 1e-9);
  EXPECT_EQ(job["interruptions"], 2);
  EXPECT_EQ(job["rank"].size(), 2u);
  EXPECT_EQ(job["rank"][0]["waiting_for"], "rank 1: Step");
  EXPECT_EQ(json::parse(TopJson({After(15)}, nullptr, nullptr))["jobs"][0]["slowest_rank"], nullptr);
}

}  // namespace
}  // namespace shardd::ctl
