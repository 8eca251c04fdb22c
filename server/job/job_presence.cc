// What trainers say of gradients between backwards: dropped (None), or written by themselves. Agreed like the presence
// of submissions: what any rank has is present, a rank that has none counts as zero, what none has is absent.

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {

absl::Status JobCore::OnSetGradientPresence(Session* session, int64_t param, bool present) {
  const int rank = session->rank();
  RankStep& state = ranks_[rank];
  if (param < 0 || param >= static_cast<int64_t>(plan_->params.size())) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, "SetGradientPresence",
                     absl::StrCat("no such parameter (got ", param, ", want 0 to ", plan_->params.size() - 1, ")"));
  }
  const int index = static_cast<int>(param);
  const ParamPlan& plan = plan_->params[index];
  const std::string what = absl::StrCat("SetGradientPresence \"", plan.fqn, "\"");
  if (!plan.requires_grad) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what, "the parameter is frozen");
  }
  if (state.closed_backwards == kAllBackwards || committing_) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what, "the step is being committed");
  }
  SHARDD_RETURN_IF_ERROR(CheckBackwardClosed(rank, what));
  for (auto it = pairs_.lower_bound({state.closed_backwards, 0}); it != pairs_.end(); ++it) {
    const auto& [key, pair] = *it;
    if (key.second == plan.group &&
        std::any_of(pair.folded.begin(), pair.folded.end(), [](int folded) { return folded > 0; })) {
      return RankError(
          absl::StatusCode::kFailedPrecondition, rank, what,
          absl::StrCat("gradients of backward ", key.first,
                       " were added to it before their turn, because ranks run groups in different orders"));
    }
  }
  const int place = state.closed_backwards;
  const auto pair = pairs_.find({place, plan.group});  // of a first try, which AbandonBackward has given up
  if (present && pair != pairs_.end()) {
    pair->second.own[plan.index_in_group] = 0;  // it holds what the trainer has written, too
  }
  const bool older_open = std::any_of(ranks_.begin(), ranks_.end(),
                                      [place](const RankStep& other) { return other.closed_backwards < place; });
  if (present == presence_.has(index) && !older_open) {
    presence_.Unsay(rank, index);  // as it is anyway: nothing that comes before its place is missing
    return absl::OkStatus();
  }
  // After AbandonBackward the sum may hold the first try of the backward that comes behind this word, the other ranks'
  // gradients with it. It cannot be taken apart, so it goes only where all ranks drop theirs.
  const bool of_first_try = !present && pair != pairs_.end() && pair->second.added[rank] > 0;
  presence_.Say(rank, index, {place, present, of_first_try});
  return absl::OkStatus();
}

DeviceOps JobCore::SettlePresence(const std::vector<int>& params, int backward) {
  return SettleParts(presence_.Settle(params, backward));
}

DeviceOps JobCore::SettleAllPresence() { return SettleParts(presence_.SettleAll()); }

// On several nodes the others do not know of what ranks of this one have dropped alone. Says so of the last parameter.
void JobCore::NoteUneven(const GradientPresence::Uneven& uneven) {
  if (nodes_ == nullptr || uneven.empty()) {
    return;
  }
  const auto by_param = [](const auto& a, const auto& b) { return a.first < b.first; };
  const auto& [param, has] = *std::max_element(uneven.begin(), uneven.end(), by_param);
  const std::vector<bool>& holders = presence_.Holders(param);
  const auto holding = std::count(holders.begin(), holders.end(), true);
  const auto having = std::count(has.begin(), has.end(), true);
  uneven_gradient_ = absl::FailedPreconditionError(
      absl::StrCat("SetGradientPresence \"", plan_->params[param].fqn, "\": ", holding - having, " of ", holding,
                   " ranks of this node that hold some of it have dropped it, and other nodes do not know; on "
                   "several nodes all ranks must drop the same (step=",
                   committed_.step() + 1, ")"));
}

// Brings copy 0 of gradient shards, which alone is read, to what their owners have: several where strategies replicate.
// It is that of the first copy one of whose owners has something, and zero where none has. `has`: by parameter, by
// rank. Each flat parameter is walked once, whatever was said of it: this runs on the loop.
DeviceOps JobCore::SettleParts(const GradientPresence::Uneven& has) {
  NoteUneven(has);
  DeviceOps ops(world_size());
  constexpr int kNone = std::numeric_limits<int>::max();
  struct Part {
    int64_t end = 0;
    int copy = kNone;  // the first that holds something
  };
  std::set<int> flat_params;
  for (const auto& [param, ranks] : has) {
    flat_params.insert(plan_->params[param].flat_param);
  }
  for (int flat_param : flat_params) {
    std::map<int64_t, Part> parts;  // by their first element; those of two ranks are equal or apart
    for (int rank = 0; rank < world_size(); ++rank) {
      for (const Segment& segment : OwnedSegments(*plan_, Purpose::kGradients, flat_param, rank)) {
        if (const auto it = has.find(segment.param); it != has.end()) {
          Part& part = parts[segment.offset];
          part.end = segment.offset + segment.numel;
          if (it->second[rank]) {
            part.copy = std::min(part.copy, plan_->gradient_copies > 1 ? plan_->placement.replica_index[rank] : 0);
          }
        }
      }
    }
    std::erase_if(parts, [](const auto& part) { return part.second.copy == 0; });
    // By the device that works on an element anyway, so that its streams keep the order.
    auto* const gradients =
        reinterpret_cast<float*>(memory_->pointers().gradients + plan_->flat_params[flat_param].gradients_offset_bytes);
    for (int worker = 0; worker < world_size(); ++worker) {
      for (const Segment& work : WorkSegments(*plan_, flat_param, worker)) {
        auto it = parts.upper_bound(work.offset);
        it = it == parts.begin() ? it : std::prev(it);
        for (; it != parts.end() && it->first < work.offset + work.numel; ++it) {
          const int64_t begin = std::max(work.offset, it->first);
          const int64_t end = std::min(work.offset + work.numel, it->second.end);
          if (begin >= end) {
            continue;
          }
          float* const first = gradients + begin;
          const int64_t size_bytes = (end - begin) * static_cast<int64_t>(sizeof(float));
          if (it->second.copy == kNone) {
            ops[worker].emplace_back(ZeroOp{first, size_bytes});
          } else {
            const char* const source = reinterpret_cast<char*>(first) + it->second.copy * plan_->gradients_stride_bytes;
            ops[worker].emplace_back(CopyOp{source, first, size_bytes});
          }
        }
      }
    }
  }
  return ops;
}

}  // namespace shardd
