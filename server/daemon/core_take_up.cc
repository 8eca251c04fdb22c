// The jobs of the daemon before this one.

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status/status_macros.h"
#include "server/daemon/core.h"
#include "server/loop/monotonic_now.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr uint64_t kJobsOfADaemon = 1 << 20;  // at most
// For whoever looks into what another daemon has left damaged.
constexpr absl::Duration kKeepRefused = absl::Minutes(15);

}  // namespace

void Core::TakeUp() {
  const auto take_up = [this](TakenUpJob taken) -> absl::Status {
    Tenant owner{taken.job.owner_uid()};
    if (SecretDigest digest; taken.job.secret_digest().size() == digest.size()) {
      std::copy(taken.job.secret_digest().begin(), taken.job.secret_digest().end(), digest.begin());
      owner.secret = digest;
    }
    const v1::JobSpec spec = taken.job.spec();
    SHARDD_ASSIGN_OR_RETURN(JobCore::Init init,
                            MakeInit(taken.job.job_id(), owner, spec, std::move(taken.plan), /*reserved_bytes=*/0,
                                     /*extends=*/false, taken.job.node(), taken.job.link_key(), &taken));
    LogInfo(absl::StrCat("job ", spec.name(), " is taken up at step ", init.committed.step, ", version ",
                         init.committed.version, ", epoch ", init.committed.epoch));
    loop_.RunAndWait([&] {
      had_job_ = true;
      Entry& entry = jobs_[{owner.uid, spec.name()}];
      if (entry.job != nullptr) {
        entry.job->EndCustody();
        entry.job->Close("a later job of its name takes its place");
      }
      entry = Entry();
      entry.job = MakeJob(std::move(init));
      entry.job->StartNodes();
      entry.job->Advance();  // its shards may be made of the snapshot
    });
    return absl::OkStatus();
  };
  TakeUpOn on;
  for (const auto& device : devices_) on.devices.push_back(device.get());
  on.place = [this](int world_size) { return PlaceOf(0, world_size); };
  for (auto& [id, taken] : custody_.TakeUp(on)) {
    const absl::Status status = taken.ok() ? take_up(*std::move(taken)) : taken.status();
    if (absl::IsNotFound(status)) {
      LogInfo(absl::StrCat("job ", id, " of the daemon before is dropped: ", status.message()));
      custody_.Drop(id);
    } else if (!status.ok()) {
      LogError(absl::StrCat("job ", id, " of the daemon before is not taken up, and its memory is freed after ",
                            absl::FormatDuration(kKeepRefused), ": ", status.message()));
      loop_.RunAndWait([this, id = id] {
        loop_.AddTimer(MonotonicNow() + kKeepRefused, [this, id] { reaper_.Post([this, id] { custody_.Drop(id); }); });
      });
    }
    // Above all that the daemon before has given: of two jobs of a name the later one counts.
    loop_.RunAndWait([this, next = id + kJobsOfADaemon] { next_job_id_ = std::max(next_job_id_, next); });
  }
}

void Core::EndKeptEpochs(absl::Duration limit, const std::function<bool(JobCore&)>& end,
                         const std::function<void(JobCore&)>& poll) {
  constexpr absl::Duration kPoll = absl::Milliseconds(2);
  const absl::Time deadline = MonotonicNow() + limit;
  bool left = false;
  loop_.RunAndWait([&] {
    for (auto& [name, entry] : jobs_) {
      JobCore& job = *entry.job;
      if (!job.committed().outlives_daemon() || job.sessions().attached() == 0) continue;
      last_epochs_.Add(job);
      if (!end(job)) last_epochs_.Remove(job);
      left = left || last_epochs_.Has(job);
    }
  });
  while (left && MonotonicNow() < deadline) {
    loop_.RunAndWait([&] {
      left = false;  // others have ended, or come to their end by themselves
      for (auto& [name, entry] : jobs_) {
        JobCore& job = *entry.job;
        if (last_epochs_.Has(job)) poll(job);
        left = left || last_epochs_.Has(job);
      }
    });
    if (left) absl::SleepFor(kPoll);
  }
  loop_.RunAndWait([&] { last_epochs_.Clear(); });
}

}  // namespace shardd
