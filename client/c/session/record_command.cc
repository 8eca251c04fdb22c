#include "client/c/session/record_command.h"

#include "common/tensor/dtype.h"

namespace shardd {
namespace {

v1::WriteParameters WriteOfRecord(const CommandRecord& record, const ShardPlan& plan, const SessionMemoryView& view) {
  v1::WriteParameters write;
  const bool of_gradient = (record.flags & kOfGradient) != 0;
  const int state = static_cast<int16_t>(record.flags >> kWrittenStateShift);
  write.set_param(record.group);
  write.set_first_element(record.arg0);
  write.set_numel(record.arg1);
  write.set_of_gradient(of_gradient);
  write.set_optimizer_state(state);
  const bool as_stored = !of_gradient && state == 0;
  const v1::DType dtype = as_stored ? plan.params[static_cast<size_t>(record.group)].dtype : v1::DTYPE_FLOAT32;
  if (record.arg1 > 0) {
    write.set_values(view.At<char>(record.arg2), static_cast<size_t>(record.arg1 * DTypeSizeBytes(dtype)));
  }
  return write;
}

v1::EnterFullParams EnterOfRecord(const CommandRecord& record) {
  v1::EnterFullParams enter;
  enter.set_writeback((record.flags & kWriteback) != 0);
  enter.set_rank0_only((record.flags & kRank0Only) != 0);
  enter.set_with_grads((record.flags & kWithGrads) != 0);
  enter.set_not_recurse((record.flags & kNotRecurse) != 0);
  enter.set_of_edits((record.flags & kEdits) != 0);
  enter.set_scope(record.group + 1);
  return enter;
}

}  // namespace

v1::Command CommandOfRecord(const CommandRecord& record, const ShardPlan& plan, const SessionLayout& layout,
                            const SessionMemoryView& view) {
  v1::Command command;
  const char* const payload = view.At<char>(layout.payload_offset_bytes);
  switch (record.opcode) {
    case Opcode::kUnshard:
      command.mutable_unshard()->set_group(record.group);
      command.mutable_unshard()->set_phase(static_cast<v1::Phase>(record.arg0));
      break;
    case Opcode::kReshard:
      command.mutable_reshard()->set_group(record.group);
      break;
    case Opcode::kSubmitGradients: {
      const auto group = static_cast<size_t>(record.group);
      const char* const masks = view.At<char>(layout.mask_offset_bytes[group]);
      const auto mask_bytes = static_cast<size_t>(layout.mask_size_bytes[group]);
      command.mutable_submit_gradients()->set_group(record.group);
      if ((record.flags & kHasPresent) != 0) command.mutable_submit_gradients()->set_present(masks, mask_bytes);
      if ((record.flags & kHasFresh) != 0) {
        command.mutable_submit_gradients()->set_fresh(masks + mask_bytes, mask_bytes);
      }
      command.mutable_submit_gradients()->set_asks_for_others((record.flags & kAsksForOthers) != 0);
      break;
    }
    case Opcode::kBackwardDone:
      command.mutable_backward_done()->set_index(static_cast<int32_t>(record.arg0));
      command.mutable_backward_done()->set_last((record.flags & kLast) != 0);
      break;
    case Opcode::kStep:
      (void)command.mutable_step()->ParseFromArray(payload, static_cast<int>(record.arg0));
      break;
    case Opcode::kWriteParameters:
      *command.mutable_write_parameters() = WriteOfRecord(record, plan, view);
      break;
    case Opcode::kCommitParameters:
      command.mutable_commit_parameters();
      break;
    case Opcode::kEnterFullParams:
      *command.mutable_enter_full_params() = EnterOfRecord(record);
      break;
    case Opcode::kLeaveFullParams:
      command.mutable_leave_full_params();
      break;
    case Opcode::kEnterPass:
      command.mutable_enter_pass()->set_stepped((record.flags & kStepped) != 0);
      command.mutable_enter_pass()->set_has_edits((record.flags & kEdits) != 0);
      command.mutable_enter_pass()->set_trainer_state(payload, static_cast<size_t>(record.arg0));
      break;
    case Opcode::kLeavePass:
      command.mutable_leave_pass();
      break;
    case Opcode::kHandIn:
      command.mutable_hand_in();
      break;
    case Opcode::kWaitGradientSlot:
      command.mutable_wait_gradient_slot()->set_group(record.group);
      break;
    case Opcode::kAbandonBackward:
      command.mutable_abandon_backward();
      break;
    case Opcode::kSetGradientPresence:
      command.mutable_set_gradient_presence()->set_param(record.group);
      command.mutable_set_gradient_presence()->set_present(record.arg0 != 0);
      break;
    case Opcode::kInvalid:
      break;
  }
  return command;
}

}  // namespace shardd
