#include "server/handover/handover.h"

#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/version.h"
#include "server/observe/log.h"

namespace shardd {

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
  jobs_->ListJobs(
      caller, [this, version = request.version(), done = std::move(done)](absl::StatusOr<v1::ListJobsResponse> listed) {
        std::vector<std::string> ending;
        absl::Status status = listed.status();
        for (int i = 0; status.ok() && i < listed->jobs_size(); ++i) {
          const v1::Job& job = listed->jobs(i);
          if (!job.outlives_daemon()) ending.push_back(absl::StrCat("\"", job.name(), "\" of uid ", job.uid()));
        }
        if (!ending.empty()) {
          status = absl::FailedPreconditionError(
              absl::StrCat("hand over: jobs would end with this daemon, because no custodian keeps them (",
                           absl::StrJoin(ending, ", "), "); wait for their end, or close them"));
        }
        if (status.ok()) {
          absl::MutexLock lock(&mutex_);
          if (asked_) {
            status = absl::FailedPreconditionError("hand over: another daemon takes this one's place already");
          } else {
            asked_ = true;
            done_ = done;
          }
        }
        if (!status.ok()) {
          done(status);
          return;
        }
        LogInfo(absl::StrCat("hands over to shardd ", version, " (this is ", kVersion, ")"));
        stop_();
      });
}

void Handover::Complete() {
  JobsSource::Done<v1::HandOverResponse> done;
  {
    absl::MutexLock lock(&mutex_);
    done = std::exchange(done_, nullptr);
  }
  if (done == nullptr) return;
  custody_->Release();
  v1::HandOverResponse response;
  response.set_pid(getpid());
  done(std::move(response));
}

}  // namespace shardd
