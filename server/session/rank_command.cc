#include "server/session/rank_command.h"

namespace shardd {

absl::string_view OpcodeName(Opcode opcode) {
  switch (opcode) {
    case Opcode::kUnshard:
      return "Unshard";
    case Opcode::kReshard:
      return "Reshard";
    case Opcode::kSubmitGradients:
      return "SubmitGradients";
    case Opcode::kBackwardDone:
      return "BackwardDone";
    case Opcode::kStep:
      return "Step";
    case Opcode::kWriteParameters:
      return "WriteParameters";
    case Opcode::kCommitParameters:
      return "CommitParameters";
    case Opcode::kEnterFullParams:
      return "EnterFullParams";
    case Opcode::kLeaveFullParams:
      return "LeaveFullParams";
    case Opcode::kEnterPass:
      return "EnterPass";
    case Opcode::kWaitGradientSlot:
      return "WaitGradientSlot";
    case Opcode::kLeavePass:
      return "LeavePass";
    case Opcode::kHandIn:
      return "HandIn";
    case Opcode::kAbandonBackward:
      return "AbandonBackward";
    case Opcode::kSetGradientPresence:
      return "SetGradientPresence";
    case Opcode::kInvalid:
      break;
  }
  return "invalid";
}

}  // namespace shardd
