#include "server/metrics/status_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "nlohmann/json.hpp"
#include "server/history/history.h"
#include "server/metrics/page_files.h"
#include "tests/server/metrics/full_metrics.h"
#include "tests/testing/http_get.h"

namespace shardd {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kHour = 3'600'000'000;  // of an event's time

// Says what is set here, and counts who asks.
class FakeSource : public MetricsSource {
 public:
  FakeSource() : MetricsSource("/nonexistent") {}
  absl::StatusOr<v1::GetMetricsResponse> Get(absl::Duration) const override {
    ++asked["metrics"];
    if (!error.ok()) return error;
    return metrics;
  }
  absl::StatusOr<v1::ListJobsResponse> Jobs(absl::Duration) const override {
    ++asked["jobs"];
    return jobs;
  }
  absl::StatusOr<v1::ListRanksResponse> Ranks(const v1::JobRef& job, absl::Duration) const override {
    ++asked["ranks of " + job.job()];
    return ranks;
  }
  absl::StatusOr<v1::ListEventsResponse> Events(const v1::ListEventsRequest& which, absl::Duration) const override {
    ++asked[which.has_uid() ? "events of " + std::to_string(which.uid()) : "events"];
    return events;
  }
  absl::StatusOr<v1::ListHistoryResponse> History(const v1::ListHistoryRequest& which, absl::Duration) const override {
    ++asked["history"];
    EXPECT_TRUE(which.events_only());
    return history;
  }

  absl::Status error;
  v1::GetMetricsResponse metrics;
  v1::ListJobsResponse jobs;
  v1::ListRanksResponse ranks;
  v1::ListEventsResponse events;
  absl::StatusOr<v1::ListHistoryResponse> history = absl::FailedPreconditionError("there is none");
  mutable std::map<std::string, int> asked;
};

class StatusPageTest : public ::testing::Test {
 protected:
  StatusPageTest() {
    source_.metrics = FullMetrics();
    source_.metrics.mutable_daemon()->set_start_time_unix_ms(1);
    AddJob("theirs", 1001, false);
    AddJob("hidden", 1000, true);
    v1::Job& first = *source_.jobs.add_jobs();
    first.set_name("gpt");
    first.set_uid(1000);
    first.set_created_unix_ms(kHour / 1000);
    source_.ranks.add_ranks()->set_waiting_for("rank 1: Step");
  }
  void AddJob(const std::string& name, uint32_t uid, bool has_secret) {
    v1::JobMetrics& metrics = *source_.metrics.add_jobs();
    metrics.set_name(name);
    metrics.set_uid(uid);
    v1::Job& job = *source_.jobs.add_jobs();
    job.set_name(name);
    job.set_uid(uid);
    job.set_has_secret(has_secret);
  }
  v1::Event& AddEvent(const std::string& job, const std::string& kind, int64_t unix_us) {
    v1::Event& event = *source_.events.add_events();
    event.set_job(job);
    event.set_kind(kind);
    event.set_unix_us(unix_us);
    event.set_text(kind + " of " + job);
    return event;
  }
  json Shown(const Viewer& viewer, const std::string& job = "", const std::string& uid = "") {
    return json::parse(page_.Json(viewer, job, uid));
  }
  static std::vector<std::string> NamesOf(const json& status) {
    std::vector<std::string> names;
    for (const json& job : status["jobs"]) names.push_back(job["name"]);
    return names;
  }
  static std::vector<std::string> TextsOf(const json& status) {
    std::vector<std::string> texts;
    for (const json& incident : status["incidents"]) texts.push_back(incident["text"]);
    return texts;
  }

  const Viewer root_ = {true, 0, "root"}, user_ = {false, 1000, "user"}, nobody_ = {false, std::nullopt, "nobody"};
  FakeSource source_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  StatusPage page_{&source_, PagePolicy::kOwn, PageReach::kLoopback, [this] { return now_; }};
};

TEST_F(StatusPageTest, EachSeesTheJobsThatAreHis) {
  EXPECT_THAT(NamesOf(Shown(root_)), ElementsAre("gpt", "theirs", "hidden"));
  EXPECT_THAT(NamesOf(Shown(user_)), ElementsAre("gpt"));
  EXPECT_EQ(Shown(user_)["hidden_jobs"], 2);
  EXPECT_THAT(NamesOf(Shown(nobody_)), IsEmpty());
  EXPECT_EQ(Shown(nobody_)["hidden_jobs"], 3);
  const std::string text = page_.Json(nobody_, "gpt", "1000");
  EXPECT_THAT(text, Not(HasSubstr("gpt")));
  EXPECT_THAT(text, Not(HasSubstr("rank 1")));
}

TEST_F(StatusPageTest, RanksAreShownOfAJobThatOneMaySee) {
  EXPECT_EQ(Shown(user_, "gpt", "1000")["selected"]["ranks"][0]["waits"], "rank 1: Step");
  EXPECT_EQ(Shown(root_, "theirs", "1001")["selected"]["job"], "theirs");
  EXPECT_EQ(Shown(user_, "theirs", "1001")["selected"], nullptr);
  EXPECT_EQ(Shown(user_, "hidden", "1000")["selected"], nullptr);
  EXPECT_EQ(Shown(user_, "gpt", "1001")["selected"], nullptr);
  EXPECT_EQ(Shown(user_, "gpt", "root")["selected"], nullptr);
  EXPECT_EQ(source_.asked.count("ranks of hidden"), 0u);
}

TEST_F(StatusPageTest, SeveralPagesCostTheDaemonOneQuestionASecond) {
  for (int second = 0; second < 3; ++second) {
    for (int page = 0; page < 7; ++page) Shown(root_, "gpt", "1000");
    now_ += absl::Seconds(1);
  }
  EXPECT_THAT(source_.asked, ElementsAre(std::pair("events", 3), std::pair("history", 1), std::pair("jobs", 3),
                                         std::pair("metrics", 3), std::pair("ranks of gpt", 3)));
}

TEST_F(StatusPageTest, AbortsAreOfTheDaemonsEventsAndOfItsHistory) {
  AddEvent("gpt", "attach", 2 * kHour);
  AddEvent("gpt", "lost", 3 * kHour).set_rank(1);
  AddEvent("gpt", "abort", 4 * kHour);
  v1::ListHistoryResponse history;
  v1::HistoryLine& same = *history.add_lines();
  *same.mutable_event() = source_.events.events(1);
  v1::HistoryLine& older = *history.add_lines();
  older.set_job("past");
  older.set_uid(1001);
  older.mutable_event()->set_job("past");
  older.mutable_event()->set_kind("abort");
  older.mutable_event()->set_text("of another daemon");
  source_.history = history;
  EXPECT_THAT(TextsOf(Shown(root_)), ElementsAre("abort of gpt", "lost of gpt", "of another daemon"));
  AddEvent("gpt", "refused", 5 * kHour);
  now_ += absl::Seconds(1);
  EXPECT_THAT(TextsOf(Shown(root_)), ElementsAre("refused of gpt", "abort of gpt", "lost of gpt", "of another daemon"));
  EXPECT_EQ(source_.asked["history"], 1);
}

// An event does not say whose it is.
TEST_F(StatusPageTest, AUserIsToldOfAbortsThatAreCertainlyHis) {
  AddEvent("gpt", "abort", kHour - 1).set_text("of a job of that name before, which may have had a secret");
  AddEvent("gpt", "abort", 2 * kHour);
  AddEvent("hidden", "abort", 2 * kHour);
  AddEvent("closed", "abort", 2 * kHour);
  v1::ListHistoryResponse history;
  for (const auto& [uid, secret] : {std::pair(1000, false), std::pair(1000, true), std::pair(1001, false)}) {
    v1::HistoryLine& line = *history.add_lines();
    line.set_uid(static_cast<uint32_t>(uid));
    line.set_has_secret(secret);
    line.mutable_event()->set_kind("abort");
    line.mutable_event()->set_unix_us(uid + (secret ? 1 : 0));
    line.mutable_event()->set_text(std::to_string(uid) + (secret ? " secret" : " past"));
  }
  source_.history = history;
  EXPECT_THAT(TextsOf(Shown(user_)), ElementsAre("abort of gpt", "1000 past"));
  EXPECT_EQ(source_.asked["events of 1000"], 1);
  EXPECT_THAT(TextsOf(Shown(nobody_)), IsEmpty());
}

TEST_F(StatusPageTest, ADaemonThatDoesNotAnswerIsSaid) {
  source_.error = absl::UnavailableError("connect /run/shardd.sock: refused");
  EXPECT_EQ(Shown(root_)["daemon"], nullptr);
  EXPECT_THAT(Shown(root_)["error"], HasSubstr("refused"));
  EXPECT_THAT(page_.Json(nobody_, "", ""), Not(HasSubstr("/run")));
}

TEST_F(StatusPageTest, TextsOfStrangersStayTextsOfJson) {
  const std::string evil = "</script><img src=x onerror=\"alert(1)\">\\";
  source_.metrics.mutable_jobs(0)->set_name(evil);
  source_.jobs.mutable_jobs(2)->set_name(evil);
  source_.ranks.mutable_ranks(0)->set_waiting_for("no UTF-8: \xff");
  const json status = Shown(root_, evil, "1000");
  EXPECT_EQ(NamesOf(status)[0], evil);
  EXPECT_EQ(status["selected"]["ranks"][0]["waits"], "no UTF-8: \xef\xbf\xbd");
}

TEST_F(StatusPageTest, FiguresAreOfTheTimeSinceTheAnswerBefore) {
  Shown(root_);
  v1::JobMetrics& job = *source_.metrics.mutable_jobs(0);
  job.mutable_steps()->mutable_last()->set_duration_ns(1);
  v1::Durations& steps = *job.mutable_steps()->mutable_duration();
  steps.set_counts(0, steps.counts(0) + 4);
  steps.set_sum_ns(steps.sum_ns() + 1'000'000'000);
  source_.metrics.mutable_daemon()->mutable_streams(0)->set_busy_us(2'000'000);
  now_ += absl::Seconds(2);
  const json status = Shown(root_);
  EXPECT_DOUBLE_EQ(status["jobs"][0]["pace"]["step_s"].get<double>(), 0.25);
  EXPECT_DOUBLE_EQ(status["daemon"]["devices"][0]["busy"]["optimizer"].get<double>(), 0.25);
  EXPECT_EQ(Shown(user_)["daemon"]["devices"][0]["busy"].size(), 0u);
  steps.set_counts(0, steps.counts(0) + 4);
  steps.set_sum_ns(steps.sum_ns() + 1'000'000'000);
  now_ += absl::Seconds(20);
  EXPECT_DOUBLE_EQ(Shown(root_)["jobs"][0]["pace"]["step_s"].get<double>(), 1e-9) << "that was too long ago";
}

// Open pages would have all threads, and scrapes none.
TEST_F(StatusPageTest, NoConnectionIsKeptForAPageThatIsOpen) {
  HttpServer::Handlers handlers;
  page_.AddTo(&handlers);
  auto server = HttpServer::Start({"", "127.0.0.1", 0}, handlers);
  ASSERT_TRUE(server.ok()) << server.status();
  const testing::HttpAnswer answer = testing::HttpGet((*server)->port(), "/status.json", "GET", /*keep_alive=*/true);
  EXPECT_EQ(answer.status, 200);
  EXPECT_TRUE(answer.closed);
}

TEST_F(StatusPageTest, ItsHeadersAllowNothingFromElsewhere) {
  HttpServer::Handlers handlers, none;
  page_.AddTo(&handlers);
  auto server = HttpServer::Start({"", "127.0.0.1", 0}, handlers);
  ASSERT_TRUE(server.ok()) << server.status();
  for (const PageFile& file : PageFiles()) {
    const testing::HttpAnswer answer = testing::HttpGet((*server)->port(), std::string(file.path));
    EXPECT_EQ(answer.status, 200) << file.path;
    EXPECT_EQ(answer.body, file.content);
    EXPECT_GT(answer.body.size(), 200u) << file.path;
    EXPECT_THAT(answer.headers, HasSubstr("Content-Security-Policy: default-src 'self';"));
    EXPECT_THAT(answer.headers, HasSubstr("X-Content-Type-Options: nosniff"));
    EXPECT_THAT(answer.headers, Not(HasSubstr("Access-Control")));
    EXPECT_THAT(answer.body, Not(HasSubstr("https://")));
  }
  EXPECT_THAT(testing::HttpGet((*server)->port(), "/status.json").headers, HasSubstr("application/json"));
  EXPECT_EQ(testing::HttpGet((*server)->port(), "/status.json", "POST").status, 405);
  StatusPage(&source_, PagePolicy::kOff, PageReach::kLoopback, [this] { return now_; }).AddTo(&none);
  EXPECT_TRUE(none.empty());
}

}  // namespace
}  // namespace shardd
