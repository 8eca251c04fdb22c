#include "server/job/nodes/job_nodes.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/collective/nodes/node_collective.h"
#include "server/collective/nodes/node_gather.h"
#include "server/job/full_params/full_params.h"
#include "server/job/job_events.h"
#include "server/job/nodes/model_digests.h"
#include "server/job/nodes/state_transfers.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/job/unshard/node_gathers.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/snapshot_keeper.h"
#include "server/job/writes/value_writes.h"
#include "server/loop/core_loop.h"
#include "server/multinode/node_member.h"
#include "server/multinode/reduced_steps.h"
#include "server/observe/duration_histogram.h"
#include "server/peer/peer_links.h"

namespace shardd {

NodeParts::~NodeParts() {
  if (events != nullptr && links != nullptr) events->ForgetExchange();  // it came to no job
}

JobNodes::~JobNodes() = default;

JobNodes::JobNodes(NodeParts* parts, const Facts& facts, const Services& services, Results results)
    : see_(facts),
      use_(services),
      tell_(std::move(results)),
      collective_(parts == nullptr ? nullptr : parts->collective),
      events_(parts == nullptr ? nullptr : std::move(parts->events)),
      links_(parts == nullptr ? nullptr : std::move(parts->links)),
      others_(see_.plan.get(), links_.get()) {
  if (parts == nullptr) {
    return;
  }
  const NodeFacts* const own_facts = this;
  member_ = std::make_unique<NodeMember>(see_.plan, parts->node, use_.work->loop(), links_.get(), events_, own_facts);
  const ShardPlan* const plan = see_.plan.get();
  NodeMember* const member = member_.get();
  left_ = std::move(parts->left);
  digests_ = std::make_unique<ModelDigests>(
      ModelDigests::Facts{plan, see_.memory, use_.committed, &use_.snapshots->snapshot()},
      ModelDigests::Services{member, parts->worker, use_.work, use_.job,
                             [this] {
                               // Nobody could send the next daemon the part that it lacks of what was agreed on.
                               const uint64_t version = use_.committed->version();
                               if (see_.plan->cut_over_nodes && version > 0) {
                                 use_.committed->PromiseValues(member_->generation());
                               }
                               use_.events->Add(-1, "parameters",
                                                absl::StrCat("version ", version + 1, " is said to node 0"));
                             },
                             [this](std::function<void()> then) { TakeNext(std::move(then)); }});
  sums_ = std::make_unique<SumsOverNodes>(
      SumsOverNodes::Facts{plan, use_.committed, see_.decision, see_.steps, use_.pairing},
      SumsOverNodes::Services{member, use_.job}, tell_.add);
  steps_ =
      std::make_unique<StepsOverNodes>(StepsOverNodes::Facts{plan, see_.steps, see_.decision, digests_.get()},
                                       StepsOverNodes::Services{use_.committed, member, use_.presence}, tell_.steps);
  states_ = std::make_unique<StateTransfers>(
      StateTransfers::Facts{plan, see_.memory, see_.decision, see_.steps, see_.full_params, &use_.values->undo(),
                            &use_.snapshots->snapshot()},
      StateTransfers::Services{member, links_.get(), events_.get(), parts->worker, use_.committed, use_.work,
                               see_.devices, use_.events, use_.job},
      StateTransfers::Results{
          [this, values = use_.values] {
            SetReadable(0);
            events_->SetHasParameters();  // others have agreed on what the job trains
            values->BeginRestore();
          },
          [this, values = use_.values, snapshots = use_.snapshots] {
            if (std::exchange(writing_, false)) use_.committed->SetWriting(false);
            SetReadable(use_.committed->version());
            events_->SetHasParameters();
            values->Restored();
            if (snapshots->snapshot().two()) snapshots->Restored();
          },
          [values = use_.values](absl::AnyInvocable<void()> then) { values->Behind(std::move(then)); }});
  if (parts->gather != nullptr) {
    gathers_ = std::make_unique<NodeGathers>(
        std::move(parts->gather), [member] { return member->reached().Unreached(); },
        [loop = use_.work->loop()](absl::AnyInvocable<void()> closure) { loop->Post(std::move(closure)); });
  }
}

void JobNodes::Start() {
  if (over_nodes()) {
    if (left_.has_value()) {
      writing_ = left_->promised_values || left_->promised_parts;
      member_->TakeUp(*std::move(left_));
      if (gathers_ != nullptr) use_.committed->SetWriting(writing_);  // else all is taken back
      if (!writing_) SetReadable(use_.committed->version());
    }
    if (use_.committed->version() > 0) events_->SetHasParameters();
    member_->Start({sums_.get(), steps_.get(), states_.get(), this});
    links_->Start();
  }
}

void JobNodes::ForgetExchange() {
  if (over_nodes()) {
    events_->ForgetExchange();
  }
}

bool JobNodes::finished() const {
  return see_.leavers->all_finished() &&
         (!over_nodes() || (see_.plan->cut_over_nodes ? member_->OthersFinished() : member_->AllServed()));
}

void JobNodes::Describe(v1::Job* out) const {
  if (gathers_ != nullptr) {
    out->set_collective(absl::StrCat(out->collective(), "; ", gathers_->Describe()));
  }
  if (over_nodes()) {
    member_->Describe(out);
  }
}

void JobNodes::SayValues() {
  use_.values->BeginSaying();
  digests_->SayValues(use_.values->StaleParts(), use_.values->written_parts(),
                      [values = use_.values] { values->EndReading(); });
}

void JobNodes::TakeNext(std::function<void()> then) {
  if (!use_.snapshots->snapshot().two()) {
    then();
    return;
  }
  use_.snapshots->TakeNext(DeviceOps(static_cast<size_t>(see_.plan->world_size)), std::move(then));
}

bool JobNodes::MaySayPass() const { return !digests_->under_way(); }

void JobNodes::SayPass(std::vector<std::string> trainer_states) {
  if (see_.plan->cut_over_nodes) use_.committed->PromiseValues(member_->generation(), trainer_states);
  v1::PeerMessage::Values values;
  values.set_version(use_.committed->version() + 1);
  values.set_of_pass(true);
  for (const int64_t count : use_.committed->step_counts()) values.add_digests(static_cast<uint64_t>(count) + 1);
  // Of rows, values are compared where steps are.
  while (values.digests_size() < DigestsOfNode(*see_.plan)) values.add_digests(0);
  member_->Values(std::move(values));
}

void JobNodes::SetReadable(uint64_t version) {
  if (gathers_ != nullptr) {
    gathers_->SetReadable(version);
  }
}

void JobNodes::SayDecided() {
  steps_->SayDecided();
  SetReadable(0);
}

void JobNodes::StepCommitted() {
  if (!over_nodes()) return;
  sums_->EndStep();
  digests_->StepCommitted();
}

absl::Status JobNodes::CheckMayBegin(const std::string& what) {
  if (gathers_ != nullptr && see_.leavers->all_finished()) {  // they know, and count on no word of this node any more
    return absl::AbortedError(
        absl::StrCat(what,
                     "all ranks of this node have finished, and its daemon serves the other nodes until theirs "
                     "have, too; attach again, or use another name"));
  }
  const std::string lacking = over_nodes() ? member_->Lacking() : "";
  return lacking.empty() ? absl::OkStatus() : absl::AbortedError(absl::StrCat(what, lacking, "; attach again"));
}

void JobNodes::EndEpoch() {
  asks_to_write_ = says_entering_ = false;
  asked_to_write_ = 0;
  if (!over_nodes()) return;
  sums_->EndStep();
  steps_->EndEpoch();
}

void JobNodes::AttemptEnded(const absl::Status& cause) {
  if (gathers_ != nullptr) {
    gathers_->EndEpoch();
  }
  if (over_nodes()) {
    member_->AttemptEnded(cause);
  }
}

void JobNodes::SayFinished() {
  finished_said_ = true;
  use_.committed->Finish();
  member_->Closing("its ranks have finished", /*finished=*/true);
}

void JobNodes::CheckSilence(absl::Time now) {
  if (!over_nodes()) {
    return;
  }
  const absl::Duration limit = absl::Milliseconds(see_.plan->config.silence_timeout_ms());
  const uint64_t epoch = use_.committed->epoch();
  states_->CheckPieces();
  if (!see_.decision->committing() || see_.decision->applied()) {
    member_->CheckSilence(now, limit);
  }
  if (gathers_ == nullptr || epoch != use_.committed->epoch()) {
    return;
  }
  const bool needs_others = use_.committed->version() > 0 || promised() || fetching();
  others_needed_since_ = needs_others ? std::min(others_needed_since_, now) : absl::InfiniteFuture();
  if (const std::string gone =
          member_->reached().UnreachedFor(now, others_needed_since_, absl::Milliseconds(see_.plan->config.grace_ms()));
      !gone.empty()) {
    use_.job->Close(absl::StrCat(
        gone,
        HasRows(*see_.plan) ? ", where a new daemon would have been sent its part by another row (within graceMs)"
                            : ", and no other node sends what its ranks held",
        "; open the job anew on all nodes, from a checkpoint"));
    return;
  }
  if (see_.decision->committing() || promised()) {
    return;
  }
  if (absl::Status late = gathers_->CheckDeadlines(now, limit); !late.ok()) {
    use_.job->Fail(std::move(late));
  }
}

void JobNodes::Close(const std::string& why, const Closing& closing) {
  if (!over_nodes()) {
    return;
  }
  if (gathers_ != nullptr) {
    gathers_->EndEpoch();
  }
  const bool cut = see_.plan->cut_over_nodes;
  if (!closing.goes_on && (see_.leavers->all_finished() || closing.everywhere || cut)) {
    // Of what is cut, a part is no job.
    member_->Closing(why, cut ? finished() : see_.leavers->all_finished());
  }
  member_->Stop();
  states_->Stop();
  collective_->Begin(std::numeric_limits<uint64_t>::max());  // nothing of it needs the links any more
  if (gathers_ != nullptr) {
    gathers_->EndJob();
  }
}

void JobNodes::NodeGeneration(uint64_t generation) {
  collective_->Begin(generation);
  if (gathers_ != nullptr) {
    gathers_->BeginGeneration(generation);
  }
}

void JobNodes::NodeIsUp() {
  finished_said_ = false;  // a link forgets what was said over the one before
  if (gathers_ != nullptr) {
    gathers_->Retry();
  }
}

void JobNodes::VersionCommitted() {
  asks_to_write_ = says_entering_ = false;
  asked_to_write_ = 0;
  if (std::exchange(writing_, false)) use_.committed->SetWriting(false);
  SetReadable(use_.committed->version());
  if (over_nodes()) events_->SetHasParameters();
}

int64_t JobNodes::NodeStep() const { return use_.committed->step() + (see_.decision->decided() ? 1 : 0); }

// A step or values: whichever is being made is one more version.
uint64_t JobNodes::NodeVersion() const {
  const bool makes_one = see_.decision->committing() && !see_.decision->has_uncommitted();
  return use_.committed->version() + (makes_one ? 1 : 0);
}

uint64_t JobNodes::NodeVersionGeneration() const {
  return NodeVersion() > use_.committed->version() ? use_.committed->next_generation() : use_.committed->generation();
}

// Nothing that comes after the last word is for this job: who has taken its place on another node ends its links.
void JobNodes::NodesExtend(bool made) {
  if (tell_.extend(made) && made) member_->Stop();
}

// Not while digests are taken of the version that is written over: if what is written is taken back, they would stay.
bool JobNodes::MayWriteBack() const {
  if (gathers_ != nullptr) return asks_to_write_ && member_->may_write_times() >= asked_to_write_;
  return !over_nodes() || (member_->OthersHaveState() && !digests_->under_way());
}

bool JobNodes::MayAskToWrite() const {
  return gathers_ != nullptr && !asks_to_write_ && !writing_ && !digests_->under_way() &&
         member_->reached().Unreached().empty();
}

void JobNodes::AskToWrite() {
  asks_to_write_ = true;
  const FullParamsRequest& agreed = *see_.full_params->agreed();
  v1::PeerMessage::AsksToWrite asks;
  asks.set_group(agreed.group);
  asks.set_recurse(agreed.recurse);
  asks.set_rank0_only(agreed.rank0_only);
  asks.set_of_edits(agreed.of_edits);
  asks.set_times(++asked_to_write_);
  member_->AsksToWrite(std::move(asks));
}

bool JobNodes::MaySayEntering() const {
  return gathers_ != nullptr && see_.plan->writes_edits_back() && !says_entering_ &&
         member_->reached().Unreached().empty();
}

void JobNodes::SayEntering(bool edited) {
  says_entering_ = true;
  v1::PeerMessage::AsksToWrite asks;
  asks.set_of_pass(true);
  asks.set_edited(edited);
  asks.set_times(++asked_to_write_);
  member_->AsksToWrite(std::move(asks));
}

bool JobNodes::MayEnterPass() const {
  return gathers_ == nullptr || !see_.plan->writes_edits_back() ||
         (says_entering_ && member_->may_write_times() >= asked_to_write_);
}

// Replicas need no word of the others: whoever edits what they do not has other values, which all hear of by name.
bool JobNodes::EnterPass(bool edited) { return std::exchange(says_entering_, false) ? member_->pass_edited() : edited; }

void JobNodes::BeginWriting() {
  if (gathers_ == nullptr || std::exchange(writing_, true)) return;
  SetReadable(0);
  use_.committed->SetWriting(true);
}

void JobNodes::EndWriting() {
  asks_to_write_ = false;
  if (!std::exchange(writing_, false)) return;
  use_.committed->SetWriting(false);
  SetReadable(use_.committed->version());
}

bool JobNodes::NodeInitialized() const { return use_.committed->version() > 0 || see_.decision->committing(); }

int64_t JobNodes::held_step() const {
  return over_nodes() ? member_->held_step() : std::numeric_limits<int64_t>::max();
}

bool JobNodes::fetching() const { return over_nodes() && member_->fetching(); }

bool JobNodes::MayBeSentState() const { return over_nodes() && member_->MayBeSentState(); }

std::string JobNodes::WaitText() const {
  const std::string text = over_nodes() ? member_->WaitText() : "";
  const bool asked = says_entering_ || asks_to_write_;
  if (!text.empty() || !asked || node() == 0 || member_->may_write_times() >= asked_to_write_) return text;
  // It alone knows who has not.
  return absl::StrCat("node 0 (", see_.plan->config.nodes().addresses(0), "), which says when all nodes have ",
                      says_entering_ ? "entered the pass" : "asked to write values");
}

uint64_t JobNodes::generation() const { return member_->generation(); }

int JobNodes::node() const { return over_nodes() ? member_->node() : 0; }

bool JobNodes::promised() const { return over_nodes() && member_->promised(); }

int JobNodes::closed() const { return over_nodes() ? sums_->closed() : kAllBackwards; }

bool JobNodes::MayDecide() const { return closed() == kAllBackwards && (!over_nodes() || !digests_->under_way()); }

void JobNodes::WantsToEnd(const absl::Status& cause) { member_->WantsToEnd(cause); }

}  // namespace shardd
