#ifndef SHARDD_SERVER_METRICS_STATUS_PAGE_H_
#define SHARDD_SERVER_METRICS_STATUS_PAGE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/metrics/http/http_server.h"
#include "server/metrics/kept_answers.h"
#include "server/metrics/metrics_source.h"
#include "server/metrics/status_json.h"
#include "server/metrics/viewer.h"

namespace shardd {

// The page at / and the data that it shows, /status.json: read-only, for people. Thread-safe.
class StatusPage {
 public:
  using Clock = std::function<absl::Time()>;
  // Asks `source`, which outlives this. `clock`: one that nobody sets.
  StatusPage(const MetricsSource* source, PagePolicy policy, PageReach reach, const Clock& clock);

  // Its paths, which need this for as long as they are served. PagePolicy::kOff: none.
  void AddTo(HttpServer::Handlers* handlers);

  // What `viewer` sees, with the ranks of the job `selected` of the user `uid` (decimal), where there is one. Blocks
  // while the daemon is asked.
  std::string Json(const Viewer& viewer, const std::string& selected, const std::string& uid);

 private:
  using Incidents = std::vector<Incident>;

  absl::StatusOr<StatusFacts> AskFacts(const StatusFacts* before) const;
  absl::StatusOr<Incidents> AskIncidents(const StatusFacts& facts, const Viewer& viewer, const Incidents* before) const;

  const MetricsSource* const source_;
  const PagePolicy policy_;
  const PageReach reach_;
  const Clock clock_;
  KeptAnswers<StatusFacts> facts_;
  KeptAnswers<SelectedRanks> ranks_;
  KeptAnswers<Incidents> incidents_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_STATUS_PAGE_H_
