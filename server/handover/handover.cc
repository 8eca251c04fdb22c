#include "server/handover/handover.h"

#include <unistd.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/version.h"
#include "server/observe/log.h"
#include "server/storage/kept_formats.h"

namespace shardd {
namespace {

// FAILED_PRECONDITION: jobs would end with this daemon, or wait in vain for one that reads them.
absl::Status CheckGoOn(const v1::ListJobsResponse& listed, const v1::HandOverRequest& request) {
  std::vector<std::string> ending;
  std::vector<std::string> coming;
  std::vector<std::string> unread;
  for (const v1::Job& job : listed.jobs()) {
    const std::string name = absl::StrCat("\"", job.name(), "\" of uid ", job.uid());
    if (job.state() == v1::JOB_STATE_TAKING_UP) {
      coming.push_back(name);
    } else if (!job.outlives_daemon()) {
      ending.push_back(name);
    } else if (const absl::Status reads = CheckReads(request, job.kept_formats()); !reads.ok()) {
      unread.push_back(absl::StrCat(name, ": ", reads.message()));
    }
  }
  if (!ending.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("hand over: jobs would end with this daemon, because no custodian keeps them (",
                     absl::StrJoin(ending, ", "), "); wait for their end, or close them"));
  }
  if (!coming.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("hand over: jobs of the daemon before are being taken up (", absl::StrJoin(coming, ", "),
                     "), whose updates would begin anew; try again when their ranks train"));
  }
  if (!unread.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("hand over: shardd ", request.version(),
                                                      " could not go on with jobs (", absl::StrJoin(unread, ", "),
                                                      "); wait for their end, or start a version that reads them"));
  }
  return absl::OkStatus();
}

}  // namespace

Handover::Handover(JobsSource* jobs, std::shared_ptr<Custody> custody, bool embedded, std::function<void()> stop)
    : jobs_(jobs),
      custody_(std::move(custody)),
      impossible_(embedded              ? "this daemon is its trainers' own, who start the next one when it ends"
                  : custody_ == nullptr ? "jobs end with this daemon, because it has no custodian; give it --custodian"
                                        : ""),
      stop_(std::move(stop)),
      state_(impossible_.empty() ? "possible" : absl::StrCat("impossible: ", impossible_)) {}

std::string Handover::state() const {
  absl::MutexLock lock(&mutex_);
  return state_;
}

void Handover::SetState(std::string state) {
  absl::MutexLock lock(&mutex_);
  state_ = std::move(state);
}

void Handover::Ask(const Caller& caller, const v1::HandOverRequest& request,
                   JobsSource::Done<v1::HandOverResponse> done) {
  if (!caller.is_admin) {
    done(absl::PermissionDeniedError(absl::StrCat("hand over: it is for the daemon's own user and root (got uid ",
                                                  caller.tenant.uid, ", want ", geteuid(),
                                                  " or 0, in the daemon's own namespaces)")));
    return;
  }
  if (!impossible_.empty()) {
    done(absl::FailedPreconditionError(absl::StrCat("hand over: ", impossible_)));
    return;
  }
  jobs_->ListJobs(caller, [this, request, done = std::move(done)](absl::StatusOr<v1::ListJobsResponse> listed) {
    absl::Status status = listed.ok() ? CheckGoOn(*listed, request) : listed.status();
    bool stops = false;
    if (status.ok()) {
      absl::MutexLock lock(&mutex_);
      if (asked_) {
        status = absl::FailedPreconditionError("hand over: another daemon takes this one's place already");
      } else {
        asked_ = true;
        done_ = done;
        stops = stops_;
      }
    }
    if (!status.ok()) {
      LogWarning(std::string(status.message()));
      done(status);
      return;
    }
    LogInfo(absl::StrCat("hands over to shardd ", request.version(), " (this is ", kVersion, ")"));
    if (!stops) stop_();
  });
}

void Handover::BeginStop() {
  absl::MutexLock lock(&mutex_);
  stops_ = true;
  state_ = "impossible: the daemon is shutting down";
}

void Handover::Complete(bool memory_is_quiet) {
  JobsSource::Done<v1::HandOverResponse> done;
  {
    absl::MutexLock lock(&mutex_);
    done = std::exchange(done_, nullptr);
  }
  if (done == nullptr) return;
  if (!memory_is_quiet) {
    LogError("hand over: a thread may still write into jobs' memory; this daemon ends at once");
    _exit(EXIT_FAILURE);
  }
  custody_->Release();
  v1::HandOverResponse response;
  response.set_pid(getpid());
  done(std::move(response));
}

}  // namespace shardd
