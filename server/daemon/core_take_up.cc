// The jobs of the daemon before this one.

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status/status_macros.h"
#include "server/daemon/core.h"
#include "server/loop/monotonic_now.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr uint64_t kJobsOfADaemon = 1 << 20;  // at most
// With updates to complete that take longer, the others are not kept waiting.
constexpr absl::Duration kListenAfter = absl::Milliseconds(500);
// For whoever looks into what another daemon has left damaged.
constexpr absl::Duration kKeepRefused = absl::Minutes(15);

Tenant OwnerOf(const v1::CustodyJob& job) {
  Tenant owner{job.owner_uid()};
  if (SecretDigest digest; job.secret_digest().size() == digest.size()) {
    std::copy(job.secret_digest().begin(), job.secret_digest().end(), digest.begin());
    owner.secret = digest;
  }
  return owner;
}

}  // namespace

void Core::TakeUpJob(uint64_t id, absl::StatusOr<JobMemory::Kept> left, const TakeUpOn& on) {
  const auto add = [this](TakenUpJob taken) -> absl::Status {
    const Tenant owner = OwnerOf(taken.job);
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
        // The others go on with the later one: they hear only that the links are gone.
        entry.job->Close("a later job of its name takes its place", JobCore::CloseOn::kReplaced);
      }
      entry = Entry();
      entry.job = MakeJob(std::move(init));
      entry.job->StartNodes();
      entry.job->Advance();  // its shards may be made of the snapshot
    });
    return absl::OkStatus();
  };
  absl::StatusOr<TakenUpJob> taken = left.ok() ? ReadTakenUpJob(*std::move(left), on) : left.status();
  absl::Status status = taken.status();
  if (taken.ok()) {
    status = absl::CancelledError("");  // this daemon shuts down, and the next one takes it up
    setup_.RunAndWait([&] { status = add(*std::move(taken)); });
  }
  if (absl::IsNotFound(status)) {
    LogInfo(absl::StrCat("job ", id, " of the daemon before is dropped: ", status.message()));
    custody_.Drop(id);
  } else if (!status.ok() && !absl::IsCancelled(status)) {
    LogError(absl::StrCat("job ", id, " of the daemon before is not taken up, and its memory is freed after ",
                          absl::FormatDuration(kKeepRefused), ": ", status.message()));
    loop_.RunAndWait([this, id] {
      loop_.AddTimer(MonotonicNow() + kKeepRefused, [this, id] { reaper_.Post([this, id] { custody_.Drop(id); }); });
    });
  }
}

void Core::TakeUp() {
  auto on = std::make_shared<TakeUpOn>();
  for (const auto& device : devices_) on->devices.push_back(device.get());
  on->place = [this](int world_size) { return PlaceOf(0, world_size); };
  on->known = [this](const TakenUpJob& taken, const TakeUpLog::Header& header) {
    v1::Job known;
    known.set_name(taken.job.spec().name());
    known.set_job_id(taken.job.job_id());
    known.set_uid(taken.job.owner_uid());
    known.set_has_secret(!taken.job.secret_digest().empty());
    known.set_outlives_daemon(true);
    *known.mutable_kept_formats() = taken.formats();
    known.set_world_size(taken.plan.world_size);
    known.set_state(v1::JOB_STATE_TAKING_UP);
    known.set_epoch(header.epoch + 1);
    known.set_committed_step(header.step);
    known.set_version(header.version);
    known.set_groups(static_cast<int>(taken.plan.groups.size()));
    *known.mutable_config() = taken.plan.config;
    known.mutable_counters();
    known.set_created_unix_ms(absl::ToUnixMillis(start_time_));
    known.set_plan_digest(absl::BytesToHexString(taken.plan.digest));
    take_ups_.Describe(OwnerOf(taken.job), std::move(known));
  };
  const bool on_gpus = on->place(1).memory != nullptr;
  std::vector<std::pair<uint64_t, absl::StatusOr<JobMemory::Kept>>> left = custody_.TakeUp(on_gpus);
  // Above all that the daemon before has given: of two jobs of a name the later one counts.
  loop_.RunAndWait([&] {
    if (!left.empty()) next_job_id_ = std::max(next_job_id_, left.back().first + kJobsOfADaemon);
  });
  // Jobs of the same name are one after the other. Other nodes take a job that is not there yet for one that is lost,
  // and GPUs have streams, which complete what is left: these are there before anybody calls.
  std::map<TakeUps::Name, std::vector<TakeUps::TakeUp>> beside;
  std::vector<TakeUps::TakeUp> first;
  std::set<TakeUps::Name> of_nodes;
  const auto name_of = [](const v1::CustodyJob& job) { return TakeUps::Name(job.owner_uid(), job.spec().name()); };
  std::vector<absl::StatusOr<v1::CustodyJob>> jobs;
  for (auto& [id, kept] : left) {
    jobs.push_back(kept.ok() ? ReadCustodyJob(*kept) : kept.status());
    if (jobs.back().ok() && jobs.back()->spec().config().has_nodes()) of_nodes.insert(name_of(*jobs.back()));
  }
  for (size_t i = 0; i < left.size(); ++i) {
    const bool is_first = on_gpus || !jobs[i].ok() || of_nodes.contains(name_of(*jobs[i]));
    std::vector<TakeUps::TakeUp>& group = is_first ? first : beside[name_of(*jobs[i])];
    group.push_back([this, on, id = left[i].first, kept = std::move(left[i].second)]() mutable {
      TakeUpJob(id, std::move(kept), *on);
    });
  }
  for (TakeUps::TakeUp& take_up : first) std::move(take_up)();
  take_ups_.Begin(std::move(beside), kListenAfter);
  if (const size_t more = take_ups_.count(); more > 0) {
    LogInfo(absl::StrCat(more, " job(s) of the daemon before are being taken up still; others are served meanwhile"));
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
