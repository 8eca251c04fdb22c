// From autograd's gradients to the rank's gradient slots, and what a backward leaves to be done at its end.

#include <algorithm>
#include <utility>
#include <vector>

#include "client/torch/sharded_state.h"

namespace shardd::internal {

Status ShardedState::ReadySlot(int32_t index) {
  GroupState& group = group_at(index);
  int32_t& owner = slot_owner_[static_cast<size_t>(group.slot)];
  if (owner >= 0 && owner != index && group_at(owner).dirty) {
    // Towers whose inputs need no gradient end only with the backward itself; what they have so far goes out now, the
    // rest with a second submission.
    Status status = Submit(owner);
    if (!status.ok()) {
      return status;
    }
  }
  Status status = job_->group(index).WaitGradientSlot();
  if (status.ok()) {
    owner = index;
    group.slot_ready = true;
  }
  return status;
}

void ShardedState::OnGradient(int32_t index, const at::Tensor& gradient) {
  if (job_ == nullptr) {
    throw StatusError(Status(Code::kFailedPrecondition, "use a sharded module: its job is finished"));
  }
  ParamState& param = params_[static_cast<size_t>(index)];
  GroupState& group = group_at(param.group);
  if (!group.slot_ready) {
    ThrowIfError(ReadySlot(param.group));
  }
  uint8_t& byte = group.present[static_cast<size_t>(param.index_in_group) / 8];
  const uint8_t bit = static_cast<uint8_t>(1u << (param.index_in_group % 8));
  const c10::AutoGradMode no_grad(false);
  const at::Tensor dense = gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
  if ((byte & bit) == 0) {
    param.gradient.copy_(dense);
  } else {
    param.gradient.add_(dense);  // a second backward() before BackwardDone
  }
  byte |= bit;
  group.dirty = true;
}

Status ShardedState::Submit(int32_t index) {
  GroupState& group = group_at(index);
  Status status = job_->group(index).SubmitGradients(group.present.data());
  std::fill(group.present.begin(), group.present.end(), uint8_t{0});
  group.dirty = false;
  group.slot_ready = false;
  group.submitted = true;
  return status;
}

Status ShardedState::BackwardDone(bool last) {
  Status status;
  for (size_t g = 0; g < groups_.size() && status.ok(); ++g) {
    GroupState& group = groups_[g];
    // Ran forward without any gradient: says so with an empty mask, which is PyTorch's None and no missing
    // contribution.
    if (group.dirty || (group.trainable && group.ran_forward && !group.submitted)) {
      status = Submit(static_cast<int32_t>(g));
    }
  }
  if (status.ok()) {
    status = ReshardAll();
  }
  if (status.ok()) {
    status = job_->BackwardDone(last);
  }
  for (GroupState& group : groups_) {
    group.ran_forward = group.submitted = false;
  }
  order_.clear();
  return status;
}

void ShardedState::LoadGradientSlots() {
  struct Range {
    const char* begin;
    const char* end;
    size_t group;
  };
  std::vector<Range> ranges;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (const int32_t p : groups_[g].params) {
      ParamState& param = params_[static_cast<size_t>(p)];
      void* data = job_->gradient_data(p);
      if (data == nullptr) {
        continue;
      }
      param.gradient = at::from_blob(data, param.tensors[0].sizes(), at::TensorOptions().dtype(param.unsharded_dtype));
      const char* begin = static_cast<const char*>(data);
      ranges.push_back({begin, begin + param.gradient.nbytes(), g});
    }
  }
  // Slots are disjoint and groups in one slot all start at its beginning, so overlap tells which groups share one.
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<std::vector<size_t>> sharing(groups_.size());
  const char* reached = nullptr;
  size_t holder = 0;
  for (const Range& range : ranges) {
    if (reached != nullptr && range.begin < reached && range.group != holder) {
      sharing[holder].push_back(range.group);
      sharing[range.group].push_back(holder);
    }
    if (reached == nullptr || range.end > reached) {
      reached = range.end;
      holder = range.group;
    }
  }
  for (GroupState& group : groups_) {
    group.slot = -1;
  }
  int32_t slots = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].slot >= 0) {
      continue;
    }
    std::vector<size_t> open = {g};
    while (!open.empty()) {
      const size_t at = open.back();
      open.pop_back();
      if (groups_[at].slot < 0) {
        groups_[at].slot = slots;
        open.insert(open.end(), sharing[at].begin(), sharing[at].end());
      }
    }
    ++slots;
  }
  slot_owner_.assign(static_cast<size_t>(slots), -1);
}

}  // namespace shardd::internal
