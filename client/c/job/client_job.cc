#include "client/c/job/client_job.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/c/daemon/unary_call.h"
#include "common/status/status_macros.h"
#include "shardd/v1/trainer.grpc.pb.h"

namespace shardd {
namespace {

constexpr absl::Duration kDetachTimeout = absl::Seconds(5);
// That a call fails of whose daemon is gone may be known so long before the session's stream says so.
constexpr absl::Duration kEndIsKnown = absl::Seconds(1);

// In the daemon's words to ranks whose job another one has taken the place of.
constexpr char kMoreToTrain[] = "it goes on with more to train";

}  // namespace

ClientJob::ClientJob(AttachOptions options)
    : attachment_(std::move(options)),
      handles_(attachment_.plan()),
      staging_(attachment_),
      hand_ins_(attachment_),
      edits_(attachment_),
      gradients_(attachment_, handles_),
      read_only_memory_(attachment_),
      optimizer_state_(attachment_, read_only_memory_),
      full_params_(attachment_, handles_, gradients_, hand_ins_, edits_),
      values_(attachment_, staging_, full_params_),
      writeback_(edits_, full_params_, values_),
      passes_(attachment_, handles_, staging_, gradients_, hand_ins_, edits_, writeback_),
      unsharding_(attachment_, handles_, passes_),
      steps_(attachment_, handles_, staging_, gradients_, hand_ins_, passes_),
      graphs_(attachment_, handles_, passes_, unsharding_, gradients_) {}

absl::StatusOr<std::unique_ptr<ClientJob>> ClientJob::Attach(AttachOptions options) {
  std::unique_ptr<ClientJob> job(new ClientJob(std::move(options)));
  SHARDD_RETURN_IF_ERROR(job->attachment_.Attach());
  job->BeginSession();
  return job;
}

void ClientJob::BeginSession() {
  read_only_memory_.OnMapped();
  handles_.Reset();
  staging_.Reset();
  hand_ins_.Reset();
  edits_.Reset();
  gradients_.Reset();
  full_params_.Reset();
  values_.Reset();
  writeback_.Reset();
  passes_.BeginSession();
  unsharding_.Reset();
  steps_.Reset();
  graphs_.OnNewSession();
}

absl::Status ClientJob::Reattach() {
  SHARDD_RETURN_IF_ERROR(attachment_.Reattach());
  BeginSession();
  return absl::OkStatus();
}

bool ClientJob::LostNothing() {
  // Over nodes what some rank has stored behind the step is lost with the attempt, and then no rank goes on silently.
  if (attachment_.Live().ok() || !attachment_.lost_nothing() || rank_plan().writes_edits_back()) {
    return false;
  }
  const absl::StatusOr<std::string> stored = edits_.on() ? edits_.FindOwn() : std::string();
  return stored.ok() && stored->empty();
}

absl::StatusOr<bool> ClientJob::Extend(v1::JobSpec spec) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const auto object = [this] { return absl::StrCat("extend_job \"", rank_plan().job(), "\": "); };
  if (spec.name() != rank_plan().job()) {
    return absl::InvalidArgumentError(absl::StrCat(object(), "the spec is of another job (got \"", spec.name(), "\")"));
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitCommitted("extend_job", nullptr));
  // What was stored into shards comes along, and is not copied before it is there.
  const absl::Duration timeout = attachment_.timeout();
  ClientSession& session = attachment_.session();
  if (rank_plan().pass_copies() && !session.stream_waits().Drain(/*release=*/false, timeout)) {
    SHARDD_RETURN_IF_ERROR(attachment_.interrupt().Check("extend_job"));
    return absl::DeadlineExceededError(absl::StrCat(object(), "the program's stream has not ended what it had within ",
                                                    absl::FormatDuration(timeout), " (rank=", attachment_.rank(), ")"));
  }
  SHARDD_RETURN_IF_ERROR(passes_.HandInEdits("extend_job"));
  SHARDD_RETURN_IF_ERROR(attachment_.Flush("extend_job"));
  v1::ExtendJobRequest request;
  request.set_session_id(session.id());
  request.set_token(session.token());
  *request.mutable_spec() = std::move(spec);
  v1::ExtendJobResponse response;
  const auto channel = Connect(attachment_.target(), attachment_.interrupt());
  absl::Status status = channel.status();
  if (status.ok()) {
    auto stub = v1::TrainerService::NewStub(*channel);
    status = AsUnavailable(UnaryCall("extend_job", stub.get(), &v1::TrainerService::Stub::AsyncExtendJob, request,
                                     Deadline::In(timeout), attachment_.interrupt(), &response));
  }
  if (status.ok()) {
    return response.extended();
  }
  // All may have decided it, also where this call was not waited for, or hears that the epoch has ended.
  if (absl::IsUnavailable(status) || absl::IsAborted(status) || absl::IsDeadlineExceeded(status) ||
      absl::IsCancelled(status)) {
    attachment_.MayBeExtended();
  }
  // What ended the session says more than that the call has failed.
  const Deadline known = Deadline::In(kEndIsKnown);
  while (absl::IsUnavailable(status) && attachment_.Live().ok() && !known.HasPassed()) {
    SHARDD_RETURN_IF_ERROR(attachment_.interrupt().Sleep(absl::Milliseconds(1), "extend_job"));
  }
  const absl::Status ended = attachment_.Live();
  // All had asked, and the daemon died between what it said to everybody and its answer to this call.
  if (absl::IsUnavailable(status) && absl::IsNotFound(ended) && absl::StrContains(ended.message(), kMoreToTrain)) {
    return true;
  }
  SHARDD_RETURN_IF_ERROR(ended);
  return status;
}

absl::Status ClientJob::Detach(bool finished) {
  // A program that has been told of an abort says with this call that it does not go on.
  const bool may_try_again = finished && (!attachment_.told() || LostNothing());
  const int64_t sent = attachment_.ledger().sent_step();
  const Deadline until = Deadline::In(attachment_.timeout());
  bool has_all = true;
  absl::Status status = DetachOnce(finished, &has_all);
  // Where the epoch has ended in between, because a daemon or another rank was lost, the program could not attach
  // again: it has no job any more. So this call does, to say that nobody comes again.
  while (may_try_again && absl::IsAborted(status) && (LostNothing() || has_all) && !until.HasPassed()) {
    const bool saw_all = attachment_.committed_step() >= sent;
    const absl::Status attached = attachment_.ReattachIfThere(sent);
    // All ranks had finished, and the daemon died before it could answer; or somebody has closed what nobody needs.
    if (absl::IsNotFound(attached) && saw_all) return absl::OkStatus();
    // The host was asked once, and takes its answer as said.
    if (Interrupt::Ended(attached)) return attached;
    if (!attached.ok()) break;
    BeginSession();
    status = DetachOnce(finished, &has_all);
  }
  return status;
}

absl::Status ClientJob::DetachOnce(bool finished, bool* has_all) {
  // `finished` is answered with the commit of the step that was sent, for which others may still compute.
  const Deadline deadline = Deadline::In(finished ? attachment_.timeout() : kDetachTimeout);
  absl::Status status = attachment_.Live();
  status = status.ok() ? attachment_.WaitPassBegun("detach", nullptr) : status;
  if (finished) {
    // Over nodes other ranks have finished perhaps, and nobody reads the job's values any more when all have.
    const bool hands_in = !rank_plan().writes_edits_back();
    status = status.ok() && hands_in && passes_.stopped_reading() ? passes_.HandInEdits("detach") : status;
    const bool reads = !hands_in || (passes_.inside() && !passes_.stopped_reading());
    const absl::StatusOr<std::string> stored = reads ? std::string() : edits_.FindOwn();
    // Also what was handed in for a pass whose beginning nobody has waited for.
    const bool wrote = hand_ins_.granted() || attachment_.ledger().entering_pass() || !stored.ok() || !stored->empty();
    status = status.ok() ? stored.status() : status;
    // Stores that nobody can search for go back to the snapshot with the epoch.
    *has_all = (!rank_plan().trainers_write() || (edits_.on() && !wrote)) && !values_.commit_sent();
    if (status.ok() && wrote) {  // what was written last becomes a version too
      status = passes_.Enter(/*stepped=*/false, "");
      status = status.ok() ? passes_.Leave() : status;
      *has_all = status.ok() && edits_.on();
    }
  }
  status = attachment_.Detach(std::move(status), finished, deadline);
  // A session that was over already has nothing left to detach; only `finished` could not be said.
  return finished || absl::IsCancelled(status) ? status : absl::OkStatus();
}

}  // namespace shardd
