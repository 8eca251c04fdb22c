#include "server/metrics/families.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/str_split.h"
#include "prometheus/text_serializer.h"
#include "server/metrics/collector.h"
#include "server/observe/duration_histogram.h"
#include "tests/server/metrics/full_metrics.h"
#include "tests/testing/build_paths.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::vector<prometheus::MetricFamily> Scrape(const absl::StatusOr<v1::GetMetricsResponse>& answer) {
  return Collector([&](absl::Duration) { return answer; }, absl::Now).Collect();
}
std::string Text(const absl::StatusOr<v1::GetMetricsResponse>& answer) {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, Scrape(answer));
  return out.str();
}

// Name to type and labels, as one word.
using Listing = std::map<std::string, std::string>;

Listing Scraped(const std::vector<prometheus::MetricFamily>& families) {
  Listing listing;
  for (const prometheus::MetricFamily& family : families) {
    std::set<std::string> labels;
    for (const prometheus::ClientMetric& metric : family.metric) {
      for (const auto& label : metric.label) labels.insert(label.name);
    }
    labels.erase("job_name");
    std::string text = family.type == prometheus::MetricType::Counter     ? "counter"
                       : family.type == prometheus::MetricType::Histogram ? "histogram"
                                                                          : "gauge";
    const bool of_job = labels.contains("uid") && family.name.find("shardd_user") != 0;
    if (of_job) labels.erase("uid");
    for (const std::string& label : labels) text += " " + label;
    listing[family.name] = text;
  }
  return listing;
}

// The rows of the document's tables.
Listing Documented() {
  std::ifstream file(built::kSourceDir + "/deploy/docs/metrics.md");
  Listing listing;
  const std::regex name("`(\\w+)`");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> cells = absl::StrSplit(line, '|');
    if (cells.size() < 5 || cells[1].find("`shardd_") == std::string::npos) continue;
    std::set<std::string> labels;
    const auto each = [&](const std::string& cell, const auto& take) {
      for (std::sregex_iterator at(cell.begin(), cell.end(), name), end; at != end; ++at) take((*at)[1].str());
    };
    each(cells[3], [&](const std::string& label) { labels.insert(label); });
    std::string text = cells[2].substr(1, cells[2].size() - 2);
    for (const std::string& label : labels) text += " " + label;
    each(cells[1], [&](const std::string& metric) { listing[metric] = text; });
  }
  return listing;
}

TEST(FamiliesTest, TheDocumentListsWhatAScrapeGives) { EXPECT_EQ(Documented(), Scraped(Scrape(FullMetrics()))); }

TEST(FamiliesTest, AJobHasAtMost500Series) {
  for (int ranks : {1, 12, 13, 64, 65, 1000}) {
    v1::GetMetricsResponse metrics = FullMetrics();
    MakeLarge(ranks, &*metrics.mutable_jobs(0));
    Families families;
    AddJob(metrics.jobs(0), &families);
    int series = 0;
    for (const prometheus::MetricFamily& family : families.Take()) {
      for (const prometheus::ClientMetric& metric : family.metric) {
        const bool histogram = family.type == prometheus::MetricType::Histogram;
        series += histogram ? static_cast<int>(metric.histogram.bucket.size()) + 2 : 1;
      }
    }
    EXPECT_LE(series, 500) << ranks << " ranks";
    EXPECT_GT(series, 150) << ranks << " ranks";
  }
}

TEST(FamiliesTest, TextIsOfBaseUnitsWithCumulativeBuckets) {
  const std::string text = Text(FullMetrics());
  EXPECT_THAT(text, HasSubstr("shardd_up 1\n"));
  EXPECT_THAT(text, HasSubstr("shardd_job_lost_work_seconds_total{job_name=\"gpt\",uid=\"1000\"} 3.5\n"));
  EXPECT_THAT(text, HasSubstr("shardd_job_step_duration_seconds_count{job_name=\"gpt\",uid=\"1000\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("shardd_job_step_duration_seconds_sum{job_name=\"gpt\",uid=\"1000\"} 3.03\n"));
  EXPECT_THAT(text,
              HasSubstr("shardd_job_step_duration_seconds_bucket{job_name=\"gpt\",uid=\"1000\",le=\"0.025\"} 2\n"));
  EXPECT_THAT(text,
              HasSubstr("shardd_job_step_duration_seconds_bucket{job_name=\"gpt\",uid=\"1000\",le=\"+Inf\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("shardd_job_wait_seconds_total{job_name=\"gpt\",uid=\"1000\",rank=\"0\",for=\"1\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("shardd_job_interruptions_total{job_name=\"gpt\",uid=\"1000\",cause=\"silence\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("shardd_rank_last_heard_seconds{job_name=\"gpt\",uid=\"1000\",rank=\"0\"} 0.25\n"));
  EXPECT_THAT(text, Not(HasSubstr("rank=\"1\"} -"))) << "rank 1 is not attached";
}

TEST(FamiliesTest, AnUnresponsiveDaemonIsShownAsDownAlone) {
  EXPECT_THAT(Text(absl::UnavailableError("nobody listens")),
              ::testing::AllOf(HasSubstr("shardd_up 0\n"), Not(HasSubstr("shardd_build_info"))));
}

TEST(FamiliesTest, AJobThatIsBeingTakenUpIsCounted) {
  v1::GetMetricsResponse metrics = FullMetrics();
  EXPECT_THAT(Text(metrics), HasSubstr("shardd_jobs{state=\"taking_up\"} 0\n"));
  v1::JobMetrics& job = *metrics.mutable_jobs(0);
  job.set_state(v1::JOB_STATE_TAKING_UP);
  job.clear_collective();
  EXPECT_THAT(Text(metrics), HasSubstr("shardd_jobs{state=\"taking_up\"} 1\n"));
  EXPECT_THAT(Text(metrics), Not(HasSubstr("path=\"\"")));
}

TEST(FamiliesTest, NamesOfJobsAreEscaped) {
  v1::GetMetricsResponse metrics = FullMetrics();
  metrics.mutable_jobs(0)->set_name("a\"b\\c\nd");
  EXPECT_THAT(Text(metrics), HasSubstr("shardd_job_world_size{job_name=\"a\\\"b\\\\c\\nd\",uid=\"1000\"} 2\n"));
}

}  // namespace
}  // namespace shardd
