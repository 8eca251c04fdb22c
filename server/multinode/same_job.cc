#include "server/multinode/same_job.h"

#include <algorithm>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/plan/node_part.h"
#include "common/plan/whole_params.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr size_t kMoreOfSpecBytes = size_t{64} << 10;
constexpr size_t kMoreOfParamBytes = 16;  // in a group of an optimizer, beside its name

constexpr size_t kMostShownBytes = 100;  // of another node's text

// Whether `wide` describes the job of `narrow` with more to train, and no other difference. Never both ways.
absl::StatusOr<Extension> ExtensionTo(const v1::JobSpec& wide, const ShardPlan& planned, const v1::JobSpec& narrow,
                                      const ShardPlan& plan) {
  SHARDD_ASSIGN_OR_RETURN(Extension extension, Extend(wide, narrow, plan));
  if (!extension.trains_more || extension.plan.digest != planned.digest) {
    return absl::FailedPreconditionError("it does not train more");
  }
  return extension;
}

size_t HashOf(const std::string& description) { return absl::Hash<absl::string_view>()(description); }

absl::Status MissedError(int node, const Extension& missed) {
  return absl::UnavailableError(
      absl::StrCat("node ", node, " trains ", missed.what, " by now, as this node does soon; it is tried again"));
}

// UNIMPLEMENTED: the other daemon makes another plan of its description than `plan`, which this one makes of it. A
// daemon that does not say its plan is of a build that knows no gathers in float8.
absl::Status CheckPlannedAlike(const v1::PeerHello& hello, const ShardPlan& plan) {
  const std::string& theirs = hello.plan_digest();
  const bool in_float8 = std::any_of(plan.groups.begin(), plan.groups.end(),
                                     [](const auto& group) { return group.mixed_precision.float8_gathers(); });
  if (theirs == plan.digest || (theirs.empty() && !in_float8)) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      "the daemon of node ", hello.node(), " is of another build, which plans the same job otherwise (got ",
      theirs.empty() ? "no digest of a plan"
                     : absl::StrCat("digest ", absl::BytesToHexString(theirs.substr(0, kMostShownBytes))),
      ", want ", absl::BytesToHexString(plan.digest), in_float8 ? "; the job has float8_gathers" : "",
      "); install the same version on all nodes"));
}

// UNIMPLEMENTED: parts of parameters would have to move between nodes.
absl::Status CheckNodesHoldTheSame(const ShardPlan& from, const ShardPlan& to) {
  for (int param = 0; to.cut_over_nodes && param < static_cast<int>(to.params.size()); ++param) {
    const std::string& fqn = to.params[static_cast<size_t>(param)].fqn;
    for (int node = 0; node < to.nodes(); ++node) {
      const ParamRange before = NodeRangeOf(from, from.FindParam(fqn), node);
      const ParamRange now = NodeRangeOf(to, param, node);
      if (before.numel == now.numel && (now.numel == 0 || before.first == now.first)) continue;
      return absl::UnimplementedError(absl::StrCat(
          "parameter \"", fqn, "\": node ", node, " would hold another part of it (got elements ", now.first, " to ",
          now.first + now.numel, ", want ", before.first, " to ", before.first + before.numel,
          "), and parts do not move between nodes; ",
          PlaceOfWhole(to, param) >= 0 ? absl::StrCat("one rank has all of ", WholeText(to, param), ", so ")
                                       : "use layout dim0, in which they stay, or ",
          "say what is trained when the job is opened"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckExtendsOverNodes(const ShardPlan& plan, bool on_gpus) {
  const bool in_trainers = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  const bool edits = plan.writes_edits_back();  // of which nobody tried what becomes
  if (plan.nodes() == 1 || (!on_gpus && !in_trainers && !edits)) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("more to train is not served on several nodes ",
                   in_trainers ? "with an optimizer that steps in the trainers (got OPTIMIZER_KIND_TRAINER, want an "
                                 "optimizer of the daemon's)"
                   : on_gpus   ? "on GPUs (want devices cpu:N)"
                               : "beside edits in place (got trainers_never_write false, want true; in PyTorch "
                                 "in_place_edits=False)",
                   "; say what is trained when the job is opened"));
}

absl::Status CheckExtension(const ShardPlan& plan, const Extension& extension) {
  if (plan.nodes() == 1 || extension.what.empty()) return absl::OkStatus();
  if (!extension.trains_more) {
    return absl::UnimplementedError(
        absl::StrCat("on several nodes optimizer groups alone do not change once the job is open (got ", extension.what,
                     " and no parameter that was frozen, want some); say them when the job is opened, or with "
                     "parameters that are trained from then on"));
  }
  return CheckNodesHoldTheSame(plan, extension.plan);
}

OwnJob::OwnJob(v1::JobSpec spec, std::string serialized, std::shared_ptr<const ShardPlan> plan, std::string data_path,
               bool on_gpus)
    : spec_(std::move(spec)),
      serialized_(std::move(serialized)),
      plan_(std::move(plan)),
      data_path_(std::move(data_path)),
      on_gpus_(on_gpus) {}

absl::Status OwnJob::CheckSame(const v1::PeerHello& hello, bool has_parameters, const Missed& missed) {
  if (!hello.data_path().empty() && hello.data_path() != data_path_) {
    return absl::FailedPreconditionError(
        absl::StrCat("gradients of node ", hello.node(), " move otherwise (got ",
                     absl::CHexEscape(hello.data_path().substr(0, kMostShownBytes)), ", want ", data_path_,
                     "); ranks train on GPUs on all nodes or on none, and their daemons' NCCL_ settings are alike"));
  }
  if (hello.spec() == serialized_) {
    return CheckPlannedAlike(hello, *plan_);
  }
  if (std::shared_ptr<const Extension> known = KnownAsMissed(hello); known != nullptr) {
    absl::Status again = MissedError(hello.node(), *known);
    missed(std::move(known));
    return again;
  }
  SHARDD_RETURN_IF_ERROR(CheckSize(hello, hello.takes_extensions() && (hello.has_parameters() || has_parameters)));
  const Asked asked{HashOf(hello.spec()), hello.takes_extensions(), hello.has_parameters(), has_parameters,
                    hello.plan_digest()};
  {
    absl::MutexLock lock(&mutex_);
    const auto before = answers_.find(hello.node());
    if (before != answers_.end() && before->second.first == asked) return before->second.second;
  }
  bool has_missed = false;
  absl::Status answer = ComparePlans(hello, has_parameters, [&](std::shared_ptr<const Extension> extension) {
    has_missed = true;
    missed(std::move(extension));
  });
  absl::MutexLock lock(&mutex_);
  if (!has_missed) answers_[hello.node()] = {asked, answer};
  return answer;
}

std::shared_ptr<const Extension> OwnJob::KnownAsMissed(const v1::PeerHello& hello) {
  absl::MutexLock lock(&mutex_);
  const bool is_known =
      missed_ != nullptr && hello.has_parameters() && hello.takes_extensions() && HashOf(hello.spec()) == missed_hash_;
  return is_known ? missed_ : nullptr;
}

// Planning a larger one would take long, and say the same. Who trains more names more parameters in its optimizer's
// groups.
absl::Status OwnJob::CheckSize(const v1::PeerHello& hello, bool may_train_more) const {
  size_t most_bytes = serialized_.size() + kMoreOfSpecBytes;
  if (may_train_more) {
    most_bytes += serialized_.size();
    for (const ParamPlan& param : plan_->params) most_bytes += param.fqn.size() + kMoreOfParamBytes;
  }
  if (hello.spec().size() <= most_bytes) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("node ", hello.node(), " describes another job under this name: a larger one (got ",
                   hello.spec().size(), " bytes of description, want ", serialized_.size(), ")"));
}

absl::Status OwnJob::ComparePlans(const v1::PeerHello& hello, bool has_parameters, const Missed& missed) {
  v1::JobSpec other;
  if (!other.ParseFromString(hello.spec())) {
    return absl::FailedPreconditionError(
        "its description of the job cannot be read; install the same version on all nodes");
  }
  SHARDD_ASSIGN_OR_RETURN(const ShardPlan others, PlanShards(other));
  SHARDD_RETURN_IF_ERROR(CheckPlannedAlike(hello, others));
  if (others.digest == plan_->digest) {
    return absl::OkStatus();
  }
  if (hello.takes_extensions() && (hello.has_parameters() || has_parameters)) {
    const std::string node = absl::StrCat("node ", hello.node());
    if (absl::StatusOr<Extension> theirs = ExtensionTo(other, others, spec_, *plan_); theirs.ok()) {
      absl::Status served = CheckExtendsOverNodes(*plan_, on_gpus_);
      if (served.ok()) served = CheckExtension(*plan_, *theirs);
      if (!hello.has_parameters() || !served.ok()) {
        return absl::UnavailableError(absl::StrCat(
            node, " trains ", theirs->what, ", which this node does not, and ",
            served.ok() ? "has no parameters yet, as this node has; the ranks of all nodes describe the same job"
                        : absl::StrCat("this node cannot become that: ", served.message()),
            "; it is tried again"));
      }
      const auto shared = std::make_shared<const Extension>(*std::move(theirs));
      {
        absl::MutexLock lock(&mutex_);
        missed_ = shared;
        missed_hash_ = HashOf(hello.spec());
      }
      missed(shared);
      return MissedError(hello.node(), *shared);
    }
    if (const absl::StatusOr<Extension> ours = ExtensionTo(spec_, *plan_, other, others); ours.ok()) {
      if (has_parameters) return absl::OkStatus();
      return absl::UnavailableError(
          absl::StrCat("this node trains ", ours->what, ", which ", node, " does not, and has no parameters yet, as ",
                       node, " has; the ranks of all nodes describe the same job; it is tried again"));
    }
  }
  const std::string difference = FirstDifference(other, spec_);
  return absl::FailedPreconditionError(absl::StrCat("node ", hello.node(), " describes another job under this name: ",
                                                    difference.empty() ? "plans differ" : difference));
}

}  // namespace shardd
