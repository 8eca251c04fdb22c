// A rank attaches.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/process/process_stat.h"
#include "common/status/status_macros.h"
#include "common/versions/versions.h"
#include "server/daemon/core.h"
#include "server/device/device_memory.h"
#include "server/job/membership/past_process.h"
#include "server/loop/post_within.h"
#include "server/observe/log.h"
#include "server/session/session.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

constexpr absl::Duration kKillGrace = absl::Seconds(2);

// What of the session's slabs lies on devices.
void DescribePlace(const JobCore& job, const Session& session, v1::AttachRankResponse* response) {
  if (job.memory().place().memory == nullptr) {
    return;
  }
  response->set_device_uuid(job.devices().by_rank()[session.rank()]->memory()->device_uuid());
  auto add = [&](SessionFd which, const DeviceSlab& from) {
    v1::DeviceSlab* slab = response->add_device_slabs();
    slab->set_descriptor_index(which);
    slab->set_size_bytes(from.size_bytes());
    for (const DeviceSlab::Piece& piece : from.pieces()) {
      if (from.pieces().size() > 1) slab->add_piece_bytes(piece.on == nullptr ? -piece.size_bytes : piece.size_bytes);
    }
  };
  for (const auto& [which, slab] : job.memory().mapped()) {
    if (slab != nullptr && !slab->on_host()) {
      add(which, *slab->on_devices());
    }
  }
  if (session.memory()->slots != nullptr) {
    add(kFdGradientSlots, *session.memory()->slots);
  }
}

}  // namespace

// Attach -----------------------------------------------------------------------------------------------------------

struct Core::Attaching {
  PeerCredentials peer;
  Tenant caller;
  UniqueFd pidfd;
  v1::AttachRankRequest request;
  Done<v1::AttachRankResponse> finish;
  bool frees_awaited = false;

  std::string what() const { return absl::StrCat("attach rank ", request.rank(), " of job ", request.job_id()); }
  // NOT_FOUND where there is no job (null), also where another user has it; CANCELLED where the next daemon may have
  // it. PERMISSION_DENIED: the secret is missing. ABORTED: another one of its name has taken its place (`replaced`).
  absl::Status Check(const JobCore* job, const LastEpochs& last_epochs, bool replaced) const {
    if (job == nullptr && replaced) {
      return absl::AbortedError(
          absl::StrCat(what(), ": another one that trains more has taken its place; open it again"));
    }
    if (job == nullptr ? last_epochs.begun() : !last_epochs.MayCome(*job)) {
      return absl::CancelledError(absl::StrCat(what(), ": the daemon is shutting down"));
    }
    if (job == nullptr || job->identity().owner.uid != caller.uid) {
      return absl::NotFoundError(absl::StrCat(what(), ": no such job; open it first"));
    }
    return job->identity().owner.Admits(caller) ? absl::OkStatus() : SecretRefused(what(), caller);
  }
};

void Core::AttachRank(PeerCredentials peer, const JobSecret& secret, UniqueFd pidfd, v1::AttachRankRequest request,
                      Done<v1::AttachRankResponse> done) {
  const Tenant caller{peer.uid, secret.digest()};
  if (absl::Status status = Begin(peer.uid, "attach rank"); !status.ok()) {
    done(std::move(status));
    return;
  }
  auto finish = [this, caller, job_id = request.job_id(), rank = request.rank(),
                 done = std::move(done)](absl::StatusOr<v1::AttachRankResponse> result) {
    End(caller.uid);
    if (IsFinalRefusal(result.status())) {
      loop_.Post([this, caller, job_id, rank, status = result.status()] {
        if (JobCore* const job = FindJob(job_id); job != nullptr && job->identity().owner.Admits(caller)) {
          job->RankAnswered(rank, status, TicksSinceBoot());
        }
      });
    }
    done(std::move(result));
  };
  Attach(std::make_shared<Attaching>(Attaching{peer, caller, std::move(pidfd), std::move(request), std::move(finish)}));
}

void Core::Attach(const std::shared_ptr<Attaching>& attaching) {
  loop_.Post([this, attaching] {
    JobCore* const job = FindJob(attaching->request.job_id());
    if (absl::Status here = take_ups_.CheckId(attaching->what(), attaching->request.job_id()); !here.ok()) {
      return attaching->finish(std::move(here));
    }
    const bool replaced = freed_.replaced(attaching->request.job_id());
    if (absl::Status status = attaching->Check(job, last_epochs_, replaced); !status.ok()) {
      attaching->finish(std::move(status));
      return;
    }
    job->devices().memory_worker()->Post([this, attaching] {
      absl::StatusOr<v1::AttachRankResponse> result = AttachRankOnWorker(*attaching);
      // Memory is short: perhaps of what other jobs have let go and the reaper has not freed yet. Not for ever: a GPU
      // that hangs would keep its requests from the uid.
      if (absl::IsResourceExhausted(result.status()) && !reaper_stuck_.load(std::memory_order_relaxed) &&
          !std::exchange(attaching->frees_awaited, true)) {
        PostWithin(
            kFreeLimit, reaper_, [this, attaching] { Attach(attaching); }, loop_,
            [attaching, refused = result.status()] { attaching->finish(refused); });
        return;
      }
      attaching->finish(std::move(result));
    });
  });
}

absl::StatusOr<v1::AttachRankResponse> Core::AttachRankOnWorker(const Attaching& attaching) {
  const PeerCredentials& peer = attaching.peer;
  const UniqueFd& pidfd = attaching.pidfd;
  const v1::AttachRankRequest& request = attaching.request;
  const int rank = request.rank();
  const std::string what = attaching.what();
  if (stopping_) {
    return absl::CancelledError(absl::StrCat(what, ": the daemon is shutting down"));
  }
  const int protocol = request.protocol_version() == 0 ? kUnsaidProtocolVersion : request.protocol_version();
  if (!kProtocolVersions.Has(protocol)) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": a protocol version that this daemon does not speak (got ", protocol, ", want ",
                     kProtocolVersions.Text(), "); open the job, whose answer says which"));
  }
  struct Found {
    std::shared_ptr<const ShardPlan> plan;
    uint64_t epoch = 0;
    uint64_t session_id = 0;
    std::shared_ptr<RankSlots> slots;
    UniqueFd killed;  // who had the rank
  };
  absl::Status last;
  for (int attempt = 0; attempt < 3; ++attempt) {
    SHARDD_ASSIGN_OR_RETURN(
        Found found, OnLoop<Found>([&]() -> absl::StatusOr<Found> {
          JobCore* job = FindJob(request.job_id());
          SHARDD_RETURN_IF_ERROR(attaching.Check(job, last_epochs_, freed_.replaced(request.job_id())));
          if (rank < 0 || rank >= job->plan()->world_size) {
            return absl::InvalidArgumentError(
                absl::StrCat(what, ": no such rank (got ", rank, ", want 0 to ", job->plan()->world_size - 1, ")"));
          }
          UniqueFd killed;
          if (Session* holder = job->sessions()[rank].get(); holder != nullptr) {
            pollfd ended{holder->pidfd.get(), POLLIN, 0};
            const bool dead = holder->pidfd.valid() && poll(&ended, 1, 0) == 1;
            if (!dead && !request.replace()) {
              return absl::AlreadyExistsError(
                  absl::StrCat(what, ": the rank has a live session (session=", holder->id(),
                               ", pid=", holder->peer.pid, "); end it first, or attach with replace"));
            }
            // Silent but alive: killed before it is replaced, so that it can never write again; where it cannot be,
            // what it may write is left to it (membership/gradient_renewal.h). A process that replaces itself (its
            // attach was answered and then failed) lives on.
            if (!dead && !AreOneProcess(holder->pidfd, holder->peer.pid, pidfd, peer.pid)) {
              if (const absl::Status kill = KillProcess(holder->pidfd, holder->peer.pid, holder->peer.uid); kill.ok()) {
                killed = UniqueFd(fcntl(holder->pidfd.get(), F_DUPFD_CLOEXEC, 0));
              } else {
                LogWarning(absl::StrCat(what, ": ", kill.message()));
              }
            }
            job->SessionLost(rank, dead ? "its process ended" : "it was replaced", /*replaced=*/true);
            if (job->sessions()[rank].get() != nullptr) {
              return absl::AbortedError(absl::StrCat(what, ": a commit is under way; attach again"));
            }
          }
          if (!killed.valid()) {
            SHARDD_RETURN_IF_ERROR(job->CheckMayAttach(rank, peer.pid, request.replace(), pidfd));
          }
          Found result;
          result.killed = std::move(killed);
          result.plan = job->plan();
          result.epoch = job->committed().epoch();
          result.session_id = next_session_id_++;
          result.slots = job->memory().rank_slots();
          return result;
        }));
    if (found.killed.valid()) {
      pollfd ended{found.killed.get(), POLLIN, 0};
      poll(&ended, 1, static_cast<int>(absl::ToInt64Milliseconds(kKillGrace)));  // its last store is behind it
    }
    // Sessions of earlier epochs were freed on this thread before, and are not in memory beside this one.
    const uint64_t start_ticks = ReadProcessStat(peer.pid).value_or(ProcessStat()).start_ticks;
    std::shared_ptr<Slab> slots;
    if (found.slots != nullptr && !request.slots_apart()) found.slots->Drop(rank);
    if (found.slots != nullptr && request.slots_apart()) {
      SHARDD_ASSIGN_OR_RETURN(slots, found.slots->For(rank, {peer.pid, start_ticks}));
    }
    SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Session> session,
                            Session::Create(found.plan, found.session_id, rank, found.epoch,
                                            PlaceOf(rank, found.plan->world_size), std::move(slots), protocol));
    session->peer = peer;
    session->expected_version = request.expected_version();
    session->start_ticks = start_ticks;
    session->pidfd = UniqueFd(pidfd.valid() ? fcntl(pidfd.get(), F_DUPFD_CLOEXEC, 0) : -1);
    absl::StatusOr<v1::AttachRankResponse> response =
        OnLoop<v1::AttachRankResponse>([&]() -> absl::StatusOr<v1::AttachRankResponse> {
          JobCore* job = FindJob(request.job_id());
          SHARDD_RETURN_IF_ERROR(attaching.Check(job, last_epochs_, freed_.replaced(request.job_id())));
          v1::AttachRankResponse result;
          const bool apart = session->memory()->host_slots != nullptr;
          result.set_session_id(session->id());
          result.set_token(session->token());
          result.set_epoch(session->epoch());
          DescribePlace(*job, *session, &result);
          SHARDD_RETURN_IF_ERROR(job->AddSession(std::move(session)));
          result.set_committed_step(job->view().committed_step());
          result.set_version(job->committed().version());
          result.set_trainer_state(job->committed().trainer_states()[rank]);
          result.set_device(job->devices().by_rank()[rank]->name());
          result.set_outlives_daemon(job->committed().outlives_daemon());
          result.set_slots_apart(apart);
          result.set_tells_words(true);
          result.set_takes_writes_where_cut(job->plan()->cut_over_nodes);
          return result;
        });
    if (!absl::IsAborted(response.status())) {
      return response;
    }
    last = response.status();  // the epoch advanced, or what the rank waits for
  }
  return last;
}

}  // namespace shardd
