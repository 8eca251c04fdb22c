#include "client/c/job/unsharding.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "client/c/attachment/call_span.h"
#include "common/status/status_macros.h"

namespace shardd {

void Unsharding::Reset() {
  unshards_.assign(attachment_.plan().groups(), 0);
  pool_offset_bytes_.assign(attachment_.plan().groups(), 0);
}

absl::Status Unsharding::Unshard(int index, HandleEvent event) {
  CallSpan span(
      attachment_,
      event == HandleEvent::kUnshardForward ? v1::TRACE_CALL_UNSHARD_FORWARD : v1::TRACE_CALL_UNSHARD_BACKWARD, index);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const GroupPlan& group = attachment_.plan().group(index);
  if (attachment_.ledger().expected_version() == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "unshard group \"", group.name, "\": the parameters have no values yet (version 0; rank=", attachment_.rank(),
        "); call shardd_write_parameter and shardd_commit_parameters"));
  }
  if (attachment_.plan().trainers_write()) {
    SHARDD_RETURN_IF_ERROR(passes_.CheckReading(absl::StrCat("unshard group \"", group.name, "\"")));
  }
  const WaitFor reason{"unshard", &group.name, "space in the command ring"};
  SHARDD_RETURN_IF_ERROR(attachment_.WaitSpace(1 + group.also_unshards.size(), reason));
  SHARDD_RETURN_IF_ERROR(handles_.ApplyWithTied(index, event));
  // Tied parameters first: they are needed with the group, and the pool serves in order.
  for (const int other : group.also_unshards) {
    SHARDD_RETURN_IF_ERROR(SendUnshard(other, event));
  }
  return span.Of(SendUnshard(index, event));
}

absl::Status Unsharding::SendUnshard(int index, HandleEvent event) {
  ++unshards_[static_cast<size_t>(index)];
  CommandRecord record = {};
  record.opcode = Opcode::kUnshard;
  record.group = index;
  record.arg0 = event == HandleEvent::kUnshardForward ? v1::PHASE_FORWARD : v1::PHASE_BACKWARD;
  // Zero-copy: the parameters are where they always are, the daemon only keeps count.
  return attachment_.Send(record, /*act=*/attachment_.plan().pooled(),
                          {"unshard", &attachment_.plan().group_name(index), "space in the command ring"});
}

absl::Status Unsharding::CheckAsked(int index) {
  if (handles_.of(index).storage() != StorageState::kSharded) {
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  return absl::FailedPreconditionError(absl::StrCat("wait_unshard group \"", attachment_.plan().group_name(index),
                                                    "\": it is not being unsharded (", handles_.of(index).DebugString(),
                                                    "; rank=", attachment_.rank(), "); call shardd_unshard first"));
}

absl::Status Unsharding::Wait(int index) {
  CallSpan span(attachment_, v1::TRACE_CALL_WAIT_UNSHARD, index);
  SHARDD_RETURN_IF_ERROR(CheckAsked(index));
  for (const int other : attachment_.plan().group(index).also_unshards) {
    SHARDD_RETURN_IF_ERROR(WaitOne(other));
  }
  return span.Of(WaitOne(index));
}

absl::Status Unsharding::WaitOne(int index) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  StepLedger& ledger = attachment_.ledger();
  if (attachment_.plan().pooled()) {
    SHARDD_RETURN_IF_ERROR(WaitPooled(index));
  } else if (!ledger.stream_awaits_expected()) {
    // Before the commit the rank gives nothing back that others could wait for, so its stream may wait for it.
    SHARDD_RETURN_IF_ERROR(attachment_.WaitInStream(
        attachment_.page().version, ledger.expected_version(),
        {"wait_unshard", &attachment_.plan().group_name(index), "the commit of the last step"}));
    ledger.StreamAwaits(ledger.expected_version());
  }
  return handles_.Arrive(index);
}

absl::Status Unsharding::WaitPooled(int index) {
  const GroupPlan& group = attachment_.plan().group(index);
  const GroupEntry& entry = attachment_.memory().daemon_page().group(index);
  const WaitFor reason{"wait_unshard", &group.name, "the unshard"};
  const uint64_t asked = unshards_[static_cast<size_t>(index)];
  if (attachment_.session().stream_waits().ordered()) {
    SHARDD_RETURN_IF_ERROR(attachment_.Wait(entry.issued, asked, reason));
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitInStream(entry.unsharded, asked, reason));
  const int64_t offset = entry.pool_offset_bytes.load(std::memory_order_relaxed);
  const int64_t last = attachment_.plan().plan().memory.unsharded_pool_bytes - group.unsharded_bytes;
  if (offset < 0 || offset > last) {
    return absl::InternalError(absl::StrCat("wait_unshard group \"", group.name,
                                            "\": its place lies outside of the pool (got offset ", offset,
                                            ", want 0 to ", last, ")"));
  }
  pool_offset_bytes_[static_cast<size_t>(index)] = offset;
  return absl::OkStatus();
}

const void* Unsharding::ParameterData(int index) const {
  const ParamPlan& param = attachment_.plan().param(index);
  if (handles_.of(param.group).storage() != StorageState::kUnsharded) {
    return nullptr;
  }
  const SessionMemory& memory = attachment_.memory();
  const FlatParamPlan& flat = attachment_.plan().flat_of(param);
  const int64_t element_offset_bytes = param.offset * DTypeSizeBytes(flat.unsharded_dtype);
  if (attachment_.plan().pooled()) {
    return memory.pool() + pool_offset_bytes_[static_cast<size_t>(param.group)] + flat.pool_offset_bytes +
           element_offset_bytes;
  }
  if (flat.params_offset_bytes >= 0) {
    return memory.parameters() + flat.params_offset_bytes + element_offset_bytes;
  }
  return memory.shards() + flat.shards_offset_bytes + element_offset_bytes;
}

absl::Status Unsharding::Reshard(int index) {
  CallSpan span(attachment_, v1::TRACE_CALL_RESHARD, index);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const GroupPlan& group = attachment_.plan().group(index);
  const bool pooled = attachment_.plan().pooled();
  const WaitFor reason{"reshard", &group.name, "space in the command ring"};
  SHARDD_RETURN_IF_ERROR(attachment_.WaitSpace(1 + group.also_unshards.size(), reason));
  CommandRecord record = {};
  record.opcode = Opcode::kReshard;
  record.group = index;
  if (pooled) {  // else nothing is given back before the step
    SHARDD_ASSIGN_OR_RETURN(record.done, attachment_.GiveBack(reason));
  }
  SHARDD_RETURN_IF_ERROR(handles_.ApplyWithTied(index, HandleEvent::kReshard));
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/pooled, reason));
  for (const int other : group.also_unshards) {
    record.group = other;
    SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/pooled, reason));
  }
  return span.Of(absl::OkStatus());
}

}  // namespace shardd
