// A job is opened, and closed.

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/extend.h"
#include "common/plan/slab_holes.h"
#include "common/process/process_stat.h"
#include "common/status/status_macros.h"
#include "common/versions/versions.h"
#include "server/daemon/byte_quota.h"
#include "server/daemon/core.h"
#include "server/loop/post_within.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr int kMaxRequestsPerUid = 256;  // under way at once; a rank has one

}  // namespace

absl::Status Core::Begin(uint32_t uid, absl::string_view what) {
  absl::MutexLock lock(&requests_mutex_);
  int& requests = requests_of_uid_[uid];
  if (requests >= kMaxRequestsPerUid) {
    return absl::ResourceExhaustedError(absl::StrCat(what, ": too many requests of uid ", uid, " under way (got ",
                                                     requests + 1, ", want at most ", kMaxRequestsPerUid,
                                                     "); try again"));
  }
  ++requests;
  return absl::OkStatus();
}

void Core::End(uint32_t uid) {
  absl::MutexLock lock(&requests_mutex_);
  if (const auto it = requests_of_uid_.find(uid); --it->second == 0) {
    requests_of_uid_.erase(it);
  }
}

void Core::OpenJob(PeerCredentials peer, JobSecret secret, v1::OpenJobRequest request, Done<v1::OpenJobResponse> done) {
  // Whoever comes keeps the job from its grace time, however long the queue is.
  if (absl::Status status = Begin(peer.uid, "open job"); !status.ok()) {
    done(std::move(status));
    return;
  }
  const Tenant caller{peer.uid, secret.digest()};
  // Null: there is none, or the caller has no part in it.
  auto find = [this, caller, name = JobName(peer.uid, request.spec().name())]() -> Entry* {
    const auto it = jobs_.find(name);
    return it != jobs_.end() && it->second.job->identity().owner.Admits(caller) ? &it->second : nullptr;
  };
  loop_.Post([this, find] {
    ++opening_;
    if (Entry* const entry = find(); entry != nullptr) {
      ++entry->arriving;
    }
  });
  auto finish = [this, caller, find, name = request.spec().name(), rank = request.has_rank() ? request.rank() : -1,
                 done = std::move(done)](absl::StatusOr<v1::OpenJobResponse> result) {
    End(caller.uid);
    loop_.Post([this, caller, find, name, rank, status = result.status()] {
      --opening_;
      if (Entry* const entry = find(); entry != nullptr) {
        entry->arriving = std::max(0, entry->arriving - 1);
        entry->job->RankAnswered(rank, status, TicksSinceBoot());
      } else {
        early_refusals_.Add(name, caller, {rank, status, TicksSinceBoot()}, MonotonicNow());
      }
    });
    done(std::move(result));
  };
  // Joining must not wait for the slabs of other jobs; making them is the setup thread's.
  join_.Post(
      [this, peer, secret = std::move(secret), request = std::move(request), finish = std::move(finish)]() mutable {
        absl::StatusOr<v1::OpenJobResponse> joined = OpenJobOnSetup(peer, secret, request, /*create=*/false);
        if (!absl::IsNotFound(joined.status())) {
          finish(std::move(joined));
          return;
        }
        auto response = std::make_shared<v1::OpenJobResponse>();
        WithMemory(
            [this, peer, secret = std::move(secret), request = std::move(request), response] {
              absl::StatusOr<v1::OpenJobResponse> opened = OpenJobOnSetup(peer, secret, request, /*create=*/true);
              if (opened.ok()) *response = *std::move(opened);
              return opened.status();
            },
            [finish = std::move(finish), response](const absl::Status& status) {
              finish(status.ok() ? absl::StatusOr<v1::OpenJobResponse>(std::move(*response)) : status);
            });
      });
}

void Core::WithMemory(std::function<absl::Status()> make, std::function<void(absl::Status)> done) {
  setup_.Post([this, make = std::move(make), done = std::move(done)]() mutable {
    const uint64_t freed = reaper_.ran();
    absl::Status made = make();
    // Something is being freed, or was meanwhile: else the same would come of another try.
    const bool frees = reaper_.posted() > freed && !reaper_stuck_.load(std::memory_order_relaxed);
    // A job that has ended has its name on the links to other nodes until it is freed.
    if ((!absl::IsResourceExhausted(made) && !absl::IsAlreadyExists(made)) || !frees) {
      done(std::move(made));
      return;
    }
    auto again = [this, make = std::move(make), done = std::move(done)] {
      setup_.Post([make, done] { done(make()); });
    };
    PostWithin(kFreeLimit, reaper_, again, loop_, [this, again] {
      reaper_stuck_ = true;
      LogWarning(absl::StrCat("memory that was let go is not free after ", absl::FormatDuration(kFreeLimit),
                              ": a GPU's driver does not return, or it is very much; jobs go on without it"));
      reaper_.Post([this] { reaper_stuck_ = false; });
      again();
    });
  });
}

namespace {

// A node out of range is CheckNode's to name.
absl::StatusOr<ShardPlan> PlanOf(const v1::JobSpec& spec, int node) {
  return PlanShards(spec, node >= 0 && node < spec.config().nodes().addresses_size() ? node : 0);
}

}  // namespace

absl::StatusOr<v1::OpenJobResponse> Core::OpenJobOnSetup(const PeerCredentials& peer, const JobSecret& secret,
                                                         const v1::OpenJobRequest& request, bool create) {
  const std::string& name = request.spec().name();
  const Tenant caller{peer.uid, secret.digest()};
  const std::string what = absl::StrCat("open job \"", absl::CHexEscape(name.substr(0, 128)), "\"");
  const absl::StatusOr<int> protocol =
      CommonVersion("protocol version", {"this daemon", kProtocolVersions},
                    {"the client", SaidRange(request.protocol_version(), request.newest_protocol_version())});
  if (!protocol.ok()) {
    return absl::Status(protocol.status().code(), absl::StrCat(what, ": ", protocol.status().message()));
  }
  if (stopping_) {
    return absl::CancelledError(absl::StrCat(what, ": the daemon is shutting down"));
  }
  SHARDD_RETURN_IF_ERROR(take_ups_.Check(what, peer.uid, name));
  const DeviceMemory* const device_memory = devices_.front()->memory();
  if (device_memory != nullptr && !request.device_memory()) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": its memory would lie on ", devices_.front()->name(),
                     " and this trainer takes host memory alone (got device_memory false, want true); use a daemon "
                     "with --devices=cpu:N, or a trainer that is written for pointers into a GPU's memory"));
  }
  absl::StatusOr<ShardPlan> plan = PlanOf(request.spec(), request.node());
  if (!plan.ok()) {
    return absl::Status(plan.status().code(), absl::StrCat(what, ": ", plan.status().message()));
  }
  if (!request.plan_digest().empty() && request.plan_digest() != plan->digest) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": client and daemon plan differently (got digest ", absl::BytesToHexString(request.plan_digest()),
        ", want ", absl::BytesToHexString(plan->digest), "); install the same version of both"));
  }
  // What the rank described may leave to the daemon; the job is what comes of it.
  const absl::StatusOr<v1::JobSpec> filled_in = FillIn(request.spec(), request.adds_gradients());
  if (!filled_in.ok()) {
    return absl::Status(filled_in.status().code(), absl::StrCat(what, ": ", filled_in.status().message()));
  }
  const v1::JobSpec& spec = *filled_in;
  const bool is_filled_in = spec.config().unshard_mode() != request.spec().config().unshard_mode() ||
                            spec.config().unsharded_pools() != request.spec().config().unsharded_pools() ||
                            spec.config().offload() != request.spec().config().offload() ||
                            spec.config().pass_copies() != request.spec().config().pass_copies() ||
                            spec.config().trainer_sums() != request.spec().config().trainer_sums();
  if (is_filled_in) {
    plan = PlanOf(spec, request.node());
    if (!plan.ok()) {
      return absl::Status(plan.status().code(), absl::StrCat(what, ": ", plan.status().message()));
    }
  }
  SHARDD_RETURN_IF_ERROR(CheckNode(what, *plan, request.node()));
  JobLauncher launcher =
      request.has_launcher() ? JobLauncher::Find(request.launcher(), peer.pid, peer.uid) : JobLauncher();
  struct Found {
    bool exists = false;
    std::shared_ptr<JobCore> other;  // of this name, with another plan
    Promised promised;
    v1::OpenJobResponse response;
    uint64_t new_id = 0;
  };
  auto fill = [&](const JobCore& job, v1::OpenJobResponse* response) {
    response->set_protocol_version(*protocol);
    response->set_job_id(job.identity().id);
    response->set_plan_digest(job.plan()->digest);
    response->set_epoch(job.committed().epoch());
    response->set_committed_step(job.view().committed_step());
    response->set_initialized(job.view().has_parameters());
    if (is_filled_in) {
      *response->mutable_spec() = spec;
    }
  };
  const auto check_node = [&](const JobCore& job) {
    const int node = job.nodes().node();
    return node == request.node() ? absl::OkStatus()
                                  : absl::FailedPreconditionError(
                                        absl::StrCat(what, ": this rank is of another node than the first one (got ",
                                                     request.node(), ", want ", node, ")"));
  };
  SHARDD_ASSIGN_OR_RETURN(
      Found found, OnLoop<Found>([&]() -> absl::StatusOr<Found> {
        Found result;
        ReviewJobs();
        auto it = jobs_.find({peer.uid, name});
        if (last_epochs_.begun() && (it == jobs_.end() || !last_epochs_.MayCome(*it->second.job))) {
          return absl::CancelledError(absl::StrCat(what, ": the daemon is shutting down"));
        }
        if (it == jobs_.end()) {
          // A job that is taken up is counted without a gap: it is among the others before it is none of those.
          SHARDD_RETURN_IF_ERROR(take_ups_.CheckClaims(what));
          result.promised = PromisedBeside(nullptr, peer.uid);
          result.new_id = next_job_id_++;
          return result;
        }
        JobCore& job = *it->second.job;
        if (!job.identity().owner.Admits(caller)) {
          return SecretRefused(what, caller);
        }
        if (caller.secret.has_value() && !job.identity().owner.secret.has_value()) {
          return absl::FailedPreconditionError(
              absl::StrCat(what,
                           ": it was opened without a secret and this rank gives one (SHARDD_JOB_SECRET), so others of "
                           "its uid could attach; give it to all ranks, and close the job first: shardctl close"));
        }
        if (job.plan()->digest != plan->digest) {
          result.other = it->second.job;
          if (request.adopt()) {
            it->second.empty_since = absl::InfiniteFuture();
          }
          fill(job, &result.response);
          return result;
        }
        SHARDD_RETURN_IF_ERROR(check_node(job));
        it->second.empty_since = absl::InfiniteFuture();  // its grace time begins anew: somebody is coming
        if (launcher.known()) {
          it->second.launcher = std::move(launcher);
        }
        result.exists = true;
        fill(job, &result.response);
        return result;
      }));
  if (found.exists) {
    return found.response;
  }
  if (found.other != nullptr && request.adopt()) {
    SHARDD_ASSIGN_OR_RETURN(const v1::JobSpec widened,
                            Widened(spec, found.other->identity().spec, *found.other->plan(), /*own_groups=*/false));
    const absl::StatusOr<ShardPlan> as_widened = PlanShards(widened);
    if (as_widened.ok() && as_widened->digest == found.other->plan()->digest) {
      SHARDD_RETURN_IF_ERROR(check_node(*found.other));
      *found.response.mutable_spec() = found.other->identity().spec;
      return found.response;
    }
  }
  if (found.other != nullptr) {  // plans both again: not the loop's work
    const std::string difference = FirstDifference(spec, found.other->identity().spec);
    return absl::FailedPreconditionError(absl::StrCat(what, ": this rank describes another job than the first one: ",
                                                      difference.empty() ? "plans differ" : difference));
  }
  if (absl::Status served = device_memory != nullptr ? CheckServedOn(*device_memory, *plan) : absl::OkStatus();
      !served.ok()) {
    return absl::Status(served.code(), absl::StrCat(what, ": ", served.message()));
  }
  if (!create) {
    return absl::NotFoundError(absl::StrCat(what, ": not there yet"));
  }
  const int64_t bytes = QuotaBytesOf(*plan, device_memory != nullptr);
  const Promised& promised = found.promised;
  if (promised.jobs_of_uid >= options_.max_jobs_per_uid) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": too many jobs of uid ", peer.uid, " (got ", promised.jobs_of_uid + 1, ", want at most ",
                     options_.max_jobs_per_uid, "); close one or raise --max_jobs_per_uid"));
  }
  SHARDD_RETURN_IF_ERROR(CheckByteQuota(what, options_.max_bytes_per_uid, peer.uid, promised.bytes_of_uid, bytes));
  SHARDD_ASSIGN_OR_RETURN(std::string link_key, secret.LinkKey(name));
  absl::StatusOr<JobCore::Init> init = MakeInit(found.new_id, caller, spec, *std::move(plan), promised.HostBytes(),
                                                /*extends=*/false, request.node(), std::move(link_key));
  if (!init.ok()) return promised.Refusal(init.status());
  return OnLoop<v1::OpenJobResponse>([&]() -> absl::StatusOr<v1::OpenJobResponse> {
    Entry entry;
    if (const v1::LostJob* lost = freed_.Find(name, caller); lost != nullptr) {
      init->lost = *lost;
    }
    entry.launcher = std::move(launcher);
    entry.job = MakeJob(*std::move(init));
    entry.job->StartNodes();
    for (const EarlyRefusals::Refusal& refusal : early_refusals_.Take(name, caller, MonotonicNow())) {
      entry.job->RankAnswered(refusal.rank, refusal.status, refusal.ticks);
    }
    had_job_ = true;
    v1::OpenJobResponse response;
    fill(*entry.job, &response);
    response.set_created(true);
    jobs_[{peer.uid, name}] = std::move(entry);
    return response;
  });
}

}  // namespace shardd
