// What trainers say of gradients between backwards: dropped (None), or written by themselves. Agreed like the presence
// of submissions: what any rank has is present, a rank that has none counts as zero, what none has is absent.

#include <algorithm>
#include <limits>
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
  for (const auto& [key, pair] : pairs_) {
    if (key.first >= state.closed_backwards && key.second == plan.group &&
        std::any_of(pair.folded.begin(), pair.folded.end(), [](int folded) { return folded > 0; })) {
      return RankError(
          absl::StatusCode::kFailedPrecondition, rank, what,
          absl::StrCat("gradients of backward ", key.first,
                       " were added to it before their turn, because ranks run groups in different orders"));
    }
  }
  state.said[index] = {state.closed_backwards, present};
  presence_said_ = true;
  return absl::OkStatus();
}

bool JobCore::SettlePresence(const std::vector<int>& params, int backward, StreamId stream) {
  if (!presence_said_) {
    return false;
  }
  std::vector<std::vector<DeviceOp>> zeros(world_size());  // by device
  bool left = false;
  for (int param : params) {
    std::vector<bool> has(world_size(), present_[param]);
    bool said = false;
    for (int rank = 0; rank < world_size(); ++rank) {
      auto& of_rank = ranks_[rank].said;
      if (const auto it = of_rank.find(param); it != of_rank.end() && it->second.closed_backwards <= backward) {
        has[rank] = it->second.present;
        of_rank.erase(it);
        said = true;
      }
    }
    if (!said) {
      continue;
    }
    present_[param] = std::find(has.begin(), has.end(), true) != has.end();
    if (present_[param]) {
      for (int rank = 0; rank < world_size(); ++rank) {
        if (!has[rank]) {
          ZeroPart(param, rank, has, &zeros);
        }
      }
    }
  }
  for (const RankStep& rank : ranks_) {
    left = left || !rank.said.empty();
  }
  presence_said_ = left;
  bool any = false;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (zeros[rank].empty()) {
      continue;
    }
    any = true;
    DeviceWork work;
    work.label = absl::StrCat("zero absent gradients step ", committed_step_ + 1);
    work.ops = std::move(zeros[rank]);
    work.done = Join(1, [](const absl::Status&) {});  // what follows in the stream fails alike
    devices_[rank]->Submit(stream, std::move(work));
  }
  return any;
}

bool JobCore::SettleAllPresence(StreamId stream) {
  if (!presence_said_) {
    return false;
  }
  std::vector<int> params(plan_->params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    params[i] = static_cast<int>(i);
  }
  return SettlePresence(params, kAllBackwards, stream);
}

// The part of the parameter's gradient shard that `rank` owns, unless a rank that has a gradient owns it as well
// (strategies that replicate). `zeros`: by device.
void JobCore::ZeroPart(int param, int rank, const std::vector<bool>& has,
                       std::vector<std::vector<DeviceOp>>* zeros) const {
  const int flat_param = plan_->params[param].flat_param;
  const FlatParamPlan& flat = plan_->flat_params[flat_param];
  const auto part_of = [&](int owner) {
    std::vector<Segment> part = RankSegments(*plan_, flat_param, owner);
    std::erase_if(part, [param](const Segment& segment) { return segment.param != param; });
    return part;
  };
  const std::vector<Segment> part = part_of(rank);
  for (int other = 0; other < world_size() && !part.empty(); ++other) {
    if (!has[other]) {
      continue;
    }
    const std::vector<Segment> of_other = part_of(other);  // equal to `part` or apart from it
    if (!of_other.empty() && of_other.front().offset == part.front().offset) {
      return;
    }
  }
  // By the device that works on an element anyway, so that its streams keep the order.
  auto* const gradients = reinterpret_cast<float*>(memory_->pointers().gradients + flat.gradients_offset_bytes);
  for (int worker = 0; worker < world_size(); ++worker) {
    for (const Segment& work : WorkSegments(*plan_, flat_param, worker)) {
      for (const Segment& segment : part) {
        const int64_t begin = std::max(work.offset, segment.offset);
        const int64_t end = std::min(work.offset + work.numel, segment.offset + segment.numel);
        if (work.param == param && begin < end) {
          (*zeros)[worker].emplace_back(ZeroOp{gradients + begin, (end - begin) * static_cast<int64_t>(sizeof(float))});
        }
      }
    }
  }
}

}  // namespace shardd
