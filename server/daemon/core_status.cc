// What operators ask for. Nothing here changes state.

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/version.h"
#include "common/versions/versions.h"
#include "server/daemon/core.h"
#include "server/daemon/gpu_status.h"
#include "server/observe/trace_sink.h"
#include "server/storage/job_slab.h"

namespace shardd {
void Core::GetDaemon(const Caller&, Done<v1::Daemon> done) {
  loop_.Post([this, done = std::move(done)] {
    v1::Daemon daemon;
    daemon.set_version(kVersion);
    daemon.set_protocol_version(kProtocolVersions.newest);
    daemon.set_oldest_protocol_version(kProtocolVersions.oldest);
    daemon.set_pid(getpid());
    daemon.set_start_time_unix_ms(absl::ToUnixMillis(start_time_));
    for (const auto& device : devices_) {
      daemon.add_devices(device->name());
    }
    daemon.set_embedded(options_.embedded);
    daemon.set_peer_address(options_.peer_address);
    daemon.set_jobs(static_cast<int>(jobs_.size() + take_ups_.count()));
    int64_t bytes = 0;
    bool huge = false;
    for (const auto& [name, entry] : jobs_) {
      bytes += entry.job->memory().allocated_bytes();
      huge = huge || (entry.job->memory().shards() != nullptr && entry.job->memory().shards()->huge_pages());
    }
    daemon.set_slab_bytes(bytes);
    daemon.set_huge_pages(huge            ? "in use"
                          : jobs_.empty() ? "no slab yet"
                                          : "none: the kernel gives shared memory 4 KiB pages");
    daemon.set_isolation(options_.embedded ? "accident only: the daemon runs under the trainers' uid"
                                           : "own uid where trainers run under another one; else accident only");
    DescribeGpus(options_.gpus, daemon.mutable_gpus());
    daemon.set_collective(options_.collective);
    daemon.mutable_warnings()->Add(options_.device_warnings.begin(), options_.device_warnings.end());
    if (std::string warning = custody_.Warning(); !warning.empty()) daemon.add_warnings(std::move(warning));
    if (std::string warning = take_ups_.Warning(); !warning.empty()) daemon.add_warnings(std::move(warning));
    done(std::move(daemon));
  });
}

void Core::ListJobs(const Caller& caller, Done<v1::ListJobsResponse> done) {
  loop_.Post([this, caller, done = std::move(done)] {
    const auto of_uid = caller.SeesAll() ? std::nullopt : std::optional(caller.tenant.uid);
    if (absl::Status described = take_ups_.CheckDescribed("list jobs", of_uid); !described.ok()) {
      return done(std::move(described));
    }
    v1::ListJobsResponse response;
    std::vector<JobDescription> descriptions;  // of the response's jobs
    for (const auto& [name, entry] : jobs_) {
      if (caller.MaySee(entry.job->identity().owner) && !entry.job->closed()) {
        descriptions.push_back(entry.job->view().Describe(response.add_jobs()));
      }
    }
    take_ups_.List(
        [&](const Tenant& owner, const v1::Job& job, const TakeUps::Claim&) {  // behind those that are described
          if (caller.MaySee(owner) && !jobs_.contains({owner.uid, job.name()})) *response.add_jobs() = job;
        });
    status_.Post(
        [response = std::move(response), descriptions = std::move(descriptions), done = std::move(done)]() mutable {
          for (size_t i = 0; i < descriptions.size(); ++i) {
            descriptions[i].Complete(response.mutable_jobs(static_cast<int>(i)));
          }
          done(std::move(response));
        });
  });
}

template <typename T>
void Core::Query(const Caller& caller, const v1::JobRef& job, Done<T> done, Fill<T> fill) {
  loop_.Post([this, caller, job, done = std::move(done), fill = std::move(fill)] {
    const absl::StatusOr<JobCore*> found = FindJobByName(caller, job);
    if (!found.ok()) {
      done(found.status());
      return;
    }
    T response;
    std::function<void(T*)> rest = fill(**found, &response);
    if (rest == nullptr) {
      done(std::move(response));
      return;
    }
    status_.Post([done = std::move(done), response = std::move(response), rest = std::move(rest)]() mutable {
      rest(&response);
      done(std::move(response));
    });
  });
}

void Core::ListRanks(const Caller& caller, const v1::JobRef& job, Done<v1::ListRanksResponse> done) {
  Query<v1::ListRanksResponse>(caller, job, std::move(done), [](const JobCore& j, auto* out) {
    j.view().DescribeRanks(out);
    return nullptr;
  });
}
void Core::ListGroups(const Caller& caller, const v1::JobRef& job, Done<v1::ListGroupsResponse> done) {
  Query<v1::ListGroupsResponse>(caller, job, std::move(done), [](const JobCore& j, auto*) {
    return [plan = j.plan()](v1::ListGroupsResponse* out) { DescribeGroups(*plan, out); };
  });
}
void Core::ListParameters(const Caller& caller, const v1::JobRef& job, Done<v1::ListParametersResponse> done) {
  Query<v1::ListParametersResponse>(caller, job, std::move(done), [](const JobCore& j, auto*) {
    return [plan = j.plan()](v1::ListParametersResponse* out) { DescribeParameters(*plan, out); };
  });
}
void Core::GetMemory(const Caller& caller, const v1::JobRef& job, Done<v1::Memory> done) {
  Query<v1::Memory>(caller, job, std::move(done), [](const JobCore& j, auto* out) {
    j.memory_account().Describe(out);
    return nullptr;
  });
}

void Core::ListStreams(const Caller& caller, Done<v1::ListStreamsResponse> done) {
  loop_.Post([this, caller, done = std::move(done)] {
    // What runs names groups, and how busy a device is tells of others' jobs. Devices are shared, so it is all or
    // nothing.
    const bool may_see_work = std::all_of(jobs_.begin(), jobs_.end(),
                                          [&](const auto& e) { return caller.MaySee(e.second.job->identity().owner); });
    v1::ListStreamsResponse response;
    const auto add = [&](const Device& device) {
      for (const StreamStatus& status : device.Status()) {
        v1::Stream* stream = response.add_streams();
        stream->set_device(device.name());
        stream->set_name(std::string(StreamName(status.stream)));
        if (may_see_work) {
          stream->set_submitted(status.submitted);
          stream->set_done(status.done);
          stream->set_current(status.current);
          stream->set_busy_us(status.busy_us);
        }
      }
    };
    for (const auto& device : devices_) {
      add(*device);
    }
    absl::MutexLock lock(&host_devices_mutex_);
    for (const auto& device : host_devices_) {
      add(*device);
    }
    done(std::move(response));
  });
}

void Core::ListEvents(const Caller& caller, const v1::JobRef& job, int limit, Done<v1::ListEventsResponse> done) {
  v1::ListEventsResponse response;
  const auto may_see = [&](const Tenant& owner) {
    return caller.MaySee(owner) && (!job.has_uid() || job.uid() == owner.uid);
  };
  for (v1::Event& event : events_.List(job.job(), limit, may_see)) {
    *response.add_events() = std::move(event);
  }
  done(std::move(response));
}

void Core::TraceJob(const Caller& caller, const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink) {
  v1::JobRef ref;
  ref.set_job(request.job());
  if (request.has_uid()) {
    ref.set_uid(request.uid());
  }
  loop_.Post([this, caller, ref, request, sink = std::move(sink)]() mutable {
    const absl::StatusOr<JobCore*> job = FindJobByName(caller, ref);
    if (!job.ok()) {
      sink->Finish(job.status());
      return;
    }
    // As ListGroups: the names of all groups.
    status_.Post([this, caller, ref, request, plan = (*job)->plan(), sink = std::move(sink)]() mutable {
      v1::TraceJobResponse start;
      DescribeTraced(*plan, start.mutable_start());
      sink->Prepare(start);
      loop_.Post([this, caller, ref, request, plan = std::move(plan), sink = std::move(sink)]() mutable {
        const absl::StatusOr<JobCore*> job = FindJobByName(caller, ref);
        if (!job.ok() || (*job)->plan() != plan) {
          sink->Finish(job.ok() ? absl::AbortedError(absl::StrCat("trace job \"", request.job(),
                                                                  "\": it was closed and opened anew; try again"))
                                : job.status());
          return;
        }
        (*job)->trace().Begin(request, std::move(sink));
      });
    });
  });
}

}  // namespace shardd
