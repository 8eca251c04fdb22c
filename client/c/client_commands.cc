#include <string.h>

#include "absl/strings/str_cat.h"
#include "client/c/call_span.h"
#include "client/c/client_job.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

CommandRecord Record(Opcode opcode, int group, int64_t arg0 = 0, uint32_t flags = 0) {
  CommandRecord record = {};
  record.opcode = opcode;
  record.group = group;
  record.flags = flags;
  record.arg0 = arg0;
  return record;
}

}  // namespace

absl::Status ClientJob::ApplyWithTied(int index, HandleEvent event) {
  const std::vector<int>& tied = group(index).also_unshards;
  if (tied.empty()) {
    return handle(index).Apply(event, group_name(index), rank());
  }
  // All or nothing: tried on copies first.
  Handle trial = handle(index);
  SHARDD_RETURN_IF_ERROR(trial.Apply(event, group_name(index), rank()));
  for (const int other : tied) {
    Handle copy = handle(other);
    SHARDD_RETURN_IF_ERROR(copy.Apply(event, group_name(other), rank()));
  }
  handle(index) = trial;
  for (const int other : tied) {
    (void)handle(other).Apply(event, group_name(other), rank());
  }
  return absl::OkStatus();
}

absl::Status ClientJob::ApplyToAll(HandleEvent event) {
  std::vector<Handle> trial = progress_.handles;
  for (size_t i = 0; i < trial.size(); ++i) {
    SHARDD_RETURN_IF_ERROR(trial[i].Apply(event, plan_.groups[i].name, rank()));
  }
  progress_.handles = std::move(trial);
  return absl::OkStatus();
}

absl::Status ClientJob::Unshard(int index, HandleEvent event) {
  CallSpan span(
      this, session_.get(),
      event == HandleEvent::kUnshardForward ? v1::TRACE_CALL_UNSHARD_FORWARD : v1::TRACE_CALL_UNSHARD_BACKWARD, index);
  SHARDD_RETURN_IF_ERROR(Live());
  if (expected_version_ == 0) {
    return absl::FailedPreconditionError(absl::StrCat("unshard group \"", group_name(index),
                                                      "\": the parameters have no values yet (version 0; rank=", rank(),
                                                      "); call shardd_write_parameter and shardd_commit_parameters"));
  }
  if (!plan_.config.trainers_never_write()) {
    SHARDD_RETURN_IF_ERROR(ReadAgain(absl::StrCat("unshard group \"", group_name(index), "\"")));
  }
  const WaitFor reason{"unshard", &group_name(index), "space in the command ring"};
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1 + group(index).also_unshards.size(), reason)));
  SHARDD_RETURN_IF_ERROR(ApplyWithTied(index, event));
  // Tied parameters first: they are needed with the group, and the pool serves in order.
  for (const int other : group(index).also_unshards) {
    SHARDD_RETURN_IF_ERROR(SendUnshard(other, event));
  }
  return span.Of(SendUnshard(index, event));
}

absl::Status ClientJob::SendUnshard(int index, HandleEvent event) {
  const int64_t phase = event == HandleEvent::kUnshardForward ? v1::PHASE_FORWARD : v1::PHASE_BACKWARD;
  const WaitFor reason{"unshard", &group_name(index), "space in the command ring"};
  ++progress_.unshards[static_cast<size_t>(index)];
  // Zero-copy: the parameters are where they always are, the daemon only keeps count.
  return Note(session_->Send(Record(Opcode::kUnshard, index, phase), /*act=*/pooled(), reason));
}

absl::Status ClientJob::WaitUnshard(int index) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_WAIT_UNSHARD, index);
  if (handle(index).storage() == StorageState::kSharded) {
    SHARDD_RETURN_IF_ERROR(Live());
    return absl::FailedPreconditionError(absl::StrCat("wait_unshard group \"", group_name(index),
                                                      "\": it is not being unsharded (", handle(index).DebugString(),
                                                      "; rank=", rank(), "); call shardd_unshard first"));
  }
  for (const int other : group(index).also_unshards) {
    SHARDD_RETURN_IF_ERROR(WaitUnshardOne(other));
  }
  return span.Of(WaitUnshardOne(index));
}

absl::Status ClientJob::WaitPassBegun(const char* call, const std::string* group) {
  if (progress_.pass_begins) {
    const WaitFor reason{call, group, "the copies that the pass reads"};
    SHARDD_RETURN_IF_ERROR(Note(session_->Wait(session_->daemon_page().page().passes, progress_.passes, reason)));
    RetireSteps();
  }
  return absl::OkStatus();
}

absl::Status ClientJob::WaitCommitted(const char* call, const std::string* group) {
  SHARDD_RETURN_IF_ERROR(WaitPassBegun(call, group));
  const WaitFor reason{call, group, "the commit of the last step"};
  return Note(session_->Wait(session_->daemon_page().page().version, expected_version_, reason));
}

absl::Status ClientJob::WaitUnshardOne(int index) {
  SHARDD_RETURN_IF_ERROR(Live());
  const ReadOnlyDaemonPageView& page = session_->daemon_page();
  if (!pooled()) {
    // Before the commit the rank gives nothing back that others could wait for, so its stream may wait for it.
    if (progress_.awaited_version != expected_version_) {
      const WaitFor reason{"wait_unshard", &group_name(index), "the commit of the last step"};
      SHARDD_RETURN_IF_ERROR(Note(session_->WaitInStream(page.page().version, expected_version_, reason)));
      progress_.awaited_version = expected_version_;
    }
  } else {
    const GroupEntry& entry = page.group(index);
    const WaitFor reason{"wait_unshard", &group_name(index), "the unshard"};
    const uint64_t asked = progress_.unshards[static_cast<size_t>(index)];
    if (session_->stream_ordered()) {
      SHARDD_RETURN_IF_ERROR(Note(session_->Wait(entry.issued, asked, reason)));
    }
    SHARDD_RETURN_IF_ERROR(Note(session_->WaitInStream(entry.unsharded, asked, reason)));
    const int64_t offset = entry.pool_offset_bytes.load(std::memory_order_relaxed);
    if (offset < 0 || offset > plan_.memory.unsharded_pool_bytes - group(index).unsharded_bytes) {
      return absl::InternalError(absl::StrCat(
          "wait_unshard group \"", group_name(index), "\": its place lies outside of the pool (got offset ", offset,
          ", want 0 to ", plan_.memory.unsharded_pool_bytes - group(index).unsharded_bytes, ")"));
    }
    progress_.pool_offset_bytes[static_cast<size_t>(index)] = offset;
  }
  if (handle(index).storage() == StorageState::kUnsharding) {
    return handle(index).Apply(HandleEvent::kUnshardDone, group_name(index), rank());
  }
  return absl::OkStatus();
}

const void* ClientJob::ParameterData(int index) const {
  const ParamPlan& param = this->param(index);
  if (handle(param.group).storage() != StorageState::kUnsharded) {
    return nullptr;
  }
  const FlatParamPlan& flat = flat_of(param);
  const int64_t element_offset_bytes = param.offset * DTypeSizeBytes(flat.unsharded_dtype);
  if (pooled()) {
    return session_->pool() + progress_.pool_offset_bytes[static_cast<size_t>(param.group)] + flat.pool_offset_bytes +
           element_offset_bytes;
  }
  if (flat.params_offset_bytes >= 0) {
    return session_->parameters() + flat.params_offset_bytes + element_offset_bytes;
  }
  return session_->shards() + flat.shards_offset_bytes + element_offset_bytes;
}

absl::Status ClientJob::Reshard(int index) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_RESHARD, index);
  SHARDD_RETURN_IF_ERROR(Live());
  const WaitFor reason{"reshard", &group_name(index), "space in the command ring"};
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1 + group(index).also_unshards.size(), reason)));
  CommandRecord record = Record(Opcode::kReshard, index);
  if (pooled()) {  // else nothing is given back before the step
    SHARDD_ASSIGN_OR_RETURN(record.done, GiveBack(reason));
  }
  SHARDD_RETURN_IF_ERROR(ApplyWithTied(index, HandleEvent::kReshard));
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/pooled(), reason)));
  for (const int other : group(index).also_unshards) {
    record.group = other;
    SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/pooled(), reason)));
  }
  return span.Of(absl::OkStatus());
}

absl::Status ClientJob::WaitGradientSlot(int index) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_WAIT_GRADIENT_SLOT, index);
  SHARDD_RETURN_IF_ERROR(Live());
  const int slot_index = group(index).gradient_slot;
  if (slot_index < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("wait_gradient_slot group \"", group_name(index),
                     "\": it has no gradient slot, all its parameters are frozen (rank=", rank(), ")"));
  }
  Slot& slot = progress_.slots[static_cast<size_t>(slot_index)];
  const TimelineWord& released = session_->daemon_page().slot(slot_index).released;
  const TimelineWord& word = session_->stream_ordered() ? session_->daemon_page().slot(slot_index).issued : released;
  const WaitFor reason{"wait_gradient_slot", &group_name(index), "the reduction of the slot's last submission"};
  if (!slot.told && !session_->Spin(word, slot.submissions)) {
    // The daemon then knows that this rank stands still, and adds out of turn if all do.
    SHARDD_RETURN_IF_ERROR(Note(session_->Send(Record(Opcode::kWaitGradientSlot, index), /*act=*/true, reason)));
    slot.told = true;
  }
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(word, slot.submissions, reason)));
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitInStream(released, slot.submissions, reason)));
  slot.holder = index;
  return span.Of(absl::OkStatus());
}

void* ClientJob::GradientData(int index) const {
  const ParamPlan& param = this->param(index);
  const int slot = group(param.group).gradient_slot;
  const FlatParamPlan& flat = flat_of(param);
  if (!param.requires_grad || slot < 0 || flat.slot_offset_bytes < 0) {
    return nullptr;
  }
  return session_->gradient_slots() + plan_.gradient_slots[static_cast<size_t>(slot)].offset_bytes +
         flat.slot_offset_bytes + param.offset * DTypeSizeBytes(flat.unsharded_dtype);
}

absl::Status ClientJob::CheckMask(int index, const char* which, const uint8_t* mask) const {
  const GroupPlan& group = this->group(index);
  const std::vector<uint8_t>& trainable = trainable_masks_[static_cast<size_t>(index)];
  for (size_t byte = 0; byte < trainable.size(); ++byte) {
    const int surplus = mask[byte] & ~trainable[byte];
    if (surplus == 0) {
      continue;
    }
    const size_t bit = byte * 8 + static_cast<size_t>(__builtin_ctz(static_cast<unsigned>(surplus)));
    const std::string what = bit < group.params.size()
                                 ? absl::StrCat("names the frozen parameter \"", param(group.params[bit]).fqn, "\"")
                                 : absl::StrCat("has a bit beyond the group's parameters (got bit ", bit,
                                                ", want below ", group.params.size(), ")");
    return absl::InvalidArgumentError(
        absl::StrCat("submit_gradients group \"", group.name, "\": mask `", which, "` ", what, " (rank=", rank(), ")"));
  }
  return absl::OkStatus();
}

absl::Status ClientJob::SubmitGradients(int index, const uint8_t* present, const uint8_t* fresh) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_SUBMIT_GRADIENTS, index);
  SHARDD_RETURN_IF_ERROR(Live());
  const GroupPlan& group = this->group(index);
  if (group.gradient_slot < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("submit_gradients group \"", group.name, "\": all its parameters are frozen (rank=", rank(), ")"));
  }
  if (progress_.last_closed) {
    return absl::FailedPreconditionError(absl::StrCat("submit_gradients group \"", group.name,
                                                      "\": the last backward of this step is closed (rank=", rank(),
                                                      "); call shardd_step first"));
  }
  Slot& slot = progress_.slots[static_cast<size_t>(group.gradient_slot)];
  if (slot.holder != index && (slot.holder >= 0 || slot.submissions > 0)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "submit_gradients group \"", group.name, "\": its gradient slot may hold another submission (slot ",
        group.gradient_slot, "; rank=", rank(), "); call shardd_wait_gradient_slot before the gradients are written"));
  }
  if (present != nullptr) {
    SHARDD_RETURN_IF_ERROR(CheckMask(index, "present", present));
  }
  if (fresh != nullptr) {
    SHARDD_RETURN_IF_ERROR(CheckMask(index, "fresh", fresh));
  }
  SHARDD_RETURN_IF_ERROR(WaitCommitted("submit_gradients", &group.name));
  const WaitFor reason{"submit_gradients", &group.name, "the daemon's copy of the group's masks"};
  uint64_t& mask_record = progress_.mask_record[static_cast<size_t>(index)];
  const int64_t mask_bytes = layout_.mask_size_bytes[static_cast<size_t>(index)];
  uint32_t flags = 0;
  if (present != nullptr || fresh != nullptr) {
    SHARDD_RETURN_IF_ERROR(Note(session_->WaitConsumed(mask_record, reason)));
  }
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1, reason)));
  SHARDD_ASSIGN_OR_RETURN(const uint64_t done, GiveBack(reason));
  SHARDD_RETURN_IF_ERROR(handle(index).Apply(HandleEvent::kSubmitGradients, group.name, rank()));
  uint8_t* masks = session_->memory().At<uint8_t>(layout_.mask_offset_bytes[static_cast<size_t>(index)]);
  if (present != nullptr) {
    flags |= kHasPresent;
    memcpy(masks, present, static_cast<size_t>(mask_bytes));
  }
  if (fresh != nullptr) {
    flags |= kHasFresh;
    for (int64_t i = 0; i < mask_bytes; ++i) {
      // A gradient that is not there cannot be fresh.
      masks[mask_bytes + i] = present == nullptr ? fresh[i] : static_cast<uint8_t>(fresh[i] & present[i]);
    }
  }
  CommandRecord record = Record(Opcode::kSubmitGradients, index, 0, flags);
  record.done = done;
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
  if (flags != 0) {
    mask_record = session_->submitted();
  }
  progress_.backward_open = progress_.has_gradients = true;
  ++slot.submissions;
  slot.holder = -1;
  slot.told = false;
  return span.Of(absl::OkStatus());
}

absl::Status ClientJob::BackwardDone(bool last) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_BACKWARD_DONE);
  SHARDD_RETURN_IF_ERROR(Live());
  if (progress_.last_closed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "backward_done job \"", spec().name(), "\": the last backward of this step is closed already (rank=", rank(),
        "); call shardd_step first"));
  }
  SHARDD_RETURN_IF_ERROR(WaitCommitted("backward_done", nullptr));
  const WaitFor reason{"backward_done", nullptr, "space in the command ring"};
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1, reason)));
  CommandRecord record = Record(Opcode::kBackwardDone, 0, progress_.backwards, last ? kLast : 0);
  SHARDD_ASSIGN_OR_RETURN(record.done, GiveBack(reason));
  SHARDD_RETURN_IF_ERROR(ApplyToAll(HandleEvent::kBackwardDone));
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
  ++progress_.backwards;
  ++progress_.backwards_closed;
  progress_.has_gradients = true;  // from now on other ranks' may be added into this one's rows
  progress_.last_closed = last;
  progress_.backward_open = false;
  return span.Of(absl::OkStatus());
}

}  // namespace shardd
