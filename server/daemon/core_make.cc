// A job is made, with its slabs, its journal and its devices.

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/slab.h"
#include "common/status/status_macros.h"
#include "server/collective/local/local_collective.h"
#include "server/collective/trainers/trainer_collective.h"
#include "server/daemon/core.h"
#include "server/device/cpu/cpu_device.h"
#include "server/device/device_memory.h"
#include "server/device/traced_device.h"
#include "server/observe/log.h"
#include "server/storage/job_slab.h"

namespace shardd {

int64_t Core::Entry::QuotaBytes() const {
  return std::max(job->memory().quota_bytes(), made.expired() ? 0 : made_quota_bytes);
}

int64_t Core::Entry::ReservedBytes() const {
  return std::max(job->memory_account().reserved_bytes(), made.expired() ? 0 : made_reserved_bytes);
}

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
    if (absl::Status added = AddNodes(node, std::move(link_key), extends || taken_up != nullptr, &init); !added.ok()) {
      if (taken_up == nullptr) custody_.Drop(id);
      return added;
    }
    if (taken_up != nullptr) init.nodes->left = std::move(taken_up->node);
  }
  init.loop = &loop_;
  init.copier = &copier_;
  init.devices.memory_worker = CoreLoop::MakeQueue("job memory");
  init.events = &events_;
  init.reserved_by_all = [this, uid = owner.uid] { return PromisedBeside(nullptr, uid).reserved_bytes; };
  return init;
}

int64_t Core::Promised::HostBytes() const {
  int64_t bytes = reserved_bytes + claimed_bytes;
  if (const absl::StatusOr<MemoryLimits> limits = GetMemoryLimits(); limits.ok() && limits->of_own_cgroup) {
    bytes += taken_up_bytes;  // charged to the daemon before, and to whatever is around both
  }
  return bytes;
}

absl::Status Core::Promised::Refusal(const absl::Status& status) const {
  if (claimed_bytes == 0 || !absl::IsResourceExhausted(status)) return status;
  return absl::AbortedError(absl::StrCat(status.message(),
                                         "; jobs of the daemon before are being taken up, which claim ", claimed_bytes,
                                         " bytes, some of them twice until they are there; try again"));
}

Core::Promised Core::PromisedBeside(const JobCore* job, uint32_t uid) const {
  Promised promised;
  for (const auto& [name, entry] : jobs_) {
    promised.reserved_bytes += entry.ReservedBytes();
    promised.taken_up_bytes += entry.job->memory().taken_up_bytes();
    if (name.first != uid || entry.job.get() == job) continue;
    ++promised.jobs_of_uid;
    promised.bytes_of_uid += entry.QuotaBytes();
  }
  take_ups_.List([&](const Tenant& owner, const v1::Job& taken, const TakeUps::Claim& claim) {
    if (jobs_.contains({owner.uid, taken.name()})) return;  // it has just been
    promised.claimed_bytes += claim.planned_bytes;
    if (owner.uid != uid) return;
    ++promised.jobs_of_uid;
    promised.bytes_of_uid += claim.quota_bytes;
  });
  return promised;
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

}  // namespace shardd
