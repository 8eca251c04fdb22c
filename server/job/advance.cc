#include "server/job/advance.h"

#include <algorithm>
#include <utility>

#include "common/clock/monotonic_now.h"
#include "server/job/job_core.h"
#include "server/job/nodes/state_transfers.h"
#include "server/job/unlike_calls.h"

namespace shardd {

absl::Span<const Transition> JobCore::Transitions() {
  static constexpr auto kAlways = [](const JobCore&) { return true; };
  static constexpr Transition kTable[] = {
      {"send state", kOverNodes, 0, [](const JobCore& job) { return job.nodes_.states().MaySend(); },
       [](JobCore& job) { job.nodes_.states().SendWaited(); }, nullptr, "",
       "A node that has lost its state is sent what is committed here, behind a commit under way, and a step that is "
       "not shown yet with it.",
       "The node may be the one that is to hold the step, also where the epoch ends next."},
      {"end the epoch", kEnding, 0, [](const JobCore& job) { return job.end_.MayBegin(); },
       [](JobCore& job) { job.EndEpoch(job.end_.Take()); }, nullptr, "",
       "A rank was lost, or went wrong, while a version was being made, which always completes first.",
       "Nothing else is begun in an epoch that is to end."},
      {"tell who was refused", 0, kEnding,
       [](const JobCore& job) { return job.absent_.SomeWaitInVain(MonotonicNow()); },
       [](JobCore& job) { return job.absent_.RefusedError(); }, nullptr, "",
       "A rank whose description of the job was refused does not come, and others wait for it.",
       "Nothing else is begun in an epoch that ends."},
      {"finish the restore", kOverNodes | kNobodyAttached, 0,
       [](const JobCore& job) { return job.nodes_.states().MayRestore() && !job.extensions_.building(); },
       [](JobCore& job) { job.nodes_.states().Restore(); }, nullptr, "the slabs and the counts of the other node",
       "All of another node's state has come.", "Everything below reads what is committed."},
      {"copy back", kNobodyAttached, kCommitting,
       [](const JobCore& job) {
         return job.snapshots_.MayCopyBack() && !job.values_.undo().undoing() && !job.nodes_.promised() &&
                !job.commits_.decision().deciding();  // where it goes back to is not decided yet
       },
       [](JobCore& job) { job.snapshots_.CopyBack(); }, nullptr,
       "the processes that may still store into the shards: attach, or their end",
       "Shards go back to the snapshot when nobody can store into them any more. One that is about to be another "
       "version's is not copied before.",
       "Nobody attaches before it has ended."},
      {"extend as other nodes have", kOverNodes | kNobodyAttached, kCommitting | kEnding,
       [](const JobCore& job) {
         return job.extensions_.MayWiden(MonotonicNow()) && !job.values_.undo().undoing() &&
                !job.snapshots_.awaits_writers() && !job.nodes_.promised() && !job.nodes_.states().has_come();
       },
       [](JobCore& job) { job.extensions_.StartWidening(); }, nullptr, "",
       "This node has missed an extension that the others have made: its job becomes what theirs is. Of a state that "
       "it is being sent the rest may never come: the sender becomes what they are, too, and ends its links.",
       "What the others train is agreed on before anything that this node would say."},
      {"say that ranks have finished", kOverNodes | kNobodyAttached, 0,
       [](const JobCore& job) { return job.nodes_.MaySayFinished(); }, [](JobCore& job) { job.nodes_.SayFinished(); },
       nullptr, "", "Other nodes go on for as long as they like, and need what this node holds.",
       "A node whose ranks have finished says nothing else that others wait for."},
      {"show the step", kCommitting | kApplied, 0,
       [](const JobCore& job) { return !job.commits_.decision().showing() && job.commits_.MayShow(); },
       [](JobCore& job) { job.commits_.Show(); }, nullptr, "the nodes that do not hold the decision yet",
       "Ranks see a step that every node holds: were this node lost, the others would make another one.",
       "Whoever waits for the version goes on as early as possible."},
      {"say good-bye", kSomeLeft, kCommitting,
       [](const JobCore& job) { return job.leavers_.MayGo(job.gradients_.reductions().under_way()) >= 0; },
       [](JobCore& job) {
         const int rank = job.leavers_.MayGo(job.gradients_.reductions().under_way());
         job.EndDetached(rank, job.leavers_.Take(rank));
       },
       nullptr, "the step, or the gradients, of the rank that leaves",
       "A rank has detached before its step was committed, or its gradients were added.",
       "Letting another rank hand in first would make leaving an interruption."},
      {"say that backwards are closed", kOverNodes, 0,
       [](const JobCore& job) { return job.nodes_.sums().MaySayClosed(); },
       [](JobCore& job) { job.nodes_.sums().SayClosed(); }, nullptr, "",
       "After this, node 0 assumes that no further contribution to these backwards will come.",
       "The other nodes wait for the word."},
      {"say that backwards are reduced", kOwesWord, 0, kAlways,
       [](JobCore& job) { job.gradients_.reductions().Publish(); }, nullptr,
       "BackwardDone of every rank, and sums under way",
       "A backward that all ranks have closed has nothing waiting, and what it has under way ends together.",
       "Trainers wait for the word."},
      {"readmit a late rank", kTrainersWrite | kSomeLate, kCommitting | kSomeHandIn,
       [](const JobCore& job) {
         return !job.writes_.LateRanks([&job](int rank) { return job.WaitingFor(rank); }).empty();
       },
       [](JobCore& job) { job.writes_.ReadmitLate([&job](int rank) { return job.WaitingFor(rank); }); }, nullptr, "",
       "A rank that left a forward without its backward goes on in the pass in which others wait for its gradients.",
       "Who is readmitted is not entering, so what waits for all to enter waits for it again."},
      {"add before its turn", kSomeBlocked, kCommitting | kReducing,
       [](const JobCore& job) { return job.gradients_.reductions().AllStuck(); },
       [](JobCore& job) { return job.gradients_.reductions().AddBeforeTurn(); },
       [](const JobCore& job, int rank) { return job.gradients_.pairing().WaitingFor(rank); },
       "SubmitGradients, or BackwardDone, of every rank for the backward and group in the slot",
       "Ranks that run groups in different orders sleep until a slot is released whose group another rank submits only "
       "later. This is done when, and only when, every rank is stuck, so results are the same on every run.",
       "No row below opens by it: sums are under way then."},
      {"extend", kAllExtend, 0, [](const JobCore& job) { return !job.extensions_.building(); },
       [](JobCore& job) -> absl::Status {
         job.events_.Add(-1, "extend", job.extensions_.by_rank().begin()->second.extension->what);
         if (!job.nodes_.over_nodes()) {
           job.extensions_.StartBuild();
           return absl::OkStatus();
         }
         SHARDD_RETURN_IF_ERROR(job.nodes_.others().CheckExtend());
         job.nodes_.steps().SayExtends(job.extensions_.BeginAsking(),
                                       /*made=*/false);  // and builds when all nodes have
         return absl::OkStatus();
       },
       [](const JobCore& job, int rank) { return job.extensions_.WaitingFor(rank); }, "ExtendJob of every rank",
       "All ranks have asked for the same more to train: another job takes this one's place.",
       "Ranks that ask do nothing else, so nothing depends on it."},
      {"refuse unlike calls", kUnlikeCalls, kCommitting | kDeciding, kAlways,
       [](JobCore& job) { return CheckLikeCalls(job.asked_calls()); }, nullptr, "",
       "Every rank waits, some in EnterFullParams and others in EnterPass or behind a Step, so that no row below "
       "opens.",
       "It ends the epoch."},
      {"decide the step", kAllStepped, kCommitting | kDeciding | kReducing,
       [](const JobCore& job) {
         return !job.commits_.decision().awaits_devices() && job.unsharding_.pending_fills() == 0 &&
                job.nodes_.MayDecide();
       },
       [](JobCore& job) { return job.commits_.BeginDecision(); },
       [](const JobCore& job, int rank) { return job.commits_.WaitingToStep(rank); }, "Step of every rank",
       "Every rank has stepped and all gradients are added: the step is measured, journaled and applied.",
       "Its commit comes before the pass that ranks enter with it."},
      {"refuse unequal backwards", kAllFullParams, kCommitting,
       [](const JobCore& job) { return job.summons_.MayGrant() && !job.summons_.CheckEqualBackwards().ok(); },
       [](JobCore& job) { return job.summons_.CheckEqualBackwards(); }, nullptr, "",
       "Gradients are entered between backwards that all ranks have closed.",
       "No sum that would be waited for makes it right."},
      {"ask the other nodes to write", kOverNodes | kAllFullParams, kCommitting,
       [](const JobCore& job) {
         return job.summons_.MayGrant() && job.summons_.full_params().AnyWrites() &&
                job.unsharding_.pending_fills() == 0 && job.nodes_.MayAskToWrite();
       },
       [](JobCore& job) -> absl::Status {
         // Alike on all nodes but that one, which refuses its own ranks.
         if (absl::Status may = job.nodes_.others().CheckTakeWrites(); !may.ok()) return job.summons_.Refuse(may);
         SHARDD_RETURN_IF_ERROR(job.summons_.CheckUndoFits());
         job.nodes_.AskToWrite();
         return absl::OkStatus();
       },
       nullptr, "",
       "Where parameters are cut over nodes, the others gather what ranks are about to write: all write when all have "
       "asked.",
       "Who is let in to write has heard from the others."},
      {"let into full parameters", kAllFullParams, kCommitting,
       [](const JobCore& job) {
         return job.summons_.MayGrant() && (!job.summons_.full_params().AnyWrites() || job.nodes_.MayWriteBack()) &&
                !job.summons_.SumsHold(job.gradients_.reductions().under_way() &&
                                       job.devices_.collective()->may_hold_requests());
       },
       [](JobCore& job) -> absl::Status {
         const bool writes = job.summons_.full_params().AnyWrites();
         if (writes) job.nodes_.BeginWriting();
         absl::Status status = job.summons_.LetIn();
         if (writes && !job.summons_.full_params().AnyAsked()) job.nodes_.EndWriting();  // all were refused
         return status;
       },
       [](const JobCore& job, int rank) { return job.summons_.WaitingFor(rank); },
       "EnterFullParams of every rank, and LeaveFullParams of those inside",
       "All ranks enter full parameters together; who has finished is not needed to read.",
       "Who is let in to write commits later."},
      {"end before a pass", kTrainersWrite | kAllEntering, kCommitting | kDeciding | kReducing | kSomeHandIn,
       [](const JobCore& job) { return job.MayEndBeforePass(); },
       [](JobCore& job) { job.EndEpoch(job.end_.TakeBeforePass()); }, nullptr, "",
       "The daemon stops, and what ranks have stored behind its last step is a version: they enter the pass at the "
       "next daemon.",
       "Nobody has begun anything in the pass."},
      {"tell the other nodes of a pass", kOverNodes | kTrainersWrite | kAllEntering,
       kPassCopies | kCommitting | kDeciding | kReducing,
       [](const JobCore& job) { return job.writes_.NoStepComesFirst() && job.nodes_.MaySayEntering(); },
       [](JobCore& job) { job.nodes_.SayEntering(job.writes_.passes().any_edits()); }, nullptr, "",
       "Where parameters are cut over nodes a pass reads what ranks of other nodes may have edited: all enter "
       "together.",
       "Who enters has heard from the others."},
      {"begin a pass", kTrainersWrite | kAllEntering, kPassCopies | kCommitting | kDeciding | kReducing,
       [](const JobCore& job) { return job.writes_.NoStepComesFirst() && job.nodes_.MayEnterPass(); },
       [](JobCore& job) { return job.pass_commits_.Commit(job.nodes_.EnterPass(job.writes_.passes().any_edits())); },
       [](const JobCore& job, int rank) { return job.writes_.WaitingToEnter(rank); }, "EnterPass of every rank",
       "All ranks enter a pass: what trainers have written becomes a version, then they are let in.",
       "What was deferred is unsharded inside of the pass."},
      {"announce a pass", kPassCopies | kAllEntering, 0,
       [](const JobCore& job) {
         return job.writes_.MayAnnounce(job.waits_.sums().by_trainers() && job.gradients_.reductions().under_way());
       },
       [](JobCore& job) { return job.pass_commits_.Announce(job.MayTellOfPass()); },
       [](const JobCore& job, int rank) { return job.writes_.WaitingToEnter(rank); }, "EnterPass of every rank",
       "The pass waits only for devices now (reductions, a decided step, the ranks' signals), so the ranks' streams "
       "may "
       "go on.",
       "Ranks go on with what the copies do not touch."},
      {"let into a pass", kPassCopies | kAllEntering, 0,
       [](const JobCore& job) { return job.writes_.passes().announced() && job.writes_.passes().copied(); },
       [](JobCore& job) { job.writes_.LetInAll(); }, nullptr, "the copies of the pass",
       "The copies that the pass reads are there.", "Copies that are there are not made again."},
      {"copy for a pass", kPassCopies | kAllEntering, kCommitting | kDeciding | kReducing,
       [](const JobCore& job) {
         const Passes& passes = job.writes_.passes();
         const bool may_be = passes.announced() && !passes.copied() && !passes.awaits_devices() &&
                             job.writes_.NoStepComesFirst() &&
                             !job.snapshots_.snapshot().behind();  // it reads the copies of before
         if (!may_be || !job.nodes_.over_nodes()) return may_be;
         // All nodes have closed the step that ranks have stored, or these have stored none.
         const bool may_say = passes.stepped(0) ? job.nodes_.MayDecide() : job.nodes_.MaySayPass();
         return may_say && !passes.saying() && job.unsharding_.pending_fills() == 0;
       },
       [](JobCore& job) { return job.pass_commits_.CommitBehindDevices(); }, nullptr, "signals of the ranks' devices",
       "All ranks enter a pass, nothing stores into the shards, and nobody reads the copies of before.",
       "What was deferred reads the copies."},
      {"let hand in", kTrainersWrite | kSomeWantToHandIn, kPassCopies | kCommitting | kDeciding,
       [](const JobCore& job) { return job.writes_.MayHandIn(); }, [](JobCore& job) { job.pass_commits_.LetHandIn(); },
       [](const JobCore& job, int rank) { return job.writes_.WaitingToHandIn(rank); }, "LeavePass of every rank",
       "Ranks write while nobody reads; what they wrote before is kept first.",
       "Nobody who unshards waits for a hand-in."},
      {"let store", kPassCopies | kSomeWantToHandIn, kSomeInside,
       [](const JobCore& job) { return !job.writes_.hand_ins().awaits_devices(); },
       [](JobCore& job) { return job.pass_commits_.LetStore(); },
       [](const JobCore& job, int rank) { return job.writes_.WaitingToStore(rank); }, "LeaveFullParams of every rank",
       "Full parameters are the shards themselves: who has left them may store when no other rank reads them any more.",
       "It changes nothing that the row below asks for."},
      {"commit values", kAllCommitted, kCommitting,
       [](const JobCore& job) {
         return !job.values_.commit().said() && !job.snapshots_.snapshot().behind();  // as where a pass is copied
       },
       [](JobCore& job) { job.nodes_.over_nodes() ? job.nodes_.SayValues() : job.values_.Commit(); },
       [](const JobCore& job, int rank) {
         return job.values_.commit().asked(rank)
                    ? FirstOther(job.world_size(), rank, "CommitParameters",
                                 [&job](int other) { return !job.values_.commit().asked(other); })
                    : Wait();
       },
       "CommitParameters of every rank", "Initial values, or written full parameters, become a version together.",
       "What was deferred reads the new version."},
      {"unshard what was deferred", kPooled, kCommitting, [](const JobCore& job) { return job.unsharding_.MayRetry(); },
       [](JobCore& job) { return job.unsharding_.Retry(); }, nullptr,
       "a slot of the pool, or the version that is being made",
       "A slot of the pool has become free, or a new version is there, for ranks that have asked before.", ""},
  };
  return kTable;
}

AskedCalls JobCore::asked_calls() const {
  return {&committed_, &commits_.steps(), &writes_.passes(), &summons_.full_params(), world_size()};
}

uint32_t JobCore::SeeFacts() const {
  const auto when = [](bool holds, Fact fact) { return holds ? static_cast<uint32_t>(fact) : 0u; };
  uint32_t facts = when(unsharding_.pooled(), kPooled) | when(nodes_.over_nodes(), kOverNodes) |
                   when(writes_.trainers_write(), kTrainersWrite) | when(writes_.pass_copies(), kPassCopies) |
                   when(commits_.decision().committing(), kCommitting) | when(commits_.decision().applied(), kApplied) |
                   when(commits_.decision().deciding(), kDeciding) |
                   when(gradients_.reductions().under_way(), kReducing) |
                   when(writes_.hand_ins().any_since_version(), kSomeHandIn) | when(end_.pending(), kEnding) |
                   when(sessions_.attached() == 0, kNobodyAttached) | when(extensions_.all_asked(), kAllExtend) |
                   when(gradients_.reductions().OwesWord(), kOwesWord);
  uint32_t all = kAllStepped | kAllEntering | kAllFullParams | kAllCommitted;
  for (int at = 0; at < world_size(); ++at) {
    const bool enters = writes_.passes().entering(at);
    all &= when(commits_.steps().stepped(at), kAllStepped) | when(enters, kAllEntering) |
           when(summons_.IsReady(at) && !commits_.steps().stepped(at), kAllFullParams) |
           when(values_.commit().asked(at), kAllCommitted);
    facts |= when(summons_.full_params().inside(at), kSomeInside) |
             when(writes_.hand_ins().wants(at), kSomeWantToHandIn) |
             when(gradients_.pairing().sleeps(at), kSomeBlocked) |
             when(enters && !writes_.passes().stepped(at), kSomeLate) | when(leavers_.leaving(at), kSomeLeft);
  }
  return facts | all | when(!CheckLikeCalls(asked_calls()).ok(), kUnlikeCalls);
}

void JobCore::Advance() {
  if (advancing_) {
    return;  // whoever does so looks again
  }
  std::shared_ptr<JobCore> keep;  // an action may drop whoever holds the job
  advancing_ = true;
  for (bool moved = true; moved && !end_.closed();) {
    moved = false;
    const uint32_t facts = SeeFacts();
    for (const Transition& row : Transitions()) {
      if ((row.needs & ~facts) != 0 || (row.unless & facts) != 0 || !row.may(*this)) {
        continue;
      }
      if (keep == nullptr) keep = shared_from_this();
      const uint64_t epoch = committed_.epoch();
      absl::Status status = row.act(*this);
      if (!status.ok()) {
        Abort(std::move(status), {});
      }
      moved = status.ok() ||
              epoch != committed_.epoch();  // else the end of the epoch waits for a commit, and so does the row
      break;
    }
  }
  advancing_ = false;
}

Wait JobCore::WaitingFor(int rank) const {
  for (const Transition& row : Transitions()) {
    if (row.waits_for == nullptr) {
      continue;
    }
    if (Wait wait = row.waits_for(*this, rank); wait.rank >= 0) {
      return wait;
    }
  }
  return {};
}

}  // namespace shardd
