#include "server/session/session.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "common/wire/message_bounds.h"

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
    case Opcode::kOpenWindow:
      return "OpenWindow";
    case Opcode::kAbandonBackward:
      return "AbandonBackward";
    case Opcode::kSetGradientPresence:
      return "SetGradientPresence";
    case Opcode::kInvalid:
      break;
  }
  return "invalid";
}

absl::StatusOr<std::unique_ptr<Session>> Session::Create(std::shared_ptr<const ShardPlan> plan, uint64_t id, int rank,
                                                         uint64_t epoch, const SlabPlace& place) {
  std::unique_ptr<Session> session(new Session());
  session->plan_ = std::move(plan);
  session->id_ = id;
  session->rank_ = rank;
  session->epoch_ = epoch;
  session->layout_ = MakeSessionLayout(*session->plan_, /*slots_elsewhere=*/place.memory != nullptr);
  session->token_.resize(kTokenBytes);
  if (getrandom(session->token_.data(), kTokenBytes, 0) != kTokenBytes) {
    return absl::InternalError(absl::StrCat("attach rank ", rank, ": getrandom: ", std::strerror(errno)));
  }
  auto memory = std::make_shared<SessionMemory>();
  SHARDD_ASSIGN_OR_RETURN(memory->memory, Slab::Create(absl::StrCat("session-", id), SlabBacking::kSealedMemfd,
                                                       session->layout_.memory_bytes));
  // Whose GPU may wait for words of the page has to be able to end such waits itself (page.h).
  SHARDD_ASSIGN_OR_RETURN(memory->daemon_page,
                          Slab::Create(absl::StrCat("page-", id),
                                       place.memory != nullptr ? SlabBacking::kSealedMemfd : SlabBacking::kFrozenMemfd,
                                       session->layout_.daemon_page_bytes));
  if (const int64_t bytes = session->plan_->memory.gradient_slots_bytes; place.memory != nullptr && bytes > 0) {
    SHARDD_ASSIGN_OR_RETURN(memory->slots,
                            place.memory->MakeSlab(absl::StrCat("gradient slots of rank ", rank), bytes, place.users));
  }
  session->doorbell_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!session->doorbell_.valid()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("attach rank ", rank, ": eventfd: ", std::strerror(errno), "; raise the limit of open files"));
  }
  const int groups = static_cast<int>(session->plan_->groups.size());
  const int slots = static_cast<int>(session->plan_->gradient_slots.size());
  session->view_ = SessionMemoryView(memory->memory->data(), session->layout_.ring_offset_bytes,
                                     session->layout_.masks_offset_bytes);
  session->page_ = DaemonPageView(memory->daemon_page->data(), slots, groups);
  if (session->plan_->config.trainer_sums()) {
    session->sums_ = std::make_shared<SumChannel>(
        memory->daemon_page->At<SumRing>(session->layout_.sum_ring_offset_bytes),
        memory->memory->At<const SumWords>(session->layout_.sum_words_offset_bytes), epoch, rank, memory);
  }
  session->memory_ = std::move(memory);
  session->released_.assign(slots, 0);
  session->issued_.assign(slots, 0);
  session->handles.resize(groups);
  DaemonPage& page = session->page_.page();
  page.magic = DaemonPage::kMagic;
  page.epoch.store(TimelineValue(epoch, 0));
  page.version.store(TimelineValue(epoch, 0));
  page.consumed.store(TimelineValue(epoch, 0));
  page.full_params.store(TimelineValue(epoch, 0));
  page.passes.store(TimelineValue(epoch, 0));
  page.windows.store(TimelineValue(epoch, 0));
  page.reduced.store(TimelineValue(epoch, 0));
  page.reducing.store(TimelineValue(epoch, 0));
  for (int s = 0; s < slots; ++s) {
    session->page_.slot(s).released.store(TimelineValue(epoch, 0));
    session->page_.slot(s).issued.store(TimelineValue(epoch, 0));
  }
  for (int g = 0; g < groups; ++g) {
    session->page_.group(g).unsharded.store(TimelineValue(epoch, 0));
    session->page_.group(g).issued.store(TimelineValue(epoch, 0));
  }
  return session;
}

char* Session::slot(int group) const {
  const int slot = plan_->groups[group].gradient_slot;
  const int64_t offset_bytes = plan_->gradient_slots[slot].offset_bytes;
  return memory_->slots == nullptr ? memory_->memory->At<char>(layout_.slots_offset_bytes + offset_bytes)
                                   : memory_->slots->data() + offset_bytes;
}

const char* Session::Staging(int64_t offset_bytes, int64_t size_bytes) const {
  // Small: one command copies no more than this on the daemon's loop.
  const int64_t end = layout_.sum_words_offset_bytes != 0 ? layout_.sum_words_offset_bytes : layout_.slots_offset_bytes;
  if (offset_bytes < layout_.payload_offset_bytes || offset_bytes > end || size_bytes < 0 ||
      size_bytes > end - offset_bytes) {
    return nullptr;
  }
  return memory_->memory->At<char>(offset_bytes);
}

bool Session::HasCommands() const {
  if (broken || held) {
    return false;
  }
  const uint64_t submitted = view_.page().submitted.load(std::memory_order_seq_cst);
  return TimelineEpoch(submitted) == epoch_ && TimelineSequence(submitted) != consumed_;
}

namespace {

std::vector<bool> CopyMask(const uint8_t* mask, int bits) {
  std::vector<bool> result(bits);
  for (int i = 0; i < bits; ++i) {
    result[i] = MaskBit(mask, i);
  }
  return result;
}

}  // namespace

// On the loop, so bounded in time too: a payload of empty or unknown fields would take 37 ms and 13 MiB.
absl::Status Session::ParseStep(absl::string_view bytes, v1::Step* step) const {
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

int64_t Session::MostOptimizerGroups() const {
  // More than there are: who has miscounted is told what is right when the step is looked at.
  return plan_->config.optimizer().groups_size() + 16;
}

int64_t Session::MostFieldsOfAStep() const {
  return v1::Step::descriptor()->field_count() +
         MostOptimizerGroups() * (1 + v1::HyperParameters::descriptor()->field_count());
}

absl::StatusOr<RankCommand> Session::NextFromRing() {
  if (broken || held) {
    return absl::NotFoundError("");
  }
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
  if (record.done > kTimelineSequenceMask || (record.done != 0 && record.done < last_done)) {
    return absl::InvalidArgumentError(absl::StrCat("ring: signal is out of range (got ", record.done, ", want 0 or ",
                                                   last_done, " to 2^40; rank=", rank_, ")"));
  }
  command.done = record.done;
  stream_ordered = stream_ordered || record.done != 0;
  last_done = std::max(last_done, record.done);
  const int groups = static_cast<int>(plan_->groups.size());
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
        const int bits = static_cast<int>(plan_->groups[record.group].params.size());
        const uint8_t* masks = view_.At<uint8_t>(layout_.mask_offset_bytes[record.group]);
        if ((record.flags & kHasPresent) != 0) {
          command.present = CopyMask(masks, bits);
        }
        if ((record.flags & kHasFresh) != 0) {
          command.fresh = CopyMask(masks + layout_.mask_size_bytes[record.group], bits);
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
      if (absl::Status status = ParseStep(copy, &command.step); !status.ok()) {
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
    case Opcode::kOpenWindow:
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

void Session::SetTracing(bool tracing) {
  page_.page().tracing.store(tracing && !trace_broken_ ? 1 : 0, std::memory_order_release);
}

std::optional<uint64_t> Session::TraceWritten() {
  if (trace_broken_) {
    return std::nullopt;
  }
  const uint64_t written = view_.page().trace_written.load(std::memory_order_acquire);
  if (written < trace_taken_ || written - trace_taken_ > kTraceRecords) {
    trace_broken_ = true;
    return std::nullopt;
  }
  return written;
}

bool Session::TakeTrace(size_t most, std::vector<TraceRecord>* out) {
  if (trace_broken_) {
    return true;
  }
  const std::optional<uint64_t> written = TraceWritten();
  if (!written.has_value()) {
    return false;
  }
  const TraceRecord* ring = view_.At<TraceRecord>(layout_.trace_offset_bytes);
  const uint64_t end = trace_taken_ + std::min<uint64_t>(most, *written - trace_taken_);
  out->reserve(out->size() + (end - trace_taken_));
  for (; trace_taken_ < end; ++trace_taken_) {
    TraceRecord record;  // copied once: the client may write it again at any moment
    std::memcpy(&record, &ring[trace_taken_ % kTraceRecords], sizeof(record));
    out->push_back(record);
  }
  page_.page().trace_taken.store(trace_taken_, std::memory_order_release);
  return true;
}

uint64_t Session::DropTrace() {
  const uint64_t written = TraceWritten().value_or(trace_taken_);
  const uint64_t dropped = written - trace_taken_;
  trace_taken_ = written;
  page_.page().trace_taken.store(trace_taken_, std::memory_order_release);
  return dropped;
}

void Session::PublishConsumed() {
  ++consumed_;
  TimelineStore(page_.page().consumed, TimelineValue(epoch_, consumed_), waiting());
}

absl::StatusOr<RankCommand> Session::Decode(const v1::Command& in) const {
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
    return CopyMask(reinterpret_cast<const uint8_t*>(bytes.data()), bits);
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
      command.step = in.step();
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
      break;
    case v1::Command::kCommitParameters:
      command.opcode = Opcode::kCommitParameters;
      break;
    case v1::Command::kEnterFullParams:
      command.opcode = Opcode::kEnterFullParams;
      command.group = in.enter_full_params().scope() - 1;
      command.flags = (in.enter_full_params().writeback() ? kWriteback : 0) |
                      (in.enter_full_params().rank0_only() ? kRank0Only : 0) |
                      (in.enter_full_params().with_grads() ? kWithGrads : 0) |
                      (in.enter_full_params().not_recurse() ? kNotRecurse : 0);
      break;
    case v1::Command::kLeaveFullParams:
      command.opcode = Opcode::kLeaveFullParams;
      break;
    case v1::Command::kEnterPass:
      SHARDD_RETURN_IF_ERROR(check_state("EnterPass", in.enter_pass().trainer_state()));
      command.opcode = Opcode::kEnterPass;
      command.flags = in.enter_pass().stepped() ? kStepped : 0;
      command.trainer_state = in.enter_pass().trainer_state();
      break;
    case v1::Command::kLeavePass:
      command.opcode = Opcode::kLeavePass;
      break;
    case v1::Command::kOpenWindow:
      command.opcode = Opcode::kOpenWindow;
      break;
    case v1::Command::kAbandonBackward:
      command.opcode = Opcode::kAbandonBackward;
      break;
    case v1::Command::kSetGradientPresence:
      command.opcode = Opcode::kSetGradientPresence;
      command.group = in.set_gradient_presence().param();
      command.arg0 = in.set_gradient_presence().present() ? 1 : 0;
      break;
    case v1::Command::KIND_NOT_SET:
      return absl::InvalidArgumentError(absl::StrCat("command: kind is not set (rank=", rank_, ")"));
  }
  return command;
}

}  // namespace shardd
