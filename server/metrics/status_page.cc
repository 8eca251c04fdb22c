#include "server/metrics/status_page.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status/status_macros.h"
#include "server/metrics/page_files.h"

namespace shardd {
namespace {

// A page asks every second, and shares the server's threads with all others.
constexpr absl::Duration kLimit = absl::Seconds(2);
// Rates over more than this would not be those of now.
constexpr absl::Duration kLongest = absl::Seconds(10);
constexpr absl::Duration kOfThePast = absl::Hours(7 * 24);
constexpr int kHistoryLines = 1000;
constexpr int kAllEvents = 4096, kNewEvents = 1024;
constexpr size_t kMostIncidents = 50;

v1::JobRef RefOf(const std::string& job, uint32_t uid) {
  v1::JobRef ref;
  ref.set_job(job);
  ref.set_uid(uid);
  return ref;
}

bool IsListed(const StatusFacts& facts, const std::string& name, uint32_t uid, const Viewer& viewer) {
  const auto& jobs = facts.jobs.jobs();
  return std::any_of(jobs.begin(), jobs.end(), [&](const v1::Job& job) {
    return job.name() == name && job.uid() == uid && viewer.Sees(uid, job.has_secret());
  });
}

// Newest first, each once, and no more than are shown.
void Tidy(std::vector<Incident>* incidents) {
  std::stable_sort(incidents->begin(), incidents->end(),
                   [](const Incident& a, const Incident& b) { return a.event.unix_us() > b.event.unix_us(); });
  std::vector<Incident> tidy;
  for (Incident& incident : *incidents) {
    if (tidy.size() == kMostIncidents) break;
    if (std::find(tidy.begin(), tidy.end(), incident) == tidy.end()) tidy.push_back(std::move(incident));
  }
  *incidents = std::move(tidy);
}

}  // namespace

StatusPage::StatusPage(const MetricsSource* source, PagePolicy policy, PageReach reach, const Clock& clock)
    : source_(source), policy_(policy), reach_(reach), clock_(clock), facts_(clock), ranks_(clock), incidents_(clock) {}

void StatusPage::AddTo(HttpServer::Handlers* handlers) {
  if (policy_ == PagePolicy::kOff) return;
  for (const PageFile& file : PageFiles()) {
    (*handlers)[std::string(file.path)] = [&file](const HttpRequest&) {
      return HttpResponse{200, std::string(file.content_type), std::string(file.content)};
    };
  }
  (*handlers)["/status.json"] = [this](const HttpRequest& request) {
    const Viewer viewer = ViewerOf(request, policy_, reach_);
    return HttpResponse{200, "application/json", Json(viewer, request.Parameter("job"), request.Parameter("uid"))};
  };
}

absl::StatusOr<StatusFacts> StatusPage::AskFacts(const StatusFacts* before) const {
  StatusFacts facts;
  facts.asked = clock_();
  facts.time = absl::Now();
  SHARDD_ASSIGN_OR_RETURN(facts.metrics, source_->Get(kLimit));
  SHARDD_ASSIGN_OR_RETURN(facts.jobs, source_->Jobs(kLimit));
  const bool is_same =
      before != nullptr && before->metrics.daemon().start_time_unix_ms() == facts.metrics.daemon().start_time_unix_ms();
  if (is_same && facts.asked - before->asked <= kLongest) {
    facts.before = before->metrics;
    facts.since_before = facts.asked - before->asked;
  }
  return facts;
}

absl::StatusOr<StatusPage::Incidents> StatusPage::AskIncidents(const StatusFacts& facts, const Viewer& viewer,
                                                               const Incidents* before) const {
  Incidents incidents = before == nullptr ? Incidents() : *before;
  v1::ListEventsRequest which;
  which.set_limit(before == nullptr ? kAllEvents : kNewEvents);
  if (!viewer.sees_all) which.set_uid(*viewer.uid);
  SHARDD_ASSIGN_OR_RETURN(const v1::ListEventsResponse events, source_->Events(which, kLimit));
  for (const v1::Event& event : events.events()) {
    if (!IsIncident(event)) continue;
    // An event does not say whose job it was of, or whether that had a secret. For a user who sees only some, those
    // count that are certainly of a job that he sees now.
    const auto& jobs = facts.jobs.jobs();
    const auto is_of = [&](const v1::Job& job) {
      return job.name() == event.job() && viewer.Sees(job.uid(), job.has_secret()) &&
             job.created_unix_ms() <= event.unix_us() / 1000;
    };
    if (!viewer.sees_all && std::none_of(jobs.begin(), jobs.end(), is_of)) continue;
    incidents.push_back({event, viewer.uid.value_or(0), false});
  }
  if (before == nullptr) {  // what other daemons have left; reading it takes longer
    v1::ListHistoryRequest past;
    past.set_events_only(true);
    past.set_limit(kHistoryLines);
    past.set_since_unix_ms(std::max<int64_t>(0, absl::ToUnixMillis(facts.time - kOfThePast)));
    if (!viewer.sees_all) past.set_uid(*viewer.uid);
    const absl::StatusOr<v1::ListHistoryResponse> history = source_->History(past, kLimit);
    if (history.ok()) {  // a daemon without one is none the worse
      for (const v1::HistoryLine& line : history->lines()) {
        if (!IsIncident(line.event()) || !viewer.Sees(line.uid(), line.has_secret())) continue;
        incidents.push_back({line.event(), line.uid(), line.has_secret()});
      }
    }
  }
  Tidy(&incidents);
  return incidents;
}

std::string StatusPage::Json(const Viewer& viewer, const std::string& selected, const std::string& uid) {
  const auto facts = facts_.Get("", [this](const StatusFacts* before) { return AskFacts(before); });
  if (!facts.ok()) return StatusJson(facts.status(), viewer);
  const StatusFacts& known = **facts;
  Incidents incidents;
  if (viewer.sees_all || viewer.uid.has_value()) {
    const auto kept = incidents_.Get(viewer.sees_all ? "all" : absl::StrCat(*viewer.uid),
                                     [&](const Incidents* before) { return AskIncidents(known, viewer, before); });
    if (kept.ok()) incidents = **kept;
  }
  uint32_t owner = 0;
  if (!absl::SimpleAtoi(uid, &owner) || !IsListed(known, selected, owner, viewer)) {
    return StatusJson(known, incidents, nullptr, viewer);
  }
  const auto ranks =
      ranks_.Get(absl::StrCat(owner, " ", selected), [&](const SelectedRanks*) -> absl::StatusOr<SelectedRanks> {
        SelectedRanks answer{selected, owner, {}};
        SHARDD_ASSIGN_OR_RETURN(answer.ranks, source_->Ranks(RefOf(selected, owner), kLimit));
        return answer;
      });
  return StatusJson(known, incidents, ranks.ok() ? ranks->get() : nullptr, viewer);
}

}  // namespace shardd
