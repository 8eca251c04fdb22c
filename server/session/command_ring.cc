#include "server/session/command_ring.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/shm/timeline.h"
#include "server/session/command_decoder.h"

namespace shardd {

const char* CommandRing::Staging(int64_t offset_bytes, int64_t size_bytes) const {
  // Small: one command copies no more than this on the daemon's loop.
  const int64_t end = layout_.sum_words_offset_bytes != 0 ? layout_.sum_words_offset_bytes : layout_.slots_offset_bytes;
  if (offset_bytes < layout_.payload_offset_bytes || offset_bytes > end || size_bytes < 0 ||
      size_bytes > end - offset_bytes) {
    return nullptr;
  }
  return view_.At<char>(offset_bytes);
}

bool CommandRing::HasCommands() const {
  const uint64_t submitted = view_.page().submitted.load(std::memory_order_seq_cst);
  return TimelineEpoch(submitted) == epoch_ && TimelineSequence(submitted) != consumed_;
}

absl::StatusOr<RankCommand> CommandRing::Next() {
  const uint64_t submitted = view_.page().submitted.load(std::memory_order_acquire);
  if (TimelineEpoch(submitted) != epoch_ || TimelineSequence(submitted) == consumed_) {
    return absl::NotFoundError("");
  }
  const uint64_t count = TimelineSequence(submitted);
  if (count < consumed_ || count - consumed_ > kRingRecords) {
    return absl::InvalidArgumentError(absl::StrCat("ring: submitted word is out of range (got ", count, ", want ",
                                                   consumed_, " to ", consumed_ + kRingRecords, "; rank=", rank_, ")"));
  }
  CommandRecord record;  // copied once: the client may write it again at any moment
  std::memcpy(static_cast<void*>(&record), &view_.record(consumed_), sizeof(record));
  if (record.sequence != consumed_) {
    return absl::InvalidArgumentError(absl::StrCat("ring: record has the wrong sequence (got ", record.sequence,
                                                   ", want ", consumed_, "; rank=", rank_, ")"));
  }
  RankCommand command;
  command.opcode = record.opcode;
  command.flags = record.flags;
  command.group = record.group;
  command.arg0 = record.arg0;
  command.arg1 = record.arg1;
  command.arg2 = record.arg2;
  // Signals of one stream, so of records in order. One that never comes holds up this client's job alone.
  if (record.done > kTimelineSequenceMask || (record.done != 0 && record.done < last_done_)) {
    return absl::InvalidArgumentError(absl::StrCat("ring: signal is out of range (got ", record.done, ", want 0 or ",
                                                   last_done_, " to 2^40; rank=", rank_, ")"));
  }
  command.done = record.done;
  stream_ordered_ = stream_ordered_ || record.done != 0;
  last_done_ = std::max(last_done_, record.done);
  const int groups = static_cast<int>(plan_.groups.size());
  switch (record.opcode) {
    case Opcode::kSubmitGradients:
    case Opcode::kUnshard:
    case Opcode::kReshard:
    case Opcode::kWaitGradientSlot: {
      if (record.group < 0 || record.group >= groups) {
        return absl::InvalidArgumentError(absl::StrCat(OpcodeName(record.opcode), ": no such group (got ", record.group,
                                                       ", want 0 to ", groups - 1, "; rank=", rank_, ")"));
      }
      if (record.opcode == Opcode::kSubmitGradients) {
        const uint8_t* masks = view_.At<uint8_t>(layout_.mask_offset_bytes[record.group]);
        if ((record.flags & kHasPresent) != 0) {
          command.present = decoder_.CopyMask(masks, record.group);
        }
        if ((record.flags & kHasFresh) != 0) {
          command.fresh = decoder_.CopyMask(masks + layout_.mask_size_bytes[record.group], record.group);
        }
      }
      break;
    }
    case Opcode::kStep: {
      const char* payload =
          record.arg0 <= kStepPayloadBytes ? Staging(layout_.payload_offset_bytes, record.arg0) : nullptr;
      if (payload == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat("Step: payload is out of range (got ", record.arg0,
                                                       " bytes, want at most ", kStepPayloadBytes, "; rank=", rank_,
                                                       ")"));
      }
      const std::string copy(payload, record.arg0);  // looked at and parsed there: the client may still write
      command.step = std::make_unique<v1::Step>();
      if (absl::Status status = decoder_.ParseStep(copy, command.step.get()); !status.ok()) {
        return status;
      }
      break;
    }
    case Opcode::kEnterPass: {
      const char* state = record.arg0 >= 0 && record.arg0 <= kMaxTrainerStateBytes
                              ? Staging(layout_.payload_offset_bytes, record.arg0)
                              : nullptr;
      if (state == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat("EnterPass: trainer state is out of range (got ", record.arg0,
                                                       " bytes, want 0 to ", kMaxTrainerStateBytes, "; rank=", rank_,
                                                       ")"));
      }
      command.trainer_state.assign(state, static_cast<size_t>(record.arg0));
      break;
    }
    case Opcode::kBackwardDone:
    case Opcode::kWriteParameters:
    case Opcode::kCommitParameters:
    case Opcode::kEnterFullParams:
    case Opcode::kLeaveFullParams:
    case Opcode::kLeavePass:
    case Opcode::kHandIn:
    case Opcode::kAbandonBackward:
    case Opcode::kSetGradientPresence:
      break;
    case Opcode::kInvalid:
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("ring: unknown opcode (got ", static_cast<uint32_t>(record.opcode), "; rank=", rank_, ")"));
  }
  // WriteParameters reads the staging area before the next record is taken; `consumed` then tells the client that
  // place, masks and staging are free.
  return command;
}

void CommandRing::PublishConsumed() {
  ++consumed_;
  TimelineStore(page_.page().consumed, TimelineValue(epoch_, consumed_), &view_.page().waiting);
}

}  // namespace shardd
