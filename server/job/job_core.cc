#include "server/job/job_core.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/membership/silence.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

// How long the end of a job waits for its sessions' memory to be free: longer than jobs that open wait for it, and than
// a GPU's driver takes.
constexpr absl::Duration kFreeSessions = absl::Seconds(20);

}  // namespace

JobCore::JobCore(Init init)
    : identity_{init.id, init.owner, std::move(init.spec), absl::Now(), std::move(init.lost)},
      plan_(std::move(init.plan)),
      memory_(std::move(init.memory)),
      own_devices_(std::move(init.own_devices)),
      devices_(std::move(init.devices)),
      optimizer_devices_(init.optimizer_devices.empty() ? devices_ : std::move(init.optimizer_devices),
                         plan_->world_size),
      collective_(std::move(init.collective)),
      loop_(init.loop),
      memory_worker_(std::move(init.memory_worker)),
      committed_(name(), static_cast<int>(plan_->params.size()), plan_->world_size, std::move(init.journal)),
      events_(name(), identity_.owner, &committed_, init.events),
      work_(
          loop_, [this] { return shared_from_this(); }, [this] { Advance(); }),
      waits_({plan_.get(), &committed_, &sessions_, &devices_},
             {collective_.get(), loop_, memory_worker_.get(),
              [this](absl::Status status) { Abort(std::move(status), {}); }, [this] { Advance(); }}),
      sessions_(plan_->world_size, loop_),
      commits_({plan_.get(), memory_.get(), &sessions_, &summons_, &extensions_, &optimizer_devices_},
               {&committed_, &gradients_, &writes_, &unsharding_, &waits_.given_back(), &snapshots_, &work_, &trace_,
                &counters_, [this](absl::Status status) { Abort(std::move(status), {}); },
                [this](const std::string& why) { Close(why); }}),
      gradients_(plan_,
                 {{&committed_, &sessions_, &commits_.steps(), &writes_, memory_.get(), &devices_,
                   identity_.owner.IsTheDaemons()},
                  &commits_.decision(),
                  &extensions_},
                 {{collective_.get(), &waits_.given_back(), &waits_.timer(), &work_, &trace_, &counters_,
                   memory_worker_.get(), [this](absl::Status status) { Abort(std::move(status), {}); }},
                  &events_}),
      values_({plan_.get(), &commits_.decision(), &summons_, &extensions_, &sessions_},
              {memory_.get(), &committed_, &gradients_.presence(), &commits_, &events_, &work_, loop_,
               [this](absl::Status status) { Abort(std::move(status), {}); },
               [this](const std::string& why) { Close(why); }},
              init.copier, WorkOwner{init.owner.uid, init.id}),
      summons_(
          {&identity_.spec, plan_.get(), init.nodes != nullptr, &committed_, &commits_.decision(), &sessions_,
           &gradients_.pairing(), &writes_, &extensions_, &values_.undo()},
          {&devices_, &waits_.given_back(), &work_, &events_, [this] { return gradients_.reductions().SettleAll(); },
           [this] { return memory_account_.CheckUndoFits(); },
           [this](absl::Status status) { Abort(std::move(status), {}); }}),
      absent_(name(), {&sessions_, &leavers_}, &events_),
      snapshots_({plan_.get(), &commits_.decision(), &sessions_, &writes_, &optimizer_devices_},
                 {memory_.get(), &committed_, &work_, &events_, loop_, memory_worker_.get(),
                  [this](absl::Status status) { Abort(std::move(status), {}); },
                  [this](const std::string& why) { Close(why); }},
                 identity_.owner.uid),
      writes_({plan_.get(), &committed_, &sessions_, &commits_.steps(), &gradients_.pairing(), &summons_.full_params(),
               &extensions_, &snapshots_.snapshot()},
              &counters_),
      pass_commits_({plan_.get(), memory_.get()}, {&writes_, &committed_, &commits_, &snapshots_, &unsharding_,
                                                   &summons_, &waits_.given_back(), &work_, loop_}),
      leavers_(plan_->world_size, {&committed_, &sessions_, &commits_.steps(), &gradients_.pairing(), &writes_.passes(),
                                   &writes_.hand_ins(), &summons_.full_params(), &values_.commit()}),
      renewal_({plan_.get(), &sessions_, &commits_.decision(), &values_.undo(), [this] { return nodes_.promised(); }},
               {memory_.get(), &work_, &optimizer_devices_, loop_, memory_worker_.get(), &events_,
                [this](absl::AnyInvocable<void()> closure) { values_.Behind(std::move(closure)); },
                [this](absl::Status status) { Abort(std::move(status), {}); },
                // What GPUs still add goes into the old ones, too.
                [this] { waits_.ForgetAllStragglers(); }}),
      extensions_(plan_->world_size,
                  {&committed_, &commits_.decision(), &leavers_, &commits_.steps(), &gradients_.pairing(),
                   &writes_.passes(), &writes_.hand_ins(), &summons_.full_params()}),
      unsharding_(plan_, {&committed_, &commits_.decision(), &commits_.steps(), &writes_, &sessions_, memory_.get()},
                  {collective_.get(), &waits_.given_back(), &work_, &events_, &counters_,
                   [this](absl::Status status) { Abort(std::move(status), {}); }}),
      nodes_(
          init.nodes.get(),
          {plan_, memory_.get(), &commits_.decision(), &commits_.steps(), &leavers_, &optimizer_devices_},
          {loop_, &committed_, &gradients_.pairing(), &gradients_.presence(), &values_, &work_, &events_},
          {{[this](PairKey key, int occurrence, const GivenGradients& given) {
              return gradients_.reductions().AddGiven(key, occurrence, given);
            },
            [this](absl::Status status) { Abort(std::move(status), {}); }},
           {[this](double norm) { commits_.Measured(norm); },
            [this](const v1::PeerMessage::Decided& decided) { commits_.Heard(decided); }, [this] { values_.Commit(); }},
           [this](const absl::Status& cause) {
             auto [own, lost] = pending_abort_.has_value() && !commits_.decision().committing()
                                    ? *std::exchange(pending_abort_, std::nullopt)
                                    : std::pair(cause, std::vector<int>());
             Abort(std::move(own), std::move(lost));
           },
           [this](absl::Status status) { Abort(std::move(status), {}); },
           [this](const std::string& why) { Close(why); },
           [this] { Advance(); }}),
      memory_account_({&identity_.spec, plan_.get(), memory_.get(), &sessions_, &renewal_.writers(),
                       &snapshots_.snapshot(), &summons_.full_params(), &values_.undo()},
                      std::move(init.reserved_by_all)),
      view_({&identity_,
             plan_,
             memory_.get(),
             &devices_,
             collective_.get(),
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
             &closed_,
             [this](int rank) { return WaitingFor(rank); }}),
      trace_({name(), plan_, &devices_, &sessions_, &committed_, &memory_account_,
              [this](int rank) { return view_.WaitText(rank); }},
             std::move(init.work_trace), loop_, &work_),
      // Who reads whether a version is being made comes behind commits_; who reads what trainers handed in, before
      // writes_; what waits for ranks' devices is dropped (here) before the slots that it would have filled.
      parts_({&commits_, &gradients_, &waits_, &nodes_, &snapshots_, &values_, &work_, &writes_, &leavers_, &summons_,
              &unsharding_, &extensions_, &waits_.sums(), &trace_}) {
  committed_.KeepIn(std::move(init.take_up_log));
  committed_.Tell(&parts_);
  parts_.EndEpoch();
  if (init.committed.version > 0) {
    committed_.TakeOver(init.committed);
    counters_ = init.committed.counters;
  }
  unsharding_.GatherFromNodes(nodes_.gathers());
  if (nodes_.over_nodes()) {
    commits_.SpanNodes({nodes_.node(), [this] { return nodes_.held_step(); },
                        [this](const Norm& own_norm) { nodes_.steps().SayReduced(own_norm); },
                        [this] { nodes_.SayDecided(); }});
    gradients_.reductions().AddOverNodes(
        {[this](PairKey key, const Pairing::Said& said) { nodes_.sums().SayReady(key, said); },
         [this] { return nodes_.closed(); }, [this] { return nodes_.generation(); }});
  }
  events_.Add(-1, "open",
              absl::StrCat("world size ", world_size(), ", ", plan_->groups.size(), " groups, ",
                           memory_->allocated_bytes(), " bytes of slabs"));
  if (identity_.lost.has_value()) {
    events_.Add(-1, "lost", identity_.lost->text());
  }
}

JobCore::~JobCore() {
  // Freeing a session's memory waits for the lock of its file, which a trainer holds for as long as a write of its own
  // into it lasts: for ever, if what it writes never comes. Then that memory is left to it, and no other.
  if (!memory_worker_->Stop(kFreeSessions)) {
    LogWarning(absl::StrCat("job ", name(), ": memory of its ranks' sessions is not free after ",
                            absl::FormatDuration(kFreeSessions),
                            ": it is very much, or a trainer's write does not end"));
    (void)memory_worker_.release();
    for (std::unique_ptr<Device>& device : own_devices_) (void)device.release();  // of that memory
  }
  nodes_.ForgetExchange();  // it is the collective's, and uses the links
  collective_.reset();
}

bool JobCore::PollRings(absl::Time until) {
  const uint64_t before = committed_.epoch();
  bool found = waits_.Poll();
  if (committed_.epoch() != before) {
    return true;
  }
  const int first = next_polled_;
  bool in_time = true;
  for (int i = 0; i < world_size() && in_time; ++i) {
    const int rank = (first + i) % world_size();
    Session* session = sessions_[rank].get();
    // Bounded in number too: no client keeps the loop from its timers and from the job's other ranks.
    for (uint32_t taken = 0; session != nullptr && taken < kRingRecords / 4; ++taken) {
      if (taken > 0 && session->last_command_time >= until) {  // when the last one began
        in_time = false;
        next_polled_ = (rank + 1) % world_size();
        break;
      }
      absl::StatusOr<RankCommand> command = session->NextFromRing();
      if (absl::IsNotFound(command.status())) {
        break;
      }
      found = true;
      const uint64_t epoch = committed_.epoch();
      absl::Status status = command.status();
      if (status.ok()) {
        status = Execute(session, *std::move(command));
      }
      if (committed_.epoch() != epoch) {
        return true;  // the sessions are gone
      }
      if (sessions_[rank].get() != session) {
        break;  // it has said good-bye before
      }
      if (!status.ok()) {
        Abort(std::move(status), {});
        if (committed_.epoch() != epoch) {
          return true;
        }
        session->broken = true;  // a commit is under way, the abort follows it
        break;
      }
      if (session->held) {
        session->consumes_when_released = true;
        break;
      }
      session->PublishConsumed();
    }
    if (in_time && found && MonotonicNow() >= until) {
      in_time = false;
      next_polled_ = (rank + 1) % world_size();
    }
  }
  return found;
}

int JobCore::ExecuteFromStream(Session* session, const v1::CommandBatch& batch, int first, absl::Time until) {
  const uint64_t epoch = committed_.epoch();
  const int rank = session->rank();
  const int end = batch.commands_size();
  for (int i = first; i < end; ++i) {
    if (session->held) {
      return i;
    }
    if (session->broken) {
      return end;
    }
    if (i > first && session->last_command_time >= until) {  // when the last one began
      return i;                                              // a batch is as long as its client likes
    }
    absl::StatusOr<RankCommand> command = session->Decode(batch.commands(i));
    absl::Status status = command.status();
    if (status.ok()) {
      status = Execute(session, *std::move(command));
    }
    if (!status.ok() && committed_.epoch() == epoch) {
      Abort(std::move(status), {});
      if (committed_.epoch() == epoch) {
        session->broken = true;
      }
    }
    if (committed_.epoch() != epoch || sessions_[rank].get() != session) {
      return end;
    }
  }
  return end;
}

absl::Status JobCore::Execute(Session* session, RankCommand command) {
  const int rank = session->rank();
  counters_.set_commands(counters_.commands() + 1);
  ++session->commands;
  session->last_command_time = MonotonicNow();
  const bool names_group = command.opcode == Opcode::kUnshard || command.opcode == Opcode::kReshard ||
                           command.opcode == Opcode::kSubmitGradients;
  if (command.opcode != Opcode::kWaitGradientSlot) {
    session->last_command = names_group
                                ? absl::StrCat(OpcodeName(command.opcode), " ", plan_->groups[command.group].name)
                                : std::string(OpcodeName(command.opcode));
    gradients_.Wake(rank);  // whoever sends is not asleep
  }
  session->gave_up = session->gave_up && (command.opcode == Opcode::kReshard || command.opcode == Opcode::kLeavePass);
  SHARDD_RETURN_IF_ERROR(extensions_.GoOn(rank));
  // Where parameters are given and taken nothing changes that a row of the table asks for, and every layer does so.
  const bool moves = command.opcode != Opcode::kUnshard && command.opcode != Opcode::kReshard;
  SHARDD_RETURN_IF_ERROR(Dispatch(session, std::move(command)));
  if (moves) {
    Advance();
  }
  return absl::OkStatus();
}

absl::Status JobCore::Dispatch(Session* session, RankCommand command) {
  const int rank = session->rank();
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
      committed_.Touch();
      return values_.Write(session, command);
    case Opcode::kCommitParameters:
      return values_.AskForCommit(rank);
    case Opcode::kEnterFullParams:
      return summons_.Enter(session, command);
    case Opcode::kLeaveFullParams:
      return OnLeaveFullParams(session, command.done);
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

absl::Status JobCore::OnLeaveFullParams(Session* session, uint64_t done) {
  bool last = false;
  SHARDD_RETURN_IF_ERROR(summons_.Leave(session, done, &last));
  values_.Forget(session->rank());
  if (last) {
    values_.Undo();  // writes that nobody committed
  }
  return absl::OkStatus();
}

void JobCore::CheckSilence(absl::Time now) {
  renewal_.FreeUnused();
  absent_.TellEnded();
  sessions_.TellWaiting(now, [this](int rank) { return view_.WaitText(rank); });
  if (values_.IsStuck(now) && !closed_) {  // whatever else the job asks the copier for would be, too
    Close(absl::StrCat("a copy of its values has not ended after ", absl::FormatDuration(ValueCopies::kLimit),
                       ": a GPU's driver does not return (devices ", devices_.front()->name(), " to ",
                       devices_.back()->name(), "); restart the daemon"));
    return;
  }
  waits_.ForgetStragglers();
  int hangs = -1;
  if (absl::Status stuck = waits_.CheckSums(now, &hangs);
      !closed_ && !commits_.decision().committing() && !stuck.ok()) {
    Abort(std::move(stuck), {hangs});
    return;
  }
  if (closed_) {
    return;
  }
  const uint64_t epoch = committed_.epoch();
  nodes_.CheckSilence(now);
  if (epoch != committed_.epoch() || commits_.decision().committing() || nodes_.promised() ||
      sessions_.attached() < world_size()) {
    return;
  }
  if (absl::Status stuck = writes_.CheckStuck(now, [this](int rank) { return WaitingFor(rank); }); !stuck.ok()) {
    Abort(std::move(stuck), {});
    return;
  }
  if (absl::Status stuck = waits_.CheckSignals(now, &hangs); !stuck.ok()) {
    Abort(std::move(stuck), {hangs});
    return;
  }
  const absl::Duration limit = absl::Milliseconds(plan_->config.silence_timeout_ms());
  const auto waiting_for = [this](int rank) { return WaitingFor(rank); };
  if (absl::Status silent = CheckSilentRanks(sessions_, committed_, limit, now, waiting_for, &hangs); !silent.ok()) {
    Abort(std::move(silent), {hangs});
  }
}

}  // namespace shardd
