#include "server/job/job_core.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/status/status_macros.h"
#include "server/device/device.h"
#include "server/job/membership/silence.h"
#include "server/loop/core_loop.h"
#include "server/multinode/given_gradients.h"
#include "server/observe/log.h"
#include "server/session/session.h"
#include "server/storage/journal.h"
#include "server/storage/take_up_log.h"

namespace shardd {
namespace {

// How long the end of a job waits for its sessions' memory to be free: longer than jobs that open wait for it, and than
// a GPU's driver takes.
constexpr absl::Duration kFreeSessions = absl::Seconds(20);

}  // namespace

JobCore::JobCore(Init init)
    : identity_{init.id,
                init.owner,
                std::move(init.spec),
                std::move(init.plan),
                absl::Now(),
                std::move(init.lost),
                std::move(init.kept_formats),
                init.nodes == nullptr ? "" : init.nodes->link_key},
      memory_(std::move(init.memory)),
      devices_(std::move(init.devices)),
      committed_(name(), static_cast<int>(plan()->params.size()), world_size(), std::move(init.journal)),
      events_(name(), identity_.owner, &committed_, init.events),
      work_(init.loop, this),
      waits_({plan().get(), &committed_, &sessions_, &devices_.by_rank()},
             {devices_.collective(), init.loop, devices_.memory_worker(), this}),
      end_(&commits_, &nodes_),
      sessions_(world_size(), init.loop),
      commands_(&sessions_, &committed_, this,
                [this](Session* session, RankCommand&& command) { return Execute(session, std::move(command)); }),
      commits_({plan().get(), memory_.get(), &sessions_, &summons_, &extensions_, &devices_.optimizer()},
               {&committed_, &gradients_, &writes_, &unsharding_, &waits_.given_back(), &snapshots_, &values_, &work_,
                &trace_, &counters_, this}),
      gradients_(plan(),
                 {{&committed_, &sessions_, &commits_.steps(), &writes_, memory_.get(), &devices_.by_rank(),
                   identity_.owner.IsTheDaemons()},
                  &commits_.decision(),
                  &extensions_},
                 {{devices_.collective(), &waits_.given_back(), &waits_.timer(), &work_, &trace_, &counters_,
                   devices_.memory_worker(), this},
                  &events_}),
      values_({plan().get(), &commits_.decision(), &summons_, &extensions_, &sessions_},
              {memory_.get(), &committed_, &gradients_.presence(), &commits_, &events_, &work_, this,
               [this] { nodes_.EndWriting(); }, &snapshots_},
              init.copier, WorkOwner{init.owner.uid, init.id}),
      summons_({&identity_.spec, plan().get(), init.nodes != nullptr, &committed_, &commits_.decision(), &sessions_,
                &gradients_.pairing(), &writes_, &extensions_, &leavers_, &values_.undo()},
               {&devices_.by_rank(), &waits_.given_back(), &work_, &events_,
                [this] { return gradients_.reductions().SettleAll(); },
                [this] { return memory_account_.CheckUndoFits(); }, this}),
      absent_(name(), {&sessions_, &leavers_}, &events_),
      snapshots_({plan().get(), &commits_.steps(), &commits_.decision(), &sessions_, &writes_, &devices_.optimizer()},
                 {memory_.get(), &committed_, &work_, &events_, devices_.memory_worker(), this}, identity_.owner.uid),
      writes_({plan().get(), &committed_, &sessions_, &commits_.steps(), &gradients_.pairing(), &summons_.full_params(),
               &extensions_, &snapshots_.snapshot()},
              &counters_),
      pass_commits_({plan().get(), memory_.get(), &writes_, &committed_, &commits_, &snapshots_, &unsharding_,
                     &summons_, &waits_.given_back(), &work_,
                     init.nodes == nullptr
                         ? PassCommits::SayPass()
                         : [this](std::vector<std::string> states) { nodes_.SayPass(std::move(states)); }}),
      leavers_(world_size(), {&committed_, &sessions_, &commits_.steps(), &gradients_.pairing(), &writes_.passes(),
                              &writes_.hand_ins(), &summons_.full_params(), &values_.commit()}),
      renewal_({plan().get(), &sessions_, &commits_.decision(), &values_.undo(), &end_,
                [this] { return nodes_.promised(); }},
               {memory_.get(), &work_, &devices_.optimizer(), devices_.memory_worker(), &events_, this,
                [this](absl::AnyInvocable<void()> closure) { values_.Behind(std::move(closure)); },
                // What GPUs still add goes into the old ones, too.
                [this] { waits_.ForgetAllStragglers(); }}),
      extensions_(world_size(), {&committed_, &commits_.decision(), &leavers_, &commits_.steps(), &gradients_.pairing(),
                                 &writes_.passes(), &writes_.hand_ins(), &summons_.full_params()}),
      unsharding_(plan(), {&committed_, &commits_.decision(), &commits_.steps(), &writes_, &sessions_, memory_.get()},
                  {devices_.collective(), &waits_.given_back(), &work_, &events_, &counters_, this}),
      nodes_(
          init.nodes.get(),
          {plan(), memory_.get(), &commits_.decision(), &commits_.steps(), &leavers_, &devices_.optimizer(),
           &summons_.full_params()},
          {&committed_, &gradients_.pairing(), &gradients_.presence(), &values_, &snapshots_, &work_, &events_, this},
          {[this](PairKey key, int occurrence, const GivenGradients& given) {
             return gradients_.reductions().AddGiven(key, occurrence, given);
           },
           {[this](double norm) { commits_.Measured(norm); },
            [this](const v1::PeerMessage::Decided& decided) { commits_.Heard(decided); },
            [this] {
              if (!writes_.passes().saying()) {
                values_.Commit();
                return;
              }
              nodes_.StopReading();
              pass_commits_.Agreed();
            },
            [this](const absl::Status& cause) { AwaitEndBehindStep(cause); }},
           [this](const absl::Status& cause) { EndEpoch(end_.TakeOr(cause)); },
           [this](bool made) { return NodesExtend(made); }}),
      memory_account_({&identity_.spec, plan().get(), memory_.get(), &sessions_, &renewal_.writers(),
                       &snapshots_.snapshot(), &summons_.full_params()},
                      std::move(init.reserved_by_all)),
      view_({&identity_,
             memory_.get(),
             &devices_.by_rank(),
             devices_.collective(),
             &committed_,
             &counters_,
             &gradients_.pairing(),
             &sessions_,
             &values_,
             &summons_,
             &absent_,
             &writes_,
             &leavers_,
             &commits_.steps(),
             &unsharding_,
             &commits_.decision(),
             &nodes_,
             &snapshots_,
             &end_,
             [this](int rank) { return WaitingFor(rank); },
             &gradients_.reductions(),
             &meter_}),
      trace_({name(), plan(), &devices_.by_rank(), &sessions_, &committed_, &memory_account_,
              [this](int rank) { return view_.WaitText(rank); }},
             std::move(init.work_trace), &work_),
      meter_(world_size(), plan()->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER,
             {&sessions_, &committed_, &commits_.decision()}, [this](const v1::StepRecord& times) { Remember(times); }),
      // Who reads whether a version is being made comes behind commits_; who reads what trainers handed in, before
      // writes_; what waits for ranks' devices is dropped (here) before the slots that it would have filled.
      parts_({&meter_, &commits_, &gradients_, &waits_, &nodes_, &snapshots_, &values_, &work_, &writes_, &leavers_,
              &summons_, &unsharding_, &extensions_, &waits_.sums(), &trace_, &end_}) {
  committed_.KeepIn(std::move(init.take_up_log));
  committed_.Tell(&parts_);
  parts_.EndEpoch();
  if (init.committed.version > 0) {
    committed_.TakeOver(init.committed);
    if (init.committed.gradients_stay) renewal_.TakeUp();
    for (const PastProcess& process : init.former) renewal_.TakeUp(process);
    for (PastProcess& process : init.living)
      absent_.SessionEnded(process.rank, process.pid, std::move(process.process));
    // On the host shards are made anew where the snapshot counts.
    if (memory_->place().memory == nullptr) init.former.clear();
    const bool promised_values = init.committed.promised_values.has_value();
    if (init.committed.in_snapshot) {
      snapshots_.TakeUp(std::move(init.former), {.shards_in_copies = init.committed.shards_in_copies,
                                                 .second = init.committed.second_snapshot.value_or(false),
                                                 .has_next = promised_values || init.committed.promised.has_value()});
    }
    if (init.committed.promised.has_value()) commits_.TakeUp(*init.committed.promised);
    if (promised_values) values_.TakeUp(*init.committed.promised_values);
    if (promised_values || init.committed.promised.has_value()) {
      end_.Await({absl::AbortedError("the daemon before has ended, and its ranks' sessions with it")});
    }
    for (size_t rank = 0; rank < init.committed.finished.size(); ++rank) {
      leavers_.Left(static_cast<int>(rank), init.committed.finished[rank]);
    }
    counters_ = init.committed.counters;
  }
  unsharding_.GatherFromNodes(nodes_.gathers());
  if (nodes_.over_nodes()) {
    commits_.SpanNodes({nodes_.node(), [this] { return nodes_.held_step(); },
                        [this](const Norm& own_norm) { nodes_.steps().SayReduced(own_norm); },
                        [this] { nodes_.SayDecided(); },
                        [this] {
                          nodes_.steps().SayPart();
                          nodes_.BeginWriting();
                        },
                        [this] { nodes_.sums().EndStep(); }, [this] { return nodes_.generation(); }});
    gradients_.reductions().AddOverNodes(
        {[this](PairKey key, const Pairing::Said& said) { nodes_.sums().SayReady(key, said); },
         [this] { return nodes_.closed(); }, [this] { return nodes_.generation(); }});
  }
  events_.Add(-1, "open",
              absl::StrCat("world size ", world_size(), ", ", plan()->groups.size(), " groups, ",
                           memory_->allocated_bytes(), " bytes of slabs"));
  if (identity_.lost.has_value()) {
    events_.Add(-1, "lost", identity_.lost->text());
  }
}

void JobCore::Remember(const v1::StepRecord& times) {
  v1::HistoryStep step;
  *step.mutable_times() = times;
  step.set_grad_norm(commits_.decision().grad_norm());
  step.set_clip_factor(commits_.decision().clip_factor());
  step.set_memory_bytes(memory_->allocated_bytes());
  events_.AddStep(step);
  trace_.Awaited(times.step(), times.slowest_rank(), absl::Nanoseconds(times.slowest_rank_ns()));
}

JobCore::~JobCore() {
  // Freeing a session's memory waits for the lock of its file, which a trainer holds for as long as a write of its own
  // into it lasts: for ever, if what it writes never comes. Then that memory is left to it, and no other.
  if (!devices_.EndMemoryWorker(kFreeSessions)) {
    LogWarning(absl::StrCat("job ", name(), ": memory of its ranks' sessions is not free after ",
                            absl::FormatDuration(kFreeSessions),
                            ": it is very much, or a trainer's write does not end"));
  }
  nodes_.ForgetExchange();  // it is the collective's, and uses the links
  devices_.EndCollective();
}

bool JobCore::PollRings(absl::Time until) {
  const uint64_t epoch = committed_.epoch();
  const bool found = waits_.Poll();
  return committed_.epoch() != epoch || commands_.PollRings(until, found);
}

absl::Status JobCore::Execute(Session* session, RankCommand command) {
  const int rank = session->rank();
  counters_.set_commands(counters_.commands() + 1);
  ++session->commands;
  session->last_command_time = MonotonicNow();
  const bool names_group = command.opcode == Opcode::kUnshard || command.opcode == Opcode::kReshard ||
                           command.opcode == Opcode::kSubmitGradients;
  if (command.opcode != Opcode::kWaitGradientSlot) {
    session->SetLastCommand(OpcodeName(command.opcode), names_group ? command.group : -1);
    gradients_.Wake(rank);  // whoever sends is not asleep
  }
  session->gave_up = session->gave_up && (command.opcode == Opcode::kReshard || command.opcode == Opcode::kLeavePass);
  SHARDD_RETURN_IF_ERROR(extensions_.GoOn(rank));
  // Where parameters are given and taken nothing changes that a row of the table asks for, and every layer does so.
  const bool moves = command.opcode != Opcode::kUnshard && command.opcode != Opcode::kReshard;
  const Opcode opcode = command.opcode;
  const bool stepped = opcode == Opcode::kEnterPass && (command.flags & kStepped) != 0;
  meter_.Begins(rank, opcode, command.arg0);
  SHARDD_RETURN_IF_ERROR(Dispatch(session, std::move(command)));
  if (moves) {
    meter_.Executed(rank, opcode, stepped, [this](int r) { return gradients_.pairing().SleepsForTurn(r); });
    Advance();
  }
  return absl::OkStatus();
}

absl::Status JobCore::Dispatch(Session* session, RankCommand command) {
  const int rank = session->rank();
  SHARDD_RETURN_IF_ERROR(commits_.CheckBetweenParts(rank, command.opcode));
  bool last = false;  // rank in full parameters
  switch (command.opcode) {
    case Opcode::kUnshard:
      return unsharding_.Unshard(session, command.group, command.arg0);
    case Opcode::kReshard:
      return unsharding_.Reshard(session, command.group, command.done);
    case Opcode::kSubmitGradients:
      trace_.Submitted(rank, command.group);
      SHARDD_RETURN_IF_ERROR(unsharding_.GradientsSubmitted(rank, command.group));
      return gradients_.Submit(session, std::move(command));
    case Opcode::kBackwardDone:
      SHARDD_RETURN_IF_ERROR(gradients_.CloseBackward(session, command));
      unsharding_.CloseBackward(rank);
      return absl::OkStatus();
    case Opcode::kStep:
      return commits_.Step(session, std::move(command));
    case Opcode::kWriteParameters:
      return values_.Write(session, command);
    case Opcode::kCommitParameters:
      return values_.AskForCommit(rank);
    case Opcode::kEnterFullParams:
      return summons_.Enter(session, command);
    case Opcode::kLeaveFullParams:
      if (values_.commit().said()) {  // node 0 may have made a version of what would be taken back here
        return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, "LeaveFullParams",
                                    "the commit is not finished");
      }
      SHARDD_RETURN_IF_ERROR(summons_.Leave(session, command.done, &last));
      values_.Forget(rank);
      if (last) values_.Undo();  // writes that nobody committed
      return absl::OkStatus();
    case Opcode::kWaitGradientSlot:
      gradients_.Sleep(rank, command.group);
      return absl::OkStatus();
    case Opcode::kEnterPass:
      return pass_commits_.Enter(rank, std::move(command));
    case Opcode::kLeavePass:
      return writes_.LeavePass(rank);
    case Opcode::kHandIn:
      return writes_.AskToHandIn(rank);
    case Opcode::kAbandonBackward:
      SHARDD_RETURN_IF_ERROR(gradients_.Abandon(session));
      unsharding_.Abandon(rank, command.done);
      return absl::OkStatus();
    case Opcode::kSetGradientPresence:
      return gradients_.SetPresence(rank, command);
    case Opcode::kInvalid:
      break;
  }
  return absl::InternalError("execute: a command passed decoding without a valid opcode");
}

void JobCore::CheckSilence(absl::Time now) {
  renewal_.FreeUnused();
  absent_.TellEnded();
  sessions_.TellWaiting(now, [this](int rank) { return view_.WaitText(rank); });
  if (values_.IsStuck(now) && !end_.closed()) {  // whatever else the job asks the copier for would be, too
    Close(absl::StrCat("a copy of its values has not ended after ", absl::FormatDuration(ValueCopies::kLimit),
                       ": a GPU's driver does not return (devices ", devices_.by_rank().front()->name(), " to ",
                       devices_.by_rank().back()->name(), "); restart the daemon"));
    return;
  }
  waits_.ForgetStragglers();
  int hangs = -1;
  if (absl::Status stuck = waits_.CheckSums(now, &hangs);
      !end_.closed() && !commits_.decision().committing() && !stuck.ok()) {
    Abort(std::move(stuck), {hangs});
    return;
  }
  if (end_.closed()) {
    return;
  }
  const uint64_t epoch = committed_.epoch();
  nodes_.CheckSilence(now);
  if (epoch != committed_.epoch() || commits_.decision().committing() || nodes_.promised() || absent_.Some()) {
    return;
  }
  const auto waiting_for = [this](int rank) { return WaitingFor(rank); };
  absl::Status late = writes_.CheckStuck(now, waiting_for);
  if (late.ok()) late = waits_.CheckSignals(now, &hangs);
  if (late.ok()) {
    const absl::Duration limit = absl::Milliseconds(plan()->config.silence_timeout_ms());
    late = CheckSilentRanks(sessions_, committed_, limit, now, waiting_for, &hangs);
  }
  if (!late.ok()) {
    Abort(std::move(late), hangs < 0 ? std::vector<int>() : std::vector<int>{hangs});
  }
}

}  // namespace shardd
