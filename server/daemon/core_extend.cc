// A job is made, and takes the place of one whose ranks ask for more trained parameters.

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/extend.h"
#include "common/status/status_macros.h"
#include "server/collective/local/local_collective.h"
#include "server/collective/trainers/trainer_collective.h"
#include "server/daemon/byte_quota.h"
#include "server/daemon/core.h"
#include "server/device/cpu/cpu_device.h"
#include "server/device/device_memory.h"
#include "server/device/traced_device.h"
#include "server/job/job_extend.h"
#include "server/observe/log.h"
#include "server/session/session.h"
#include "server/storage/job_slab.h"

namespace shardd {

absl::StatusOr<JobCore::Init> Core::MakeInit(uint64_t id, const Tenant& owner, const v1::JobSpec& spec, ShardPlan plan,
                                             int64_t reserved_bytes, bool extends, int node, std::string link_key,
                                             TakenUpJob* taken_up) {
  JobCore::Init init;
  init.id = id;
  init.owner = owner;
  init.spec = spec;
  auto shared_plan = std::make_shared<ShardPlan>(std::move(plan));
  init.plan = shared_plan;
  if (taken_up != nullptr) {
    init.kept_formats = taken_up->formats();  // of what is moved next
    init.memory = std::move(taken_up->memory);
    init.journal = std::move(taken_up->journal);
    init.take_up_log = std::move(taken_up->log);
    init.committed = std::move(taken_up->committed);
    init.former = std::move(taken_up->former);
    init.living = std::move(taken_up->living);
  } else {
    const SlabPlace place = PlaceOf(0, shared_plan->world_size);
    SHARDD_ASSIGN_OR_RETURN(init.memory, JobMemory::Create(*shared_plan, spec.name(), reserved_bytes, place, extends,
                                                           custody_.Keeps(*shared_plan)));
    absl::StatusOr<std::unique_ptr<Journal>> journal = Journal::Create(shared_plan->memory.journal_bytes / 2);
    if (!journal.ok()) {
      return absl::Status(journal.status().code(),
                          absl::StrCat("open job \"", spec.name(), "\": ", journal.status().message()));
    }
    init.journal = *std::move(journal);
  }
  if (absl::Status handed = custody_.HandOver(node, link_key, &init); !handed.ok()) {
    if (taken_up == nullptr) custody_.Drop(id);
    return handed;
  }
  init.work_trace = std::make_shared<WorkTrace>();
  for (int rank = 0; rank < shared_plan->world_size; ++rank) {
    init.devices.own.push_back(std::make_unique<TracedDevice>(devices_[rank % devices_.size()].get(), init.work_trace,
                                                              rank, WorkOwner{owner.uid, id}));
    init.devices.by_rank.push_back(init.devices.own.back().get());
  }
  if (devices_.front()->memory() != nullptr && IsOffloaded(*shared_plan)) {
    for (const auto& [host, rank] : HostDevices(shared_plan->world_size)) {
      init.devices.own.push_back(std::make_unique<TracedDevice>(host, init.work_trace, rank, WorkOwner{owner.uid, id}));
      init.devices.optimizer.push_back(init.devices.own.back().get());
    }
  }
  if (shared_plan->config.trainer_sums()) {
    init.devices.collective = std::make_unique<TrainerCollective>(init.devices.by_rank);
  } else if (options_.make_collective != nullptr) {
    init.devices.collective = options_.make_collective(init.devices.by_rank);
  } else {
    init.devices.collective = std::make_unique<LocalCollective>(init.devices.by_rank);
  }
  if (shared_plan->nodes() > 1) {
    if (absl::Status added = AddNodes(node, std::move(link_key), &init); !added.ok()) {
      if (taken_up == nullptr) custody_.Drop(id);
      return added;
    }
    if (taken_up != nullptr) init.nodes->left = std::move(taken_up->node);
  }
  init.loop = &loop_;
  init.copier = &copier_;
  init.devices.memory_worker = CoreLoop::MakeQueue("job memory");
  init.events = &events_;
  init.reserved_by_all = [this] {
    int64_t bytes = 0;
    for (const auto& [name, entry] : jobs_) bytes += entry.job->memory_account().reserved_bytes();
    return bytes;
  };
  return init;
}

std::vector<std::pair<Device*, int>> Core::HostDevices(int world_size) {
  const int threads = options_.offload_threads;
  absl::MutexLock lock(&host_devices_mutex_);
  for (int i = static_cast<int>(host_devices_.size()); i < threads; ++i) {
    host_devices_.push_back(std::make_unique<CpuDevice>(absl::StrCat("host:", i)));
  }
  const int for_each_rank = std::max(1, threads / world_size);
  std::vector<std::pair<Device*, int>> devices;
  for (int rank = 0; rank < world_size; ++rank) {
    for (int i = 0; i < for_each_rank; ++i) {
      devices.emplace_back(host_devices_[static_cast<size_t>((rank * for_each_rank + i) % threads)].get(), rank);
    }
  }
  return devices;
}

SlabPlace Core::PlaceOf(int rank, int world_size) const {
  SlabPlace place;
  place.memory = devices_[rank % devices_.size()]->memory();
  for (int other = 0; place.memory != nullptr && other < world_size; ++other) {
    if (static_cast<size_t>(other) < devices_.size()) {
      place.users.push_back(devices_[other]->memory());
    }
  }
  return place;
}

absl::StatusOr<v1::JobSpec> Core::FillIn(v1::JobSpec spec, bool ranks_add) const {
  const bool on_gpus = devices_.front()->memory() != nullptr;
  const bool offloads = spec.config().offload() == v1::OFFLOAD_HOST;
  if (!on_gpus && spec.config().trainer_sums()) {
    return absl::FailedPreconditionError(
        absl::StrCat("trainer_sums: the daemon's devices are no GPUs (got ", devices_.front()->name(),
                     ", want cuda:N); leave it false, or use a daemon with --devices=cuda:all"));
  }
  if (spec.config().trainer_sums() && spec.world_size() > kMaxSumRanks) {
    return absl::UnimplementedError(absl::StrCat("trainer_sums: more ranks than one of them adds gradients of (got ",
                                                 spec.world_size(), ", want at most ", kMaxSumRanks,
                                                 "); leave it false"));
  }
  if (!spec.config().has_trainer_sums()) {
    // Under MPS a kernel of the daemon's runs beside a trainer's, and graphs may be had; NCCL is asked for by name.
    const bool has_turns =
        std::any_of(options_.gpus.begin(), options_.gpus.end(), [](const GpuFacts& gpu) { return gpu.mps != "on"; });
    spec.mutable_config()->set_trainer_sums(on_gpus && ranks_add && has_turns && !offloads && !options_.nccl_by_name &&
                                            spec.world_size() <= kMaxSumRanks && !spec.config().has_nodes());
  }
  if (!on_gpus && offloads) {
    spec.mutable_config()->set_offload(v1::OFFLOAD_NONE);  // all memory is the host's
  }
  if (on_gpus && !spec.config().trainers_never_write()) {
    spec.mutable_config()->set_pass_copies(true);  // no store can be caught there
  }
  const int gpus = on_gpus ? std::clamp(spec.world_size(), 1, static_cast<int>(devices_.size())) : 1;
  const int asked = spec.config().unsharded_pools();
  if (gpus > 1 && spec.config().unshard_mode() == v1::UNSHARD_MODE_UNSPECIFIED) {
    spec.mutable_config()->set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  }
  if (gpus > 1 && asked == 0 && spec.config().unshard_mode() == v1::UNSHARD_MODE_POOLED) {
    spec.mutable_config()->set_unsharded_pools(gpus);
  }
  const int pools = spec.config().unsharded_pools();
  if (pools > 0 && pools != gpus) {
    return absl::FailedPreconditionError(
        absl::StrCat("unsharded_pools is not the number of GPUs that the job's ranks are on (got ", asked,
                     ", want 0 or ", gpus, "); leave it to the daemon"));
  }
  return spec;
}

std::shared_ptr<JobCore> Core::MakeJob(JobCore::Init init) {
  // Whoever lets go last, unmapping gigabytes is not its work.
  return std::shared_ptr<JobCore>(new JobCore(std::move(init)), [this](JobCore* job) {
    reaper_.Post([this, job] {
      const uint64_t id = job->identity().id;
      const bool ended = job->committed().custody_ended();
      delete job;
      if (ended) custody_.Drop(id);
      heap_trim_.Freed();  // the heap keeps what a plan of many parameters took, for allocations that may never come
    });
  });
}

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
  const auto extend = [&]() -> absl::StatusOr<Extension> {
    if ((*job)->plan()->nodes() > 1) {
      return absl::UnimplementedError(
          absl::StrCat("extend job \"", (*job)->name(),
                       "\": more to train is not served on several nodes; say so when the job is opened"));
    }
    SHARDD_ASSIGN_OR_RETURN(const v1::JobSpec spec,
                            FillIn(request.spec(), (*job)->identity().spec.config().trainer_sums()));
    return Extend(spec, (*job)->identity().spec, *(*job)->plan());
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
    const uint64_t epoch = job->committed().epoch();
    WithMemory([this, job, agreed, epoch] { return BuildExtended(job, *agreed, epoch); },
               [this, job, epoch, asked = std::move(asked)](const absl::Status& status) {
                 loop_.Post([job, epoch, asked, status] {
                   if (!status.ok() && job->extending() && job->committed().epoch() == epoch) {
                     job->GiveUpExtension();
                   }
                   for (const Extensions::Done& one : asked) one(status);
                 });
               });
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

absl::Status Core::BuildExtended(const std::shared_ptr<JobCore>& job, const Extension& extension, uint64_t epoch) {
  const std::string what = absl::StrCat("extend job \"", job->name(), "\"");
  if (stopping_) {
    return absl::CancelledError(absl::StrCat(what, ": the daemon is shutting down"));
  }
  struct Found {
    int64_t reserved_bytes = 0;
    int64_t bytes_of_uid = 0;
    uint64_t new_id = 0;
    CommittedFacts committed;
  };
  const auto ended = [&] { return absl::AbortedError(absl::StrCat(what, ": the epoch has ended")); };
  SHARDD_ASSIGN_OR_RETURN(Found found, OnLoop<Found>([&]() -> absl::StatusOr<Found> {
                            if (!job->extending() || job->committed().epoch() != epoch) return ended();
                            Found result;
                            for (const auto& [name, entry] : jobs_) {
                              result.reserved_bytes += entry.job->memory_account().reserved_bytes();
                              if (entry.job->identity().owner.uid == job->identity().owner.uid && entry.job != job) {
                                result.bytes_of_uid += QuotaBytesOf(*entry.job->plan(), *devices_.front());
                              }
                            }
                            result.new_id = next_job_id_++;
                            result.committed = job->committed_facts();
                            return result;
                          }));
  const auto failed = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(what, " by ", extension.what, ": ", status.message()));
  };
  const DeviceMemory* const device_memory = devices_.front()->memory();
  if (absl::Status served = device_memory != nullptr ? CheckServedOn(*device_memory, extension.plan) : absl::OkStatus();
      !served.ok()) {
    return failed(served);
  }
  if (absl::Status status = CheckByteQuota("memory", options_.max_bytes_per_uid, job->identity().owner.uid,
                                           found.bytes_of_uid, QuotaBytesOf(extension.plan, *devices_.front()));
      !status.ok()) {
    return failed(status);
  }
  absl::StatusOr<JobCore::Init> init = MakeInit(found.new_id, job->identity().owner, extension.spec, extension.plan,
                                                found.reserved_bytes, /*extends=*/true);
  if (!init.ok()) {
    return failed(init.status());
  }
  // Nobody writes: every rank waits for this, or is dead, and then none of it counts.
  std::vector<DeviceMemory::Copied> copies;
  DeviceMemory* const on_device = init->memory->shards()->on_host() ? nullptr : init->memory->place().memory;
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
  absl::Status status = absl::CancelledError(absl::StrCat(what, ": the daemon is shutting down"));
  loop_.RunAndWait([&] {
    const auto it = jobs_.find({job->identity().owner.uid, job->name()});
    if (!job->extending() || job->closed() || job->committed().epoch() != epoch || it == jobs_.end() ||
        it->second.job != job) {
      status = ended();
      return;
    }
    it->second.job = MakeJob(*std::move(init));
    job->EndCustody();  // last: a daemon that is killed before leaves two, of which the later one counts
    it->second.empty_since = absl::InfiniteFuture();
    job->Close(absl::StrCat("it goes on with more to train: ", extension.what));
    status = absl::OkStatus();
  });
  if (!status.ok()) custody_.Drop(found.new_id);
  return status;
}

}  // namespace shardd
