// Jobs end because somebody says so, on all their nodes.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "server/daemon/core.h"

namespace shardd {
namespace {

constexpr absl::Duration kLookAgain = absl::Milliseconds(20);
// The links of a job that has taken another's place, or was taken up, are up by then, or a node is lost, whose ranks
// hear it later.
constexpr absl::Duration kLinksAreUp = absl::Seconds(30);
// What all nodes had made has been decided by then, or given up.
constexpr absl::Duration kIsDecided = absl::Seconds(1);

}  // namespace

// Several nodes train more from a step on: between the word of all that they have made what does so and its links, a
// node that ended its job would tell nobody, and the others would go on without it. So that is waited for. On the loop.
struct Core::Closing {
  Core* core = nullptr;
  uint64_t job_id = 0;  // or what goes on in its place when others hear
  std::string why;
  std::vector<std::function<void()>> done;
  absl::Time until;                              // others may not be there
  absl::Time not_before = absl::InfinitePast();  // where this node has taken back what it had made

  // Whoever else is to end the job meanwhile waits with the first one, however many these are.
  static void Begin(Core* core, const JobCore& job, std::string why, std::function<void()> done) {
    Entry& entry = *core->FindEntryOf(job);
    if (entry.closing != nullptr) {
      entry.closing->done.push_back(std::move(done));
      return;
    }
    entry.closing = std::make_shared<Closing>(
        Closing{core, job.identity().id, std::move(why), {std::move(done)}, MonotonicNow() + kLinksAreUp});
    Try(entry.closing);
  }

 private:
  // By value: its entry lets go of it meanwhile.
  static void Try(std::shared_ptr<Closing> closing) {
    Core* const core = closing->core;
    if (JobCore* const job = core->FindJob(core->freed_.Newest(closing->job_id)); job != nullptr) {
      const absl::Time now = MonotonicNow();
      Entry& entry = *core->FindEntryOf(*job);
      if (job->nodes().over_nodes() && now < closing->until && !closing->OthersHear(entry, now)) {
        core->loop_.AddTimer(now + kLookAgain, [closing] { Try(closing); });
        return;
      }
      entry.closing = nullptr;
      job->Close(closing->why, JobCore::CloseOn::kAllNodes);
      core->ReviewJobs();
    }
    for (const auto& done : closing->done) done();
  }

  bool OthersHear(const Entry& entry, absl::Time now) {
    JobCore& job = *entry.job;
    if (job.extensions().has_built()) {  // all nodes may have said that they have, too
      not_before = now + kIsDecided;
      job.Abort(absl::AbortedError(why), {});
      return false;
    }
    if (now < not_before || job.extensions().decided() || job.extensions().widens()) return false;
    const bool links_are_new = now < entry.links_anew + kLinksAreUp || not_before > absl::InfinitePast();
    return !links_are_new || job.nodes().others().AreReached();
  }
};

void Core::Entry::CloseNow() {
  const std::shared_ptr<Closing> waits = std::exchange(closing, nullptr);
  if (waits == nullptr) return;
  job->Close(waits->why, JobCore::CloseOn::kAllNodes);
  for (const auto& done : std::exchange(waits->done, {})) done();
}

void Core::CloseJob(PeerCredentials peer, const JobSecret& secret, bool is_admin, uint64_t job_id,
                    std::function<void(absl::Status)> done) {
  const Caller caller{{peer.uid, secret.digest()}, is_admin};
  loop_.Post([this, peer, caller, job_id, done = std::move(done)] {
    if (absl::Status here = take_ups_.CheckId(absl::StrCat("close job ", job_id), job_id); !here.ok()) {
      return done(std::move(here));
    }
    JobCore* const job = FindJob(freed_.Newest(job_id));
    if (job == nullptr) return done(absl::OkStatus());
    const JobIdentity& identity = job->identity();
    if (!caller.MaySee(identity.owner)) {
      const std::string what = absl::StrCat("close job ", job_id);
      return done(identity.owner.uid == peer.uid
                      ? SecretRefused(what, caller.tenant)
                      : absl::PermissionDeniedError(absl::StrCat(what, ": it belongs to another user")));
    }
    Closing::Begin(this, *job, absl::StrCat("closed by pid ", peer.pid), [done] { done(absl::OkStatus()); });
  });
}

void Core::CloseJobByName(const Caller& caller, const v1::JobRef& job, Done<v1::CloseJobByNameResponse> done) {
  loop_.Post([this, caller, job, done = std::move(done)] {
    v1::CloseJobByNameResponse response;
    Caller closer = caller;
    closer.is_viewer = false;  // it may close its own as anybody may
    const absl::StatusOr<JobCore*> found = FindJobByName(closer, job);
    if (absl::IsNotFound(found.status()) && !absl::IsNotFound(FindJobByName(caller, job).status())) {
      done(absl::PermissionDeniedError(
          absl::StrCat("close job \"", job.job(), "\": it belongs to another user; members of the group that sees all ",
                       "jobs (--view_group) may ask and change nothing (got uid ", caller.tenant.uid,
                       ", want its owner's, or the daemon's user or root)")));
      return;
    }
    if (!found.ok()) {
      done(absl::IsNotFound(found.status()) ? absl::StatusOr<v1::CloseJobByNameResponse>(std::move(response))
                                            : found.status());
      return;
    }
    response.set_existed(true);
    Closing::Begin(this, **found, absl::StrCat("closed by uid ", caller.tenant.uid),
                   [done, response] { done(response); });
  });
}

}  // namespace shardd
