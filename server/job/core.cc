#include "server/job/core.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "common/status/status_macros.h"
#include "common/version.h"
#include "server/collective/local/local_collective.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(100);
constexpr absl::Duration kAttachTimeout = absl::Seconds(30);  // from AttachRank to hello

int64_t JournalPlaceBytes(const ShardPlan& plan) {
  const int64_t params = static_cast<int64_t>(plan.params.size());
  return 4096 + plan.world_size * (kMaxTrainerStateBytes + 16) + params * 11 + (int64_t{128} << 10);
}

bool NameIsValid(const std::string& name) {
  if (name.empty() || name.size() > 128 || name[0] == '.') {
    return false;
  }
  for (char c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') {
      return false;
    }
  }
  return true;
}

}  // namespace

Core::Core(CoreOptions options, std::vector<std::unique_ptr<Device>> devices)
    : options_(std::move(options)),
      devices_(std::move(devices)),
      start_time_(absl::Now()),
      started_(MonotonicNow()),
      loop_([this] { return BeforeSleep(); }) {
  loop_.Post([this] { Tick(); });
}

Core::~Core() { Shutdown(); }

void Core::Shutdown() {
  if (shut_down_) {
    return;
  }
  shut_down_ = true;
  attach_.Stop();
  setup_.Stop();
  loop_.RunAndWait([this] {
    for (auto& [name, entry] : jobs_) {
      entry.job->Close("the daemon is shutting down");
    }
  });
  // Devices first: their completions are posted to the loop while it still runs, and they hold the jobs.
  for (const auto& device : devices_) {
    device->Shutdown();
  }
  loop_.RunAndWait([this] { jobs_.clear(); });
  loop_.Stop();
}

bool Core::BeforeSleep() {
  bool found = false;
  for (auto& [name, entry] : jobs_) {
    entry.job->SetAwake(true);
    found = entry.job->PollRings() || found;
  }
  if (found) {
    return true;
  }
  // About to sleep: clients ring the doorbell from here on. Whoever wrote before it saw that is found by the second
  // look.
  for (auto& [name, entry] : jobs_) {
    entry.job->SetAwake(false);
  }
  for (auto& [name, entry] : jobs_) {
    for (int rank = 0; rank < entry.job->plan()->world_size; ++rank) {
      if (Session* session = entry.job->session(rank); session != nullptr && session->HasCommands()) {
        return true;
      }
    }
  }
  return false;
}

void Core::Tick() {
  const absl::Time now = MonotonicNow();
  for (auto& [name, entry] : jobs_) {
    JobCore* job = entry.job.get();
    job->PollRings();  // also what was sent without a doorbell
    for (int rank = 0; rank < job->plan()->world_size; ++rank) {
      Session* session = job->session(rank);
      if (session != nullptr && session->stream == nullptr && now - session->last_command_time > kAttachTimeout) {
        job->SessionLost(rank, "it never opened its session stream");
      }
    }
    job->CheckSilence(now);
  }
  ReviewJobs();
  if (options_.embedded && jobs_.empty() && opening_ == 0 && !idle_reported_ &&
      (had_job_ || now - started_ > options_.embedded_idle)) {
    idle_reported_ = true;
    options_.on_idle();
  }
  loop_.AddTimer(now + kTick, [this] { Tick(); });
}

void Core::ReviewJobs() {
  const absl::Time now = MonotonicNow();
  for (auto it = jobs_.begin(); it != jobs_.end();) {
    Entry& entry = it->second;
    JobCore& job = *entry.job;
    if (!job.closed() && job.finished()) {
      job.Close("all ranks have finished");
    }
    if (!job.closed()) {
      if (job.attached() > 0 || entry.arriving > 0) {
        entry.empty_since = absl::InfiniteFuture();
      } else if (entry.empty_since == absl::InfiniteFuture()) {
        entry.empty_since = now;
      } else if (now - entry.empty_since > absl::Milliseconds(job.plan()->config.grace_ms())) {
        job.Close(absl::StrCat("no session for ", absl::FormatDuration(now - entry.empty_since)));
      }
    }
    if (job.closed()) {
      it = jobs_.erase(it);  // the memory goes when the last device work has ended
    } else {
      ++it;
    }
  }
}

JobCore* Core::FindJob(uint64_t job_id) const {
  for (const auto& [name, entry] : jobs_) {
    if (entry.job->id() == job_id && !entry.job->closed()) {
      return entry.job.get();
    }
  }
  return nullptr;
}

absl::StatusOr<JobCore*> Core::FindJobByName(const Caller& caller, const std::string& name) const {
  auto it = jobs_.find(name);
  if (it == jobs_.end() || !caller.MaySee(it->second.job->uid()) || it->second.job->closed()) {
    return absl::NotFoundError(absl::StrCat("no job \"", name, "\""));
  }
  return it->second.job.get();
}

Session* Core::FindSession(uint64_t session_id, JobCore** job) const {
  for (const auto& [name, entry] : jobs_) {
    if (Session* session = entry.job->FindSession(session_id); session != nullptr) {
      *job = entry.job.get();
      return session;
    }
  }
  return nullptr;
}

template <typename T>
absl::StatusOr<T> Core::OnLoop(std::function<absl::StatusOr<T>()> body) {
  absl::StatusOr<T> result = absl::CancelledError("the daemon is shutting down");
  loop_.RunAndWait([&] { result = body(); });
  return result;
}

// Open -------------------------------------------------------------------------------------------------------------

void Core::OpenJob(PeerCredentials peer, v1::OpenJobRequest request, Done<v1::OpenJobResponse> done) {
  // Whoever comes keeps the job from its grace time, however long the queue is.
  loop_.Post([this, name = request.spec().name()] {
    ++opening_;
    if (auto it = jobs_.find(name); it != jobs_.end()) {
      ++it->second.arriving;
    }
  });
  auto finish = [this, name = request.spec().name(),
                 done = std::move(done)](absl::StatusOr<v1::OpenJobResponse> result) {
    loop_.Post([this, name] {
      --opening_;
      if (auto it = jobs_.find(name); it != jobs_.end()) {
        it->second.arriving = std::max(0, it->second.arriving - 1);
      }
    });
    done(std::move(result));
  };
  // Joining must not wait for the slabs of other jobs; making them is the setup thread's.
  attach_.Post([this, peer, request = std::move(request), finish = std::move(finish)]() mutable {
    absl::StatusOr<v1::OpenJobResponse> joined = OpenJobOnSetup(peer, request, /*create=*/false);
    if (!absl::IsNotFound(joined.status())) {
      finish(std::move(joined));
      return;
    }
    setup_.Post([this, peer, request = std::move(request), finish = std::move(finish)] {
      finish(OpenJobOnSetup(peer, request, /*create=*/true));
    });
  });
}

absl::StatusOr<v1::OpenJobResponse> Core::OpenJobOnSetup(const PeerCredentials& peer, const v1::OpenJobRequest& request,
                                                         bool create) {
  const std::string& name = request.spec().name();
  const std::string what = absl::StrCat("open job \"", absl::CHexEscape(name.substr(0, 128)), "\"");
  if (request.protocol_version() != kProtocolVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": client and daemon are of different versions (got protocol ", request.protocol_version(),
                     ", want ", kProtocolVersion, "); install the same version of both"));
  }
  if (!NameIsValid(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": a name is 1 to 128 characters of [A-Za-z0-9._-] and does not start with a dot"));
  }
  absl::StatusOr<ShardPlan> plan = PlanShards(request.spec());
  if (!plan.ok()) {
    return absl::Status(plan.status().code(), absl::StrCat(what, ": ", plan.status().message()));
  }
  if (!request.plan_digest().empty() && request.plan_digest() != plan->digest) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": client and daemon plan differently (got digest ", absl::BytesToHexString(request.plan_digest()),
        ", want ", absl::BytesToHexString(plan->digest), "); install the same version of both"));
  }
  struct Found {
    bool exists = false;
    v1::OpenJobResponse response;
    int jobs_of_uid = 0;
    int64_t bytes_of_uid = 0;
    uint64_t new_id = 0;
  };
  auto fill = [](const JobCore& job, v1::OpenJobResponse* response) {
    response->set_job_id(job.id());
    response->set_plan_digest(job.plan()->digest);
    response->set_epoch(job.epoch());
    response->set_committed_step(job.committed_step());
    response->set_initialized(job.version() > 0);
  };
  SHARDD_ASSIGN_OR_RETURN(
      Found found, OnLoop<Found>([&]() -> absl::StatusOr<Found> {
        Found result;
        ReviewJobs();
        for (const auto& [job_name, entry] : jobs_) {
          if (entry.job->uid() == peer.uid) {
            ++result.jobs_of_uid;
            result.bytes_of_uid += entry.job->plan()->memory.TotalBytes(entry.job->plan()->world_size);
          }
        }
        auto it = jobs_.find(name);
        if (it == jobs_.end()) {
          result.new_id = next_job_id_++;
          return result;
        }
        JobCore& job = *it->second.job;
        if (job.uid() != peer.uid) {
          return absl::PermissionDeniedError(absl::StrCat(what, ": the name is taken by a job of another user"));
        }
        if (job.plan()->digest != plan->digest) {
          const std::string difference = FirstDifference(request.spec(), job.spec());
          return absl::FailedPreconditionError(absl::StrCat(what,
                                                            ": this rank describes another job than the first one: ",
                                                            difference.empty() ? "plans differ" : difference));
        }
        it->second.empty_since = absl::InfiniteFuture();  // its grace time begins anew: somebody is coming
        result.exists = true;
        fill(job, &result.response);
        return result;
      }));
  if (found.exists) {
    return found.response;
  }
  if (!create) {
    return absl::NotFoundError(absl::StrCat(what, ": not there yet"));
  }
  const int64_t bytes = plan->memory.TotalBytes(plan->world_size);
  if (found.jobs_of_uid >= options_.max_jobs_per_uid) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": too many jobs of uid ", peer.uid, " (got ", found.jobs_of_uid + 1, ", want at most ",
                     options_.max_jobs_per_uid, "); close one or raise --max_jobs_per_uid"));
  }
  if (options_.max_bytes_per_uid > 0 && found.bytes_of_uid + bytes > options_.max_bytes_per_uid) {
    return absl::ResourceExhaustedError(absl::StrCat(what, ": quota of uid ", peer.uid, " is exceeded (got ",
                                                     found.bytes_of_uid + bytes, " bytes, want at most ",
                                                     options_.max_bytes_per_uid, "); raise --max_bytes_per_uid"));
  }
  JobCore::Init init;
  init.id = found.new_id;
  init.uid = peer.uid;
  init.spec = request.spec();
  auto shared_plan = std::make_shared<ShardPlan>(*std::move(plan));
  init.plan = shared_plan;
  const std::string directory = absl::StrCat(options_.state_dir, "/job-", getpid(), "-", found.new_id);
  SHARDD_ASSIGN_OR_RETURN(init.memory, JobMemory::Create(*shared_plan, name, options_.state_dir, directory));
  SHARDD_ASSIGN_OR_RETURN(init.journal, Journal::Create(directory + "/journal", JournalPlaceBytes(*shared_plan)));
  for (int rank = 0; rank < shared_plan->world_size; ++rank) {
    init.devices.push_back(devices_[rank % devices_.size()].get());
  }
  init.collective = std::make_unique<LocalCollective>(init.devices);
  init.loop = &loop_;
  init.events = &events_;
  return OnLoop<v1::OpenJobResponse>([&]() -> absl::StatusOr<v1::OpenJobResponse> {
    Entry entry;
    entry.job = std::make_shared<JobCore>(std::move(init));
    had_job_ = true;
    v1::OpenJobResponse response;
    fill(*entry.job, &response);
    response.set_created(true);
    jobs_[name] = std::move(entry);
    return response;
  });
}

// Attach -----------------------------------------------------------------------------------------------------------

void Core::AttachRank(PeerCredentials peer, UniqueFd pidfd, v1::AttachRankRequest request,
                      Done<v1::AttachRankResponse> done) {
  auto shared_pidfd = std::make_shared<UniqueFd>(std::move(pidfd));
  attach_.Post([this, peer, shared_pidfd, request = std::move(request), done = std::move(done)] {
    done(AttachRankOnSetup(peer, std::move(*shared_pidfd), request));
  });
}

absl::StatusOr<v1::AttachRankResponse> Core::AttachRankOnSetup(const PeerCredentials& peer, UniqueFd pidfd,
                                                               const v1::AttachRankRequest& request) {
  const int rank = request.rank();
  const std::string what = absl::StrCat("attach rank ", rank, " of job ", request.job_id());
  struct Found {
    std::shared_ptr<const ShardPlan> plan;
    uint64_t epoch = 0;
    uint64_t session_id = 0;
  };
  for (int attempt = 0; attempt < 3; ++attempt) {
    SHARDD_ASSIGN_OR_RETURN(
        Found found, OnLoop<Found>([&]() -> absl::StatusOr<Found> {
          JobCore* job = FindJob(request.job_id());
          if (job == nullptr || job->uid() != peer.uid) {
            return absl::NotFoundError(absl::StrCat(what, ": no such job; open it first"));
          }
          if (rank < 0 || rank >= job->plan()->world_size) {
            return absl::InvalidArgumentError(
                absl::StrCat(what, ": no such rank (got ", rank, ", want 0 to ", job->plan()->world_size - 1, ")"));
          }
          if (Session* holder = job->session(rank); holder != nullptr) {
            pollfd ended{holder->pidfd.get(), POLLIN, 0};
            const bool dead = holder->pidfd.valid() && poll(&ended, 1, 0) == 1;
            if (!dead && !request.replace()) {
              return absl::AlreadyExistsError(
                  absl::StrCat(what, ": the rank has a live session (session=", holder->id(),
                               ", pid=", holder->peer.pid, "); end it first, or attach with replace"));
            }
            // Silent but alive: killed before it is replaced, so that it can never write again.
            if (!dead && holder->pidfd.valid()) {
              syscall(SYS_pidfd_send_signal, holder->pidfd.get(), SIGKILL, nullptr, 0);
            }
            job->SessionLost(rank, dead ? "its process ended" : "it was replaced");
            if (job->session(rank) != nullptr) {
              return absl::AbortedError(absl::StrCat(what, ": a commit is under way; attach again"));
            }
          }
          Found result;
          result.plan = job->plan();
          result.epoch = job->epoch();
          result.session_id = next_session_id_++;
          return result;
        }));
    SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Session> session,
                            Session::Create(found.plan, found.session_id, rank, found.epoch));
    session->peer = peer;
    session->pidfd = UniqueFd(pidfd.valid() ? fcntl(pidfd.get(), F_DUPFD_CLOEXEC, 0) : -1);
    absl::StatusOr<v1::AttachRankResponse> response =
        OnLoop<v1::AttachRankResponse>([&]() -> absl::StatusOr<v1::AttachRankResponse> {
          JobCore* job = FindJob(request.job_id());
          if (job == nullptr) {
            return absl::NotFoundError(absl::StrCat(what, ": the job was closed"));
          }
          v1::AttachRankResponse result;
          result.set_session_id(session->id());
          result.set_token(session->token());
          result.set_epoch(session->epoch());
          SHARDD_RETURN_IF_ERROR(job->AddSession(std::move(session)));
          result.set_committed_step(job->committed_step());
          result.set_version(job->version());
          result.set_trainer_state(job->trainer_state(rank));
          result.set_device(job->device_name(rank));
          return result;
        });
    if (!absl::IsAborted(response.status())) {
      return response;
    }
  }
  return absl::UnavailableError(absl::StrCat(what, ": the epoch keeps advancing; attach again"));
}

void Core::CloseJob(PeerCredentials peer, uint64_t job_id, std::function<void(absl::Status)> done) {
  loop_.Post([this, peer, job_id, done = std::move(done)] {
    if (JobCore* job = FindJob(job_id); job != nullptr) {
      if (job->uid() != peer.uid && peer.uid != 0) {
        done(absl::PermissionDeniedError(absl::StrCat("close job ", job_id, ": it belongs to another user")));
        return;
      }
      job->Close(absl::StrCat("closed by pid ", peer.pid));
      ReviewJobs();
    }
    done(absl::OkStatus());
  });
}

// Sessions ---------------------------------------------------------------------------------------------------------

void Core::StartSession(uint64_t session_id, std::string token, PeerCredentials peer,
                        std::shared_ptr<SessionStream> stream, std::function<void(absl::Status)> done) {
  loop_.Post(
      [this, session_id, token = std::move(token), peer, stream = std::move(stream), done = std::move(done)]() mutable {
        JobCore* job = nullptr;
        Session* session = FindSession(session_id, &job);
        if (session == nullptr || session->token() != token || session->peer.uid != peer.uid) {
          done(absl::UnauthenticatedError(absl::StrCat("session ", session_id, ": no such session, or wrong token")));
          return;
        }
        if (session->stream != nullptr) {
          done(absl::AlreadyExistsError(absl::StrCat("session ", session_id, ": it has a stream already")));
          return;
        }
        done(absl::OkStatus());
        job->SessionLive(session, std::move(stream));
      });
}

Session* Core::FindSessionOf(uint64_t session_id, const SessionStream& stream, JobCore** job) const {
  Session* session = FindSession(session_id, job);
  return session != nullptr && session->stream.get() == &stream ? session : nullptr;
}

void Core::SessionCommands(uint64_t session_id, StreamPtr stream, v1::CommandBatch batch) {
  loop_.Post([this, session_id, stream = std::move(stream), batch = std::move(batch)] {
    JobCore* job = nullptr;
    if (Session* session = FindSessionOf(session_id, *stream, &job); session != nullptr) {
      job->ExecuteFromStream(session, batch);
    }
  });
}

void Core::SessionDetach(uint64_t session_id, StreamPtr stream, bool finished) {
  loop_.Post([this, session_id, stream = std::move(stream), finished] {
    JobCore* job = nullptr;
    if (Session* session = FindSessionOf(session_id, *stream, &job); session != nullptr) {
      job->PollRings();  // what it has asked for before
      session = job->FindSession(session_id);
      if (session != nullptr) {
        job->Detach(session->rank(), finished);
      }
      ReviewJobs();
    }
  });
}

void Core::SessionStreamClosed(uint64_t session_id, StreamPtr stream) {
  loop_.Post([this, session_id, stream = std::move(stream)] {
    JobCore* job = nullptr;
    if (Session* session = FindSessionOf(session_id, *stream, &job); session != nullptr) {
      session->stream = nullptr;
      job->SessionLost(session->rank(), "its session stream ended");
    }
  });
}

void Core::FetchFds(FdRequest request, PeerCredentials peer, UniqueFd /*peer_pidfd*/,
                    std::function<void(absl::Status, const std::vector<int>&)> done) {
  auto shared = std::make_shared<FdRequest>(std::move(request));
  loop_.Post([this, shared, peer, done = std::move(done)] {
    JobCore* job = nullptr;
    Session* session = FindSession(shared->session_id, &job);
    if (shared->protocol_version != kProtocolVersion) {
      done(absl::FailedPreconditionError(absl::StrCat("fd channel: protocol version differs (got ",
                                                      shared->protocol_version, ", want ", kProtocolVersion, ")")),
           {});
      return;
    }
    if (session == nullptr || session->token() != shared->token || session->peer.uid != peer.uid) {
      done(absl::PermissionDeniedError(
               absl::StrCat("fd channel: session ", shared->session_id, ": no such session, or wrong token")),
           {});
      return;
    }
    // Read-only descriptors are made anew for each request and closed after sending.
    std::vector<UniqueFd> owned;
    std::vector<int> fds(kSessionFdCount, -1);
    UniqueFd absent(open("/dev/null", O_RDONLY | O_CLOEXEC));
    auto read_only = [&](const Slab* slab) -> absl::StatusOr<int> {
      if (slab == nullptr) {
        return absent.get();
      }
      SHARDD_ASSIGN_OR_RETURN(UniqueFd fd, slab->ReadOnlyFd());
      owned.push_back(std::move(fd));
      return owned.back().get();
    };
    auto collect = [&]() -> absl::Status {
      const JobMemory& memory = job->memory();
      fds[kFdSessionMemory] = session->memory()->memory->fd();
      SHARDD_ASSIGN_OR_RETURN(fds[kFdDaemonPage], read_only(session->memory()->daemon_page.get()));
      fds[kFdDoorbell] = session->doorbell();
      SHARDD_ASSIGN_OR_RETURN(fds[kFdShards], read_only(memory.shards()));
      SHARDD_ASSIGN_OR_RETURN(fds[kFdParameters], read_only(memory.parameters()));
      SHARDD_ASSIGN_OR_RETURN(fds[kFdPool], read_only(memory.pool()));
      fds[kFdGradients] = absent.get();
      return absl::OkStatus();
    };
    absl::Status status = collect();
    done(status, status.ok() ? fds : std::vector<int>());
  });
}

// Status -----------------------------------------------------------------------------------------------------------

void Core::GetDaemon(const Caller&, Done<v1::Daemon> done) {
  loop_.Post([this, done = std::move(done)] {
    v1::Daemon daemon;
    daemon.set_version(kVersion);
    daemon.set_protocol_version(kProtocolVersion);
    daemon.set_pid(getpid());
    daemon.set_start_time_unix_ms(absl::ToUnixMillis(start_time_));
    for (const auto& device : devices_) {
      daemon.add_devices(device->name());
    }
    daemon.set_state_dir(options_.state_dir);
    daemon.set_embedded(options_.embedded);
    daemon.set_jobs(static_cast<int>(jobs_.size()));
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
    done(std::move(daemon));
  });
}

void Core::ListJobs(const Caller& caller, Done<v1::ListJobsResponse> done) {
  loop_.Post([this, caller, done = std::move(done)] {
    v1::ListJobsResponse response;
    for (const auto& [name, entry] : jobs_) {
      if (caller.MaySee(entry.job->uid()) && !entry.job->closed()) {
        entry.job->Describe(response.add_jobs());
      }
    }
    done(std::move(response));
  });
}

template <typename T>
void Core::Query(const Caller& caller, const std::string& job, Done<T> done,
                 std::function<void(const JobCore&, T*)> fill) {
  loop_.Post([this, caller, job, done = std::move(done), fill = std::move(fill)] {
    absl::StatusOr<JobCore*> found = FindJobByName(caller, job);
    if (!found.ok()) {
      done(found.status());
      return;
    }
    T response;
    fill(**found, &response);
    done(std::move(response));
  });
}

void Core::ListRanks(const Caller& caller, const std::string& job, Done<v1::ListRanksResponse> done) {
  Query<v1::ListRanksResponse>(caller, job, std::move(done), [](const JobCore& j, auto* out) { j.DescribeRanks(out); });
}
void Core::ListGroups(const Caller& caller, const std::string& job, Done<v1::ListGroupsResponse> done) {
  Query<v1::ListGroupsResponse>(caller, job, std::move(done),
                                [](const JobCore& j, auto* out) { j.DescribeGroups(out); });
}
void Core::ListParameters(const Caller& caller, const std::string& job, Done<v1::ListParametersResponse> done) {
  Query<v1::ListParametersResponse>(caller, job, std::move(done),
                                    [](const JobCore& j, auto* out) { j.DescribeParameters(out); });
}
void Core::GetMemory(const Caller& caller, const std::string& job, Done<v1::Memory> done) {
  Query<v1::Memory>(caller, job, std::move(done), [](const JobCore& j, auto* out) { j.DescribeMemory(out); });
}

void Core::ListStreams(const Caller&, Done<v1::ListStreamsResponse> done) {
  v1::ListStreamsResponse response;
  for (const auto& device : devices_) {
    for (const StreamStatus& status : device->Status()) {
      v1::Stream* stream = response.add_streams();
      stream->set_device(device->name());
      stream->set_name(std::string(StreamName(status.stream)));
      stream->set_submitted(status.submitted);
      stream->set_done(status.done);
      stream->set_current(status.current);
      stream->set_busy_us(status.busy_us);
    }
  }
  done(std::move(response));
}

void Core::ListEvents(const Caller& caller, const std::string& job, int limit, Done<v1::ListEventsResponse> done) {
  v1::ListEventsResponse response;
  for (v1::Event& event : events_.List(job, limit, [&](uint32_t uid) { return caller.MaySee(uid); })) {
    *response.add_events() = std::move(event);
  }
  done(std::move(response));
}

void Core::CloseJobByName(const Caller& caller, const std::string& job, Done<v1::CloseJobByNameResponse> done) {
  loop_.Post([this, caller, job, done = std::move(done)] {
    v1::CloseJobByNameResponse response;
    if (absl::StatusOr<JobCore*> found = FindJobByName(caller, job); found.ok()) {
      response.set_existed(true);
      (*found)->Close(absl::StrCat("closed by uid ", caller.uid));
      ReviewJobs();
    }
    done(std::move(response));
  });
}

}  // namespace shardd
