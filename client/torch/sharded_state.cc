#include "client/torch/sharded_state.h"

#include <algorithm>
#include <utility>

#include "client/torch/autograd_nodes.h"

namespace shardd::internal {
namespace {

// Deaths while initial values are being given; each is another process that died, so this ends.
constexpr int kMaxInitialAttempts = 100;

at::ScalarType ScalarTypeOf(int32_t dtype) {
  switch (dtype) {
    case SHARDD_BFLOAT16:
      return at::kBFloat16;
    case SHARDD_FLOAT16:
      return at::kHalf;
    case SHARDD_FLOAT64:
      return at::kDouble;
    case SHARDD_INT64:
      return at::kLong;
    case SHARDD_INT32:
      return at::kInt;
    case SHARDD_INT16:
      return at::kShort;
    case SHARDD_INT8:
      return at::kChar;
    case SHARDD_UINT8:
      return at::kByte;
    case SHARDD_BOOL:
      return at::kBool;
    default:
      return at::kFloat;
  }
}

void Check(Status status) {
  if (!status.ok()) {
    throw StatusError(std::move(status));
  }
}

std::string RankText(const Job& job) { return "rank=" + std::to_string(job.info().rank); }

}  // namespace

Use::Use(std::shared_ptr<ShardedState> owner, int32_t use_group)
    : state(owner), group(use_group), attachment(owner->attachment()) {}

Use::~Use() {
  const std::shared_ptr<ShardedState> owner = state.lock();
  if (awaits_end && owner != nullptr && owner->attachment_ == attachment) {
    --owner->group_at(group).awaiting_end;  // its graph was dropped without a backward
  }
}

Status ShardedState::Bind(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  const shardd_job_info info = job_->info();
  params_.resize(static_cast<size_t>(info.param_count));
  for (int32_t i = 0; i < info.param_count; ++i) {
    const shardd_param_info plan = job_->parameter_info(i);
    ParamState& param = params_[static_cast<size_t>(i)];
    param.fqn = plan.fqn;
    param.group = plan.group;
    param.index_in_group = plan.index_in_group;
    param.requires_grad = plan.requires_grad != 0;
    param.stored_dtype = ScalarTypeOf(plan.dtype);
    param.unsharded_dtype = ScalarTypeOf(plan.unsharded_dtype);
  }
  for (int32_t g = 0; g < info.group_count; ++g) {
    const shardd_group_info plan = job_->group(g).info();
    GroupState group;
    group.name = plan.name;
    group.params.assign(plan.params, plan.params + plan.param_count);
    group.also_unshards.assign(plan.also_unshards, plan.also_unshards + plan.also_unshard_count);
    group.reshard_after_forward = plan.reshard_after_forward != 0;
    group.trainable = plan.trainable != 0;
    group.present.assign((static_cast<size_t>(plan.param_count) + 7) / 8, 0);
    groups_.push_back(std::move(group));
  }
  for (const auto& entry : tensors) {
    const at::Tensor& tensor = entry.second;
    const int32_t index = job_->FindParameter(entry.first);
    if (index < 0) {
      continue;
    }
    auto& known = params_[static_cast<size_t>(index)].tensors;
    if (std::none_of(known.begin(), known.end(), [&](const at::Tensor& other) { return other.is_same(tensor); })) {
      known.push_back(tensor);
    }
  }
  for (const ParamState& param : params_) {
    if (param.tensors.empty()) {
      return Status(Code::kInternal, "bind parameter \"" + param.fqn + "\": planned but not in the module");
    }
  }
  LoadGradientSlots();
  return Status();
}

Status ShardedState::GiveInitialValues(int32_t writer) {
  Status status;
  for (int attempt = 0; attempt < kMaxInitialAttempts; ++attempt) {
    const shardd_job_info info = job_->info();
    if (info.version > 0) {
      return Status();
    }
    status = Status();
    if (info.rank == writer) {
      for (size_t i = 0; i < params_.size() && status.ok(); ++i) {
        const at::Tensor values = params_[i].tensors[0].detach().contiguous();
        status = job_->WriteParameter(static_cast<int32_t>(i), values.const_data_ptr(), 0, values.numel());
      }
    }
    if (status.ok()) {
      status = job_->CommitParameters();
    }
    if (status.ok()) {
      return status;
    }
    if (!status.aborted()) {
      return status;
    }
    Status attached = Reattach();
    if (!attached.ok()) {
      return attached;
    }
  }
  return status;
}

void ShardedState::Adopt() {
  for (size_t i = 0; i < params_.size(); ++i) {
    ParamState& param = params_[i];
    const std::string& group = group_at(param.group).name;
    param.storage = std::make_unique<ParameterStorage>(
        param.tensors[0].sizes(), param.unsharded_dtype,
        "use of parameter \"" + param.fqn + "\": parameter group \"" + group +
            "\" is resharded; it can be read inside ShardedModule::Run of its module and in the backward of that");
    for (at::Tensor& tensor : param.tensors) {
      param.storage->Adopt(tensor);
      if (param.requires_grad) {
        param.accumulators.push_back(InstallGradientAccumulator(shared_from_this(), static_cast<int32_t>(i), tensor));
      }
    }
  }
}

Status ShardedState::CheckAlive(const Use& use) const {
  if (job_ == nullptr) {
    return Status(Code::kFailedPrecondition, "use a sharded module: its job is finished");
  }
  if (use.attachment != attachment_) {
    return Status(Code::kFailedPrecondition, "backward of group \"" + groups_[static_cast<size_t>(use.group)].name +
                                                 "\": its forward was before the last Reattach (" + RankText(*job_) +
                                                 "); run forward again");
  }
  return Status();
}

Status ShardedState::AddReader(int32_t index) {
  GroupState& group = group_at(index);
  if (group.readers == 0) {
    for (const int32_t p : group.params) {
      ParamState& param = params_[static_cast<size_t>(p)];
      for (const at::Tensor& tensor : param.tensors) {
        if (!param.storage->Holds(tensor)) {
          return Status(Code::kFailedPrecondition,
                        "unshard parameter \"" + param.fqn +
                            "\": its tensor was given another storage (set_data, to, share_memory); parameters of a "
                            "sharded module keep theirs");
        }
      }
      param.storage->PointTo(job_->parameter_data(p));
    }
  }
  ++group.readers;
  return Status();
}

void ShardedState::DropReader(int32_t index) {
  GroupState& group = group_at(index);
  if (--group.readers == 0) {
    for (const int32_t p : group.params) {
      params_[static_cast<size_t>(p)].storage->Clear();
    }
  }
}

Status ShardedState::Acquire(Use* use, shardd_phase phase, bool Use::*hold) {
  GroupState& group = group_at(use->group);
  if (use->hold_stamp != group.hold_stamp) {
    use->hold_stamp = group.hold_stamp;
    use->holds_forward = use->holds_backward = use->in_backward = false;
  }
  ParameterGroup handle = job_->group(use->group);
  if (phase == SHARDD_BACKWARD && group.prefetched) {
    group.prefetched = false;  // that hold is this use's now
  } else {
    Status status = handle.UnshardAsync(phase);
    if (!status.ok()) {
      return status;
    }
    ++group.holds;
  }
  Status status = handle.Wait();
  for (size_t i = 0; status.ok() && i < group.also_unshards.size(); ++i) {
    status = AddReader(group.also_unshards[i]);
  }
  if (status.ok()) {
    status = AddReader(use->group);
  }
  use->*hold = status.ok();
  return status;
}

Status ShardedState::Release(Use* use, bool Use::*hold) {
  GroupState& group = group_at(use->group);
  const bool held = use->*hold && use->hold_stamp == group.hold_stamp;
  use->*hold = false;
  if (!held) {
    return Status();
  }
  DropReader(use->group);
  for (const int32_t other : group.also_unshards) {
    DropReader(other);
  }
  --group.holds;
  return job_->group(use->group).Reshard();
}

std::shared_ptr<Use> ShardedState::BeginForward(int32_t group) {
  auto use = std::make_shared<Use>(shared_from_this(), group);
  Check(CheckAlive(*use));
  Check(Acquire(use.get(), SHARDD_FORWARD, &Use::holds_forward));
  return use;
}

void ShardedState::EndForward(const std::shared_ptr<Use>& use, bool has_backward) {
  GroupState& group = group_at(use->group);
  if (has_backward) {
    while (!order_.empty() && order_.back().expired()) {
      order_.pop_back();  // of forwards that nobody will run backward
    }
    use->order = order_.size();
    order_.push_back(use);
    group.ran_forward = true;
    if (!group.reshard_after_forward) {
      return;
    }
  }
  Check(Release(use.get(), &Use::holds_forward));
}

void ShardedState::AbandonForward(Use* use) {
  if (job_ != nullptr && use->attachment == attachment_) {
    // The trainer's own error is on its way out; one of the reshard would come up again at the next call.
    (void)Release(use, &Use::holds_forward);
  }
}

void ShardedState::BeginBackward(Use* use) {
  Check(CheckAlive(*use));
  GroupState& group = group_at(use->group);
  const bool current = use->hold_stamp == group.hold_stamp;
  if (current && use->in_backward) {
    return;  // another output of the same forward was here first
  }
  if (!current || !use->holds_forward) {
    Check(Acquire(use, SHARDD_BACKWARD, &Use::holds_backward));
  }
  use->in_backward = true;
  if (options_.prefetch_on_begin) {
    Check(PrefetchBefore(use->order));
  }
}

void ShardedState::EndBackward(Use* use) {
  Check(CheckAlive(*use));
  GroupState& group = group_at(use->group);
  use->in_backward = false;
  if (use->awaits_end) {
    use->awaits_end = false;
    --group.awaiting_end;
  }
  if (group.dirty && group.awaiting_end == 0) {
    Check(Submit(use->group));
  }
  Check(Release(use, &Use::holds_backward));
  Check(Release(use, &Use::holds_forward));
  if (options_.prefetch_on_end) {
    Check(PrefetchBefore(use->order));
  }
}

Status ShardedState::PrefetchBefore(size_t order) {
  for (size_t i = std::min(order, order_.size()); i > 0; --i) {
    const std::shared_ptr<Use> use = order_[i - 1].lock();
    if (use == nullptr) {
      continue;
    }
    GroupState& group = group_at(use->group);
    if (group.holds > 0) {
      // Unsharded since forward (its backward needs nothing more), or asked for already.
      if (group.prefetched) {
        return Status();
      }
      continue;
    }
    Status status = job_->group(use->group).UnshardAsync(SHARDD_BACKWARD);
    if (status.ok()) {
      ++group.holds;
      group.prefetched = true;
    }
    return status;
  }
  return Status();
}

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
    Check(ReadySlot(param.group));
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

Status ShardedState::ReshardAll() {
  Status first;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (; groups_[g].holds > 0; --groups_[g].holds) {
      Status status = job_->group(static_cast<int32_t>(g)).Reshard();
      if (first.ok()) {
        first = std::move(status);
      }
    }
    ++groups_[g].hold_stamp;
    groups_[g].prefetched = false;
    if (groups_[g].readers > 0) {
      groups_[g].readers = 0;
      for (const int32_t p : groups_[g].params) {
        params_[static_cast<size_t>(p)].storage->Clear();
      }
    }
  }
  return first;
}

void ShardedState::ForgetMemory() {
  ++attachment_;
  order_.clear();
  for (GroupState& group : groups_) {
    if (group.readers > 0) {
      for (const int32_t p : group.params) {
        params_[static_cast<size_t>(p)].storage->Clear();
      }
    }
    group.holds = group.readers = group.awaiting_end = 0;
    ++group.hold_stamp;
    group.prefetched = group.ran_forward = group.submitted = group.slot_ready = group.dirty = false;
    std::fill(group.present.begin(), group.present.end(), uint8_t{0});
  }
  for (ParamState& param : params_) {
    param.gradient = at::Tensor();
  }
}

Status ShardedState::Reattach() {
  ForgetMemory();
  Status status = job_->Reattach();
  if (status.ok()) {
    LoadGradientSlots();
  }
  return status;
}

std::unique_ptr<Job> ShardedState::TakeJob() {
  ForgetMemory();
  return std::move(job_);
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
