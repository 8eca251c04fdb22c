#include "server/daemon/core.h"

#include <fcntl.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/device/device_memory.h"
#include "server/observe/log.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

constexpr absl::Duration kReviewCustody = absl::Seconds(1);
constexpr absl::Duration kTick = absl::Milliseconds(100);
// Threads that call a GPU's driver may hang in it: a shutdown goes on without them.
constexpr absl::Duration kStopLimit = absl::Seconds(20);
// Of a job that has committed nothing but initial values: whoever comes gives them again.
constexpr absl::Duration kGraceOfNothing = absl::Minutes(1);
constexpr absl::Duration kAttachTimeout = absl::Seconds(30);  // from AttachRank to hello
constexpr absl::Duration kCommits = absl::Seconds(20);        // of a shutdown: commits under way
constexpr absl::Duration kQuiet = absl::Seconds(1);           // of ranks that are in no step
constexpr absl::Duration kTakenUp = absl::Seconds(1);  // of jobs of before; the next daemon goes on with the rest

// False: it has not ended.
template <typename Thread>
bool StopWithin(Thread& thread, absl::string_view name) {
  const bool ended = thread.Stop(kStopLimit);
  if (!ended) {
    LogError(absl::StrCat("shutdown: the ", name, " thread has not ended within ", absl::FormatDuration(kStopLimit),
                          " and is left: a GPU's driver does not return, or much memory is being freed"));
  }
  return ended;
}

// Each daemon gives numbers of its own: a rank that has opened its job at the one before, and attaches here, finds
// none, and no other job of that number. Doubles, which scripts read JSON into, have them whole.
uint64_t FirstJobId() {
  std::random_device device;  // the kernel's
  return 1 + (uint64_t{device()} << 20);
}

}  // namespace

Core::Core(CoreOptions options, std::vector<std::unique_ptr<Device>> devices)
    : options_(std::move(options)),
      devices_(std::move(devices)),
      start_time_(absl::Now()),
      started_(MonotonicNow()),
      custody_(options_.custody),
      next_job_id_(FirstJobId()),
      loop_([this] { return BeforeSleep(); }) {
  events_.KeepBy(options_.history);
  loop_.Post([this] { Tick(); });
}

Core::~Core() { Shutdown(nullptr, nullptr); }

void Core::Shutdown(const std::function<void()>& stop_listening, const MemoryWritten& written) {
  if (!last_epochs_.Begin()) return;
  // Their ranks come again, to the next daemon. Where all have sent the step that runs within this time, nobody does
  // anything anew; all else is served meanwhile.
  const absl::Status goes_on = absl::AbortedError("the daemon is shutting down, and the next one goes on with the job");
  EndKeptEpochs(
      options_.finish_step, [&](JobCore& job) { return job.EndBehindStep(goes_on); },
      [&](JobCore& job) { job.EndIfIdle(goes_on, kQuiet); });
  if (stop_listening != nullptr) stop_listening();
  stopping_ = true;
  status_.Stop();
  node_values_.Stop();
  StopWithin(join_, "join");
  StopWithin(setup_, "setup");
  // No commit is left half done: the next daemon would complete it, from its log.
  const auto abort = [&](JobCore& job) {
    job.Abort(goes_on, {});
    return true;
  };
  EndKeptEpochs(kCommits, abort, [](JobCore&) {});
  loop_.RunAndWait([this] {
    for (auto& [name, entry] : jobs_) entry.CloseNow();
    ReviewJobs();  // what has come to its end by itself is nothing for the next daemon
    last_epochs_.LeaveJobs();
    for (auto& [name, entry] : jobs_) {
      const Committed& committed = entry.job->committed();
      // Ranks of a job that has nothing yet open it anew, as where this daemon dies.
      const bool comes = committed.next_daemon_goes_on() ||
                         (committed.outlives_daemon() && committed.version() == 0 && !entry.job->nodes().over_nodes());
      entry.job->Close("the daemon is shutting down",
                       comes ? JobCore::CloseOn::kThisDaemon : JobCore::CloseOn::kThisNode);
    }
  });
  // Devices first: their completions are posted to the loop while it still runs, and they hold the jobs.
  for (const auto& device : devices_) {
    device->Shutdown();
  }
  {
    absl::MutexLock lock(&host_devices_mutex_);
    for (const auto& device : host_devices_) {
      device->Shutdown();
    }
  }
  const bool are_taken_up = take_ups_.Stop(kTakenUp);
  const bool is_quiet = StopWithin(copier_, "copier") && are_taken_up;
  if (written != nullptr) written(is_quiet);
  loop_.RunAndWait([this] { jobs_.clear(); });
  loop_.Stop();
  StopWithin(reaper_, "reaper");
}

void Core::Tick() {
  const absl::Time now = MonotonicNow();
  for (auto& [name, entry] : jobs_) {
    JobCore* job = entry.job.get();
    for (int rank = 0; rank < job->plan()->world_size; ++rank) {
      Session* session = job->sessions()[rank].get();
      if (session != nullptr && session->stream == nullptr && now - session->last_command_time > kAttachTimeout) {
        job->SessionLost(rank, "it never opened its session stream");
      }
    }
    job->CheckSilence(now);
  }
  ReviewJobs();
  const bool quiet = std::all_of(jobs_.begin(), jobs_.end(),
                                 [](const auto& job) { return job.second.job->sessions().attached() == 0; });
  if (heap_trim_.TakeDue(quiet)) {
    reaper_.Post([this] { heap_trim_.Run(); });
  }
  if (options_.custody != nullptr && now >= review_custody_at_) {
    review_custody_at_ = now + kReviewCustody;
    reaper_.Post([this] { custody_.Review(); });
  }
  if (options_.embedded && jobs_.empty() && take_ups_.count() == 0 && opening_ == 0 && !idle_reported_ &&
      !freed_.Awaits(now) && (had_job_ || now - started_ > options_.embedded_idle)) {
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
    if (!job.closed() && job.nodes().finished()) {
      job.Close("all ranks have finished");
    }
    if (!job.closed()) {
      const bool is_busy = job.nodes().ServesOthers() || job.nodes().fetching();
      if (job.sessions().attached() > 0 || entry.arriving > 0 || is_busy) {
        entry.empty_since = absl::InfiniteFuture();
      } else {
        ReviewEmpty(&entry, now);
      }
    }
    if (job.closed()) {
      for (const auto& pending : entry.batches.TakeAll()) {
        EndBatch(pending);
      }
      if (!entry.freed && job.committed().version() > 1) {
        freed_.Forget(job.name(), job.identity().owner.uid);  // a later job of the name has come to its end
      }
      if (!last_epochs_.leaves_jobs()) job.EndCustody();
      it = jobs_.erase(it);  // the memory goes when the last device work has ended
    } else {
      ++it;
    }
  }
}

void Core::ReviewEmpty(Entry* entry, absl::Time now) {
  JobCore& job = *entry->job;
  if (entry->launcher.lives()) {
    entry->empty_since = absl::InfiniteFuture();
    return;
  }
  if (entry->launcher.alone()) {
    job.Close("no session, and its launcher has ended");
    return;
  }
  entry->empty_since = std::min(entry->empty_since, now);
  if (const auto& slots = job.memory().rank_slots(); slots != nullptr && slots->allocated_bytes() > 0) {
    reaper_.Post([slots] { slots->FreeOfEnded(); });
  }
  const absl::Duration empty = now - entry->empty_since;
  const bool has_commits = job.committed().version() > 1;
  const absl::Duration grace = absl::Milliseconds(job.plan()->config.grace_ms());
  if (empty <= (has_commits || job.plan()->nodes() > 1 ? grace : std::min(grace, kGraceOfNothing))) {
    return;
  }
  if (has_commits) {
    v1::LostJob lost;
    lost.set_committed_step(job.view().committed_step());
    lost.set_freed_unix_ms(absl::ToUnixMillis(absl::Now()));
    lost.set_text(absl::StrCat(
        "the job of this name had ", job.view().committed_step(), " committed steps and was freed at ",
        absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone()), ", because no rank had come for ",
        absl::FormatDuration(grace), " (graceMs, or SHARDD_GRACE_MS); a longer one would have kept it"));
    freed_.Add(job.name(), job.identity().owner, std::move(lost), now);
    entry->freed = true;
  }
  job.Close(absl::StrCat("no session for ", absl::FormatDuration(empty)));
}

JobCore* Core::FindJob(uint64_t job_id) const {
  for (const auto& [name, entry] : jobs_) {
    if (entry.job->identity().id == job_id && !entry.job->closed()) {
      return entry.job.get();
    }
  }
  return nullptr;
}

absl::StatusOr<JobCore*> Core::FindJobByName(const Caller& caller, const v1::JobRef& ref) const {
  std::vector<JobCore*> found;
  const bool of_any = caller.SeesAll() && !ref.has_uid();
  for (const auto& [name, entry] : jobs_) {
    const bool is_meant = of_any || name.first == (ref.has_uid() ? ref.uid() : caller.tenant.uid);
    if (is_meant && name.second == ref.job() && !entry.job->closed()) {
      found.push_back(entry.job.get());
    }
  }
  // To other users it makes no difference whether it is there.
  if (found.empty() || (!caller.SeesAll() && found.front()->identity().owner.uid != caller.tenant.uid)) {
    const std::string what = absl::StrCat("job \"", ref.job(), "\"");
    const std::optional<uint32_t> uid =
        of_any ? std::nullopt : std::optional(caller.SeesAll() ? ref.uid() : caller.tenant.uid);
    SHARDD_RETURN_IF_ERROR(take_ups_.Check(what, uid, ref.job()));
    return absl::NotFoundError(absl::StrCat("no ", what));
  }
  if (found.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "job \"", ref.job(), "\": several users have one of that name (uid ", found[0]->identity().owner.uid, ", uid ",
        found[1]->identity().owner.uid, found.size() > 2 ? ", ..." : "", "); say whose with uid (shardctl: --uid)"));
  }
  if (!caller.MaySee(found.front()->identity().owner)) {
    return SecretRefused(absl::StrCat("job \"", ref.job(), "\""), caller.tenant);
  }
  return found.front();
}

Session* Core::FindSession(uint64_t session_id, JobCore** job) const {
  for (const auto& [name, entry] : jobs_) {
    if (Session* session = entry.job->sessions().Find(session_id); session != nullptr) {
      *job = entry.job.get();
      return session;
    }
  }
  return nullptr;
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

Core::Entry* Core::FindEntryOf(const JobCore& job) {
  const auto it = jobs_.find({job.identity().owner.uid, job.name()});
  return it == jobs_.end() || it->second.job.get() != &job ? nullptr : &it->second;
}

void Core::SessionDetach(uint64_t session_id, StreamPtr stream, bool finished) {
  loop_.Post([this, session_id, stream = std::move(stream), finished] {
    JobCore* job = nullptr;
    if (Session* session = FindSessionOf(session_id, *stream, &job); session != nullptr) {
      auto again = [this, session_id, stream, finished] { SessionDetach(session_id, stream, finished); };
      if (session->held) {  // in the middle of what it has asked for before
        session->when_released.push_back(std::move(again));
        return;
      }
      if (session->HasCommands()) {  // likewise; they come in the job's turns
        loop_.Post(std::move(again));
        return;
      }
      job->Detach(session->rank(), finished);
      ReviewJobs();
    }
  });
}

void Core::FetchFds(FdRequest request, PeerCredentials peer,
                    std::function<void(absl::Status, const std::vector<int>&)> done) {
  auto shared = std::make_shared<FdRequest>(std::move(request));
  loop_.Post([this, shared, peer, done = std::move(done)] {
    JobCore* job = nullptr;
    Session* session = FindSession(shared->session_id, &job);
    if (session == nullptr || session->token() != shared->token || session->peer.uid != peer.uid) {
      done(absl::PermissionDeniedError(
               absl::StrCat("fd channel: session ", shared->session_id, ": no such session, or wrong token")),
           {});
      return;
    }
    if (static_cast<int>(shared->protocol_version) != session->protocol_version()) {
      done(absl::FailedPreconditionError(absl::StrCat("fd channel: session ", shared->session_id,
                                                      ": another protocol version (got ", shared->protocol_version,
                                                      ", want ", session->protocol_version(), ", as it was attached)")),
           {});
      return;
    }
    job->WatchProcess(session, std::move(shared->pidfd));  // where the kernel did not give one with AttachRank
    // Read-only descriptors are made anew for each request and closed after sending.
    std::vector<UniqueFd> owned;
    std::vector<int> fds(kSessionFdCount, -1);
    UniqueFd absent(open("/dev/null", O_RDONLY | O_CLOEXEC));
    auto read_only = [&](const auto* slab) -> absl::StatusOr<int> {
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
      if (const Slab* page = session->memory()->daemon_page.get(); page->backing() == SlabBacking::kSealedMemfd) {
        fds[kFdDaemonPage] = page->fd();
      } else {
        SHARDD_ASSIGN_OR_RETURN(fds[kFdDaemonPage], read_only(page));
      }
      fds[kFdDoorbell] = session->doorbell();
      const v1::JobConfig& config = job->plan()->config;
      const bool in_trainers = config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
      if (config.trainers_never_write() || memory.shards() == nullptr) {
        SHARDD_ASSIGN_OR_RETURN(fds[kFdShards], read_only(memory.shards()));
      } else {
        fds[kFdShards] = memory.shards()->fd();
      }
      if (in_trainers && memory.optimizer() != nullptr) {
        fds[kFdOptimizer] = memory.optimizer()->fd();
      } else {
        SHARDD_ASSIGN_OR_RETURN(fds[kFdOptimizer], read_only(memory.optimizer()));
      }
      SHARDD_ASSIGN_OR_RETURN(fds[kFdParameters], read_only(memory.parameters()));
      SHARDD_ASSIGN_OR_RETURN(fds[kFdPool], read_only(memory.pool()));
      fds[kFdGradients] = memory.gradients() == nullptr ? absent.get() : memory.gradients()->fd();
      if (const DeviceSlab* slots = session->memory()->slots.get(); slots != nullptr) {
        fds[kFdGradientSlots] = slots->pieces().front().fd;
      } else if (const Slab* apart = session->memory()->host_slots.get(); apart != nullptr) {
        fds[kFdGradientSlots] = apart->fd();
      }
      return absl::OkStatus();
    };
    const FdRange range = shared->range;
    if (range.first >= kFdFirstPeerSlots) {
      const absl::StatusOr<int> slots = job->waits().SlotsOfPeer(range);
      done(slots.status(), slots.ok() ? std::vector<int>{*slots} : std::vector<int>());
      return;
    }
    absl::Status status = range.first < uint32_t{kSessionFdCount} ? collect() : absl::OkStatus();
    // Behind them, what DescribePlace has announced.
    for (const auto& [which, slab] : job->memory().mapped()) {
      for (size_t i = 1; slab != nullptr && !slab->on_host() && i < slab->on_devices()->pieces().size(); ++i) {
        if (const DeviceSlab::Piece& piece = slab->on_devices()->pieces()[i]; piece.on != nullptr) {
          fds.push_back(piece.fd);
        }
      }
    }
    if (status.ok() && (range.first > fds.size() || range.count > fds.size() - range.first)) {
      status = absl::InvalidArgumentError(
          absl::StrCat("fd channel: session ", shared->session_id, " has no such descriptors (got ", range.first,
                       " to ", uint64_t{range.first} + range.count, ", want at most ", fds.size(), ")"));
    }
    if (!status.ok()) {
      done(status, {});
      return;
    }
    const auto begin = fds.begin() + range.first;
    done(status, std::vector<int>(begin, begin + range.count));
  });
}

}  // namespace shardd
