// What a monitoring system asks for. The loop copies what it has counted; whatever reads files is read elsewhere.

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "common/shm/open_files.h"
#include "common/version.h"
#include "server/daemon/core.h"
#include "server/daemon/gpu_status.h"

namespace shardd {
namespace {

// Of this process and its machine. Any thread.
void DescribeProcess(const CoreOptions& options, v1::DaemonMetrics* out) {
  const OpenFiles files = CountOpenFiles();
  out->set_open_files(files.open);
  out->set_max_open_files(files.limit == std::numeric_limits<int64_t>::max() ? -1 : files.limit);
  const absl::StatusOr<MemoryLimits> memory = GetMemoryLimits();
  out->set_free_memory_bytes(memory.ok() ? memory->free_bytes : -1);
  const absl::Time expiry =
      options.certificate_expiry == nullptr ? absl::InfiniteFuture() : options.certificate_expiry();
  out->set_certificate_expires_unix_ms(expiry == absl::InfiniteFuture() ? 0 : absl::ToUnixMillis(expiry));
}

void DescribeDevice(const Device& device, bool may_see_work, v1::DaemonMetrics* out) {
  v1::DeviceHealth* const health = out->add_devices();
  health->set_device(device.name());
  health->set_lost(std::string(device.lost().message()));
  for (const StreamStatus& status : device.Status()) {
    v1::Stream* const stream = out->add_streams();
    stream->set_device(device.name());
    stream->set_name(std::string(StreamName(status.stream)));
    if (!may_see_work) continue;
    stream->set_submitted(status.submitted);
    stream->set_done(status.done);
    stream->set_busy_us(status.busy_us);
  }
}

// As far as it is known of a job that is being taken up.
v1::JobMetrics MetricsOf(const v1::Job& job) {
  v1::JobMetrics metrics;
  metrics.set_name(job.name());
  metrics.set_uid(job.uid());
  metrics.set_world_size(job.world_size());
  metrics.set_state(job.state());
  metrics.set_epoch(job.epoch());
  metrics.set_committed_step(job.committed_step());
  metrics.mutable_counters();
  metrics.mutable_time()->set_since_commit_ns(-1);
  for (int rank = 0; rank < job.world_size(); ++rank) {
    v1::RankMetrics* const described = metrics.add_ranks();
    described->set_state(v1::RANK_STATE_ABSENT);
    described->set_last_heard_ns(-1);
  }
  return metrics;
}

}  // namespace

void Core::GetMetrics(const Caller& caller, Done<v1::GetMetricsResponse> done) {
  loop_.Post([this, caller, done = std::move(done)] {
    v1::GetMetricsResponse response;
    v1::DaemonMetrics& daemon = *response.mutable_daemon();
    daemon.set_version(kVersion);
    daemon.set_start_time_unix_ms(absl::ToUnixMillis(start_time_));
    Describe(loop_.lag(), daemon.mutable_loop_lag());
    std::map<uint32_t, v1::UserQuota> quotas;
    bool may_see_all = true;
    for (const auto& [name, entry] : jobs_) {
      const JobCore& job = *entry.job;
      const bool may_see = caller.MaySee(job.identity().owner);
      may_see_all = may_see_all && may_see;
      v1::UserQuota& quota = quotas[job.identity().owner.uid];  // counts as OpenJob does
      quota.set_jobs(quota.jobs() + 1);
      quota.set_planned_bytes(quota.planned_bytes() + entry.QuotaBytes());
      if (!may_see || job.closed()) continue;
      v1::JobMetrics* const described = response.add_jobs();
      job.view().DescribeMetrics(described);
      job.memory_account().Describe(described->mutable_memory());
    }
    take_ups_.List([&](const Tenant& owner, const v1::Job& job, const TakeUps::Claim& claim) {
      if (jobs_.contains({owner.uid, job.name()})) return;
      v1::UserQuota& quota = quotas[owner.uid];
      quota.set_jobs(quota.jobs() + 1);
      quota.set_planned_bytes(quota.planned_bytes() + claim.quota_bytes);
      if (caller.MaySee(owner)) *response.add_jobs() = MetricsOf(job);
    });
    for (auto& [uid, quota] : quotas) {
      if (!caller.SeesAll() && uid != caller.tenant.uid) continue;
      quota.set_uid(uid);
      quota.set_max_jobs(options_.max_jobs_per_uid);
      quota.set_max_bytes(options_.max_bytes_per_uid);
      *daemon.add_quotas() = std::move(quota);
    }
    for (const auto& device : devices_) DescribeDevice(*device, may_see_all, &daemon);
    {
      absl::MutexLock lock(&host_devices_mutex_);
      for (const auto& device : host_devices_) DescribeDevice(*device, may_see_all, &daemon);
    }
    status_.Post([this, response = std::move(response), done = std::move(done)]() mutable {
      v1::DaemonMetrics* const described = response.mutable_daemon();
      DescribeGpus(options_.gpus, described->mutable_gpus());
      DescribeProcess(options_, described);
      done(std::move(response));
    });
  });
}

}  // namespace shardd
