// How a rank comes to a session: the job is opened, the rank attached, memory mapped, and what goes away by itself
// tried again.

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/c/attachment/attachment.h"
#include "client/c/daemon/describe.h"
#include "client/c/daemon/unary_call.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/optimizer_kinds.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kFirstRetry = absl::Milliseconds(5);
constexpr absl::Duration kLongestRetry = absl::Milliseconds(500);
constexpr absl::Duration kLongestRetryOfAgain = absl::Milliseconds(50);  // the others train no sooner than this rank
// After so long, the rank says what it waits for.
constexpr absl::Duration kSayAfter = absl::Seconds(1);
// An embedded daemon that is just ending while another is started.
constexpr absl::Duration kAutostartGrace = absl::Seconds(5);
constexpr int kTriesThere = 3;
// The daemon may not have noticed yet that our former session is over.
constexpr absl::Duration kOwnSessionGrace = absl::Seconds(5);

// A daemon of an older release refuses a kind of optimizer by its number, and cannot say what would help.
absl::Status WithRemedy(const absl::Status& refused, const v1::OptimizerConfig& optimizer) {
  const v1::OptimizerKind kind = optimizer.kind();
  if (HasSeveralOptimizers(optimizer) && absl::StrContains(refused.message(), "plan differently")) {
    return absl::Status(refused.code(),
                        absl::StrCat(refused.message(), "; a daemon older than this library knows one optimizer of a ",
                                     "model alone: upgrade the daemon, or let the optimizers step in the trainers ",
                                     "(OPTIMIZER_KIND_TRAINER; in PyTorch install(optimizers=False))"));
  }
  if (!absl::IsInvalidArgument(refused) || !absl::StrContains(refused.message(), "optimizer.kind: unknown value")) {
    return refused;
  }
  return absl::Status(refused.code(),
                      absl::StrCat(refused.message(), "; the daemon is older than this library and has no ",
                                   OptimizerKindText(kind), ": upgrade the daemon, or let the optimizer step in the ",
                                   "trainers (OPTIMIZER_KIND_TRAINER; in PyTorch install(optimizers=False))"));
}

}  // namespace

absl::Status Attachment::Attach() {
  SHARDD_RETURN_IF_ERROR(plan_.Use(std::exchange(options_.spec, v1::JobSpec())));
  SHARDD_RETURN_IF_ERROR(plan_.CheckRank());
  return Establish(Deadline::In(options_.timeout));
}

absl::Status Attachment::Establish(Deadline deadline) {
  const absl::Time begun = MonotonicNow();
  absl::Time start = begun;  // since when there is no daemon
  const bool again = attached_before_;
  reached_ = again || options_.adopt;  // the job of this process, or of the one before it, had a daemon
  absl::Duration pause = kFirstRetry;
  bool said = false;
  while (true) {
    absl::Status status = TryEstablish(deadline);
    if (reached_ && !said && (absl::IsUnavailable(status) || IsShuttingDown(status)) &&
        MonotonicNow() - start > kSayAfter) {
      said = true;
      std::fprintf(stderr, "shardd: job \"%s\": rank %d waits up to %s for a daemon (%s)\n", plan_.job().c_str(),
                   rank(), absl::FormatDuration(options_.daemon_wait).c_str(), std::string(status.message()).c_str());
    }
    if (absl::IsAborted(status)) {  // the daemon is there, and says so
      start = MonotonicNow();
      if (!said && start - begun > kSayAfter) {
        said = true;
        std::fprintf(stderr, "shardd: job \"%s\": rank %d tries again (%s)\n", plan_.job().c_str(), rank(),
                     std::string(status.message()).c_str());
      }
    }
    if (status.ok() || !MayRetry(status, again, MonotonicNow() - start) || deadline.Left() <= pause) {
      return AsUnavailable(std::move(status));
    }
    SHARDD_RETURN_IF_ERROR(interrupt_.Sleep(pause, again ? "reattach" : "attach"));
    pause = std::min(2 * pause, again && !absl::IsAborted(status) ? kLongestRetryOfAgain : kLongestRetry);
  }
}

bool Attachment::MayRetry(const absl::Status& status, bool again, absl::Duration waited) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      if (target_.found_here && waited < kAutostartGrace) return true;
      // A daemon that listens has taken the place of the one that died during a call; or it means what it says.
      if (!again && reached_ && ConnectUnix(target_.socket_path, interrupt_).ok()) return ++tries_there_ <= kTriesThere;
      // With an address given, a first attach says at once that nobody listens there.
      return reached_ && waited < options_.daemon_wait;
    case absl::StatusCode::kCancelled:
      // A daemon that was started for others is just ending, with its last job; another one takes its place. What an
      // interrupt has ended has the same code and stays ended.
      return IsShuttingDown(status) &&
             (reached_ ? waited < options_.daemon_wait : target_.found_here && waited < kAutostartGrace);
    case absl::StatusCode::kAborted:
      // Somebody else was lost between two of our calls. Nothing was given out yet, so nothing has to be rewound.
      return true;
    case absl::StatusCode::kAlreadyExists:
      return attached_before_ && waited < kOwnSessionGrace;
    default:
      return false;
  }
}

absl::Status Attachment::TryEstablish(Deadline deadline) {
  SHARDD_RETURN_IF_ERROR(SessionMemory::GiveUpStoresOfEnded());  // the daemon takes an attach for that
  if (!attached_before_) {  // later it is the daemon there or none: another one does not have the job
    target_.found_here = options_.address.empty();
    SHARDD_ASSIGN_OR_RETURN(
        target_, ResolveTarget(options_.address, options_.local_world, options_.device_memory, deadline, interrupt_));
  }
  if (attached_before_ && target_.own && outlives_daemon_) {
    SHARDD_RETURN_IF_ERROR(StartAgain(target_, options_.local_world, deadline, interrupt_));
  }
  SHARDD_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, Connect(target_, interrupt_));
  reached_ = true;
  if (if_there_ >= 0) {
    SHARDD_ASSIGN_OR_RETURN(const v1::Job job, DescribeJob(target_, plan_.job(), job_id_, options_.job_secret,
                                                           deadline.Left(), interrupt_));
    if (job.committed_step() < if_there_) {
      return absl::OutOfRangeError(absl::StrCat("reattach job \"", plan_.job(), "\": it has committed step ",
                                                job.committed_step(), " (want ", if_there_, ")"));
    }
  }
  const absl::StatusOr<v1::OpenJobResponse> answer =
      OpenJob(channel, OpenRequest(), options_.job_secret, deadline, interrupt_);
  if (!answer.ok()) {
    return WithRemedy(answer.status(), plan_.plan().config.optimizer());
  }
  const v1::OpenJobResponse& opened = *answer;
  if (if_there_ >= 0 && (opened.created() || opened.job_id() != job_id_)) {  // it has gone in between
    return absl::NotFoundError(absl::StrCat("reattach job \"", plan_.job(), "\": the daemon does not have it"));
  }
  if (opened.has_spec()) {
    if (session_ != nullptr) {  // pointers and indices of the old plan are in use
      trains_more_ = true;
      return absl::FailedPreconditionError(
          absl::StrCat("reattach job \"", plan_.job(), "\": it trains more by now; detach, and attach with adopt"));
    }
    SHARDD_RETURN_IF_ERROR(plan_.Use(opened.spec()));
  }
  SHARDD_RETURN_IF_ERROR(CheckPlannedAlike(plan_.job(), opened.plan_digest(), plan_.plan().digest));
  SHARDD_RETURN_IF_ERROR(
      SessionMemory::GiveUpStoresBefore(ClientSession::JobName(target_, opened.job_id()), opened.epoch()));
  if (options_.control == Control::kGrpc) {  // before the others have to do with this rank
    SHARDD_RETURN_IF_ERROR(SessionMemory::CheckOwnWords(plan_.plan()));
  }
  v1::AttachRankRequest request;
  request.set_job_id(opened.job_id());
  request.set_rank(rank());
  // Never once this process has had a session: its holder might be ourselves.
  request.set_replace(options_.replace && !attached_before_);
  request.set_expected_version(ledger_.expected_version());
  request.set_slots_apart(true);
  request.set_protocol_version(opened.protocol_version());
  const absl::StatusOr<v1::AttachRankResponse> attached =
      AttachRank(channel, request, options_.job_secret, deadline, interrupt_);
  if (absl::IsNotFound(attached.status()) && !opened.initialized() && ledger_.expected_version() == 0) {
    // It has ended in between, with its daemon perhaps. It had nothing yet, and the rank has had nothing of it, so
    // another one is as good.
    return absl::AbortedError(attached.status().message());
  }
  SHARDD_RETURN_IF_ERROR(attached.status());
  const v1::AttachRankResponse& attach = *attached;
  attached_before_ = true;
  ClientSession::Options session_options;
  session_options.plan = &plan_.plan();
  session_options.rank = rank();
  session_options.protocol_version = opened.protocol_version();
  session_options.job_id = opened.job_id();
  session_options.control = options_.control;
  session_options.timeout = options_.timeout;
  session_options.deadline = deadline;
  session_options.interrupt = &interrupt_;
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<ClientSession> session,
                          ClientSession::Open(target_, channel, attach, session_options));
  if (stream_.has_value() && session->memory().on_device()) {
    SHARDD_RETURN_IF_ERROR(session->stream_waits().Use(*stream_));
  }
  created_ = opened.created();
  job_id_ = opened.job_id();
  Adopt(attach, std::move(session));
  return absl::OkStatus();
}

v1::OpenJobRequest Attachment::OpenRequest() const {
  v1::OpenJobRequest request;
  *request.mutable_spec() = plan_.spec();
  request.set_plan_digest(plan_.plan().digest);
  request.set_node(options_.node);
  request.set_adopt(options_.adopt);
  request.set_device_memory(options_.device_memory);
  request.set_rank(rank());
  if (options_.launcher.start_ticks() != 0) {
    *request.mutable_launcher() = options_.launcher;
  }
  return request;
}

void Attachment::Adopt(const v1::AttachRankResponse& attach, std::unique_ptr<ClientSession> session) {
  session_ = std::move(session);
  failure_ = absl::OkStatus();
  told_ = lost_nothing_ = false;
  outlives_daemon_ = attach.outlives_daemon();
  takes_writes_where_cut_ = attach.takes_writes_where_cut();
  device_ = attach.device();
  epoch_ = attach.epoch();
  ledger_.Reset(attach);
}

}  // namespace shardd
