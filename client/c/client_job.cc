#include "client/c/client_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/c/write_faults.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kFirstRetry = absl::Milliseconds(5);
constexpr absl::Duration kLongestRetry = absl::Milliseconds(500);
// A daemon that is being replaced.
constexpr absl::Duration kRestartGrace = absl::Seconds(30);
// An embedded daemon that is just ending while another is started.
constexpr absl::Duration kAutostartGrace = absl::Seconds(5);
// The daemon may not have noticed yet that our former session is over.
constexpr absl::Duration kOwnSessionGrace = absl::Seconds(5);
constexpr absl::Duration kDetachTimeout = absl::Seconds(5);

}  // namespace

absl::StatusOr<std::unique_ptr<ClientJob>> ClientJob::Attach(AttachOptions options) {
  std::unique_ptr<ClientJob> job(new ClientJob(std::move(options)));
  SHARDD_RETURN_IF_ERROR(job->UseSpec(job->options_.spec));
  if (job->rank() < 0 || job->rank() >= job->plan_.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("attach job \"", job->spec().name(),
                                                   "\": rank is out of range (got ", job->rank(), ", want 0 to ",
                                                   job->plan_.world_size - 1, ")"));
  }
  SHARDD_RETURN_IF_ERROR(job->Establish(absl::Now() + job->options_.timeout));
  return job;
}

absl::Status ClientJob::UseSpec(v1::JobSpec spec) {
  SHARDD_ASSIGN_OR_RETURN(plan_, PlanShards(spec, options_.node));
  options_.spec = std::move(spec);
  layout_ = MakeSessionLayout(plan_);
  trainable_masks_.clear();
  for (const GroupPlan& group : plan_.groups) {
    std::vector<uint8_t> mask(static_cast<size_t>(MaskBytes(static_cast<int64_t>(group.params.size()))), 0);
    for (size_t i = 0; i < group.params.size(); ++i) {
      SetMaskBit(mask.data(), static_cast<int64_t>(i), param(group.params[i]).requires_grad);
    }
    trainable_masks_.push_back(std::move(mask));
  }
  return absl::OkStatus();
}

absl::Status ClientJob::Establish(absl::Time deadline) {
  const absl::Time start = absl::Now();
  const bool again = attached_before_;
  absl::Duration pause = kFirstRetry;
  while (true) {
    absl::Status status = TryEstablish(deadline);
    if (status.ok()) {
      return status;
    }
    const absl::Duration waited = absl::Now() - start;
    bool retry = false;
    switch (status.code()) {
      case absl::StatusCode::kUnavailable:
        // With an address given, a first attach says at once that nobody listens there.
        retry = (again && waited < kRestartGrace) || (target_.found_here && waited < kAutostartGrace);
        break;
      case absl::StatusCode::kCancelled:
        // A daemon that was started for others is just ending, with its last job; another one takes its place. What an
        // interrupt has ended has the same code and stays ended: by its text, because a signal can be asked for once.
        retry = absl::StrContains(status.message(), "the daemon is shutting down") && !again && target_.found_here &&
                waited < kAutostartGrace;
        break;
      case absl::StatusCode::kAborted:
        // Somebody else was lost between two of our calls. Nothing was given out yet, so nothing has to be rewound.
        retry = true;
        break;
      case absl::StatusCode::kAlreadyExists:
        retry = attached_before_ && waited < kOwnSessionGrace;
        break;
      default:
        break;
    }
    if (!retry || absl::Now() + pause >= deadline) {
      return status;
    }
    SHARDD_RETURN_IF_ERROR(interrupt_.Sleep(pause, again ? "reattach" : "attach"));
    pause = std::min(2 * pause, kLongestRetry);
  }
}

absl::Status ClientJob::TryEstablish(absl::Time deadline) {
  SHARDD_RETURN_IF_ERROR(ClientSession::GiveUpStoresOfEnded());  // the daemon takes an attach for that
  if (!attached_before_) {  // later it is this daemon or none: another one does not have the job
    target_.found_here = options_.address.empty();
    SHARDD_ASSIGN_OR_RETURN(
        target_, ResolveTarget(options_.address, options_.local_world, options_.device_memory, deadline, interrupt_));
  }
  SHARDD_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, Connect(target_, interrupt_));
  SHARDD_ASSIGN_OR_RETURN(const v1::OpenJobResponse opened, OpenJob(channel, OpenRequest(), deadline, interrupt_));
  if (opened.has_spec()) {
    if (session_ != nullptr) {  // pointers and indices of the old plan are in use
      return absl::FailedPreconditionError(
          absl::StrCat("reattach job \"", spec().name(), "\": it trains more by now; attach anew"));
    }
    SHARDD_RETURN_IF_ERROR(UseSpec(opened.spec()));
  }
  SHARDD_RETURN_IF_ERROR(CheckPlannedAlike(spec().name(), opened.plan_digest(), plan_.digest));
  // Never once this process has had a session: its holder might be ourselves.
  const bool replace = options_.replace && !attached_before_;
  v1::AttachRankRequest request;
  request.set_job_id(opened.job_id());
  request.set_rank(options_.rank);
  request.set_replace(replace);
  request.set_expected_version(expected_version_);
  SHARDD_ASSIGN_OR_RETURN(const v1::AttachRankResponse attach, AttachRank(channel, request, deadline, interrupt_));
  attached_before_ = true;
  ClientSession::Options session_options;
  session_options.plan = &plan_;
  session_options.rank = options_.rank;
  session_options.timeout = options_.timeout;
  session_options.deadline = deadline;
  session_options.interrupt = &interrupt_;
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<ClientSession> session,
                          ClientSession::Open(target_, channel, attach, session_options));
  if (has_cuda_stream_ && session->on_device()) {
    SHARDD_RETURN_IF_ERROR(session->UseStream(cuda_stream_));
  }
  job_id_ = opened.job_id();
  created_ = opened.created();
  Adopt(attach, std::move(session));
  return absl::OkStatus();
}

v1::OpenJobRequest ClientJob::OpenRequest() const {
  v1::OpenJobRequest request;
  *request.mutable_spec() = options_.spec;
  request.set_plan_digest(plan_.digest);
  request.set_node(options_.node);
  request.set_adopt(options_.adopt);
  request.set_device_memory(options_.device_memory);
  request.set_rank(options_.rank);
  if (options_.launcher.start_ticks() != 0) {
    *request.mutable_launcher() = options_.launcher;
  }
  return request;
}

void ClientJob::Adopt(const v1::AttachRankResponse& attach, std::unique_ptr<ClientSession> session) {
  session_ = std::move(session);
  WriteFaults::Forget(this);
  if (watch_writes_) {
    (void)WatchSlabs();
  }
  failure_ = absl::OkStatus();
  device_ = attach.device();
  epoch_ = attach.epoch();
  expected_version_ = attach.version();
  committed_step_ = attach.committed_step();
  trainer_state_ = attach.trainer_state();
  progress_ = Progress();
  recording_ = nullptr;
  for (const std::unique_ptr<JobGraph>& graph : graphs_) {
    if (graph != nullptr) {  // of the session that is gone, whose number another daemon may give again
      graph->session_id = 0;
      graph->words = nullptr;
    }
  }
  progress_.handles.resize(plan_.groups.size());
  progress_.unshards.assign(plan_.groups.size(), 0);
  progress_.pool_offset_bytes.assign(plan_.groups.size(), 0);
  progress_.slots.resize(plan_.gradient_slots.size());
  progress_.mask_record.assign(plan_.groups.size(), 0);
}

absl::Status ClientJob::Reattach() {
  if (failure_.ok() && Live().ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "reattach job \"", spec().name(), "\": the session is alive (epoch ", epoch_, "; rank=", rank(), ")"));
  }
  if (absl::IsNotFound(failure_)) {
    return failure_;  // attaching would make a new job of the same name
  }
  // The old memory stays mapped until the new one is there: pointers into it must not fault while this fails and is
  // tried again.
  session_->Close();
  // What its stream still writes is none of the next epoch.
  if (!session_->DrainStreams(/*release=*/true, options_.timeout)) {
    SHARDD_RETURN_IF_ERROR(interrupt_.Check("reattach"));
    return absl::DeadlineExceededError(absl::StrCat("reattach job \"", spec().name(),
                                                    "\": the program's stream has not ended what it had within ",
                                                    absl::FormatDuration(options_.timeout), " (rank=", rank(), ")"));
  }
  SHARDD_RETURN_IF_ERROR(session_->GiveUpStores());
  return Establish(absl::Now() + options_.timeout);
}

absl::Status ClientJob::Detach(bool finished) {
  // `finished` is answered with the commit of the step that was sent, for which others may still compute.
  const absl::Time deadline = absl::Now() + (finished ? options_.timeout : kDetachTimeout);
  absl::Status status = Live();
  status = status.ok() ? WaitPassBegun("detach", nullptr) : status;
  if (status.ok() && finished && progress_.window) {  // what was written last becomes a version too
    status = EnterPass(/*stepped=*/false, "");
    status = status.ok() ? LeavePass() : status;
  }
  if (status.ok() && !session_->DrainStreams(/*release=*/false, deadline - absl::Now())) {
    status = absl::DeadlineExceededError(
        absl::StrCat("detach: the program's stream has not done with the job's memory in time (rank=", rank(), ")"));
  }
  if (status.ok()) {
    // The ring and the stream are two ways to the daemon: what was sent on the first must not be overtaken.
    const TimelineWord& consumed = session_->daemon_page().page().consumed;
    session_->Wake();
    while (status.ok() && !session_->Reached(consumed, session_->submitted()) && absl::Now() < deadline) {
      status = session_->WaitBriefly(consumed, session_->submitted(), "detach");
    }
    status = status.ok() ? session_->GiveUpStores() : status;  // nobody waits for the stores of who has detached
    if (status.ok()) {
      status = session_->Detach(finished, deadline);
    }
  }
  session_->Close();
  // A session that was over already has nothing left to detach; only `finished` could not be said.
  return finished || absl::IsCancelled(status) ? status : absl::OkStatus();
}

absl::Status ClientJob::Live() {
  if (!failure_.ok()) {
    return failure_;
  }
  return Note(session_->Live());
}

absl::Status ClientJob::Note(absl::Status status) {
  // An interrupted wait says nothing of the session, even if that has ended meanwhile: the next call finds out why.
  if (status.ok() || !failure_.ok() || absl::IsCancelled(status) || !session_->Over()) {
    return status;
  }
  RetireSteps();
  failure_ = status;
  if (const auto aborted = session_->stream().aborted(); aborted.has_value()) {
    committed_step_ = aborted->committed_step();
    trainer_state_ = aborted->trainer_state();
    progress_.pending_steps.clear();
    progress_.pass_begins = false;
  }
  return status;
}

void ClientJob::RetireSteps() {
  auto& pending = progress_.pending_steps;
  if (session_ == nullptr || (pending.empty() && !progress_.pass_begins)) {
    return;
  }
  // Looked at before the version, which is published first.
  const bool begun =
      progress_.pass_begins && session_->Reached(session_->daemon_page().page().passes, progress_.passes);
  const uint64_t version = session_->SequenceOf(session_->daemon_page().page().version);
  while (!pending.empty() && pending.front().version <= version) {
    committed_step_ = pending.front().step;
    trainer_state_ = std::move(pending.front().trainer_state);
    pending.pop_front();
  }
  if (!begun) {
    return;
  }
  progress_.pass_begins = false;
  expected_version_ = version;
  progress_.awaited_version = version;  // all that was enqueued since the pass was entered runs behind it
  if (progress_.entering_stepped || !progress_.entering_state.empty()) {
    trainer_state_ = std::move(progress_.entering_state);
  }
  committed_step_ += progress_.entering_stepped ? 1 : 0;
}

int64_t ClientJob::committed_step() {
  RetireSteps();
  return committed_step_;
}

const std::string& ClientJob::trainer_state() {
  RetireSteps();
  return trainer_state_;
}

}  // namespace shardd
