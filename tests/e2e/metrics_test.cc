// What operators are told of time, by the daemon and by the shardd-metrics that it starts: work that was lost, who was
// waited for. The test measures the same from outside, by what ranks say of the moments at which they are.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <regex>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "common/shm/unique_fd.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/build_paths.h"
#include "tests/testing/http_get.h"
#include "tests/testing/process.h"
#include "tests/testing/programs.h"
#include "tests/testing/run_as_uid.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::HttpGet;
using testing::PollUntil;

class MetricsTest : public Cluster {
 protected:
  // What is between a moment and when it is written down, on a busy machine.
  static constexpr int64_t kSlackMs = 250;

  void SetUp() override {
    if (access(testing::ProgramPath("shardd-metrics").c_str(), X_OK) != 0) {
      GTEST_SKIP() << "shardd-metrics is not built: prometheus-cpp-dev is not installed";
    }
  }
  // With a shardd-metrics at a free port.
  void Start(std::vector<std::string> flags = {}) {
    flags.push_back("--metrics_listen=127.0.0.1:0");
    StartDaemon(flags);
    ASSERT_TRUE(PollUntil([&] { return FindPort() > 0; })) << Log();
  }
  static std::string TextOf(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  std::string Log() const { return TextOf(DaemonLog()); }
  int FindPort() {
    const std::string log = Log();
    std::smatch match;
    const std::regex line("shardd-metrics serves http://127\\.0\\.0\\.1:(\\d+)/metrics");
    port_ = std::regex_search(log, match, line) ? std::stoi(match[1]) : 0;
    return port_;
  }
  v1::JobMetrics Metrics() {
    v1::GetMetricsResponse response;
    grpc::Status status;
    // A busy machine's daemon may not have ended calls yet that this test has the answers of.
    PollUntil([&] {
      grpc::ClientContext context;
      status = jobs().GetMetrics(&context, v1::GetMetricsRequest(), &response);
      return status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED;
    });
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.jobs().empty() ? v1::JobMetrics() : response.jobs(0);
  }
  // The value of a line of the scrape; -1: there is none.
  double Scraped(const std::string& series) {
    const std::string body = absl::StrCat("\n", HttpGet(port_, "/metrics").body);
    const size_t at = body.find(absl::StrCat("\n", series, " "));
    double value = -1;
    if (at == std::string::npos) return value;
    const size_t begin = at + series.size() + 2;
    EXPECT_TRUE(absl::SimpleAtod(body.substr(begin, body.find('\n', begin) - begin), &value));
    return value;
  }
  std::string Of(const std::string& metric, const std::string& more = "") const {
    return absl::StrCat(metric, "{job_name=\"job\",uid=\"", getuid(), "\"", more, "}");
  }
  // What `shardctl top --once` says.
  std::string Top(std::vector<std::string> options) const {
    std::vector<std::string> argv = {testing::ProgramPath("shardctl"), "top", "--once", "--address", socket()};
    argv.insert(argv.end(), options.begin(), options.end());
    EXPECT_EQ(testing::Spawn(argv, {.log = File("top")}).Wait(), 0);
    const std::string text = TextOf(File("top"));
    unlink(File("top").c_str());
    return text;
  }
  static double NumberOf(const std::string& json, const std::string& member) {
    const std::string key = absl::StrCat("\"", member, "\":");
    const size_t at = json.find(key);
    return at == std::string::npos ? -1 : std::strtod(json.c_str() + at + key.size(), nullptr);
  }
  // A job of root's, on the page, or only that there is one.
  void ExpectThatAnotherUserSees(bool job) {
    Child ranks[] = {StartRank(0, {{"steps", "100000"}}), StartRank(1, {{"steps", "100000"}})};
    ASSERT_TRUE(PollUntil([&] { return Metrics().committed_step() > 0; }));
    const auto page = [&] { return HttpGet(port_, "/status.json?job=job&uid=0").body; };
    ASSERT_TRUE(PollUntil([&] { return absl::StrContains(page(), "\"selected\":{\"job\":\"job\""); })) << page();
    EXPECT_TRUE(absl::StrContains(page(), "\"hidden_jobs\":0"));
    testing::RunAsUid(1234, [&] {
      const std::string theirs = page();
      EXPECT_EQ(absl::StrContains(theirs, "\"name\":\"job\""), job) << theirs;
      EXPECT_EQ(absl::StrContains(theirs, "\"hidden_jobs\":1"), !job) << theirs;
      EXPECT_EQ(absl::StrContains(theirs, "\"selected\":null"), !job) << theirs;
    });
    for (Child& rank : ranks) rank.Kill(SIGKILL);
  }
  // So long by the clock by which ranks say when they were where.
  static void StayFor(int64_t ms) {
    const int64_t end = NowMs() + ms;
    ASSERT_TRUE(PollUntil([&] { return NowMs() >= end; }));
  }

  int port_ = 0;
};

TEST_F(MetricsTest, WhatAKilledRankCostsIsWhatTheTestMeasures) {
  Start();
  const Args args = {{"steps", "7"}, {"recover", "1"}, {"wait_step", "1"}};
  Child survivor = StartRank(0, args.With({{"mark", "root_held@4"}, {"pause", "before_step@5"}}));
  Child victim = StartRank(1, args.With({{"mark", "before_step@3"}, {"pause", "some_gradients@4"}}));
  AwaitPause(args, "some_gradients", 1);
  StayFor(400);
  EXPECT_EQ(Metrics().steps().committed(), 4);
  const int64_t killed_ms = NowMs();
  victim.Kill(SIGKILL);
  ASSERT_TRUE(PollUntil([&] { return Metrics().steps().dropped() == 1; }));
  const int64_t aborted_ms = NowMs();
  // The commit lies between what the victim did before it, and what rank 0 did behind it.
  const int64_t before_commit_ms = TimeOf(args, "before_step", 1), behind_commit_ms = TimeOf(args, "root_held", 0);
  Child replacement = StartRank(1, args);
  AwaitPause(args, "before_step", 0);  // of the step behind the one that was done anew

  const v1::JobMetrics metrics = Metrics();
  EXPECT_EQ(metrics.steps().dropped(), 1);
  EXPECT_EQ(metrics.steps().committed(), 5);
  EXPECT_EQ(metrics.steps().taken_back(), 0);
  const double lost_s = Scraped(Of("shardd_job_lost_work_seconds_total"));
  EXPECT_EQ(lost_s, static_cast<double>(metrics.time().dropped_ns()) / 1e9);
  EXPECT_EQ(Scraped(Of("shardd_job_steps_total", ",result=\"dropped\"")), 1);
  EXPECT_EQ(Scraped(Of("shardd_job_interruptions_total", ",cause=\"rank_lost\"")), 1);
  EXPECT_GT(Scraped(Of("shardd_job_redone_seconds_total")), 0);
  const double goodput = Scraped(Of("shardd_job_goodput_ratio"));
  EXPECT_TRUE(goodput > 0 && goodput < 1) << goodput;
  LetGo(args, "before_step", 0);
  EXPECT_EQ(survivor.Wait(), 0);
  EXPECT_EQ(replacement.Wait(), 0);

  const auto lost_ms = static_cast<int64_t>(lost_s * 1e3);
  EXPECT_GE(lost_ms, killed_ms - behind_commit_ms - 1);
  EXPECT_LE(lost_ms, aborted_ms - before_commit_ms + 1);
  std::cout << "lost work: " << lost_ms << " ms by the daemon; between " << killed_ms - behind_commit_ms << " and "
            << aborted_ms - before_commit_ms << " ms by the test\n";
}

TEST_F(MetricsTest, StepsTakenBackToASnapshotAreLostToo) {
  Start();
  const Args args = {{"model", "pass"},       {"trainers_write", "1"}, {"trained", "sgd"},
                     {"blocks", "3"},         {"numel", "20011"},      {"steps", "9"},
                     {"timeout_ms", "60000"}, {"keep_every", "3"},     {"recover", "1"}};
  Child survivor = StartRank(0, args.With({{"pause", "end"}}));
  Child victim = StartRank(1, args.With({{"pause", "before_update@5"}}));
  AwaitPause(args, "before_update", 1);
  const int64_t before = Metrics().committed_step();
  victim.Kill(SIGKILL);
  ASSERT_TRUE(PollUntil([&] { return Metrics().epoch() == 2; }));
  const v1::JobMetrics metrics = Metrics();
  EXPECT_EQ(metrics.steps().committed(), before);
  EXPECT_EQ(metrics.steps().taken_back(), before - metrics.committed_step());
  EXPECT_EQ(metrics.time().taken_back_ns() > 0, metrics.steps().taken_back() > 0);
  Child replacement = StartRank(1, args);
  AwaitPause(args, "end", 0);
  EXPECT_EQ(Metrics().steps().committed(), metrics.steps().taken_back() + 9) << "each of those was done twice";
  EXPECT_GT(Metrics().time().redone_ns(), 0);
  LetGo(args, "end", 0);
  EXPECT_EQ(survivor.Wait(), 0);
  EXPECT_EQ(replacement.Wait(), 0);
}

TEST_F(MetricsTest, TheSlowRankIsNamedWithItsShare) {
  Start();
  const Args args = {{"steps", "5"}, {"wait_step", "1"}};
  Child fast = StartRank(0, args.With({{"mark", "step_sent@2"}, {"pause", "before_step@3"}}));
  Child slow = StartRank(1, args.With({{"pause", "before_step@2"}}));
  AwaitPause(args, "before_step", 1);
  ASSERT_TRUE(PollUntil([&] { return Ranks()[0].state() == v1::RANK_STATE_STEPPED; }));
  StayFor(400);
  const int64_t released_ms = NowMs();
  LetGo(args, "before_step", 1);
  ASSERT_TRUE(PollUntil([&] { return Metrics().committed_step() == 3; }));
  const v1::JobMetrics metrics = Metrics();
  EXPECT_EQ(metrics.steps().last().slowest_rank(), 1);
  const v1::StepRecord& step = metrics.steps().last();
  const double share = static_cast<double>(step.slowest_rank_ns()) / static_cast<double>(step.duration_ns());
  EXPECT_GT(share, 0);
  const std::string top = Top({"--json"});
  EXPECT_TRUE(absl::StrContains(top, "\"slowest_rank\":1,")) << top;
  EXPECT_NEAR(NumberOf(top, "slowest_rank_share"), share, 1e-9) << "of the time of one other rank";
  EXPECT_TRUE(absl::StrContains(Top({}), absl::StrFormat("rank 1, %.1f %%", 100 * share))) << Top({});
  const double waited_s = Scraped(Of("shardd_job_wait_seconds_total", ",rank=\"0\",for=\"1\""));
  const double for_0_s = Scraped(Of("shardd_job_wait_seconds_total", ",rank=\"1\",for=\"0\""));
  EXPECT_LT(for_0_s, waited_s);
  EXPECT_GE(static_cast<double>(metrics.time().slow_rank_ns()) / 1e9, 0.4);
  AwaitPause(args, "before_step", 0);
  LetGo(args, "before_step", 0);
  EXPECT_EQ(fast.Wait(), 0);
  EXPECT_EQ(slow.Wait(), 0);
  const int64_t step_sent_ms = TimeOf(args, "step_sent", 0);
  const auto of_step_ms = metrics.steps().last().slowest_rank_ns() / 1'000'000;
  EXPECT_GE(of_step_ms, 400);
  EXPECT_NEAR(static_cast<double>(of_step_ms), static_cast<double>(released_ms - step_sent_ms), kSlackMs);
  std::cout << "rank 0 waited for rank 1: " << of_step_ms << " ms by the daemon, " << released_ms - step_sent_ms
            << " ms by the test\n";
}

TEST_F(MetricsTest, AScrapeTakesMillisecondsWhileRanksTrain) {
  Start();
  const Args args = {{"steps", "100000"}};
  Child ranks[] = {StartRank(0, args), StartRank(1, args)};
  ASSERT_TRUE(PollUntil([&] { return Metrics().committed_step() > 10; }));
  std::vector<double> call_ms, whole_ms;
  for (int scrape = 0; scrape < 100; ++scrape) {
    const absl::Time begin = absl::Now();
    call_ms.push_back(Scraped("shardd_call_seconds") * 1e3);
    whole_ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
  }
  for (std::vector<double>* all : {&call_ms, &whole_ms}) std::sort(all->begin(), all->end());
  EXPECT_GT(call_ms.front(), 0);
  std::cout << "scrape of two ranks that train: call " << call_ms[50] << " ms (p90 " << call_ms[90] << "), over HTTP "
            << whole_ms[50] << " ms (p90 " << whole_ms[90] << "); wanted: below 5 ms\n";
  for (Child& rank : ranks) rank.Kill(SIGKILL);
}

TEST_F(MetricsTest, AFloodOfScrapesHoldsNeitherTrainingNorPageUp) {
  Start();
  const Args args = {{"steps", "100000"}};
  Child ranks[] = {StartRank(0, args), StartRank(1, args)};
  ASSERT_TRUE(PollUntil([&] { return Metrics().committed_step() > 10; }));
  std::atomic<bool> over = false;
  std::atomic<int> whole = 0, not_whole = 0;
  std::vector<std::thread> flood;
  for (int i = 0; i < 32; ++i) {
    flood.emplace_back([&] {
      while (!over) {
        ++(absl::StrContains(HttpGet(port_, "/metrics").body, "\nshardd_up 1\n") ? whole : not_whole);
      }
    });
  }
  EXPECT_TRUE(PollUntil([&] { return whole >= 500; }));
  const int64_t before = Metrics().committed_step();
  std::vector<double> page_ms;
  for (int i = 0; i < 10; ++i) {
    const absl::Time begin = absl::Now();
    EXPECT_TRUE(absl::StrContains(HttpGet(port_, "/status.json").body, "\"name\":\"job\"")) << "the page goes on";
    page_ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
  }
  EXPECT_TRUE(PollUntil([&] { return Metrics().committed_step() > before + 20; })) << "training goes on";
  over = true;
  for (std::thread& each : flood) each.join();
  EXPECT_EQ(not_whole, 0) << "no scrape is refused, and none finds the daemon down";
  std::sort(page_ms.begin(), page_ms.end());
  std::cout << "beside a flood of " << whole << " scrapes the page takes " << page_ms[5] << " ms, at most "
            << page_ms.back() << " ms\n";
  for (Child& rank : ranks) rank.Kill(SIGKILL);
}

TEST_F(MetricsTest, MetricsPagesAloneAreServedUntilTheDaemonEnds) {
  Start();
  EXPECT_EQ(HttpGet(port_, "/metrics").status, 200);
  EXPECT_TRUE(absl::StrContains(HttpGet(port_, "/metrics").headers, "text/plain; version=0.0.4"));
  EXPECT_EQ(HttpGet(port_, "/metrics", "HEAD").body, "");
  EXPECT_EQ(HttpGet(port_, "/metrics", "POST").status, 405);
  EXPECT_EQ(HttpGet(port_, "/etc/passwd").status, 404);
  EXPECT_EQ(HttpGet(port_, "/../../etc/passwd").status, 404);
  EXPECT_EQ(Scraped("shardd_up"), 1);
  kill(daemon_pid(), SIGKILL);
  EXPECT_TRUE(PollUntil([&] { return HttpGet(port_, "/metrics").status == 0; }));
}

TEST_F(MetricsTest, ThePageShowsUsersTheirOwnJobs) {
  if (getuid() != 0) GTEST_SKIP() << "only root can connect as another user";
  Start();
  ExpectThatAnotherUserSees(false);
}

TEST_F(MetricsTest, ThePageShowsAllJobsWhereTheOperatorSaysSo) {
  if (getuid() != 0) GTEST_SKIP() << "only root can connect as another user";
  Start({"--status_page=all"});
  ExpectThatAnotherUserSees(true);
}

TEST_F(MetricsTest, ADaemonWithoutTheHttpProgramSaysSoAndEnds) {
  std::filesystem::copy_file(testing::ProgramPath("shardd"), File("shardd"));
  Child daemon = testing::Spawn(
      {File("shardd"), absl::StrCat("--listen=unix:", File("shardd.sock")), "--metrics_listen=127.0.0.1:0"},
      {.log = File("log")});
  EXPECT_EQ(daemon.Wait(), 1);
  const std::string log = TextOf(File("log"));
  EXPECT_TRUE(absl::StrContains(log, "build it with prometheus-cpp-dev installed")) << log;
}

// Debian's Prometheus, with the rules that are shipped.
TEST_F(MetricsTest, AlertsOfPrometheusFireWhereARankIsKilled) {
  const std::string program = "/usr/bin/prometheus";
  if (access(program.c_str(), X_OK) != 0) GTEST_SKIP() << program << " is not there (apt-get install prometheus)";
  Start();
  const Args args = {{"steps", "100000"}, {"recover", "1"}};
  Child survivor = StartRank(0, args);
  Child victim = StartRank(1, args);
  const int prometheus_port = testing::FreePort();
  std::ofstream(File("prometheus.yml")) << "global: {scrape_interval: 500ms, evaluation_interval: 500ms}\n"
                                        << "rule_files: [" << built::kSourceDir
                                        << "/deploy/prometheus/shardd.rules.yml]\n"
                                        << "scrape_configs: [{job_name: shardd, static_configs: [{targets: ['127.0.0.1:"
                                        << port_ << "']}]}]\n";
  Child prometheus = testing::Spawn({program, absl::StrCat("--config.file=", File("prometheus.yml")),
                                     absl::StrCat("--storage.tsdb.path=", File("tsdb")),
                                     absl::StrCat("--web.listen-address=127.0.0.1:", prometheus_port)},
                                    {.log = File("prometheus.log")});
  const auto says = [&](const std::string& target, const std::string& text) {
    return PollUntil([&] { return absl::StrContains(HttpGet(prometheus_port, target).body, text); });
  };
  // Until it has seen the counter at 0 twice.
  ASSERT_TRUE(
      says("/api/v1/query?query=count_over_time(shardd_job_interruptions_total%7Bcause=%22rank_lost%22%7D[1m])%3E1",
           "\"job_name\":\"job\""))
      << HttpGet(prometheus_port, "/api/v1/targets").body;
  EXPECT_FALSE(absl::StrContains(HttpGet(prometheus_port, "/api/v1/alerts").body, "SharddRankLost"));
  const absl::Time killed = absl::Now();
  victim.Kill(SIGKILL);
  EXPECT_TRUE(says("/api/v1/alerts", "SharddRankLost"));
  std::cout << "the alert fires " << absl::FormatDuration(absl::Now() - killed) << " after the SIGKILL\n";
  EXPECT_TRUE(says("/api/v1/alerts", "\"SharddRankAbsent\"")) << "pending: the rank does not come back";
  survivor.Kill(SIGKILL);
}

}  // namespace
}  // namespace shardd::e2e
