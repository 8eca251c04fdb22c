#include "client/c/job/gradients.h"

#include <string.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "client/c/attachment/call_span.h"
#include "common/status/status_macros.h"

namespace shardd {

void Gradients::Reset() {
  slots_.assign(attachment_.plan().plan().gradient_slots.size(), Slot());
  mask_record_.assign(attachment_.plan().groups(), 0);
  backwards_ = 0;
  backwards_closed_ = 0;
  others_seen_ = 0;
  given_by_others_.clear();
  last_closed_ = backward_open_ = has_gradients_ = false;
}

void Gradients::BeginStep(bool goes_on) {
  backwards_ = 0;
  last_closed_ = false;
  has_gradients_ = has_gradients_ && goes_on;
}

absl::Status Gradients::CheckTrains(const char* call, int index) const {
  const GroupPlan& group = attachment_.plan().group(index);
  return group.gradient_slot >= 0
             ? absl::OkStatus()
             : absl::FailedPreconditionError(absl::StrCat(
                   call, " group \"", group.name,
                   "\": it has no gradient slot, all its parameters are frozen (rank=", attachment_.rank(), ")"));
}

absl::Status Gradients::WaitSlot(int index) {
  CallSpan span(attachment_, v1::TRACE_CALL_WAIT_GRADIENT_SLOT, index);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckTrains("wait_gradient_slot", index));
  const GroupPlan& group = attachment_.plan().group(index);
  Slot& slot = slot_of(index);
  ClientSession& session = attachment_.session();
  const TimelineWord& released = session.memory().daemon_page().slot(group.gradient_slot).released;
  const TimelineWord& word =
      session.stream_waits().ordered() ? session.memory().daemon_page().slot(group.gradient_slot).issued : released;
  const WaitFor reason{"wait_gradient_slot", &group.name, "the reduction of the slot's last submission"};
  if (!slot.told && !session.waits().Spin(word, slot.submissions)) {
    // The daemon then knows that this rank stands still, and adds out of turn if all do.
    CommandRecord record = {};
    record.opcode = Opcode::kWaitGradientSlot;
    record.group = index;
    SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
    slot.told = true;
  }
  SHARDD_RETURN_IF_ERROR(attachment_.Wait(word, slot.submissions, reason));
  SHARDD_RETURN_IF_ERROR(attachment_.WaitInStream(released, slot.submissions, reason));
  slot.holder = index;
  return span.Of(absl::OkStatus());
}

void* Gradients::SlotData(int index) const {
  const RankPlan& plan = attachment_.plan();
  const ParamPlan& param = plan.param(index);
  const int slot = plan.group(param.group).gradient_slot;
  const FlatParamPlan& flat = plan.flat_of(param);
  if (!param.requires_grad || slot < 0 || flat.slot_offset_bytes < 0) {
    return nullptr;
  }
  return attachment_.memory().gradient_slots() + plan.plan().gradient_slots[static_cast<size_t>(slot)].offset_bytes +
         flat.slot_offset_bytes + param.offset * DTypeSizeBytes(flat.unsharded_dtype);
}

absl::Status Gradients::CheckMask(int index, const char* which, const uint8_t* mask) const {
  const RankPlan& plan = attachment_.plan();
  const GroupPlan& group = plan.group(index);
  const std::vector<uint8_t>& trainable = plan.trainable_mask(index);
  for (size_t byte = 0; byte < trainable.size(); ++byte) {
    const int surplus = mask[byte] & ~trainable[byte];
    if (surplus == 0) {
      continue;
    }
    const size_t bit = byte * 8 + static_cast<size_t>(__builtin_ctz(static_cast<unsigned>(surplus)));
    const std::string what =
        bit < group.params.size()
            ? absl::StrCat("names the frozen parameter \"", plan.param(group.params[bit]).fqn, "\"")
            : absl::StrCat("has a bit beyond the group's parameters (got bit ", bit, ", want below ",
                           group.params.size(), ")");
    return absl::InvalidArgumentError(absl::StrCat("submit_gradients group \"", group.name, "\": mask `", which, "` ",
                                                   what, " (rank=", attachment_.rank(), ")"));
  }
  return absl::OkStatus();
}

absl::Status Gradients::CheckMasks(int group, const uint8_t* present, const uint8_t* fresh) const {
  if (present != nullptr) {
    SHARDD_RETURN_IF_ERROR(CheckMask(group, "present", present));
  }
  return fresh != nullptr ? CheckMask(group, "fresh", fresh) : absl::OkStatus();
}

uint32_t Gradients::PutMasks(int group, const uint8_t* present, const uint8_t* fresh) {
  const SessionLayout& layout = attachment_.plan().layout();
  const int64_t mask_bytes = layout.mask_size_bytes[static_cast<size_t>(group)];
  uint8_t* masks = attachment_.memory().view().At<uint8_t>(layout.mask_offset_bytes[static_cast<size_t>(group)]);
  if (present != nullptr) {
    memcpy(masks, present, static_cast<size_t>(mask_bytes));
  }
  if (fresh != nullptr) {
    for (int64_t i = 0; i < mask_bytes; ++i) {
      // A gradient that is not there cannot be fresh.
      masks[mask_bytes + i] = present == nullptr ? fresh[i] : static_cast<uint8_t>(fresh[i] & present[i]);
    }
  }
  return (present != nullptr ? kHasPresent : 0u) | (fresh != nullptr ? kHasFresh : 0u);
}

absl::Status Gradients::Submit(int index, const uint8_t* present, const uint8_t* fresh) {
  CallSpan span(attachment_, v1::TRACE_CALL_SUBMIT_GRADIENTS, index);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckTrains("submit_gradients", index));
  SHARDD_RETURN_IF_ERROR(CheckMasks(index, present, fresh));
  const GroupPlan& group = attachment_.plan().group(index);
  if (last_closed_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "submit_gradients group \"", group.name,
        "\": the last backward of this step is closed (rank=", attachment_.rank(), "); call shardd_step first"));
  }
  Slot& slot = slot_of(index);
  if (slot.holder != index && (slot.holder >= 0 || slot.submissions > 0)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "submit_gradients group \"", group.name, "\": its gradient slot may hold another submission (slot ",
        group.gradient_slot, "; rank=", attachment_.rank(),
        "); call shardd_wait_gradient_slot before the gradients are written"));
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitCommitted("submit_gradients", &group.name));
  const WaitFor reason{"submit_gradients", &group.name, "the daemon's copy of the group's masks"};
  uint64_t& mask_record = mask_record_[static_cast<size_t>(index)];
  if (present != nullptr || fresh != nullptr) {
    SHARDD_RETURN_IF_ERROR(attachment_.WaitConsumed(mask_record, reason));
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitSpace(1, reason));
  CommandRecord record = {};
  SHARDD_ASSIGN_OR_RETURN(record.done, attachment_.GiveBack(reason));
  SHARDD_RETURN_IF_ERROR(handles_.Apply(index, HandleEvent::kSubmitGradients));
  record.opcode = Opcode::kSubmitGradients;
  record.group = index;
  record.flags = PutMasks(index, present, fresh) | (asks_for_others_ ? kAsksForOthers : 0u);
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
  if (present != nullptr || fresh != nullptr) {
    mask_record = attachment_.session().ring().submitted();
  }
  backward_open_ = has_gradients_ = true;
  ++slot.submissions;
  slot.holder = -1;
  slot.told = false;
  return span.Of(absl::OkStatus());
}

absl::Status Gradients::BackwardDone(bool last) {
  CallSpan span(attachment_, v1::TRACE_CALL_BACKWARD_DONE);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  if (last_closed_) {
    return absl::FailedPreconditionError(absl::StrCat("backward_done job \"", attachment_.plan().job(),
                                                      "\": the last backward of this step is closed already (rank=",
                                                      attachment_.rank(), "); call shardd_step first"));
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitCommitted("backward_done", nullptr));
  const WaitFor reason{"backward_done", nullptr, "space in the command ring"};
  SHARDD_ASSIGN_OR_RETURN(CommandRecord record, attachment_.GivingBack(Opcode::kBackwardDone, 1, reason));
  SHARDD_RETURN_IF_ERROR(handles_.ApplyToAll(HandleEvent::kBackwardDone));
  record.flags = last ? kLast : 0;
  record.arg0 = backwards_;
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
  ++backwards_;
  ++backwards_closed_;
  has_gradients_ = true;  // from now on other ranks' may be added into this one's rows
  last_closed_ = last;
  backward_open_ = false;
  return span.Of(absl::OkStatus());
}

absl::Status Gradients::WaitReduced() {
  CallSpan span(attachment_, v1::TRACE_CALL_WAIT_GRADIENTS);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const WaitFor reason{"wait_gradients", nullptr, "the reduction of the backwards closed so far"};
  const DaemonPage& page = attachment_.page();
  if (attachment_.session().stream_waits().ordered()) {
    SHARDD_RETURN_IF_ERROR(attachment_.Wait(page.reducing, backwards_closed_, reason));
  }
  return span.Of(attachment_.WaitInStream(page.reduced, backwards_closed_, reason));
}

}  // namespace shardd
