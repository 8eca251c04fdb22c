// The jobs of the daemon before this one.

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/slab_holes.h"
#include "common/shm/open_files.h"
#include "common/status/status_macros.h"
#include "server/daemon/core.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr uint64_t kJobsOfADaemon = 1 << 20;  // at most
// With updates to complete that take longer, the others are not kept waiting.
constexpr absl::Duration kListenAfter = absl::Milliseconds(500);
// For whoever looks into what another daemon has left damaged.
constexpr absl::Duration kKeepRefused = absl::Minutes(15);
// With too few descriptors, or too little memory, for a job: its ranks are told to come again.
constexpr absl::Duration kTryFor = absl::Minutes(15);

Tenant OwnerOf(const v1::CustodyJob& job) {
  Tenant owner{job.owner_uid()};
  if (SecretDigest digest; job.secret_digest().size() == digest.size()) {
    std::copy(job.secret_digest().begin(), job.secret_digest().end(), digest.begin());
    owner.secret = digest;
  }
  return owner;
}

}  // namespace

// What the daemon before has left of a job. All block.
struct Core::TakingUp {
  Core* core = nullptr;
  uint64_t id = 0;
  absl::StatusOr<JobMemory::Kept> kept;  // for the first of them
  bool again = false;                    // something was short
  std::optional<LeftJob> left = std::nullopt;
  std::string lacks = "";                     // what was short last
  absl::Time until = absl::InfiniteFuture();  // it is tried again
  // As far as its record says that.
  std::string name = "";
  Tenant owner = {};
  bool is_loss = false;  // if it is not taken up: no other node has it, and something was committed, or nobody knows
  int64_t step = 0;

  absl::StatusOr<TakeUps::Next> Advance(const TakeUpOn& on);  // TakeUps::TakeUp::advance
  absl::Status Add(TakenUpJob taken);
  void End(const absl::Status& status);  // it was taken up, or why never
  v1::LostJob Lost(const absl::Status& status) const;
  void Describe();
};

absl::StatusOr<TakeUps::Next> Core::TakingUp::Advance(const TakeUpOn& on) {
  absl::Status status;
  if (left.has_value()) {
    absl::StatusOr<TakenUpJob> taken = left->TakeUp(on);
    left.reset();
    status = taken.ok() ? Add(*std::move(taken)) : taken.status();
  } else {
    if (again) kept = core->custody_.LeftOf(id);
    absl::StatusOr<LeftJob> read = kept.ok() ? LeftJob::Read(*std::move(kept), on) : kept.status();
    status = read.status();
    if (read.ok()) {
      left = *std::move(read);
      Describe();
      return TakeUps::Next::kTakes;
    }
  }
  // With the last descriptors open, whatever went wrong may have gone wrong for want of one.
  const bool may_be_files = !status.ok() && !absl::IsNotFound(status) && !absl::IsCancelled(status);
  if (absl::IsResourceExhausted(status) || (may_be_files && !CheckOpenFiles("take up").ok())) {
    const absl::Time now = MonotonicNow();
    again = true;
    until = std::min(until, now + kTryFor);
    if (now < until) {
      status = absl::ResourceExhaustedError(absl::StrCat("job ", id, " of the daemon before: ", status.message()));
      if (std::exchange(lacks, std::string(status.message())) != status.message()) {
        LogWarning(absl::StrCat(status.message(), "; it stays with the custodian, and is tried again for ",
                                absl::FormatDuration(kTryFor)));
      }
      return status;
    }
  }
  End(status);
  return TakeUps::Next::kDone;
}

absl::Status Core::TakingUp::Add(TakenUpJob taken) {
  absl::Status status = absl::CancelledError("");  // this daemon shuts down, and the next one takes it up
  core->setup_.RunAndWait([&]() mutable {
    const Tenant owner = OwnerOf(taken.job);
    const v1::JobSpec spec = taken.job.spec();
    absl::StatusOr<JobCore::Init> init =
        core->MakeInit(taken.job.job_id(), owner, spec, std::move(taken.plan), /*reserved_bytes=*/0, /*extends=*/false,
                       taken.job.node(), taken.job.link_key(), &taken);
    status = init.status();
    if (!init.ok()) return;
    LogInfo(absl::StrCat("job ", spec.name(), " is taken up at step ", init->committed.step, ", version ",
                         init->committed.version, ", epoch ", init->committed.epoch));
    core->loop_.RunAndWait([&] {
      core->had_job_ = true;
      Entry& entry = core->jobs_[{owner.uid, spec.name()}];
      if (entry.job != nullptr) {
        entry.job->EndCustody();
        // The others go on with the later one: they hear only that the links are gone.
        entry.job->Close("a later job of its name takes its place", JobCore::CloseOn::kReplaced);
      }
      entry = Entry();
      entry.job = core->MakeJob(*std::move(init));
      entry.links_anew = MonotonicNow();
      entry.job->StartNodes();
      entry.job->Advance();  // its shards may be made of the snapshot
    });
  });
  return status;
}

void Core::TakingUp::End(const absl::Status& status) {
  if (absl::IsNotFound(status)) {
    LogInfo(absl::StrCat("job ", id, " of the daemon before is dropped: ", status.message()));
    core->custody_.Drop(id);
  } else if (!status.ok() && !absl::IsCancelled(status)) {
    LogError(absl::StrCat("job ", id, " of the daemon before is not taken up, and its memory is freed after ",
                          absl::FormatDuration(kKeepRefused), ": ", status.message()));
    core->loop_.RunAndWait([&, core = core, id = id] {
      const absl::Time now = MonotonicNow();
      core->loop_.AddTimer(now + kKeepRefused,
                           [core, id] { core->reaper_.Post([core, id] { core->custody_.Drop(id); }); });
      // Who comes to a job of that name is not to begin anew as if nothing had been.
      if (is_loss) core->freed_.Add(name, owner, Lost(status), now);
    });
  }
}

v1::LostJob Core::TakingUp::Lost(const absl::Status& status) const {
  v1::LostJob lost;
  lost.set_committed_step(step);
  lost.set_freed_unix_ms(absl::ToUnixMillis(absl::Now()));
  lost.set_text(
      absl::StrCat("the job of this name", step > 0 ? absl::StrCat(" had ", step, " committed steps and") : "",
                   " was left by the daemon before, and this daemon could not go on with it: ", status.message(),
                   ". Its memory is kept until ",
                   absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now() + kKeepRefused, absl::UTCTimeZone()),
                   "; a daemon that can go on with it takes it up, if the job that has its name now is closed first "
                   "(shardctl close)"));
  return lost;
}

void Core::TakingUp::Describe() {
  const TakenUpJob& taken = left->job();
  const TakeUpLog::Header& header = left->committed();
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
  known.set_created_unix_ms(absl::ToUnixMillis(core->start_time_));
  known.set_plan_digest(absl::BytesToHexString(taken.plan.digest));
  step = header.step;
  is_loss = header.version > 1 && (taken.plan.nodes() == 1 || taken.plan.cut_over_nodes);
  core->take_ups_.Describe(
      OwnerOf(taken.job), std::move(known),
      {QuotaBytesOf(taken.plan, core->devices_.front()->memory() != nullptr), left->planned_bytes()});
}

absl::Status Core::TakeUp() {
  auto on = std::make_shared<TakeUpOn>();
  for (const auto& device : devices_) on->devices.push_back(device.get());
  on->place = [this](int world_size) { return PlaceOf(0, world_size); };
  const bool on_gpus = on->place(1).memory != nullptr;
  // Where the daemon before still ends this one does: nobody else would take its jobs up when it has.
  SHARDD_ASSIGN_OR_RETURN(auto left, custody_.TakeUp(on_gpus));
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
    jobs.push_back(ReadCustodyJob(kept));
    if (absl::IsResourceExhausted(jobs.back().status())) return jobs.back().status();
    if (jobs.back().ok() && jobs.back()->spec().config().has_nodes()) of_nodes.insert(name_of(*jobs.back()));
  }
  for (size_t i = 0; i < left.size(); ++i) {
    const bool is_first = on_gpus || !jobs[i].ok() || of_nodes.contains(name_of(*jobs[i]));
    std::vector<TakeUps::TakeUp>& group = is_first ? first : beside[name_of(*jobs[i])];
    auto job = std::make_shared<TakingUp>(TakingUp{this, left[i].first, std::move(left[i].second)});
    if (jobs[i].ok()) {
      job->name = jobs[i]->spec().name();
      job->owner = OwnerOf(*jobs[i]);
      job->is_loss = !jobs[i]->spec().config().has_nodes();
    }
    // What GPUs have too little room for is not for all to wait for.
    if (on_gpus) job->until = absl::InfinitePast();
    group.push_back({left[i].first, [on, job] { return job->Advance(*on); }});
  }
  for (TakeUps::TakeUp& job : first) {
    absl::StatusOr<TakeUps::Next> next;
    do {
      next = job.advance();
    } while (next.ok() && *next != TakeUps::Next::kDone);
    SHARDD_RETURN_IF_ERROR(next.status());
  }
  take_ups_.Begin(std::move(beside), kListenAfter);
  if (const size_t more = take_ups_.count(); more > 0) {
    LogInfo(absl::StrCat(more, " job(s) of the daemon before are being taken up still; others are served meanwhile"));
  }
  return absl::OkStatus();
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
