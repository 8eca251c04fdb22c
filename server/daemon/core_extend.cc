// A job takes the place of one whose ranks ask for more trained parameters, or whose other nodes train them already.

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/extend.h"
#include "common/plan/slab_holes.h"
#include "common/status/status_macros.h"
#include "server/daemon/byte_quota.h"
#include "server/daemon/core.h"
#include "server/device/device_memory.h"
#include "server/job/job_extend.h"
#include "server/multinode/same_job.h"
#include "server/observe/log.h"
#include "server/session/session.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

constexpr absl::Duration kWidenAgain = absl::Seconds(1);
constexpr absl::Duration kAskAgain = absl::Milliseconds(100);

// What was to be what the other nodes have could not be made. Here is state that none of them may have, so the job
// stays for as long as it would without ranks, unless nothing could come of it.
void PutOffWidening(CoreLoop* loop, JobCore& job, const absl::Status& why) {
  if (absl::IsCancelled(why)) return;  // the next daemon has the job as it is, and meets the others again
  const absl::Time now = MonotonicNow();
  const bool ends_by_itself = absl::IsAborted(why);  // that jobs are being taken up
  const absl::Duration put_off = job.extensions().PutOffWidening(now, kWidenAgain, !ends_by_itself);
  // The custodian is away, others have the memory, ...
  const bool is_final = absl::IsInvalidArgument(why) || absl::IsUnimplemented(why);
  if (!is_final && put_off < absl::Milliseconds(job.plan()->config.grace_ms())) {
    if (put_off == absl::ZeroDuration() && !ends_by_itself) {
      LogWarning(
          absl::StrCat(why.message(), "; the job goes on as the other nodes do when it can, and is tried again"));
    }
    loop->AddTimer(now + kWidenAgain, [of = job.weak_from_this()] {
      if (const auto held = of.lock(); held != nullptr) held->Advance();
    });
    return;
  }
  job.Close(absl::StrCat("it cannot go on as the other nodes do: ", why.message()));
}

// What was to take the job's place could not be made.
void GiveUp(CoreLoop* loop, JobCore& job, const absl::Status& why) {
  if (job.extensions().widens()) {
    PutOffWidening(loop, job, why);
  } else if (job.nodes().over_nodes()) {
    job.Abort(why, {});  // the others wait for it
  } else {
    (void)job.extensions().TakeAll();
  }
}

using Answer = std::function<void(const absl::Status&)>;

// Calls `answer` once: with what it is called with, or with ABORTED where it is dropped before.
std::shared_ptr<const Answer> AnswerOnce(CoreLoop* loop, const std::string& what, const Answer& answer) {
  struct Once {
    Answer answer;
    bool answered = false;
  };
  const std::shared_ptr<Once> once(new Once{answer}, [loop, what](Once* of) {
    if (!of->answered) {  // behind what ends the sessions
      loop->Post([what, answer = std::move(of->answer)] {
        answer(absl::AbortedError(absl::StrCat(what, ": the epoch has ended")));
      });
    }
    delete of;
  });
  return std::make_shared<const Answer>([once](const absl::Status& status) {
    once->answered = true;
    once->answer(status);
  });
}

}  // namespace

struct Core::Extending {
  Core* core = nullptr;
  std::shared_ptr<JobCore> job;  // whose ranks wait for it, or have no session
  std::shared_ptr<const Extension> extension;
  uint64_t epoch = 0;  // of `job`

  std::string what() const { return absl::StrCat("extend job \"", job->name(), "\""); }
  bool goes_on() const { return job->extensions().building() && job->committed().epoch() == epoch; }
  // Starts Make, and TakePlace behind it: on one node, or where this one `widens`, at once. `asked`: who is answered.
  static void Start(Core* core, const std::shared_ptr<JobCore>& job, const std::shared_ptr<const Extension>& extension,
                    std::vector<Extensions::Done> asked);
  // On the setup thread. An error where the job does not go on with it any more.
  absl::StatusOr<std::shared_ptr<JobCore::Init>> Make() const;
  // On the loop: what was made takes the job's place, `decided`: by all nodes, whatever has become of the ranks.
  absl::Status TakePlace(JobCore::Init* init, bool decided) const;
};

void Core::ExtendJob(PeerCredentials peer, v1::ExtendJobRequest request, Done<v1::ExtendJobResponse> done) {
  if (absl::Status status = Begin(peer.uid, "extend job"); !status.ok()) {
    done(std::move(status));
    return;
  }
  auto finish = [this, uid = peer.uid, done = std::move(done)](absl::StatusOr<v1::ExtendJobResponse> result) {
    End(uid);
    done(std::move(result));
  };
  join_.Post([this, peer, request = std::move(request), finish = std::move(finish)] {
    ExtendJobOnSetup(peer, request, finish);
  });
}

void Core::ExtendJobOnSetup(const PeerCredentials& peer, const v1::ExtendJobRequest& request,
                            Done<v1::ExtendJobResponse> done) {
  const uint64_t session_id = request.session_id();
  const auto gone = [session_id] {
    return absl::UnauthenticatedError(
        absl::StrCat("extend job: session ", session_id, ": no such session, or wrong token"));
  };
  if (stopping_) {
    done(absl::CancelledError("extend job: the daemon is shutting down"));
    return;
  }
  absl::StatusOr<std::shared_ptr<JobCore>> job =
      OnLoop<std::shared_ptr<JobCore>>([&]() -> absl::StatusOr<std::shared_ptr<JobCore>> {
        JobCore* of = nullptr;
        Session* session = FindSession(session_id, &of);
        if (session == nullptr || session->token() != request.token() || session->peer.uid != peer.uid) {
          return gone();
        }
        return of->shared_from_this();
      });
  if (!job.ok()) {
    done(job.status());
    return;
  }
  // As where a job is opened: it is not known yet what others claim. Nothing has ended that this rank could attach to
  // again, so its call waits.
  if (!take_ups_.CheckClaims("extend job").ok()) {
    loop_.Post([this, again = [this, peer, request, done = std::move(done)] {
      ExtendJobOnSetup(peer, request, done);
    }] { loop_.AddTimer(MonotonicNow() + kAskAgain, [this, again] { join_.Post(again); }); });
    return;
  }
  const auto extend = [&]() -> absl::StatusOr<Extension> {
    SHARDD_RETURN_IF_ERROR(CheckExtendsOverNodes(*(*job)->plan(), devices_.front()->memory() != nullptr));
    SHARDD_ASSIGN_OR_RETURN(const v1::JobSpec spec,
                            FillIn(request.spec(), (*job)->identity().spec.config().trainer_sums()));
    SHARDD_ASSIGN_OR_RETURN(Extension extension, Extend(spec, (*job)->identity().spec, *(*job)->plan()));
    if ((*job)->plan()->nodes() > 1 && !extension.trains_more && !extension.what.empty()) {
      // A program that was restarted and has not come to all that the job trains: its groups are the job's first ones.
      SHARDD_ASSIGN_OR_RETURN(const bool is_earlier, DescribesEarlier(spec, *(*job)->plan()));
      if (is_earlier) extension.what.clear();
    }
    SHARDD_RETURN_IF_ERROR(CheckExtension(*(*job)->plan(), extension));
    return extension;
  };
  absl::StatusOr<Extension> extension = extend();
  if (!extension.ok()) {
    done(absl::Status(extension.status().code(),
                      absl::StrCat("extend job \"", (*job)->name(), "\": ", extension.status().message())));
    return;
  }
  v1::ExtendJobResponse response;
  if (extension->what.empty()) {
    done(response);
    return;
  }
  response.set_extended(true);
  auto answer = [done, response](const absl::Status& status) {
    done(status.ok() ? absl::StatusOr<v1::ExtendJobResponse>(response) : status);
  };
  auto build = [this, job = *job](const std::shared_ptr<const Extension>& agreed, std::vector<Extensions::Done> asked) {
    Extending::Start(this, job, agreed, std::move(asked));
  };
  loop_.Post([this, session_id, gone, job = *std::move(job), answer = std::move(answer), build = std::move(build),
              shared = std::make_shared<const Extension>(*std::move(extension))]() mutable {
    Session* session = job->sessions().Find(session_id);
    if (session == nullptr) {
      answer(gone());
      return;
    }
    job->AwaitExtension(session, std::move(shared), std::move(answer), std::move(build));
    ReviewJobs();
  });
}

absl::StatusOr<std::shared_ptr<JobCore::Init>> Core::Extending::Make() const {
  const std::string what = this->what();
  if (core->stopping_) {
    return absl::CancelledError(absl::StrCat(what, ": the daemon is shutting down"));
  }
  struct Found {
    Promised promised;
    uint64_t new_id = 0;
    CommittedFacts committed;
  };
  const auto ended = [&] { return absl::AbortedError(absl::StrCat(what, ": the epoch has ended")); };
  SHARDD_ASSIGN_OR_RETURN(Found found, core->OnLoop<Found>([&]() -> absl::StatusOr<Found> {
    if (!goes_on()) return ended();
    // Where other nodes are met before those are known; who asks has waited for them.
    if (job->extensions().widens()) SHARDD_RETURN_IF_ERROR(core->take_ups_.CheckClaims(what));
    Found result;
    result.promised = core->PromisedBeside(job.get(), job->identity().owner.uid);
    result.new_id = core->next_job_id_++;
    result.committed = job->committed_facts();
    return result;
  }));
  const auto failed = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(what, " by ", extension->what, ": ", status.message()));
  };
  const DeviceMemory* const device_memory = core->devices_.front()->memory();
  if (absl::Status served =
          device_memory != nullptr ? CheckServedOn(*device_memory, extension->plan) : absl::OkStatus();
      !served.ok()) {
    return failed(served);
  }
  if (absl::Status status =
          CheckByteQuota("memory", core->options_.max_bytes_per_uid, job->identity().owner.uid,
                         found.promised.bytes_of_uid, QuotaBytesOf(extension->plan, device_memory != nullptr));
      !status.ok()) {
    return failed(status);
  }
  absl::StatusOr<JobCore::Init> made =
      core->MakeInit(found.new_id, job->identity().owner, extension->spec, extension->plan, found.promised.HostBytes(),
                     /*extends=*/true, job->nodes().node(), job->identity().link_key);
  if (!made.ok()) {
    return failed(found.promised.Refusal(made.status()));
  }
  // What comes to nothing is freed where that keeps nobody waiting.
  std::shared_ptr<JobCore::Init> init(new JobCore::Init(*std::move(made)), [core = core, id = found.new_id](auto* of) {
    core->reaper_.Post([core, id, of] {
      const bool used = of->memory == nullptr;
      delete of;
      if (!used) core->custody_.Drop(id);
    });
  });
  // Nobody writes: every rank waits for this, or is dead, and then none of it counts.
  std::vector<DeviceMemory::Copied> copies;
  DeviceMemory* const on_device = init->memory->shards()->on_host() ? nullptr : init->memory->place().memory;
  // Initial values that are no version are nothing that slabs may hold.
  const bool has_values = found.committed.version > 0 || job->plan()->nodes() == 1;
  if (has_values)
    CopyExtended(*job->plan(), job->memory().pointers(), *init->plan, init->memory->pointers(),
                 [&](char* to, const char* from, int64_t size_bytes) {
                   if (on_device == nullptr) {
                     std::memcpy(to, from, static_cast<size_t>(size_bytes));
                   } else {
                     copies.push_back({from, to, size_bytes});
                   }
                 });
  if (absl::Status copied = on_device == nullptr ? absl::OkStatus() : on_device->Copy(copies); !copied.ok()) {
    return failed(copied);
  }
  init->committed = std::move(found.committed);
  if (init->nodes != nullptr) {
    init->nodes->events->SetHasParameters();  // all nodes have agreed on what it trains, also where it lacks the state
    if (init->committed.version > 0) init->nodes->left.emplace();
  }
  return init;
}

absl::Status Core::Extending::TakePlace(JobCore::Init* init, bool decided) const {
  const auto it = core->jobs_.find({job->identity().owner.uid, job->name()});
  if ((!decided && !goes_on()) || job->closed() || it == core->jobs_.end() || it->second.job != job) {
    return absl::AbortedError(absl::StrCat(what(), ": the epoch has ended"));
  }
  init->committed.epoch = std::max(init->committed.epoch, job->committed().epoch() + 1);
  it->second.job = core->MakeJob(std::move(*init));
  it->second.made.reset();
  job->EndCustody();  // last: a daemon that is killed before leaves two, of which the later one counts
  it->second.empty_since = absl::InfiniteFuture();
  it->second.links_anew = MonotonicNow();
  core->freed_.Replace(job->identity().id, it->second.job->identity().id, job->identity().owner.uid);
  job->Close(absl::StrCat("it goes on with more to train: ", extension->what), JobCore::CloseOn::kReplaced);
  it->second.job->StartNodes();
  return absl::OkStatus();
}

void Core::Extending::Start(Core* core, const std::shared_ptr<JobCore>& job,
                            const std::shared_ptr<const Extension>& extension, std::vector<Extensions::Done> asked) {
  const auto self = std::make_shared<const Extending>(Extending{core, job, extension, job->committed().epoch()});
  auto made = std::make_shared<std::shared_ptr<JobCore::Init>>();
  const auto answer = [asked = std::move(asked)](const absl::Status& status) {
    for (const Extensions::Done& one : asked) one(status);
  };
  const auto make = [self, made]() -> absl::Status {
    SHARDD_ASSIGN_OR_RETURN(*made, self->Make());
    return absl::OkStatus();
  };
  core->WithMemory(make, [core, self, made, answer](const absl::Status& status) {
    core->loop_.Post([core, self, init = std::exchange(*made, nullptr), answer, status] {
      JobCore& job = *self->job;
      if (!status.ok()) {
        if (self->goes_on()) GiveUp(&core->loop_, job, status);
        answer(status);
        return;
      }
      if (self->goes_on() && job.extensions().widens() && !MayBeWidened(job)) return;  // for which nobody waits
      if (!job.nodes().over_nodes() || job.extensions().widens() || !self->goes_on()) {
        answer(self->TakePlace(init.get(), /*decided=*/false));
        return;
      }
      if (Entry* const entry = core->FindEntryOf(job); entry != nullptr) {
        entry->made = init->plan;
        entry->made_quota_bytes = init->memory->quota_bytes();
        entry->made_reserved_bytes = UnusedHostBytes(*init->plan, *init->memory);
      }
      // Whoever asked is answered when all nodes have theirs, or when this comes to nothing.
      job.ExtensionBuilt(*self->extension, [core, self, init, answer = AnswerOnce(&core->loop_, self->what(), answer)] {
        core->loop_.Post([self, init, answer] { (*answer)(self->TakePlace(init.get(), /*decided=*/true)); });
      });
    });
  });
}

void Core::WidenJob(uint64_t id, int as, std::shared_ptr<const Extension> extension) {
  loop_.Post([this, id, as, shared = std::move(extension)] {
    JobCore* const job = FindJob(id);
    if (job == nullptr) return;
    job->Widen(shared, as,
               [this, held = job->weak_from_this()](const std::shared_ptr<const Extension>& agreed,
                                                    std::vector<Extensions::Done> asked) {
                 if (const auto of = held.lock(); of != nullptr) Extending::Start(this, of, agreed, std::move(asked));
               });
  });
}

}  // namespace shardd
