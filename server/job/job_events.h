#ifndef SHARDD_SERVER_JOB_JOB_EVENTS_H_
#define SHARDD_SERVER_JOB_JOB_EVENTS_H_

#include <string>

#include "absl/strings/string_view.h"
#include "server/observe/events.h"
#include "server/tenant/tenant.h"

namespace shardd {

class Committed;

// What one job tells operators: a line of the daemon's log and an entry in the log of events, with the epoch and the
// committed step of the moment. Loop-confined.
class JobEvents {
 public:
  // `committed` and `events` outlive this.
  JobEvents(std::string job, Tenant owner, const Committed* committed, EventLog* events)
      : job_(std::move(job)), owner_(std::move(owner)), committed_(committed), events_(events) {}

  // `rank` -1: the job as a whole.
  void Add(int rank, absl::string_view kind, std::string text);
  // A step is committed.
  void AddStep(const v1::HistoryStep& step) { events_->AddStep(job_, owner_, step); }

 private:
  const std::string job_;
  const Tenant owner_;
  const Committed* const committed_;
  EventLog* const events_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_JOB_EVENTS_H_
