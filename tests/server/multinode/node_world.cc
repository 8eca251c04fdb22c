#include "tests/server/multinode/node_world.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/loop/core_loop.h"
#include "server/multinode/backwards.h"
#include "server/multinode/reduced_steps.h"

namespace shardd::testing {
namespace {

class MemoryLinks final : public PeerLinks {
 public:
  MemoryLinks(NodeWorld* world, int node, int nodes) : world_(world), node_(node), nodes_(nodes) {}
  int node() const override { return node_; }
  int nodes() const override { return nodes_; }
  void Send(int node, v1::PeerMessage message) override { world_->Send(node_, node, std::move(message)); }
  void SendData(int, const v1::PeerData&, absl::string_view, std::function<void(absl::Status)>) override {}

 private:
  NodeWorld* const world_;
  const int node_;
  const int nodes_;
};

}  // namespace

// The job -----------------------------------------------------------------------------------------------------------

void RandomJob::BeginAttempt() {
  begun_ = true;
  said_values_ = said_reduced_ = said_all_ = loads_ = false;
  extends_ = Extends::kNo;
  backward_ = closed_ = 0;
  to_give_.clear();
  waits_.clear();
  added_.clear();
  // The same on all nodes, but for order and what is missing.
  std::mt19937_64 same(world_->seed() * 1000003 + static_cast<uint64_t>(step));
  backwards_ = 1 + static_cast<int>(same() % 2);
  // A part takes as many events as the rest of a step: where there are some, less else happens.
  parts_wanted_ = world_->seed() % 4 == 1 ? static_cast<int>(same() % 3) : 0;
  parts_ = 0;
  says_part_ = false;
}

bool RandomJob::MustLoad() const {
  std::mt19937_64 same(world_->seed() * 7919 + static_cast<uint64_t>(step));
  return same() % 3 == 0 && !loaded_;
}

// One thing of a load. Some are left once without a commit, and asked for again.
void RandomJob::LoadNext() {
  if (said_values_) return;
  if (world_->plan().cut_over_nodes) {
    if (!std::exchange(asks_to_write_, true)) {
      v1::PeerMessage::AsksToWrite asks;
      asks.set_times(++asked_to_write_);
      asks.set_group(-1);
      member->AsksToWrite(std::move(asks));
      return;
    }
    if (member->may_write_times() < asked_to_write_) return;
    if (asked_to_write_ == 1 && (world_->seed() + static_cast<uint64_t>(step)) % 4 == 0) {
      asks_to_write_ = false;
      return;
    }
  }
  said_values_ = loads_ = true;
  loads_in_ = member->generation();
  v1::PeerMessage::Values values;
  for (int at = 0; at < DigestsOfNode(world_->plan()); ++at) values.add_digests(static_cast<uint64_t>(7 + at));
  values.set_version(NodeVersion() + 1);
  member->Values(std::move(values));
}

bool RandomJob::MustExtend() const { return initialized && trains < world_->TrainsAt(step); }

void RandomJob::ExtendNext() {
  if (extends_ == Extends::kAsked || extends_ == Extends::kMade) return;
  if (extends_ == Extends::kMakes) {
    if (world_->Random(4) != 0) return;
    if (!world_->calm() && world_->Random(8) == 0) {
      Abort(absl::ResourceExhaustedError("what trains more has no memory"));
      return;
    }
  }
  v1::PeerMessage::Extends extends;
  extends.set_version(NodeVersion());
  extends.set_plan_digest(absl::StrCat("trains ", trains + 1));
  extends.set_what("more");
  extends.set_made(extends_ == Extends::kMakes);
  extends_ = extends_ == Extends::kMakes ? Extends::kMade : Extends::kAsked;
  member->Extends(std::move(extends));
}

void RandomJob::NodesExtend(bool made) {
  if (replaced || extends_ != (made ? Extends::kMade : Extends::kAsked)) {
    world_->Fail(absl::StrCat("node ", node_, " is told to extend", made ? ", by what is made," : "", " out of turn"));
  }
  if (!made) {
    extends_ = Extends::kMakes;
    return;
  }
  replaced = true;
  member->Stop();
}

std::string RandomJob::StepShown() const {
  const auto is_step = [](const std::string& commit) { return absl::StartsWith(commit, "step "); };
  return *std::find_if(commits.rbegin(), commits.rend(), is_step);
}

void RandomJob::GiveNext() {
  std::mt19937_64 same(world_->seed() * 1000003 + static_cast<uint64_t>(step * 8 + backward_));
  for (int group = 0; group < static_cast<int>(world_->plan().groups.size()); ++group) {
    if (same() % 5 == 0) continue;
    const bool may_miss = world_->plan().config.allow_missing_contribution();
    if (may_miss && world_->Random(4) == 0) continue;
    // Twice in one backward, where nodes leave out others, is for all to wait for one another.
    to_give_.push_back({group, !may_miss && world_->Random(4) == 0 ? 2 : 1});
  }
  std::shuffle(to_give_.begin(), to_give_.end(), std::mt19937_64(static_cast<uint64_t>(world_->Random(1 << 30))));
}

void RandomJob::Act() {
  if (stopped || replaced) {
    return;
  }
  if (committing_) {
    if (applied_) return;                                            // until all hold it
    if (world_->seed() % 3 == 0 && world_->Random(16) != 0) return;  // so that links come and go meanwhile
    applied_ = true;
    if (initialized && !loads_) SendWaited();
    if (pending_abort_.has_value() && !MayShow()) {
      Abort(*std::exchange(pending_abort_, std::nullopt));
      return;
    }
    MaybeShow();
    return;
  }
  if (state_sent_.has_value()) {
    if (!pieces_here_ && member->fetching()) return;  // else it was given up
    // Devices cast for some time, in which others are lost.
    if (!world_->of_rows() || world_->calm() || world_->Random(12) == 0) FinishRestore();
    return;
  }
  if (member->promised() || said_reduced_) {
    return;
  }
  if (world_->target() > 0 && step >= world_->target()) {
    if (ranks_finished_ || member->Lacking().empty()) Finish();
    return;
  }
  if (!begun_) {
    if (!member->Lacking().empty() || becomes > 0) return;  // nobody attaches
    if (step > 0) world_->Shown(node_, step, StepShown());
    BeginAttempt();
    GiveNext();
    return;
  }
  if (!initialized) {
    if (!std::exchange(said_values_, true)) {
      v1::PeerMessage::Values values;
      for (int at = 0; at < DigestsOfNode(world_->plan()); ++at) values.add_digests(static_cast<uint64_t>(7 + at));
      member->Values(std::move(values));
    }
    return;
  }
  if (MustExtend()) {
    ExtendNext();
    return;
  }
  if (MustLoad()) {
    LoadNext();
    return;
  }
  if (!to_give_.empty()) {
    Give& give = to_give_.back();
    const auto same_group = [&](const auto& wait) { return wait.first.second == give.group; };
    if (std::any_of(waits_.begin(), waits_.end(), same_group)) {
      std::rotate(to_give_.begin(), to_give_.end() - 1, to_give_.end());  // its slot is taken
      return;
    }
    const GroupPlan& group = world_->plan().groups[give.group];
    v1::PeerMessage::Ready ready;
    ready.mutable_key()->set_step(step + 1);
    ready.mutable_key()->set_backward(backward_);
    ready.mutable_key()->set_group(give.group);
    const int occurrence = give.times < 0 ? 1 : 0;
    ready.mutable_key()->set_occurrence(occurrence);
    ready.mutable_gives()->set_present(std::string(1, static_cast<char>((1 << group.params.size()) - 1)));
    ready.mutable_gives()->set_fresh(std::string(1, '\0'));
    waits_[{backward_, give.group}] = occurrence;
    if (give.times == 2) {
      give.times = -1;
    } else {
      to_give_.pop_back();
    }
    member->Ready(std::move(ready));
    return;
  }
  if (backward_ < backwards_) {
    ++backward_;
    v1::PeerMessage::Closed closed;
    closed.set_step(step + 1);
    closed.set_backwards(backward_);
    if (backward_ < backwards_) GiveNext();
    member->Closed(std::move(closed));
    return;
  }
  if (!std::exchange(said_all_, true)) {
    v1::PeerMessage::Closed closed;
    closed.set_step(step + 1);
    closed.set_backwards(kAllBackwards);
    closed.mutable_ranks_step()->add_groups()->set_lr(0.5);
    closed.mutable_ranks_step()->set_part(parts_ < parts_wanted_);
    member->Closed(std::move(closed));
    return;
  }
  if (closed_ == kAllBackwards) {
    if (!waits_.empty()) {
      world_->Fail(absl::StrCat("node ", node_, ": all backwards are closed and a sum that it gave was never added"));
      return;
    }
    said_reduced_ = true;
    says_part_ = parts_ < parts_wanted_;
    promised_in_ = member->generation();
    reduced_in_life_ = world_->life();
    v1::PeerMessage::Reduced reduced;
    reduced.set_step(step + 1);
    reduced.set_present(std::string(1, '\x0f'));
    reduced.set_part(says_part_);
    if (!says_part_ && !world_->calm() && world_->Random(12) == 0) {
      leaves_ = true;
      reduced.set_ends_attempt(absl::StrCat("the daemon of node ", node_, " is replaced"));
    }
    member->Reduced(std::move(reduced));
  }
}

void RandomJob::Abort(const absl::Status& cause) {
  if (stopped || replaced) {
    return;
  }
  if ((committing_ && !applied_) || member->promised()) {
    if (!pending_abort_.has_value()) pending_abort_ = cause;
    if (!committing_) member->WantsToEnd(*pending_abort_);
    return;
  }
  ++aborts;
  begun_ = said_reduced_ = says_part_ = asks_to_write_ = false;
  extends_ = Extends::kNo;
  if (!applied_) loads_ = false;
  asked_to_write_ = 0;
  member->AttemptEnded(cause);
  if (applied_) EndCommit();
  loaded_ = false;
  SendWaited();
  if (std::exchange(leaves_, false)) world_->Leave(node_);
}

std::string RandomJob::CommitText() const {
  v1::PeerMessage::Decided decided = decided_;
  decided.clear_ends_attempt();  // of an attempt
  if (loads_) return absl::StrCat("load before step ", step + 1, ", of generation ", makes_in_);
  return initialized ? absl::StrCat("step ", step + 1, ": ", decided.ShortDebugString(), " of ", added_) : "values";
}

void RandomJob::EndCommit() {
  commits.push_back(CommitText());
  loaded_ = loads_;
  step += initialized && !loads_ ? 1 : 0;
  initialized = true;
  made_in_ = std::exchange(makes_in_, 0);
  committing_ = applied_ = begun_ = loads_ = asks_to_write_ = false;
  asked_to_write_ = 0;
}

void RandomJob::MaybeShow() {
  if (!committing_ || !applied_ || !MayShow()) {
    return;
  }
  const bool made_step = initialized && !loads_;
  EndCommit();
  if (made_step) world_->Shown(node_, step, StepShown());
  SendWaited();
  if (pending_abort_.has_value()) {
    Abort(*std::exchange(pending_abort_, std::nullopt));
  } else if (made_step && !decided_.ends_attempt().empty()) {
    world_->EndedBehindStep();
    Abort(absl::AbortedError(decided_.ends_attempt()));
  }
}

void RandomJob::NodeIsUp() {
  if (ranks_finished_ && world_->plan().cut_over_nodes) member->Closing("its ranks have finished", true);
}

// What is cut over nodes is served until the others' ranks have finished, too.
void RandomJob::Finish() {
  const bool cut = world_->plan().cut_over_nodes;
  if (!std::exchange(ranks_finished_, true) && cut) member->Closing("its ranks have finished", true);
  if (cut ? !member->OthersFinished() : !member->AllServed()) {
    return;
  }
  stopped = true;
  member->Closing("all ranks have finished", true);
  member->Stop();
}

// A step that it had decided, or heard to be decided, is journaled and completes.
void RandomJob::TakeUp(const RandomJob& before) {
  NodeLeft left;
  trains = before.trains;
  older = before.older;
  if (before.initialized) {
    commits = before.commits;
    step = before.step;
    initialized = true;
    decided_ = left.decided = before.decided_;
    added_ = before.added_;
    made_in_ = before.made_in_;
    makes_in_ = before.makes_in_;
    const bool loads = before.loads_ && (before.committing_ || before.said_values_);
    if (loads && world_->plan().cut_over_nodes) {
      left.promised_in = loads_in_ = before.loads_in_;
      left.promised_values = begun_ = said_values_ = loads_ = true;
      pending_abort_ = absl::AbortedError("the daemon before has ended");
    } else if (before.committing_ && !before.loads_) {
      EndCommit();
    } else if (before.said_reduced_ && !before.says_part_ && node_ != 0) {
      left.promised_in = promised_in_ = before.promised_in_;
      begun_ = said_reduced_ = said_all_ = true;
      reduced_in_life_ = before.reduced_in_life_;
      added_in_ = before.added_in_;
      pending_abort_ = absl::AbortedError("the daemon before has ended");
    }
    world_->TookUp(left.promised_in > 0, left.promised_values);
    member->TakeUp(std::move(left));
  }
}

void RandomJob::TakePlaceOf(const RandomJob& before, int trains_now) {
  if (before.InTheMiddle()) {
    world_->Fail(absl::StrCat("node ", node_, " trains more in the middle of something: ", before.Text()));
  }
  trains = trains_now;
  commits = before.commits;
  step = before.step;
  initialized = before.initialized;
  made_in_ = before.made_in_;
  if (initialized) member->TakeUp({});
}

std::string RandomJob::Text() const {
  std::string text = absl::StrCat(
      "step ", step, ", trains ", trains, replaced ? ", replaced" : "", becomes > 0 ? ", becomes more" : "",
      committing_ ? ", committing" : "", applied_ ? ", applied" : "", begun_ ? ", begun" : "",
      said_reduced_ ? ", reduced" : "", ", backward ", backward_, " of ", backwards_, ", closed ", closed_, ", gives");
  for (const Give& give : to_give_) absl::StrAppend(&text, " ", give.group, "x", give.times);
  text += ", waits for";
  for (const auto& [key, occurrence] : waits_) absl::StrAppend(&text, " ", key.first, ".", key.second, ".", occurrence);
  return text;
}

void RandomJob::NodeGo(const v1::PeerMessage::Go& go) {
  world_->Added(node_, member->generation(), go);
  const auto wait = waits_.find({go.key().backward(), go.key().group()});
  const bool own = wait != waits_.end() && wait->second == go.key().occurrence();
  const bool there = go.gives(node_).present() != std::string(1, '\0');
  if (stopped || committing_ || !initialized || go.key().step() != step + 1 || said_reduced_ || own != there) {
    world_->Fail(absl::StrCat("node ", node_, " at step ", step,
                              ": a sum that is not its own or not now: ", go.ShortDebugString()));
    return;
  }
  if (own) waits_.erase(wait);
  if (!added_.empty() && added_in_ != member->generation()) {
    world_->Fail(absl::StrCat("node ", node_, ": sums of two generations in one attempt"));
  }
  added_in_ = member->generation();
  absl::StrAppend(&added_, added_in_, "/", go.sequence(), " ", go.key().backward(), ".", go.key().group(), ".",
                  go.key().occurrence(), "; ");
}

void RandomJob::NodesClosed(int backwards) {
  if (backwards <= closed_ || (backwards == kAllBackwards && !said_all_) || committing_) {
    world_->Fail(absl::StrCat("node ", node_, ": ", backwards, " closed backwards, twice or too early"));
  }
  closed_ = backwards;
}

void RandomJob::NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) {
  if (node_ != 0 || !said_reduced_ || committing_) {
    world_->Fail(absl::StrCat("node ", node_, " is asked to decide what it has not reduced"));
    return;
  }
  if (!world_->calm() && world_->Random(20) == 0) {
    Abort(absl::InternalError("the journal could not be written"));
    return;
  }
  v1::PeerMessage::Decided decided;
  decided.set_step(step + 1);
  decided.set_grad_norm(world_->Random(1 << 20));
  for (const v1::PeerMessage::Reduced& of : reduced) {
    if (!of.ends_attempt().empty()) decided.set_ends_attempt(of.ends_attempt());
  }
  if (says_part_) {
    decided.set_part(true);
    member->DecidePart(decided);
    MakePart();
    return;
  }
  world_->Node0Decides(step + 1);
  decided.set_generation(member->generation());
  member->Decide(decided);
  committing_ = true;
  makes_in_ = member->generation();
  said_reduced_ = false;
  decided_ = decided;
}

void RandomJob::MakePart() {
  ++parts_;
  world_->MadePart();
  absl::StrAppend(&added_, "part ", parts_, "; ");
  said_all_ = said_reduced_ = says_part_ = false;
  closed_ = 0;
}

void RandomJob::NodeDecided(const v1::PeerMessage::Decided& decided) {
  if (committing_ || !said_reduced_ || decided.step() != step + 1 || decided.part() != says_part_) {
    world_->Fail(
        absl::StrCat("node ", node_, " at step ", step, ": is told of a decided step that it has not reduced"));
  }
  if (decided.part()) {
    MakePart();
    return;
  }
  committing_ = true;
  makes_in_ = member->generation();
  said_reduced_ = false;
  decided_ = decided;
  world_->Decided(reduced_in_life_);
  member->Holding(decided.step());
}

bool RandomJob::AwaitsWord() const {
  return (committing_ && (!applied_ || loads_)) || (world_->of_rows() && member->promised()) ||
         member->search()->has_come();
}

void RandomJob::SendWaited() {
  if (AwaitsWord()) return;
  for (const auto& [node, transfer] : std::exchange(wait_for_state_, {})) NodeSendState(node, transfer);
}

void RandomJob::NodeStopSending(int node) {
  wait_for_state_.erase(node);
  world_->StopPieces(node_, node);
}

void RandomJob::NodeSendState(int node, uint64_t transfer) {
  NodeStopSending(node);
  if (AwaitsWord()) {
    wait_for_state_[node] = transfer;
    return;
  }
  if (!initialized && world_->of_rows()) {
    v1::PeerMessage nothing;
    nothing.mutable_state()->set_transfer(transfer);
    world_->Send(node_, node, std::move(nothing));
    world_->HadNone();
    return;
  }
  if (!initialized) {
    world_->Fail(absl::StrCat("node ", node_, " is asked for a state that it has not"));
  }
  std::vector<std::string> sent = commits;
  if (applied_) sent.push_back(CommitText());
  v1::PeerMessage own;
  own.mutable_rank_state()->set_transfer(transfer);
  own.mutable_rank_state()->set_rank(world_->PlaceOf(node_));
  own.mutable_rank_state()->set_trainer_state(absl::StrJoin(sent, "\n"));
  world_->Send(node_, node, std::move(own));
  v1::PeerMessage message;
  message.mutable_state()->set_transfer(transfer);
  message.mutable_state()->set_step(step + (applied_ ? 1 : 0));
  message.mutable_state()->set_version(sent.size());
  message.mutable_state()->set_version_generation(applied_ ? makes_in_ : made_in_);
  world_->Send(node_, node, std::move(message));
  world_->SendPieces(node_, node, transfer);
}

void RandomJob::NodeBeginFetch(int from, uint64_t transfer) {
  if (begun_ || committing_ || !member->fetching()) {
    world_->Fail(absl::StrCat("node ", node_, " fetches in the middle of something"));
  }
  if (initialized && !older) commits_before_ = commits;  // of what was made in another attempt nothing follows
  if (world_->of_rows() && transfer_ > 0 && fetches_from_ != from) world_->AskedAgain();
  fetches_from_ = from;
  world_->Lose(node_);
  commits.clear();
  initialized = older = false;
  step = 0;
  made_in_ = 0;
  decided_.Clear();
  ForgetFetch();
  transfer_ = transfer;
  v1::PeerMessage message;
  message.mutable_fetch()->set_transfer(transfer);
  world_->Send(node_, from, std::move(message));
}

void RandomJob::NodeTakeRankState(const v1::PeerMessage::RankState& state) {
  if (state.transfer() != transfer_) return;
  commits_sent_ = absl::StrSplit(state.trainer_state(), '\n');
  if (state.rank() != world_->PlaceOf(node_)) {
    world_->Fail(absl::StrCat("node ", node_, " is sent the part of place ", state.rank()));
  }
}

void RandomJob::NodeTakeState(const v1::PeerMessage::State& state) {
  if (state.transfer() != transfer_) return;
  state_sent_ = state;
  MaybeCame();
}

void RandomJob::PiecesCame(int from, uint64_t transfer) {
  if (transfer != transfer_ || from != fetches_from_ || !member->fetching()) return;
  pieces_here_ = true;
  MaybeCame();
}

void RandomJob::MaybeCame() {
  if (!state_sent_.has_value() || !pieces_here_ || !member->fetching()) return;
  member->search()->Came(state_sent_->step(), state_sent_->version(), state_sent_->version_generation());
  member->StateCame();
}

void RandomJob::ForgetFetch() {
  state_sent_.reset();
  pieces_here_ = false;
  transfer_ = 0;
}

// Some time behind it, as bytes of slabs come.
void RandomJob::FinishRestore() {
  const v1::PeerMessage::State state = *std::exchange(state_sent_, std::nullopt);
  ForgetFetch();
  if (!member->fetching()) {
    return;
  }
  const bool prefix = commits_before_.size() <= commits_sent_.size() &&
                      std::equal(commits_before_.begin(), commits_before_.end(), commits_sent_.begin());
  if (initialized || committing_ || begun_ || !prefix) {
    world_->Fail(absl::StrCat("node ", node_, " is sent a state that does not follow its own: ",
                              absl::StrJoin(commits_sent_, "\n"), "\nit had: ", absl::StrJoin(commits_before_, "\n")));
  }
  commits = commits_sent_;
  commits_before_.clear();
  step = state.step();
  made_in_ = member->search()->came().generation;
  initialized = true;
  world_->Restored(node_, fetches_from_, step);
  member->Restored();
  SendWaited();
}

void RandomJob::NodeValuesAgreed() {
  if (committing_ || initialized != loads_ || !said_values_) {
    world_->Fail(absl::StrCat("node ", node_, ": values agreed that it has not given"));
  }
  committing_ = true;
  makes_in_ = member->generation();
  if (loads_ && pending_abort_.has_value()) world_->CarriedLoadOver();
}

void RandomJob::NodeAbort(const absl::Status& cause) {
  if (pending_abort_.has_value() && !committing_) {
    Abort(*std::exchange(pending_abort_, std::nullopt));
    return;
  }
  Abort(cause);
}

void RandomJob::NodeGeneration(uint64_t generation) {
  if (generation < last_generation_) {
    world_->Fail(absl::StrCat("node ", node_, ": generation ", generation, " behind ", last_generation_));
  }
  last_generation_ = generation;
}

void RandomJob::NodeClose(const std::string& why) { world_->Fail(absl::StrCat("node ", node_, " is closed: ", why)); }

// The world ---------------------------------------------------------------------------------------------------------

NodeWorld::NodeWorld(int nodes, uint64_t seed, bool allow_missing, Options options)
    : seed_(seed),
      options_(options),
      rng_(seed),
      plan_(NodesPlan(nodes, allow_missing, options.cut, options.row)),
      nodes_(static_cast<size_t>(nodes)) {
  for (int node = 0; node < nodes; ++node) MakeNode(node);
}

void NodeWorld::MakeNode(int node) {
  Node& made = nodes_[static_cast<size_t>(node)];
  made.member.reset();
  made.daemon = ++daemons_made_;
  made.links = std::make_unique<MemoryLinks>(this, node, static_cast<int>(nodes_.size()));
  made.events = std::make_shared<NodeEvents>(&loop_, [](const v1::PeerHello&, bool) { return absl::OkStatus(); });
  made.job = std::make_unique<RandomJob>(this, node);
  made.member = std::make_unique<NodeMember>(plan_, node, &loop_, made.links.get(), made.events, made.job.get());
  made.job->member = made.member.get();
}

void NodeWorld::Start(int node) {
  RandomJob* job = nodes_[static_cast<size_t>(node)].job.get();
  nodes_[static_cast<size_t>(node)].member->Start({job, job, job, job});
}

// Where parameters are cut over nodes, nothing is anywhere else before all nodes have committed the initial ones.
bool NodeWorld::MayKill(int node) {
  const bool all_have =
      std::all_of(nodes_.begin(), nodes_.end(), [](const Node& each) { return each.job->initialized; });
  all_had_values_ = all_had_values_ || all_have;
  return !plan_->cut_over_nodes ||
         (!nodes_[static_cast<size_t>(node)].job->stopped && (options_.rows_lose ? all_had_values_ : all_have));
}

bool NodeWorld::OthersHave(int node) const {
  for (int other = 0; other < static_cast<int>(nodes_.size()); ++other) {
    const RandomJob& job = *nodes_[static_cast<size_t>(other)].job;
    if (other != node && PlaceOf(other) == PlaceOf(node) && job.has_all() && !job.stopped) return true;
  }
  return false;
}

// What it had not read goes with it, and what it had where nobody keeps that; of what it has sent the last may not
// come.
void NodeWorld::Kill(int node, bool leaves_nothing) {
  if (!MayKill(node)) return;
  Node& killed = nodes_[static_cast<size_t>(node)];
  const bool may_lose = options_.rows_lose ? OthersHave(node) : !options_.cut;
  if (killed.job->casts() && !may_lose) return;  // no custodian keeps what is not restored
  const int casting = Casting();
  const bool sent = casting >= 0 && casting != node &&
                    (nodes_[static_cast<size_t>(casting)].job->fetches_from() == node || node == 0);
  const bool all_lost = may_lose && (leaves_nothing || (options_.twice && sent));
  const bool leaves = options_.custodians && !all_lost && (!may_lose || Random(2) == 0);
  lost_twice_ += sent && !leaves ? 1 : 0;
  if (node == 0) ++life_;
  for (int other = 0; other < static_cast<int>(nodes_.size()); ++other) {
    if (other != node) Break(node, other, /*loses=*/true);
  }
  const bool may_return = MayReturn(node);
  killed.member->Stop();
  const bool may_keep = options_.twice && !leaves && killed.job->MayBeCutOff();
  std::unique_ptr<RandomJob> before = std::move(killed.job);
  const int daemon = killed.daemon;
  if (!leaves || !before->initialized) Lose(node);
  killed.comes.clear();
  killed.pieces.clear();
  killed.added.clear();
  MakeNode(node);
  if (leaves && before->initialized) killed.daemon = daemon;
  ForgetSums();
  if (leaves) killed.job->TakeUp(*before);
  if (!leaves && options_.twice && may_return && Random(2) == 0) {
    promised_came_ += killed.cut_off->has_promised() ? 1 : 0;
    promised_loads_came_ += killed.cut_off->has_promised_load() ? 1 : 0;
    made_came_ += killed.cut_off->has_unshown() ? 1 : 0;
    killed.job->TakeUp(*std::exchange(killed.cut_off, nullptr));
    killed.job->older = true;
    ++came_older_;
    node0_came_older_ += node == 0 ? 1 : 0;
  }
  if (may_keep) {
    before->member = nullptr;
    killed.cut_off = std::move(before);
  }
  Start(node);
}

void NodeWorld::ForgetSums() {
  std::erase_if(added_, [this](const auto& generation) {  // what nobody knows of may come again
    return std::none_of(nodes_.begin(), nodes_.end(),
                        [&](const Node& left) { return left.added.contains(generation.first); });
  });
}

int NodeWorld::TrainsAt(int64_t step) const {
  int trains = 0;
  for (int64_t at = 1; options_.extends && at <= step; ++at) {
    trains += std::mt19937_64(seed_ * 104729 + static_cast<uint64_t>(at))() % 3 == 0 ? 1 : 0;
  }
  return trains;
}

void NodeWorld::TakePlace(int node, int trains) {
  Node& taken = nodes_[static_cast<size_t>(node)];
  const int nodes = static_cast<int>(nodes_.size());
  for (int other = 0; other < nodes; ++other) {
    if (other != node) Break(node, other, /*loses=*/true);
  }
  taken.member->Stop();
  const std::unique_ptr<RandomJob> before = std::move(taken.job);
  const std::unique_ptr<NodeMember> member = std::move(taken.member);
  const int daemon = taken.daemon;
  taken.comes.clear();
  taken.pieces.clear();
  taken.added.clear();
  MakeNode(node);
  taken.daemon = daemon;
  ForgetSums();
  taken.job->TakePlaceOf(*before, trains);
  Start(node);
  ++extended_;
  for (int other = 0; calm() && other < nodes; ++other) {
    if (other != node) Make(node, other);
  }
}

bool NodeWorld::Meet(int a, int b) {
  const RandomJob& first = *nodes_[static_cast<size_t>(a)].job;
  const RandomJob& second = *nodes_[static_cast<size_t>(b)].job;
  if (first.replaced || second.replaced) return false;
  if (first.trains == second.trains) return true;
  RandomJob& narrow = *nodes_[static_cast<size_t>(first.trains < second.trains ? a : b)].job;
  if (narrow.becomes == 0) {
    narrow.becomes = std::max(first.trains, second.trains);
    narrow.Abort(absl::AbortedError("the other trains more by now"));
  }
  return false;
}

void NodeWorld::Shown(int node, int64_t step, const std::string& commit) {
  if (const auto found = shown_.find(step); found != shown_.end()) {
    if (found->second.text != commit) {
      Fail(absl::StrCat("node ", node, " shows {", commit, "}, and ranks have been shown {", found->second.text, "}"));
    }
    return;
  }
  Commit shown{commit, {}};
  for (const Node& there : nodes_) {
    if (decided_by_[step].contains(there.daemon)) shown.daemons.insert(there.daemon);
  }
  if (!shown.daemons.empty()) shown_[step] = std::move(shown);
}

void NodeWorld::Lose(int node) {
  if (options_.rows_lose) return;  // another node has what it had
  for (auto& [step, commit] : shown_) commit.daemons.erase(nodes_[static_cast<size_t>(node)].daemon);
  std::erase_if(shown_, [](const auto& step) { return step.second.daemons.empty(); });
}

void NodeWorld::Restored(int node, int from, int64_t step) {
  ++restored_;
  restored_by_others_ += from != 0 ? 1 : 0;
  for (auto& [shown, commit] : shown_) {
    if (shown <= step) commit.daemons.insert(nodes_[static_cast<size_t>(node)].daemon);
  }
  if (node == 0 && step > 0) ++recoveries_;
}

NodeWorld::~NodeWorld() {
  loop_.RunAndWait([this] {
    for (Node& node : nodes_) node.member->Stop();
  });
  loop_.Stop();
}

void NodeWorld::Fail(const std::string& what) {
  if (failure_.empty()) failure_ = what;
}

void NodeWorld::Send(int from, int to, v1::PeerMessage message) {
  if (Linked(from, to)) {
    nodes_[static_cast<size_t>(to)].comes[from].push_back({Event::Kind::kMessage, std::move(message)});
  }
}

// What was sent over it and has not come is lost from some place on, in each direction.
void NodeWorld::Break(int a, int b, bool loses) {
  if (!std::exchange(Linked(a, b), false)) {
    return;
  }
  for (const auto& [from, to] : {std::pair{a, b}, std::pair{b, a}}) {
    std::deque<Event>& comes = nodes_[static_cast<size_t>(to)].comes[from];
    for (int lost = loses ? Random(5) : 0; lost > 0 && !comes.empty() && comes.back().kind == Event::Kind::kMessage;
         --lost) {
      comes.pop_back();
    }
    comes.push_back({Event::Kind::kDown, {}});
    // The last of them may have been taken before, which the loop hears of at any time.
    std::deque<Pieces>& pieces = nodes_[static_cast<size_t>(to)].pieces;
    std::erase_if(pieces, [&, sender = from](const Pieces& of) {
      return of.from == sender && !of.taken && loses && Random(2) == 0;
    });
    for (Pieces& of : pieces) of.taken = of.taken || of.from == from;
  }
}

void NodeWorld::SendPieces(int from, int to, uint64_t transfer) {
  if (Linked(from, to)) nodes_[static_cast<size_t>(to)].pieces.push_back({from, transfer, false});
}

void NodeWorld::StopPieces(int from, int to) {
  std::erase_if(nodes_[static_cast<size_t>(to)].pieces,
                [&](const Pieces& of) { return of.from == from && !of.taken && Random(2) == 0; });
}

void NodeWorld::DeliverPieces(int to) {
  Node& node = nodes_[static_cast<size_t>(to)];
  const Pieces pieces = node.pieces.front();
  node.pieces.pop_front();
  if (node.job->stopped || node.job->replaced) return;
  const bool had_come = node.job->casts();
  node.job->PiecesCame(pieces.from, pieces.transfer);
  pieces_behind_end_ += !had_come && node.job->casts() && pieces.taken ? 1 : 0;
  node.job->Advance();
}

void NodeWorld::Leave(int node) {
  for (int other = 0; other < static_cast<int>(nodes_.size()); ++other) {
    if (other == node) continue;
    Break(node, other, /*loses=*/true);
    if (calm()) Make(node, other);
  }
}

void NodeWorld::Make(int a, int b) {
  if (Linked(a, b) || !Meet(a, b) || std::exchange(Linked(a, b), true)) {
    return;
  }
  nodes_[static_cast<size_t>(a)].comes[b].push_back({Event::Kind::kUp, {}});
  nodes_[static_cast<size_t>(b)].comes[a].push_back({Event::Kind::kUp, {}});
}

void NodeWorld::Added(int node, uint64_t generation, const v1::PeerMessage::Go& go) {
  generation += static_cast<uint64_t>(nodes_[static_cast<size_t>(node)].job->trains) << 32;  // each job has its own
  std::vector<std::string>& all = added_[generation];
  size_t& count = nodes_[static_cast<size_t>(node)].added[generation];
  const std::string text = go.ShortDebugString();
  if (go.sequence() != count || (count < all.size() && all[count] != text)) {
    Fail(absl::StrCat("node ", node, ", generation ", generation, ": sum ", count, " is {", text, "}, elsewhere {",
                      count < all.size() ? all[count] : "not yet there", "}"));
    return;
  }
  if (count++ == all.size()) all.push_back(text);
}

bool NodeWorld::Deliver(int to) {
  Node& node = nodes_[static_cast<size_t>(to)];
  std::vector<int> senders;
  for (const auto& [from, events] : node.comes) {
    if (!events.empty()) senders.push_back(from);
  }
  if (senders.empty()) {
    return false;
  }
  const int from = senders[static_cast<size_t>(Random(static_cast<int>(senders.size())))];
  const Event event = std::move(node.comes[from].front());
  node.comes[from].pop_front();
  if (node.job->stopped || node.job->replaced) {
    return true;
  }
  switch (event.kind) {
    case Event::Kind::kUp:
      node.member->OnUp(from);
      break;
    case Event::Kind::kMessage:
      delivers_begin_ = event.message.has_begin();
      node.member->OnMessage(from, event.message);
      delivers_begin_ = false;
      break;
    case Event::Kind::kDown:
      node.member->OnDown(from, absl::UnavailableError("the link broke"));
      break;
  }
  return true;
}

int NodeWorld::Promised(int otherwise) const {
  const auto promised = [](const Node& node) { return node.member->promised(); };
  const auto found = std::find_if(nodes_.rbegin(), nodes_.rend(), promised);
  return found == nodes_.rend() ? otherwise : static_cast<int>(nodes_.rend() - found) - 1;
}

int NodeWorld::Sender(int otherwise) const {
  const auto asks = [](const Node& node) { return node.job->fetches_from() >= 0; };
  const auto found = std::find_if(nodes_.begin(), nodes_.end(), asks);
  return found == nodes_.end() ? otherwise : found->job->fetches_from();
}

int NodeWorld::Casting() const {
  const auto found = std::find_if(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.job->casts(); });
  return found == nodes_.end() ? -1 : static_cast<int>(found - nodes_.begin());
}

bool NodeWorld::MayReturn(int node) const {
  const RandomJob* const machine = nodes_[static_cast<size_t>(node)].cut_off.get();
  if (machine == nullptr) return false;
  const size_t made = machine->commits.size() + (machine->has_unshown() ? 1 : 0);
  return std::all_of(nodes_.begin(), nodes_.end(), [made](const Node& other) {
    return !other.job->initialized || other.job->commits.size() >= made;
  });
}

bool NodeWorld::HasOther(int node) const {
  if (!MayReturn(node)) return false;
  const Node& of = nodes_[static_cast<size_t>(node)];
  const bool promised = of.cut_off->has_promised() || of.cut_off->has_promised_load();
  return of.cut_off->has_unshown() || (promised && of.job->commits.size() == of.cut_off->commits.size() + 1);
}

void NodeWorld::CutOffDecision(int64_t step) {
  cut_off_step_ = step;
  lost_in_ = 1 + Random(40);
  for (int other = 1; other < static_cast<int>(nodes_.size()); ++other) {
    if (Random(2) == 0) Break(0, other, /*loses=*/true);
  }
}

void NodeWorld::LoseDecision() {
  std::vector<int> knows;
  for (int node = 1; node < static_cast<int>(nodes_.size()); ++node) {
    const RandomJob& job = *nodes_[static_cast<size_t>(node)].job;
    if (job.NodeInitialized() && job.NodeStep() >= cut_off_step_) knows.push_back(node);
  }
  if (nodes_[0].job->NodeStep() != cut_off_step_ || knows.size() + 1 == nodes_.size()) return;
  Kill(0, /*leaves_nothing=*/true);
  for (const int node : knows) Kill(node, /*leaves_nothing=*/true);
  const auto knows_it = [this](const Node& node) {
    return node.job->NodeInitialized() && node.job->NodeStep() >= cut_off_step_;
  };
  decisions_lost_ += std::none_of(nodes_.begin(), nodes_.end(), knows_it) ? 1 : 0;
}

void NodeWorld::Trouble() {
  const int nodes = static_cast<int>(nodes_.size());
  const int a = Random(nodes);
  const int b = (a + 1 + Random(nodes - 1)) % nodes;
  Node& node = nodes_[static_cast<size_t>(a)];
  for (int returns = 0; returns < nodes; ++returns) {
    if (HasOther(returns)) return Kill(returns, /*leaves_nothing=*/true);
  }
  if (const int casting = options_.twice ? Casting() : -1; casting >= 0 && Random(3) == 0) {
    const int from = nodes_[static_cast<size_t>(casting)].job->fetches_from();
    const int lost = Random(2) == 0 ? from : 0;
    if (lost != casting && Random(4) != 0) return Kill(lost);
    return Break(casting, casting == 0 ? from : 0, /*loses=*/true);
  }
  switch (Random(options_.daemons_die ? 9 : 8)) {
    case 8:
      if (options_.custodians) {  // sooner where a promise is open
        const int chosen = Random(2) == 0 ? a : Promised(a);
        Kill(options_.rows_lose && Random(3) == 0 ? Sender(chosen) : chosen);
      } else if (Random(2) == 0) {
        Kill(Random(3) == 0 ? a : 0);
      }
      return;
    case 0:
      Break(a, b, /*loses=*/true);
      return;
    case 1:  // the next links are there before anybody has heard of the end of these
      for (int other = 0; other < nodes; ++other) {
        if (other == a || (other != b && Random(2) == 0)) continue;
        const bool was_linked = Linked(a, other);
        Break(a, other, /*loses=*/true);
        if (was_linked) Make(a, other);
      }
      return;
    case 2:
    case 3:
    case 4:
      if (nodes <= 3) return Make(a, b);
      MakeAll();  // one at a time, more nodes would hardly ever have all links, and never agree on initial values
      return;
    case 5:
    case 6:
      node.job->Abort(absl::AbortedError(absl::StrCat("rank of node ", a, " is lost")));
      return;
    default:
      if (Random(3) == 0 && !node.job->replaced) {
        if (!node.pieces.empty()) node.member->search()->Comes(MonotonicNow() + absl::Hours(1));
        node.member->CheckSilence(MonotonicNow() + absl::Hours(1), absl::Minutes(1));
      }
  }
}

void NodeWorld::CalmDown() {
  int64_t most = 0;
  for (const Node& node : nodes_) most = std::max(most, node.job->step);
  target_ = most + 3;
  node0_dies_ = false;
  lost_in_ = 0;
  MakeAll();
}

void NodeWorld::MakeAll() {
  for (int a = 0; a < static_cast<int>(nodes_.size()); ++a) {
    for (int b = 0; b < a; ++b) Make(a, b);
  }
}

bool NodeWorld::Ended() const {
  return !failure_.empty() ||
         std::all_of(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.job->stopped; });
}

// Posts what nodes post to their loop goes between.
void NodeWorld::Turn() {
  for (int i = 1 + Random(4); i > 0 && !Ended(); --i) {
    const int node = Random(static_cast<int>(nodes_.size()));
    const RandomJob& its_job = *nodes_[static_cast<size_t>(node)].job;
    if (std::exchange(node0_dies_, false)) {
      Kill(0);
    } else if (lost_in_ > 0 && --lost_in_ == 0) {
      LoseDecision();
    } else if (its_job.replaced && Random(4) == 0) {
      TakePlace(node, its_job.trains + 1);
    } else if (its_job.becomes > 0 && !its_job.InTheMiddle()) {
      ++widened_;
      TakePlace(node, its_job.becomes);
    } else if (target_ == 0 && Random(25) == 0) {
      Trouble();
    } else if (!nodes_[static_cast<size_t>(node)].pieces.empty() && Random(6) == 0) {
      DeliverPieces(node);
    } else if (Random(3) == 0 || !Deliver(node)) {
      RandomJob& job = *nodes_[static_cast<size_t>(node)].job;
      const bool was_stopped = job.stopped;
      job.Act();
      if (job.stopped && !was_stopped) {
        for (int other = 0; other < static_cast<int>(nodes_.size()); ++other) {
          if (other != node) Break(node, other, /*loses=*/false);
        }
      }
    }
    if (--left_ == 0 && target_ == 0) {
      CalmDown();
      left_ = 4000 * static_cast<int>(nodes_.size());
    } else if (left_ == 0) {
      std::string text = "nothing moves:";
      for (const Node& n : nodes_) {
        absl::StrAppend(&text, " [", n.job->Text(), n.member->promised() ? ", promised" : "", ", generation ",
                        n.member->generation(), n.job->stopped ? ", finished" : "", " ", n.member->WaitText(), "]");
      }
      Fail(absl::StrCat(text, ", target ", target_));
    }
  }
  if (Ended()) {
    ended_.Notify();
    return;
  }
  loop_.Post([this] { Turn(); });
}

std::string NodeWorld::Run(int events) {
  left_ = events;
  loop_.Post([this] {
    for (size_t node = 0; node < nodes_.size(); ++node) Start(static_cast<int>(node));
    Turn();
  });
  ended_.WaitForNotification();
  std::string result;
  loop_.RunAndWait([&] {
    for (size_t node = 1; node < nodes_.size() && failure_.empty(); ++node) {
      const std::vector<std::string>& own = nodes_[node].job->commits;
      const std::vector<std::string>& first = nodes_[0].job->commits;
      for (size_t i = 0; i < std::max(own.size(), first.size()); ++i) {
        if (i >= own.size() || i >= first.size() || own[i] != first[i]) {
          Fail(absl::StrCat("commit ", i, " of node ", node, " is {", i < own.size() ? own[i] : "none",
                            "} and of node 0 {", i < first.size() ? first[i] : "none", "}"));
          break;
        }
      }
    }
    result = failure_;
  });
  return result;
}

}  // namespace shardd::testing
