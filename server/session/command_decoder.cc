#include "server/session/command_decoder.h"

#include <limits>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/plan/session_layout.h"
#include "common/shm/session_view.h"
#include "common/status/status_macros.h"
#include "common/wire/message_bounds.h"

namespace shardd {

std::vector<bool> CommandDecoder::CopyMask(const uint8_t* mask, int group) const {
  std::vector<bool> result(plan_->groups[group].params.size());
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = MaskBit(mask, static_cast<int64_t>(i));
  }
  return result;
}

// On the loop, so bounded in time too: a payload of empty or unknown fields would take 37 ms and 13 MiB.
absl::Status CommandDecoder::ParseStep(absl::string_view bytes, v1::Step* step) const {
  const MessageLimits limits = {kStepPayloadBytes, std::numeric_limits<int64_t>::max(), UnknownFields::kRefused,
                                MostFieldsOfAStep()};
  absl::Status status = EstimateDecodedBytes("Step", bytes, *v1::Step::descriptor(), limits).status();
  if (status.ok() && !step->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    status = MalformedMessage("Step", *v1::Step::descriptor());
  }
  return status.ok()
             ? status
             : absl::Status(absl::StatusCode::kInvalidArgument, absl::StrCat(status.message(), " (rank=", rank_, ")"));
}

int64_t CommandDecoder::MostOptimizerGroups() const {
  // More than there are: who has miscounted is told what is right when the step is looked at.
  return plan_->config.optimizer().groups_size() + 16;
}

int64_t CommandDecoder::MostFieldsOfAStep() const {
  return v1::Step::descriptor()->field_count() +
         MostOptimizerGroups() * (1 + v1::HyperParameters::descriptor()->field_count());
}

absl::StatusOr<RankCommand> CommandDecoder::Decode(const v1::Command& in) const {
  RankCommand command;
  const int groups = static_cast<int>(plan_->groups.size());
  auto check_group = [&](int32_t group) -> absl::Status {
    if (group < 0 || group >= groups) {
      return absl::InvalidArgumentError(
          absl::StrCat("command: no such group (got ", group, ", want 0 to ", groups - 1, "; rank=", rank_, ")"));
    }
    return absl::OkStatus();
  };
  auto check_state = [&](absl::string_view what, const std::string& state) -> absl::Status {
    if (static_cast<int64_t>(state.size()) > kMaxTrainerStateBytes) {
      return absl::InvalidArgumentError(absl::StrCat(what, ": trainer state is too large (got ", state.size(),
                                                     ", want at most ", kMaxTrainerStateBytes, " bytes; rank=", rank_,
                                                     ")"));
    }
    return absl::OkStatus();
  };
  auto mask = [&](const std::string& bytes, int group) -> absl::StatusOr<std::vector<bool>> {
    const int bits = static_cast<int>(plan_->groups[group].params.size());
    if (bytes.empty()) {
      return std::vector<bool>();
    }
    if (static_cast<int64_t>(bytes.size()) != MaskBytes(bits)) {
      return absl::InvalidArgumentError(absl::StrCat("SubmitGradients group \"", plan_->groups[group].name,
                                                     "\": mask has the wrong size (got ", bytes.size(), ", want ",
                                                     MaskBytes(bits), " bytes; rank=", rank_, ")"));
    }
    return CopyMask(reinterpret_cast<const uint8_t*>(bytes.data()), group);
  };
  switch (in.kind_case()) {
    case v1::Command::kUnshard:
      SHARDD_RETURN_IF_ERROR(check_group(in.unshard().group()));
      command.opcode = Opcode::kUnshard;
      command.group = in.unshard().group();
      command.arg0 = in.unshard().phase();
      break;
    case v1::Command::kReshard:
      SHARDD_RETURN_IF_ERROR(check_group(in.reshard().group()));
      command.opcode = Opcode::kReshard;
      command.group = in.reshard().group();
      break;
    case v1::Command::kSubmitGradients: {
      const auto& submit = in.submit_gradients();
      SHARDD_RETURN_IF_ERROR(check_group(submit.group()));
      command.opcode = Opcode::kSubmitGradients;
      command.group = submit.group();
      SHARDD_ASSIGN_OR_RETURN(command.present, mask(submit.present(), submit.group()));
      SHARDD_ASSIGN_OR_RETURN(command.fresh, mask(submit.fresh(), submit.group()));
      command.flags = submit.asks_for_others() ? kAsksForOthers : 0;
      break;
    }
    case v1::Command::kBackwardDone:
      command.opcode = Opcode::kBackwardDone;
      command.arg0 = in.backward_done().index();
      command.flags = in.backward_done().last() ? kLast : 0;
      break;
    case v1::Command::kStep:  // copied on the loop: of the size that a record's can have
      SHARDD_RETURN_IF_ERROR(check_state("Step", in.step().trainer_state()));
      if (in.step().groups_size() > MostOptimizerGroups()) {
        return absl::InvalidArgumentError(
            absl::StrCat("Step: optimizer groups are too many (got ", in.step().groups_size(), ", want ",
                         plan_->config.optimizer().groups_size() + 1, " at most; rank=", rank_, ")"));
      }
      command.opcode = Opcode::kStep;
      command.step = std::make_unique<v1::Step>(in.step());
      break;
    case v1::Command::kWriteParameters:
      command.opcode = Opcode::kWriteParameters;
      command.group = in.write_parameters().param();
      command.arg0 = in.write_parameters().first_element();
      command.arg1 = in.write_parameters().numel();
      command.arg2 = in.write_parameters().staging_offset_bytes();
      if (const int32_t state = in.write_parameters().optimizer_state(); state != static_cast<int16_t>(state)) {
        return absl::InvalidArgumentError(
            absl::StrCat("WriteParameters: optimizer_state is out of range (got ", state, "; rank=", rank_, ")"));
      }
      command.flags = (in.write_parameters().of_gradient() ? kOfGradient : 0) |
                      static_cast<uint32_t>(in.write_parameters().optimizer_state()) << kWrittenStateShift;
      if (const std::string& values = in.write_parameters().values(); !values.empty()) {
        if (static_cast<int64_t>(values.size()) > kStepPayloadBytes) {  // as the staging area, for the same reason
          return absl::InvalidArgumentError(absl::StrCat("WriteParameters: values are too many (got ", values.size(),
                                                         ", want at most ", kStepPayloadBytes, " bytes; rank=", rank_,
                                                         ")"));
        }
        command.values = std::make_shared<const std::string>(values);
      }
      break;
    case v1::Command::kCommitParameters:
      command.opcode = Opcode::kCommitParameters;
      break;
    case v1::Command::kEnterFullParams:
      command.opcode = Opcode::kEnterFullParams;
      // Unsigned, as a client may send the least number there is; the table of requests refuses what is no group.
      command.group = static_cast<int32_t>(static_cast<uint32_t>(in.enter_full_params().scope()) - 1);
      command.flags = (in.enter_full_params().writeback() ? kWriteback : 0) |
                      (in.enter_full_params().rank0_only() ? kRank0Only : 0) |
                      (in.enter_full_params().with_grads() ? kWithGrads : 0) |
                      (in.enter_full_params().not_recurse() ? kNotRecurse : 0) |
                      (in.enter_full_params().of_edits() ? kEdits : 0);
      break;
    case v1::Command::kLeaveFullParams:
      command.opcode = Opcode::kLeaveFullParams;
      break;
    case v1::Command::kEnterPass:
      SHARDD_RETURN_IF_ERROR(check_state("EnterPass", in.enter_pass().trainer_state()));
      command.opcode = Opcode::kEnterPass;
      command.flags = (in.enter_pass().stepped() ? kStepped : 0) | (in.enter_pass().has_edits() ? kEdits : 0);
      command.trainer_state = in.enter_pass().trainer_state();
      break;
    case v1::Command::kLeavePass:
      command.opcode = Opcode::kLeavePass;
      break;
    case v1::Command::kHandIn:
      command.opcode = Opcode::kHandIn;
      break;
    case v1::Command::kAbandonBackward:
      command.opcode = Opcode::kAbandonBackward;
      break;
    case v1::Command::kSetGradientPresence:
      command.opcode = Opcode::kSetGradientPresence;
      command.group = in.set_gradient_presence().param();
      command.arg0 = in.set_gradient_presence().present() ? 1 : 0;
      break;
    case v1::Command::kWaitGradientSlot:
      SHARDD_RETURN_IF_ERROR(check_group(in.wait_gradient_slot().group()));
      command.opcode = Opcode::kWaitGradientSlot;
      command.group = in.wait_gradient_slot().group();
      break;
    case v1::Command::KIND_NOT_SET:
      return absl::InvalidArgumentError(absl::StrCat("command: kind is not set (rank=", rank_, ")"));
  }
  return command;
}

}  // namespace shardd
